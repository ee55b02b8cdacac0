"""A run in five lines of Python: load a config, run it, look at the result.

    import tacit

    config = tacit.load("quickstart.yaml", {"rounds": 10})
    result = tacit.run(config)
    print(result.last("accuracy"), result.path)

A module, a data set, an algorithm or a task of one's own is passed as an object; nothing is registered.
"""

from __future__ import annotations

import json
import math
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from tacit import config as configs
from tacit.algorithms import Algorithm
from tacit.config import Config
from tacit.config.build import (
    build_base,
    build_dataset,
    build_job,
    build_model,
    build_sampling,
    build_settings,
)
from tacit.config.imports import PREFIX
from tacit.config.methods import build_algorithm
from tacit.config.records import named_tokenizer
from tacit.config.sweep import load_one
from tacit.data import Dataset, Tokenizer, own
from tacit.data.describe import client_names
from tacit.data.identity import Identity, identify
from tacit.engine import EngineSettings, Job
from tacit.engine.device import DeviceSettings, devices
from tacit.errors import UserError
from tacit.federation import Federation, Result, Settings, Tracker
from tacit.federation.checkpoint import CLIENTS, CONFIG, LABELS, LINEAGE, load_model
from tacit.federation.ending import Ending, write_ending
from tacit.federation.files import sealed_text, write_atomically
from tacit.federation.fitting import refuse_mismatch, refuse_odd, refuse_other_task
from tacit.federation.lineage import Ancestor, ancestry, carried_charges, read_lineage, write_lineage
from tacit.federation.lock import locked
from tacit.federation.passed import (
    OBJECTS,
    describe,
    mark,
    own_copy,
    read_passed,
    refuse_others,
    trained_by,
    write_passed,
)
from tacit.federation.start import MODEL, save_weights
from tacit.federation.statements import LEDGER, STATEMENT, Together, read_statement, read_together
from tacit.federation.testing import Metrics, load_newest, metrics_by_client, metrics_by_user
from tacit.federation.trackers import open_tracker
from tacit.federation.verify import Finding, examine, refuse_changed_config
from tacit.models.export import auto_class, copy_tokenizer, name_labels, outputs, save_adapter, save_model
from tacit.models.weights import locate
from tacit.optimizers.server import OptimizerFactory
from tacit.privacy import Charge, Mechanism, Poisson, Sampler, Workload
from tacit.privacy.accountants import epsilon
from tacit.privacy.conventions import Scale
from tacit.privacy.events import Spend
from tacit.privacy.statement import Statement
from tacit.privacy.tuning import tuned_epsilon
from tacit.report.card import card, loading
from tacit.report.compare import find_runs, read_run, rows, to_json
from tacit.report.page import PAGE, write_page
from tacit.report.progress import watching
from tacit.tasks import Task

RUNS = Path("runs")
"""Where runs go unless told otherwise."""
MAY_CHANGE = (
    "rounds",
    "engine",
    "trackers",
    "checkpoint",
    "evaluate.every",
    "evaluate.batch",
    "evaluate.patience",
)
"""What a resume may set otherwise: how long, and how it is computed, tested and saved."""


FIRST_FILES = {CONFIG, LINEAGE, LABELS, CLIENTS, OBJECTS}
"""What is written before a run begins."""


def load(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """A checked config.

    Args:
        source: a YAML file, or a mapping of the same keys.
        overrides: dotted keys and their values, such as {"local.lr": 0.1}.

    Returns:
        The config, every default filled in.

    Raises:
        UserError: a key or a value is wrong; it names the file, the line and the key.
    """
    return configs.load(source, overrides)


def dataset(source: Any, *, tokenizer: str | Tokenizer | None = None, **columns: Any) -> Dataset:
    """A data set of one's own records: see `tacit.data.own.dataset` for all that it takes.

        data = tacit.dataset(frame, text="review", label="stars", user="customer", tokenizer="bytes")
        tacit.run(config, dataset=data)

    Args:
        source: a pandas or polars DataFrame, a Hugging Face `datasets` object, a torch `Dataset`, a pair of
            arrays (x, y), a list of rows or a dict of columns.
        tokenizer: `bytes`, a folder, a name on the hub, or an object.
        columns: which columns are what (`text`, `label`, `user`, …), and further options.

    Returns:
        What `tacit.run(dataset=…)` takes.

    Raises:
        UserError: a column is missing, or holds what cannot be trained on.
    """
    if isinstance(tokenizer, str):
        tokenizer = named_tokenizer(tokenizer, False, columns.get("max_length", 128))
    return own.dataset(source, tokenizer=tokenizer, **columns)


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
    """Train. The run is saved in a folder of its own, from which it can be resumed.

    Guarantee: that of the config's `privacy` section, of everything that is released; what it is, against
    whom, and what it does not cover is `tacit.statement(folder)`, a replay of the ledger. Without such a
    section nothing is claimed.

    Args:
        config: what to do, from `load`.
        folder: where the run is saved, a new one under runs/ by default; it must not hold a run.
        model: a module of one's own. A copy of it is trained, `result.model`; the object stays as it is. One
            that a run has trained brings along what that run has cost, as `model.start` does.
        dataset: records of one's own, from `tacit.dataset` or a `tacit.Dataset`.
        algorithm: an instance of a `tacit.Algorithm`.
        task: a loss and metrics of one's own, a `tacit.Task`.
        optimizer: the server's, instead of `server.optimizer`: a class of torch optimizers, or
            `functools.partial(CLASS, OPTIONS)`. `server.lr` and `server.schedule` stay the config's.
        sampling: who takes part in each round, a `tacit.privacy.Sampler`. Amplification is claimed for
            `Poisson` and `FixedSize` alone: with any other, a guarantee for clients costs in every round what
            it would if everyone took part.
        engine: where clients run, instead of the config's `engine`: settings such as
            `tacit.engine.PoolSettings(workers=4)`, or an object of one's own with such an `open`. It changes
            how long a run takes, and nothing else, so it is not recorded.
        device: where clients compute, instead of the config's `engine.device`: auto, cpu, cuda, cuda:1, mps,
            xpu, or a list, one worker for each.
        trackers: objects that hear of every round; one that fails is left out and never ends the run.
        progress: show a bar; by default in terminals and notebooks.

    Returns:
        The trained model and every round's metrics.

    Raises:
        UserError: something cannot be done as asked; what is unsound is refused before anything is charged.
    """
    _refuse_other_kinds(config, model, dataset, engine)
    folder = Path(folder) if folder is not None else new_folder(config.name)
    with locked(folder, create=True), _nothing_left_of_a_refusal(folder):
        config = _on(config, device)
        if dataset is not None and not isinstance(dataset, type):
            refuse_odd(dataset, config.task.name if config.task is not None else dataset.task)
        if (folder / CONFIG).exists():
            raise UserError(
                f"{folder} already holds a run; `tacit resume {folder}` goes on with it, or choose another"
            )
        given = {"model": model, "dataset": dataset, "algorithm": algorithm, "task": task}
        passed = describe(**given, optimizer=optimizer, sampling=sampling)
        ancestors: list[Ancestor] = []
        if not config.model.public:
            ancestors = [*ancestry(config.model.start), *ancestry(trained_by(model))]
        trackers = [*watching(trackers, progress), *trackers]
        model = None if model is None else own_copy(model)
        dataset = dataset or build_dataset(config)
        if task is None:
            refuse_other_task(dataset, config.task.name if config.task is not None else dataset.task)
        job = build_job(config, folder, model, dataset, algorithm, task, sampling=sampling)
        if "model" in passed:
            refuse_mismatch(job.model, job.task, dataset)
        config = resolved(config, job)
        data = identify(config.data.name, job.population)
        settings = build_settings(config, job.algorithm, engine, optimizer)
        federation = _federation(config, folder, job, trackers, data, ancestors, settings, sampling)
        try:
            write_lineage(folder, data, ancestors)
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
    """Go on with a run from its newest sound checkpoint.

    Objects given to `run` must be given again, and others are refused: a run is one experiment to its end. A
    private round that was cut short is repeated with fresh noise and charged again.

    Args:
        folder: the run's.
        model: as given to `run`, if it was.
        dataset: as given to `run`, if it was.
        algorithm: as given to `run`, if it was.
        task: as given to `run`, if it was.
        optimizer: as given to `run`, if it was.
        sampling: as given to `run`, if it was.
        engine: where clients run; it may be another.
        device: where clients compute; it may be another.
        trackers: objects that hear of every round.
        progress: show a bar; by default in terminals and notebooks.
        rounds: go on to this round instead of the one that the run was started with. That is the one setting
            that changes the run; it also moves the end of schedules that are made for the whole run.
        overrides: may have it too, and whatever of `MAY_CHANGE` decides how the run is computed, tested and
            saved: that holds until this call returns, and is not recorded.

    Returns:
        The trained model and every round's metrics.

    Raises:
        UserError: the folder holds no run, another object was given, a file was changed, or `overrides` has
            what may not change.
    """
    folder = Path(folder)
    _config(folder)  # a folder without a run is told before a lock is left in it
    with locked(folder):
        changed = {} if rounds is None else {"rounds": rounds}
        changed |= _refuse_other_changes(overrides or {})
        recorded = _config(folder, {"rounds": changed["rounds"]} if "rounds" in changed else {})
        config = _on(_config(folder, changed), device, server=True)
        given = {"model": model, "dataset": dataset, "algorithm": algorithm, "task": task}
        refuse_others(folder, given | {"optimizer": optimizer, "sampling": sampling})
        trackers = [*watching(trackers, progress), *trackers]
        model = None if model is None else own_copy(model)
        job = build_job(config, folder, model, dataset, algorithm, task, sampling=sampling)
        data = identify(config.data.name, job.population)
        _, ancestors = read_lineage(folder)
        settings = build_settings(config, job.algorithm, engine, optimizer)
        federation = _federation(config, folder, job, trackers, data, ancestors, settings, sampling)
        if "rounds" in changed:
            try:
                write_atomically(folder / CONFIG, sealed_text(configs.dump(recorded)))
            except OSError as error:
                raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
        return _saved(config, federation.run())


def _refuse_other_kinds(config: Any, model: Any, dataset: Any, engine: Any) -> None:
    """What was passed in must be what it is passed as; of classes `describe` has a word of its own."""
    for name, value, wanted, advice in (
        ("config", config, Config, "tacit.load(…) makes one of a file or a mapping"),
        ("model", model, nn.Module, "give a torch module, or name one in the config"),
        ("dataset", dataset, Dataset, "tacit.dataset(…) makes one of tables, arrays and lists"),
    ):
        if not isinstance(value, type | wanted) and not (value is None and name != "config"):
            raise UserError(f"{name}: this is a {type(value).__name__}; {advice}")
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


def verify(folder: str | Path) -> list[Finding]:
    """Check every file of a run: what is sound, what is damaged, and what can be saved.

    Args:
        folder: the run's.

    Returns:
        A finding for each file.

    Raises:
        UserError: the folder holds no run.
    """
    folder = Path(folder)
    if not (folder / CONFIG).exists() and not (folder / "checkpoint").exists():
        raise UserError(f"{folder} holds no run (there is no {CONFIG} in it); runs are under {RUNS}/")
    return examine(folder)


def test(
    place: str | Path, overrides: Sequence[str] = (), *, dataset: Dataset | None = None
) -> tuple[int, Metrics, dict[str, Metrics]]:
    """Evaluate a run's newest model, or the one a config starts from, on the test set.

    Args:
        place: a run's folder, or a config; of a sweep, the config is that of its first run.
        overrides: `key=value` settings, as on the command line.
        dataset: records of one's own, if the run was given some.

    Returns:
        The round, the metrics, and the metrics by user.

    Raises:
        UserError: there is no run, or no such config.
    """
    place = Path(place)
    is_run = place.is_dir()
    given = configs.parse_overrides(list(overrides))
    config = _config(place, given) if is_run else load_one(place, given)
    job = build_job(config.model_copy(update={"privacy": None}), place, dataset=dataset)
    round = load_newest(job, place) if is_run else 0
    return round, *metrics_by_user(job)


def test_clients(
    place: str | Path, count: int, overrides: Sequence[str] = (), *, dataset: Dataset | None = None
) -> tuple[int, dict[str, dict[int, Metrics]]]:
    """Evaluate clients' own models, each on its client's own held-out records (`data.holdout`).

    These are exact numbers about single clients, which no guarantee covers.

    Args:
        place: a run's folder (its newest model, with the personal parts that it keeps), or a config.
        count: how many clients; those that a run with as many `evaluate.clients` tests.
        overrides: `key=value` settings, as on the command line.
        dataset: records of one's own, if the run was given some.

    Returns:
        The round, and by client: `personal`, and `tuned` where the config has `evaluate.tune`.

    Raises:
        UserError: there is no run or config, or clients have no records held out.
    """
    place = Path(place)
    is_run = place.is_dir()
    given = configs.parse_overrides(list(overrides))
    config = _config(place, given) if is_run else load_one(place, given)
    if not config.data.holdout:
        raise UserError("clients have no test split of their own; data.holdout was not set")
    job = build_job(config.model_copy(update={"privacy": None}), place, dataset=dataset)
    round = load_newest(job, place) if is_run else 0
    kinds = {"personal": None} | ({} if config.evaluate.tune is None else {"tuned": config.evaluate.tune})
    return round, {
        kind: metrics_by_client(job, place if is_run else None, count, tune) for kind, tune in kinds.items()
    }


def statement(folder: str | Path, groups: Sequence[int] = ()) -> Statement:
    """What a run guarantees so far: a replay of its ledger.

    Args:
        folder: the run's.
        groups: also ε for so many units together.

    Returns:
        ε, δ, the unit and the neighbouring relation, against whom it holds and what it does not cover.

    Raises:
        UserError: the run claims nothing, or its ledger was changed.
    """
    folder = Path(folder)
    if _config(folder).privacy is None:
        raise UserError(f"{folder}: this run guarantees nothing: its config has no `privacy` section")
    return read_statement(folder, groups)


def ledger(folders: Sequence[str | Path], delta: float | None = None) -> Together:
    """What several runs on the same data have spent together: their events composed, not their ε added.

    Args:
        folders: the runs'.
        delta: the δ to state ε for; the smallest of the runs' by default.

    Returns:
        ε of all of them for the worst unit, and of each alone.

    Raises:
        UserError: runs that have nobody in common, or no ledger.
    """
    places = [Path(folder) for folder in folders]
    first, *others = [read_lineage(place)[0] for place in places]
    for place, data in zip(places[1:], others, strict=True):
        if not data.overlaps(first):
            raise UserError(
                f"{place} and {places[0]} have nobody in common, so nothing adds up; leave one out"
            )
    return read_together(places, delta)


def plan(
    config: Config,
    *,
    dataset: Dataset | None = None,
    sampling: Sampler | None = None,
    trials: float | None = None,
) -> dict[str, Any]:
    """What a config will cost, before it runs: the noise it will use, and ε after all its rounds.

    At client level `signal_to_noise` is the length of the mean update, were every client's as long as the
    clip and all of one direction, over the expected length of the noise on it: cohort ÷ (σ √d).

    Args:
        config: what to plan; it needs a `privacy` section.
        dataset: records of one's own, instead of the config's.
        sampling: who takes part in each round, as for `run`.
        trials: also what the best of a random number of such runs, of this mean, would cost (Papernot and
            Steinke 2022, arXiv:2110.03620).

    Returns:
        Plain values by name: `epsilon`, `delta`, `noise`, `unit`, `cohort`, `warnings`, …

    Raises:
        UserError: the config has no `privacy` section, or no noise keeps its budget.
    """
    if config.privacy is None:
        raise UserError(
            "this config has no `privacy` section, so nothing is spent and nothing guaranteed; add one, or "
            "give its keys with --set"
        )
    job = build_job(config, Path(config.name), dataset=dataset, sampling=sampling)
    mechanism = job.privacy
    assert mechanism is not None
    spends = mechanism.planned(job.workload, config.rounds, mechanism.noise)
    cost = max((epsilon(spend, mechanism.delta) for spend in spends), key=lambda found: found.value)
    cohort = mechanism.expected(len(job.population))
    strength = cohort / (mechanism.noise * math.sqrt(job.layout.shared)) if mechanism.noise else math.inf
    return {
        "unit": mechanism.unit,
        "epsilon": cost.value,
        "delta": mechanism.delta,
        "budget": mechanism.epsilon,
        "noise": mechanism.noise,
        "rounds": config.rounds,
        "clients": len(job.population),
        "cohort": cohort,
        "sampling": "poisson" if isinstance(mechanism.sampling, Poisson) else "fixed",
        "parameters": job.layout.shared,
        "signal_to_noise": strength if mechanism.unit == "client" else None,
        "simulation": mechanism.simulated,
        "metrics": _metrics_cost(mechanism, job.workload, config.rounds),
        "tuned": None if trials is None else _tuned(spends, mechanism.delta, trials),
        "warnings": mechanism.warnings(job.workload),
    }


def _tuned(spends: Sequence[Spend], delta: float, trials: float) -> dict[str, Any]:
    return asdict(max((tuned_epsilon(spend, delta, trials) for spend in spends), key=lambda t: t.epsilon))


def _metrics_cost(mechanism: Mechanism, workload: Workload, rounds: int) -> dict[str, float] | None:
    """The noise of private metrics, and ε as it would be without them and with the same noise on updates."""
    if mechanism.metrics is None or mechanism.unit == "example":
        return None
    alone = mechanism.without_metrics()
    spends = alone.planned(workload, rounds, alone.noise)
    return {
        "share": mechanism.metrics.share,
        "noise": mechanism.metrics.noise(mechanism.noise),
        "update_noise": alone.noise,
        "epsilon_without": max(epsilon(spend, alone.delta).value for spend in spends),
    }


def compare(runs: str | Path | Sequence[str | Path]) -> list[dict[str, Any]]:
    """What `tacit compare` shows, as rows of plain values: runs that differ only in their seed are one.

    Args:
        runs: folders of runs or of sweeps, one or several.

    Returns:
        One row for each setting.

    Raises:
        UserError: a folder holds no run.
    """
    places = [runs] if isinstance(runs, str | Path) else runs
    return to_json(rows(find_runs([Path(place) for place in places])))


def page(runs: str | Path | Sequence[str | Path], file: str | Path = PAGE) -> Path:
    """Make the HTML page on some runs.

    Args:
        runs: folders of runs or of sweeps, one or several.
        file: where the page is written.

    Returns:
        The file.

    Raises:
        UserError: a folder holds no run.
    """
    places = [runs] if isinstance(runs, str | Path) else runs
    write_page(rows(find_runs([Path(place) for place in places])), Path(file))
    return Path(file)


def trained(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    algorithm: Algorithm | None = None,
) -> nn.Module:
    """The model of a run's newest checkpoint, in evaluation mode.

    Args:
        folder: the run's.
        model: as given to `run`, if it was; a copy of it is filled.
        dataset: as given to `run`, if it was.
        algorithm: as given to `run`, if it was.

    Returns:
        The module. It knows which run trained it: another run that is given it counts that run's cost.

    Raises:
        UserError: there is no checkpoint, or another object was given.
    """
    folder = Path(folder)
    given = {"model": model, "algorithm": algorithm}
    refuse_others(folder, given if dataset is None else {**given, "dataset": dataset}, "trained")
    return _trained(folder, _config(folder), model, dataset, algorithm)


def _trained(
    folder: Path,
    config: Config,
    model: nn.Module | None,
    dataset: Dataset | None,
    algorithm: Algorithm | None,
) -> nn.Module:
    model = None if model is None else own_copy(model)
    algorithm = algorithm or build_algorithm(config.method.name, config.method.options)
    model = model or build_model(config, dataset or build_dataset(config))
    load_model(folder, model, algorithm.personal_part)
    return mark(model, folder).eval()


def export(
    folder: str | Path,
    into: str | Path,
    *,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    algorithm: Algorithm | None = None,
) -> tuple[str, ...]:
    """Save a run's model for plain transformers and peft: an adapter with LoRA, else the whole model.

    The names of the classes go along (`id2label`), and a model card, README.md, with the statement.

    Args:
        folder: the run's.
        into: a folder that does not exist yet.
        model: as given to `run`, if it was.
        dataset: as given to `run`, if it was.
        algorithm: as given to `run`, if it was.

    Returns:
        Patterns of what each client trained for itself, of which the server has but the beginning.

    Raises:
        UserError: the folder exists, there is no checkpoint, or another object was given.
    """
    folder, into = Path(folder), Path(into)
    config = _config(folder)
    if into.exists():
        raise UserError(f"{into} exists already; choose another folder")
    # Whatever may refuse comes before anything is made.
    run, said = read_run(folder), read_statement(folder) if config.privacy is not None else None
    given = {"model": model, "algorithm": algorithm}
    refuse_others(folder, given if dataset is None else {**given, "dataset": dataset}, "export")
    given_model = model is not None
    algorithm = algorithm or build_algorithm(config.method.name, config.method.options)
    dataset = dataset or build_dataset(config)
    model = _trained(folder, config, model, dataset, algorithm)
    partial = into.with_name(f"{into.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        how_to = _save(config, model, given_model, dataset, partial, into.resolve())
        if config.model.hub is not None and not given_model:
            copy_tokenizer(locate(config.model.hub, offline=True), partial)
        for name in (STATEMENT, LEDGER, LINEAGE):  # the guarantee goes along, and what it was trained on
            if (folder / name).exists():
                shutil.copyfile(folder / name, partial / name)
        text = card(run, said, dataset.label_names, how_to, config.model.hub)
        write_atomically(partial / "README.md", text)
        partial.rename(into)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{into}: the model cannot be saved ({error.strerror or error})") from None
    return algorithm.personal_part


def _save(config: Config, model: nn.Module, given: bool, dataset: Dataset, partial: Path, into: Path) -> str:
    """Write the model; the Python that loads it from where it will be."""
    section = config.model
    name_labels(model, dataset.label_names)
    how: dict[str, Any] = {"shape": dataset.shape, "classes": dataset.classes}
    if given or section.name is None or section.name.startswith(PREFIX):
        how = {"class": f"{type(model).__module__}.{type(model).__qualname__}", **section.options, **how}
    else:
        how = {"tacit": section.name, **section.options, **how}
    known = hasattr(model, "save_pretrained")
    if section.lora is None or given:
        save_model(model, how, partial)
        kind = "transformers" if known else "tacit" if "tacit" in how else "own"
        return loading(kind, into, type(model).__name__ if known or kind == "own" else None)
    base = build_base(config, dataset)
    name_labels(base, dataset.label_names)
    home = section.hub if section.start is None else None  # where others find this very base
    local = None if home is None else Path(home).expanduser()
    if local is not None and local.is_dir():
        # Loading by name alone works where the base has the same outputs; else it goes along, with them.
        home = str(local.resolve()) if outputs(local) == dataset.classes else None
    save_adapter(model, base, section.lora, home or str(into / "base"), partial)
    if home is None:
        save_model(base, how, partial / "base")
    return loading("peft", into, auto_class(model))


def _config(folder: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no run (there is no {CONFIG} in it); runs are under {RUNS}/")
    refuse_changed_config(folder)
    return configs.load(folder / CONFIG, overrides, presets=False)


def extrapolations(folder: str | Path, more: Sequence[Scale] = ()) -> list[str]:
    """What ε would be with more clients, for a run so far: a line each, none of them a claim of the run."""
    folder = Path(folder)
    config = _config(folder)
    privacy = config.privacy
    asked = [(Scale(s.population, s.cohort), s.rounds) for s in privacy.extrapolate] if privacy else []
    asked += [(scale, None) for scale in more]
    if privacy is None or not asked:
        return []
    own = "sampling" in (read_passed(folder) or {}) or config.cohort.sampling == "fixed"
    if privacy.unit != "client" or privacy.adaptive is not None or own:
        raise UserError("an extrapolation needs client-level privacy, Poisson cohorts and a constant clip")
    noise, done = float(privacy.noise or 0.0), statement(folder).rounds  # type: ignore[arg-type]
    if not noise:
        return []
    lines = []
    for scale, rounds in asked:
        # A federation that goes on for longer does so in proportion while this run is under way.
        rounds = done if rounds is None else max(1, round(rounds * done / config.rounds))
        epsilon = scale.cost(noise, config.cohort.size, rounds, privacy.delta)
        lines.append(scale.text(epsilon, scale.noise(noise, config.cohort.size), rounds))
    return lines


def resolved(config: Config, job: Job) -> Config:
    """The config with the noise that was found for its budget, so that a resume uses the same."""
    if config.privacy is None or job.privacy is None:
        return config
    privacy = config.privacy.model_copy(update={"noise": job.privacy.noise})
    return config.model_copy(update={"privacy": privacy})


@contextmanager
def _nothing_left_of_a_refusal(folder: Path) -> Iterator[None]:
    """A run that is refused before it began (its device, its federation, …) takes its first files along."""
    before = {file.name for file in folder.iterdir()}
    try:
        yield
    except BaseException:
        begun = {file.name for file in folder.iterdir()} - before - FIRST_FILES
        if not begun:
            for name in FIRST_FILES - before:
                (folder / name).unlink(missing_ok=True)
        raise


def new_folder(name: str) -> Path:
    """A new folder under runs/, named after the config and the time; made here, so it is nobody else's."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = [RUNS / f"{name}-{stamp}", *(RUNS / f"{name}-{stamp}-{n}" for n in range(2, 1000))]
    try:
        RUNS.mkdir(exist_ok=True)
        for folder in candidates:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                return folder
    except OSError as error:
        raise UserError(
            f"{RUNS}/: cannot be written ({error.strerror}); choose a folder with --out"
        ) from None
    raise UserError(f"{RUNS}/ has a thousand runs of this name and second; choose a folder with --out")


def _saved(config: Config, result: Result) -> Result:
    """A seed model is for others to start from: with its weights by name, beside its config."""
    mark(result.model, result.path)
    last = result.metrics[-1]["round"] if result.metrics else 0
    try:
        write_ending(result.path, Ending(last, result.finished, result.stopped))
    except OSError as error:
        raise UserError(
            f"{result.path}: the run is saved, but not how it ended ({error.strerror}); make room on the "
            "disk, then `tacit resume` writes it down"
        ) from None
    if result.metrics:
        try:
            write_page(rows([read_run(result.path)]), result.path / PAGE)
        except Exception as error:  # a page is for looking at: none is worth a run
            warnings.warn(f"{result.path / PAGE} could not be made: {error}", RuntimeWarning, stacklevel=2)
    if config.pretrain is not None and result.finished:
        save_weights(result.model, result.path / MODEL)
    return result


def _on(config: Config, device: str | Sequence[str] | None, server: bool = False) -> Config:
    """The config with another `engine.device`; if asked, its server moves from an accelerator, too."""
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
