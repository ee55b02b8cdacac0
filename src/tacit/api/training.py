"""`tacit.run` and `tacit.resume`: from a config, and your own objects, to a trained model in a folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from torch import nn

from tacit import config as configs
from tacit.algorithms import Algorithm
from tacit.api.folders import new_folder, recorded_config
from tacit.config import Config
from tacit.config.build import build_dataset, build_job, build_sampling, build_settings
from tacit.config.loading import refuse_no_config
from tacit.config.records import described
from tacit.data import Dataset
from tacit.data.describe import client_names
from tacit.data.identity import Identity, identify
from tacit.engine import EngineSettings, Job
from tacit.engine.device import DeviceSettings, devices
from tacit.errors import UserError
from tacit.federation import Federation, Result, Settings, Tracker
from tacit.federation.checkpoint import CLIENTS, CONFIG, LABELS, LINEAGE, kept_facts, newest
from tacit.federation.ending import Ending, write_ending
from tacit.federation.files import sealed_text, write_atomically
from tacit.federation.fitting import (
    refuse_lazy,
    refuse_mismatch,
    refuse_odd,
    refuse_odd_metrics,
    refuse_other_task,
)
from tacit.federation.lineage import (
    Ancestor,
    ancestry,
    carried_charges,
    read_lineage,
    recorded_start,
    write_lineage,
)
from tacit.federation.lock import LOCK, locked
from tacit.federation.passed import (
    OBJECTS,
    describe,
    mark,
    own_copy,
    refuse_others,
    trained_by,
    write_passed,
)
from tacit.federation.start import MODEL, save_weights, weights_hash
from tacit.federation.trackers import open_tracker
from tacit.federation.tracking import refuse_odd_trackers
from tacit.optimizers.server import OptimizerFactory
from tacit.privacy import Charge, Sampler
from tacit.privacy.mechanisms.base import NO_ROUND_FITS
from tacit.privacy.sampling import refuse_no_sampler
from tacit.report.compare import read_run, rows
from tacit.report.page import PAGE, write_page
from tacit.report.progress import watching
from tacit.section import IMPORT
from tacit.tasks import Task
from tacit.tasks.base import refuse_no_task

MAY_CHANGE = (
    "rounds",
    "engine",
    "trackers",
    "checkpoint",
    "evaluate.every",
    "evaluate.batch",
    "evaluate.patience",
)
"""What a resume may change: how long the run is, and how it is computed, tested and saved."""
FIRST_FILES = {CONFIG, LINEAGE, LABELS, CLIENTS, OBJECTS}
"""Files that are written before a run begins."""


def run(
    config: Config,
    folder: str | Path | None = None,
    *,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    algorithm: Algorithm | None = None,
    task: Task | None = None,
    optimizer: OptimizerFactory | None = None,
    sampling: Sampler | None = None,
    engine: EngineSettings | None = None,
    device: str | Sequence[str] | None = None,
    trackers: Sequence[Tracker] = (),
    progress: bool | None = None,
) -> Result:
    """Train a model. The run is saved in its own folder, from which it can be resumed.

    Guarantee: the config's `privacy` section decides it, for everything that is released.
    `tacit.statement(folder)` says what it is, against whom it holds and what it does not cover, from a replay
    of the ledger. Without a `privacy` section nothing is claimed.

    Args:
        config: what to do, from `load`.
        folder: where the run is saved; by default a new folder under runs/. It must be new or empty.
        model: your own module. The run trains a copy, `result.model`; your object stays unchanged. If a run
            trained this module, or a part of it, that run's cost is carried over, as with `model.start`.
            Nothing is known of weights that were copied into it.
        dataset: your own records, from `tacit.dataset` or a `tacit.Dataset`.
        algorithm: an instance of a `tacit.Algorithm`.
        task: your own loss and metrics, a `tacit.Task`.
        optimizer: the server's, instead of `server.optimizer`: a class of torch optimizers, or
            `functools.partial(CLASS, OPTIONS)`. `server.lr` and `server.schedule` still come from the config.
        sampling: your own cohort sampler, a `tacit.privacy.Sampler`. Amplification is claimed only for
            `Poisson` and `FixedSize`. With any other sampler, a guarantee for clients is charged in every
            round as if everyone took part.
        engine: where clients run, instead of the config's `engine`: settings such as
            `tacit.engine.PoolSettings(workers=4)`, or your own object with the same `open` method. It affects
            only how long a run takes, so it is not recorded.
        device: where clients compute, instead of the config's `engine.device`: auto, cpu, cuda, cuda:1, mps,
            xpu, or a list with one worker for each entry.
        trackers: objects that are called in every round; one that fails is left out and never ends the run.
        progress: show a progress bar; by default in terminals and notebooks.

    Returns:
        The trained model and every round's metrics.

    Raises:
        UserError: the run cannot be done as asked. An unsound run is refused before anything is charged.
    """
    refuse_no_config(config)
    _refuse_other_kinds(model, dataset, algorithm, task, sampling, engine)
    folder = Path(folder) if folder is not None else new_folder(config.name)
    _refuse_strangers(folder)  # before a lock is created among them
    with locked(folder, create=True), _nothing_left_of_a_refusal(folder):
        config = _on(config, device)
        if dataset is not None and not isinstance(dataset, type):
            refuse_odd(dataset, config.task.name if config.task is not None else dataset.task)
        if (folder / CONFIG).exists():
            raise UserError(
                f"{folder} already holds a run; `tacit resume {quote(str(folder))}` goes on with it, or "
                "choose another"
            )
        if isinstance(model, nn.Module):
            refuse_lazy(model)
        given = {"model": model, "dataset": dataset, "algorithm": algorithm, "task": task}
        passed = describe(**given, optimizer=optimizer, sampling=sampling)
        places = [config.model.start, *trained_by(model)]
        refuse_odd_trackers(trackers)
        trackers = [*watching(trackers, progress), *trackers]
        model = None if model is None else own_copy(model)
        dataset = dataset or build_dataset(config)
        if task is None:
            refuse_other_task(dataset, config.task.name if config.task is not None else dataset.task)
        job = build_job(config, folder, model, dataset, algorithm, task, sampling=sampling, engine=engine)
        # After the weights were read: if that run goes on meanwhile, too much is charged, never too little.
        ancestors = [ancestor for place in places for ancestor in ancestry(place)]
        if config.model.public:  # for this run only; runs that start from its model decide for themselves
            ancestors = [ancestor for ancestor in ancestors if ancestor.data is not None]
        start = None if config.model.start is None or model is not None else weights_hash(job.model)
        if "model" in passed or (config.model.name or "").startswith(IMPORT):
            refuse_mismatch(job.model, job.task, dataset)
        refuse_odd_metrics(job, dataset.test)
        if config.privacy is not None and config.privacy.noise is not None:
            _refuse_no_round(job)
        config = resolved(config, job)
        data = identify(config.data.name, job.population, job.public)
        settings = build_settings(config, job.algorithm, engine, optimizer)
        charged = [] if config.model.public else ancestors
        federation = _federation(config, folder, job, trackers, data, charged, settings, sampling)
        federation.note(_left_out(config, job, dataset))
        federation.note(_unused(config, given))
        try:
            write_lineage(folder, data, ancestors, start)
            write_passed(folder, passed)
            if dataset.label_names:
                write_atomically(folder / LABELS, json.dumps(dataset.label_names, ensure_ascii=False) + "\n")
            natural = config.privacy is None and config.data.partition.kind == "natural"
            if natural and (names := client_names(job.population)) is not None:
                write_atomically(folder / CLIENTS, json.dumps(names, ensure_ascii=False) + "\n")
            write_atomically(folder / CONFIG, sealed_text(configs.dump(config)))
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
        return _saved(config, federation.run())


def resume(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    algorithm: Algorithm | None = None,
    task: Task | None = None,
    optimizer: OptimizerFactory | None = None,
    sampling: Sampler | None = None,
    engine: EngineSettings | None = None,
    device: str | Sequence[str] | None = None,
    trackers: Sequence[Tracker] = (),
    progress: bool | None = None,
    rounds: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Continue a run from its newest sound checkpoint.

    Objects that were given to `run` must be given again, and different objects are refused: a run is one
    experiment to its end. An interrupted private round is repeated with fresh noise and charged again.

    Args:
        folder: the run's.
        model: as given to `run`, if it was.
        dataset: as given to `run`, if it was.
        algorithm: as given to `run`, if it was.
        task: as given to `run`, if it was.
        optimizer: as given to `run`, if it was.
        sampling: as given to `run`, if it was.
        engine: where clients run; it may differ from before.
        device: where clients compute; it may differ from before.
        trackers: objects that are called in every round.
        progress: show a progress bar; by default in terminals and notebooks.
        rounds: continue up to this round instead of the number that the run was started with. This is the
            only setting that changes the run; it also moves the end of schedules that cover the whole run.
        overrides: may set `rounds` too, and everything in `MAY_CHANGE`, which decides how the run is
            computed, tested and saved. Those settings hold until this call returns, and are not recorded.

    Returns:
        The trained model and every round's metrics.

    Raises:
        UserError: the folder holds no run, a different object was given, a file was changed, `overrides` has
            a setting that may not change, or more rounds are done than `rounds`.
    """
    _refuse_other_kinds(model, dataset, algorithm, task, sampling, engine)
    folder = Path(folder)
    recorded_config(folder)  # a folder without a run is refused before a lock is created in it
    with locked(folder):
        changed = {} if rounds is None else {"rounds": rounds}
        changed |= _refuse_other_changes(overrides or {})
        recorded = recorded_config(folder, {"rounds": changed["rounds"]} if "rounds" in changed else {})
        if "rounds" in changed:
            _refuse_rounds_done(folder, recorded.rounds)
        config = _on(recorded_config(folder, changed), device, server=True)
        given = {"model": model, "dataset": dataset, "algorithm": algorithm, "task": task}
        refuse_others(folder, given | {"optimizer": optimizer, "sampling": sampling})
        _, ancestors = read_lineage(folder)
        if not config.model.public:
            _refuse_trained_since(folder, model, ancestors)
        refuse_odd_trackers(trackers)
        trackers = [*watching(trackers, progress), *trackers]
        model = None if model is None else own_copy(model)
        job = build_job(config, folder, model, dataset, algorithm, task, sampling=sampling, engine=engine)
        if model is None:
            _refuse_other_start(folder, config, job.model)
        data = identify(config.data.name, job.population, job.public)
        settings = build_settings(config, job.algorithm, engine, optimizer)
        charged = [] if config.model.public else ancestors
        federation = _federation(config, folder, job, trackers, data, charged, settings, sampling)
        if "rounds" in changed:
            try:
                write_atomically(folder / CONFIG, sealed_text(configs.dump(recorded)))
            except OSError as error:
                raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
        return _saved(config, federation.run())


def _left_out(config: Config, job: Job, dataset: Dataset) -> str:
    """A note on rows that were not read; under a guarantee it says only that there may be such rows."""
    if job.privacy is None or job.privacy.simulated:
        return dataset.left_out
    skips = config.data.on_bad == "skip"
    return "rows that cannot be used are left out (data.on_bad); `tacit data` tells which" if skips else ""


def _unused(config: Config, given: Mapping[str, Any]) -> str:
    """A note on keys that change the config's network or records, where the run was given others instead."""
    model = type(config.model).model_fields
    keys = [
        f"model.{key}"
        for key in ("start", "lora", "train", "frozen")
        if given["model"] is not None and getattr(config.model, key) != model[key].default
    ]
    keys += [f"data.{key}" for key in described(config.data) if given["dataset"] is not None]
    return f"not used, as the run was given objects instead: {', '.join(keys)}" if keys else ""


def _refuse_no_round(job: Job) -> None:
    """Refuse a given noise that is not enough for one round, before there is a run. Only at client level: the
    cost to single records depends on their client and on the draw.
    """
    mechanism = job.privacy
    if mechanism is not None and mechanism.unit == "client" and not mechanism.most_rounds(job.workload, 1):
        raise UserError(NO_ROUND_FITS)


def _refuse_trained_since(folder: Path, model: nn.Module | None, ancestors: Sequence[Ancestor]) -> None:
    """Refuse a model that another run has trained further since this run began: that cost would be missing.
    What this run itself has taught the model is on its own ledger.
    """
    for place in trained_by(model):
        if place.resolve() != folder.resolve() and any(
            ancestor not in ancestors for ancestor in ancestry(place)
        ):
            raise UserError(
                f"model: {place} trained this module, and not yet so when {folder} began; give the one it "
                "had, or start a new run with this one"
            )


def _refuse_other_start(folder: Path, config: Config, model: nn.Module) -> None:
    """Weights that are read from `model.start` again must be those that the run began with: others may have
    seen more of its people than its ledger says. The run's own checkpoint has all trained parameters.
    """
    known = None if config.model.start is None else recorded_start(folder)
    if known is None or weights_hash(model) == known:
        return
    if any(not p.requires_grad for p in model.parameters()) or newest(folder / "checkpoint")[0] is None:
        raise UserError(
            f"model.start: {config.model.start} holds other weights than when {folder} began with it (that "
            "run went on, or its files were changed); restore them, or start a new run"
        )


def _refuse_strangers(folder: Path) -> None:
    """Refuse a folder with other files, such as records. Files of a run that was killed before it began are
    accepted.
    """
    ours = {LOCK, *FIRST_FILES, *(f"{name}.partial" for name in FIRST_FILES)}
    try:
        found = {file.name for file in folder.iterdir()}
    except OSError:  # it is not there, or whoever locks it says what is wrong with it
        return
    if CONFIG not in found and not found <= ours:
        raise UserError(f"{folder} is not empty, and holds no run; choose another folder")


def _refuse_other_kinds(
    model: Any, dataset: Any, algorithm: Any, task: Any, sampling: Any, engine: Any
) -> None:
    """Refuse arguments of the wrong kind; classes instead of instances are refused by `describe`."""
    for name, value, wanted, advice in (
        ("model", model, nn.Module, "give a torch module, or name one in the config"),
        ("dataset", dataset, Dataset, "tacit.dataset(…) makes one of tables, arrays and lists"),
        ("algorithm", algorithm, Algorithm, "give a tacit.Algorithm, or name one in the config's `method`"),
    ):
        if value is not None and not isinstance(value, type | wanted):
            raise UserError(f"{name}: this is a {type(value).__name__}; {advice}")
    if task is not None and not isinstance(task, type):
        refuse_no_task(task)
    if sampling is not None:
        refuse_no_sampler(sampling)
    if engine is not None and not hasattr(engine, "open"):
        raise UserError(f"engine: {engine!r} is no engine; give tacit.engine.PoolSettings(workers=4) or such")


def _refuse_other_changes(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in overrides:
        if not any(f"{key}.".startswith(f"{allowed}.") for allowed in MAY_CHANGE):
            raise UserError(
                f"--set {key}: a run is one experiment to its end; what may change is "
                f"{', '.join(MAY_CHANGE)}. Start a new run for anything else"
            )
    return overrides


def _refuse_rounds_done(folder: Path, rounds: int) -> None:
    """Rounds that are done and charged cannot be undone by asking for fewer."""
    done = max((int(facts["round"]) for facts in kept_facts(folder / "checkpoint")), default=0)
    if rounds < done:
        raise UserError(f"rounds: {folder} has done {done:,} already; give {done:,} or more (got {rounds:,})")


def _on(config: Config, device: str | Sequence[str] | None, server: bool = False) -> Config:
    """The config with another `engine.device`; with `server`, a server on an accelerator moves, too."""
    if device is None:
        return config
    if not isinstance(config.engine, DeviceSettings):
        raise UserError("engine.device: this kind of engine has no device to choose; leave it out")
    wanted = device if isinstance(device, str) else tuple(device)
    first = devices(wanted)[0]
    changed: dict[str, Any] = {"engine": config.engine.model_copy(update={"device": wanted})}
    if server and config.server.device != "cpu":
        changed["server"] = config.server.model_copy(update={"device": first})
    return config.model_copy(update=changed)


def resolved(config: Config, job: Job) -> Config:
    """The config with the noise that was found for its budget, so that a resume uses the same noise."""
    if config.privacy is None or job.privacy is None:
        return config
    privacy = config.privacy.model_copy(update={"noise": job.privacy.noise})
    return config.model_copy(update={"privacy": privacy})


def _federation(
    config: Config,
    folder: Path,
    job: Job,
    trackers: Sequence[Tracker],
    data: Identity,
    ancestors: Sequence[Ancestor],
    settings: Settings,
    sampler: Sampler | None,
) -> Federation:
    values = config.model_dump(mode="json") if config.trackers else {}
    own = [open_tracker(name, folder, values) for name in config.trackers]
    sampling = build_sampling(config, len(job.population), sampler)
    carried: list[Charge] = []
    if job.privacy is not None:
        header = job.privacy.header(job.workload, data.fingerprint)
        carried = carried_charges(ancestors, data, header)
    return Federation(job, settings, sampling, folder, [*own, *trackers], data.fingerprint, carried)


@contextmanager
def _nothing_left_of_a_refusal(folder: Path) -> Iterator[None]:
    """Remove the first files of a run that is refused before it begins (its device, its federation, …)."""
    before = {file.name for file in folder.iterdir()}
    try:
        yield
    except BaseException:
        begun = {file.name for file in folder.iterdir()} - before - FIRST_FILES
        if not begun:
            for name in FIRST_FILES - before:
                (folder / name).unlink(missing_ok=True)
        raise


def _saved(config: Config, result: Result) -> Result:
    """Write how the run ended, its page and, for a seed model, its weights for other runs to start from."""
    mark(result.model, result.path)
    last = result.metrics[-1]["round"] if result.metrics else 0
    seed = config.pretrain is not None and result.finished
    weights = weights_hash(result.model) if seed else None
    try:
        write_ending(result.path, Ending(last, result.finished, result.stopped, weights))
    except OSError as error:
        raise UserError(
            f"{result.path}: the run is saved, but not how it ended ({error.strerror}); make room on the "
            "disk, then `tacit resume` writes it down"
        ) from None
    if result.metrics:
        try:
            write_page(rows([read_run(result.path)]), result.path / PAGE)
        except Exception as error:  # a page is only for viewing: failing to write it must not fail the run
            warnings.warn(f"{result.path / PAGE} could not be made: {error}", RuntimeWarning, stacklevel=2)
    if seed:
        save_weights(result.model, result.path / MODEL)
    return result
