"""Reading a run's folder: its files, its metrics, its guarantee, and pages about it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Any

from torch import nn

from tacit import config as configs
from tacit.algorithms import Algorithm
from tacit.api.folders import no_run, recorded_config
from tacit.config import Config
from tacit.config.build import build_job
from tacit.config.sweep import load_one
from tacit.data import Dataset
from tacit.engine import Job
from tacit.errors import UserError
from tacit.federation.checkpoint import CONFIG
from tacit.federation.lineage import read_lineage
from tacit.federation.passed import own_copy, refuse_others
from tacit.federation.statements import Together, read_statement, read_together
from tacit.federation.testing import Metrics, Tested, load_newest, metrics_by_client, tested
from tacit.federation.verify import Finding, examine
from tacit.privacy.mechanisms.base import Unit
from tacit.privacy.statement import Statement
from tacit.report.compare import find_runs, rows, to_json
from tacit.report.page import PAGE, write_page
from tacit.tasks import Task


def verify(folder: str | Path) -> list[Finding]:
    """Check every file of a run: which are sound, which are damaged, and what can be saved.

    Args:
        folder: the run's.

    Returns:
        A finding for each file.

    Raises:
        UserError: the folder holds no run.
    """
    folder = Path(folder)
    if not (folder / CONFIG).exists() and not (folder / "checkpoint").exists():
        raise UserError(no_run(folder))
    return examine(folder)


def test(
    place: str | Path,
    overrides: Sequence[str] = (),
    *,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
    task: Task | None = None,
) -> Tested:
    """Evaluate a run's newest model, or the one a config starts from, on the test set.

    Args:
        place: a run's folder, or a config; for a sweep, the config of its first run.
        overrides: `key=value` settings, as on the command line.
        dataset: your own records: those that were given to `run`, or others.
        model: as given to `run`, if it was; a copy of it is filled.
        algorithm: as given to `run`, if it was.
        task: as given to `run`, if it was.

    Returns:
        The round, the metrics, the metrics by user and their distribution. There are no metrics by user if
        test users are clients that the run claims to protect.

    Raises:
        UserError: there is no run or no such config, the run was given another object, or the run claims a
            guarantee and the records are its clients' validation records.
    """
    place = Path(place)
    is_run = place.is_dir()
    given = configs.parse_overrides(list(overrides))
    config = recorded_config(place, given) if is_run else load_one(place, given)
    claimed = _claimed(place)
    if claimed is not None and config.evaluate.split == "validation" and config.data.validation:
        raise UserError(
            f"{place} protects its clients, and the validation records are theirs; exact numbers on them are "
            "outside any guarantee: judge by the test set, --set evaluate.split=test"
        )
    job = _tested_job("test", config, place, dataset, model, algorithm, task)
    round = load_newest(job, place) if is_run else 0
    return tested(job, round, claimed)


def test_clients(
    place: str | Path,
    count: int,
    overrides: Sequence[str] = (),
    *,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
    task: Task | None = None,
) -> tuple[int, dict[str, dict[int, Metrics]]]:
    """Evaluate clients' own models, each on its client's own held-out records (`data.holdout`).

    Args:
        place: a run's folder (its newest model, with the personal parts that it keeps), or a config.
        count: how many clients; the same ones that a run with this number of `evaluate.clients` tests.
        overrides: `key=value` settings, as on the command line.
        dataset: your own records, if the run was given some.
        model: as given to `run`, if it was; a copy of it is filled.
        algorithm: as given to `run`, if it was.
        task: as given to `run`, if it was.

    Returns:
        The round, and by client: `personal`, and `tuned` where the config has `evaluate.tune`.

    Raises:
        UserError: there is no run or config, clients have no held-out records, the run claims to protect
            them, or the run was given another object.
    """
    place = Path(place)
    is_run = place.is_dir()
    given = configs.parse_overrides(list(overrides))
    config = recorded_config(place, given) if is_run else load_one(place, given)
    if not config.data.holdout:
        raise UserError("clients have no test split of their own; data.holdout was not set")
    if _claimed(place) is not None:
        raise UserError(
            f"{place} claims to protect its clients, and exact numbers on each of them are outside the "
            "guarantee; simulations (privacy.entropy: seed) can be tested so"
        )
    job = _tested_job("test_clients", config, place, dataset, model, algorithm, task)
    round = load_newest(job, place) if is_run else 0
    kinds = {"personal": None} | ({} if config.evaluate.tune is None else {"tuned": config.evaluate.tune})
    return round, {
        kind: metrics_by_client(job, place if is_run else None, count, tune) for kind, tune in kinds.items()
    }


def _tested_job(
    verb: str,
    config: Config,
    place: Path,
    dataset: Dataset | None,
    model: nn.Module | None,
    algorithm: Algorithm | None,
    task: Task | None,
) -> Job:
    """The job of a run, without its privacy; objects that the run was given must be given again."""
    if place.is_dir():
        given = {"model": model, "algorithm": algorithm, "task": task}
        refuse_others(place, given | ({"dataset": None} if dataset is None else {}), verb)
    model = None if model is None else own_copy(model)
    return build_job(config.model_copy(update={"privacy": None}), place, model, dataset, algorithm, task)


def _claimed(place: Path) -> Unit | None:
    """The unit that a run's recorded guarantee protects, whatever overrides are given now; None for a run
    that claims nothing, and for a config.
    """
    claimed = recorded_config(place).claimed if place.is_dir() else None
    return None if claimed is None else claimed.unit


def statement(folder: str | Path, groups: Sequence[int] = ()) -> Statement:
    """What a run guarantees so far: a replay of its ledger.

    Args:
        folder: the run's.
        groups: sizes of groups of units; the statement then also has ε for each.

    Returns:
        ε, δ, the unit, the adjacency, against whom the guarantee holds and what it does not cover.

    Raises:
        UserError: the run claims nothing, its ledger was changed, or a group size is not a whole number.
    """
    folder = Path(folder)
    if recorded_config(folder).privacy is None:
        raise UserError(f"{folder}: this run guarantees nothing: its config has no `privacy` section")
    return read_statement(folder, _sizes(groups))


def _sizes(groups: Any) -> list[int]:
    """The sizes of groups, as they were given."""
    told = f"groups: {groups!r} is no list of sizes; give whole numbers from 1, such as [2, 5]"
    try:
        sizes = [index(size) for size in groups]
    except TypeError:
        raise UserError(told) from None
    if any(size < 1 for size in sizes):
        raise UserError(told)
    return sizes


def ledger(folders: str | Path | Sequence[str | Path], delta: float | None = None) -> Together:
    """What several runs on the same data have spent together: their events are composed, their ε not added.

    Args:
        folders: the folder of one run, or those of several.
        delta: the δ to state ε for; by default the smallest of the runs.

    Returns:
        ε of all runs together for the worst unit, and of each run alone.

    Raises:
        UserError: the runs have nobody in common, their clients are not the same people, or one run has no
            ledger.
    """
    places = [Path(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)]
    for place in places:
        recorded_config(place)  # what is no run's folder is told as such
    first, *others = data = [read_lineage(place)[0] for place in places]
    for place, other in zip(places[1:], others, strict=True):
        if not other.overlaps(first):
            raise UserError(
                f"{place} and {places[0]} have nobody in common, so nothing adds up; leave one out"
            )
    together = read_together(places, delta)
    for (one, mine), (two, yours) in itertools.combinations(zip(places, data, strict=True), 2):
        if mine.shows(yours) or yours.shows(mine):
            raise UserError(
                f"{one} and {two}: one used records as public (data.public) that the other protects, so for "
                "these nothing holds; leave one out"
            )
        if together.unit == "client" and not mine.same_clients(yours):
            raise UserError(
                f"{one} and {two} divide their records among clients in different ways, so a client of one "
                "may be several of the other, and nothing adds up; leave one out"
            )
    return together


def compare(runs: str | Path | Sequence[str | Path]) -> list[dict[str, Any]]:
    """The table of `tacit compare`, as rows of plain values; runs that differ only in their seed share a row.

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
