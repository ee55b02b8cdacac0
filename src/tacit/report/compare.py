"""One table over many runs: runs that differ only in their seed form one row.

Rows differ in some key that may change a result, in an object passed to the run, or in the training data. Two
runs with equal settings and equal seeds never count as two seeds of one experiment.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from tacit.config.yamls import parse
from tacit.errors import UserError
from tacit.federation import Record, read_metrics
from tacit.federation.checkpoint import CONFIG, LINEAGE
from tacit.federation.ending import Ending, read_ending
from tacit.federation.lineage import read_lineage
from tacit.federation.passed import Passed, read_passed
from tacit.federation.statements import read_ledger
from tacit.federation.tracking import METRICS
from tacit.federation.verify import refuse_changed_config
from tacit.reading import read_text
from tacit.report.naming import differences as differences
from tacit.report.naming import named, settings_of, without_noise
from tacit.report.paired import Difference, paired
from tacit.tasks import Headline, headline
from tacit.tasks.headline import KEPT

KINDS: dict[str, Any] = {
    "name": str, "seed": int, "rounds": int, "data": dict, "model": dict, "method": dict, "cohort": dict,
    "local": dict, "server": dict, "evaluate": dict, "privacy": dict | NoneType,
}  # fmt: skip
"""The least that a run's config must contain, whichever version wrote it."""


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    folder: Path
    config: dict[str, Any]
    metrics: list[Record]
    passed: Mapping[str, Passed] = field(default_factory=dict)
    """Objects that were passed to it instead of names."""
    content: str | None = None
    """A hash of its records."""
    ending: Ending | None = None
    unknown: str = ""
    """Why its ε is unknown, if it is: what is wrong with its ledger."""

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(round, value) for each round that recorded the metric."""
        return [(r["round"], float(r[metric])) for r in self.metrics if metric in r]

    @property
    def rounds_done(self) -> int:
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def planned(self) -> int:
        return int(self.config.get("rounds", 0))

    @property
    def finished(self) -> bool:
        """Whether it ran all its rounds, or ended for a good reason (a spent budget)."""
        return self.rounds_done >= self.planned or (self.ending is not None and self.ending.finished)

    @property
    def unit(self) -> str | None:
        """The unit that it protects, if any."""
        privacy = self.config.get("privacy")
        return str(privacy["unit"]) if privacy else None

    @property
    def simulated(self) -> bool:
        """Whether its noise can be repeated, so that its ε is no claim."""
        return (self.config.get("privacy") or {}).get("entropy") == "seed"


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds."""

    mean: float
    std: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        if not all(map(math.isfinite, values)):  # ε without noise is ∞, which `statistics` cannot handle
            return Spread(statistics.fmean(values), 0.0 if len(set(values)) == 1 else math.nan)
        return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class Row:
    """All seeds of one configuration."""

    label: str
    runs: tuple[Run, ...]
    tuned: bool = False
    """The same runs, evaluated after each client has fine-tuned the model for itself."""

    def last(self, metric: str) -> Spread | None:
        """The metric at the end of each run."""
        return Spread.of([series[-1][1] for run in self.runs if (series := run.series(metric))])

    def by_seed(self, metric: str) -> dict[int, float]:
        """The same, by seed."""
        return {
            int(run.config.get("seed", 0)): series[-1][1]
            for run in self.runs
            if (series := run.series(metric))
        }

    @property
    def epsilon(self) -> float | None:
        """The ε that holds for all its runs: the largest, if every one is known."""
        if self.unknown:
            return None
        return max((series[-1][1] for run in self.runs if (series := run.series("epsilon"))), default=None)

    @property
    def unknown(self) -> str:
        """Why ε is unknown, for the first run where it is."""
        return next((run.unknown for run in self.runs if run.unknown), "")

    def best(self, metric: Headline) -> Spread | None:
        """The metric's best value in each run."""
        found = [series for run in self.runs if (series := run.series(metric.name))]
        return Spread.of([metric.best(v for _, v in series) for series in found])

    def own(self, metric: Headline) -> Spread | None:
        """The metric on the clients' own test splits."""
        return self.last(self.own_name(metric))

    def own_name(self, metric: Headline) -> str:
        return f"tuned_{metric.common.name}" if self.tuned else metric.common.own.name

    def total(self, name: str) -> float:
        """A quantity's sum over a run, averaged over the runs."""
        return statistics.fmean(sum(r.get(name, 0.0) for r in run.metrics) for run in self.runs)

    @property
    def rounds(self) -> str:
        """Rounds done, and "of" the planned number if a run is not finished.

        >>> Row("a", (Run(Path("x"), {"rounds": 9}, [{"round": 4}]),)).rounds
        '4 of 9'
        """
        least = min(self.runs, key=lambda run: (run.finished, run.rounds_done))
        return f"{least.rounds_done:,}" if least.finished else f"{least.rounds_done:,} of {least.planned:,}"

    @property
    def unfinished(self) -> int:
        return sum(not run.finished for run in self.runs)

    @property
    def protects(self) -> str | None:
        """The unit of its guarantee; a simulation claims none and says so."""
        run = self.runs[0]
        return f"{run.unit} (simulated)" if run.unit and run.simulated else run.unit

    @property
    def place(self) -> str:
        """The place of its runs, in shell notation.

        >>> runs = [Run(Path("runs/sweep") / f"lr=0.1,seed={seed}", {}, []) for seed in (9, 10)]
        >>> Row("", tuple(runs)).place, Row("", (runs[0],)).place
        ('runs/sweep/lr=0.1,seed={9,10}', 'runs/sweep/lr=0.1,seed=9')
        """
        parents, names = {run.folder.parent for run in self.runs}, [run.folder.name for run in self.runs]
        start = re.sub(r"\w*$", "", _same_start(names))  # never split a number
        rests = [name.removeprefix(start) for name in names]
        same_end = _same_start([rest[::-1] for rest in rests])[::-1]
        end = same_end[same_end.index(",") :] if "," in same_end else ""  # start at a whole setting
        middles = [rest.removesuffix(end) for rest in rests]
        if len(self.runs) == 1 or len(parents) > 1 or any("," in middle for middle in middles):
            return ", ".join(str(run.folder) for run in self.runs)
        return str(parents.pop() / f"{start}{{{','.join(middles)}}}{end}")

    @property
    def other_weights(self) -> bool:
        """Whether its networks were objects with different initial weights: runs with different seeds have
        them, and so do runs with different networks.
        """
        return len({run.passed["model"].weights for run in self.runs if "model" in run.passed}) > 1


def _same_start(names: Sequence[str]) -> str:
    """The common prefix of the names."""
    places = zip(*names, strict=False)
    return "".join(letters[0] for letters in itertools.takewhile(lambda place: len({*place}) == 1, places))


def read_run(folder: Path) -> Run:
    """Read a run's folder; an error names a folder that cannot be read."""
    file = folder / CONFIG
    refuse_changed_config(folder)
    try:
        config, _ = parse(read_text(file))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file} cannot be read ({first(error)}); restore it, or leave the run out") from None
    known = config if isinstance(config, dict) else {"name": None}
    odd = any(name in known and not isinstance(known[name], kind) for name, kind in KINDS.items())
    if odd or ("unit" not in (known.get("privacy") or {"unit": None})):
        raise UserError(f"{file} is no config of a run; restore it, or leave the run out")
    metrics = read_metrics(folder / METRICS)
    # A run of an earlier version has none: its config must suffice.
    content = read_lineage(folder)[0].content if (folder / LINEAGE).exists() else None
    return Run(folder, config, metrics, read_passed(folder) or {}, content, read_ending(folder))


def first(error: Exception) -> str:
    """An error's text on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().split("\n")[0][:120]


def find_runs(places: Iterable[Path]) -> list[Run]:
    """The runs in these folders: a run itself, or the runs of a sweep (without those that only tuned).

    The ε in a run's metrics is believed only if every line of its ledger is valid.
    """
    runs: dict[Path, Run] = {}  # a run that is named twice counts once
    for place in places:
        files = [place / CONFIG] if (place / CONFIG).exists() else sorted(place.glob(f"*/{CONFIG}"))
        if not files:
            raise UserError(f"{place}: no run there, nor a sweep with runs inside")
        for file in files:
            run = read_run(file.parent)
            if run.metrics:
                runs[file.parent.resolve()] = replace(run, unknown=_unknown(run))
    if not runs:
        raise UserError("none of these runs has finished a round yet")
    return list(runs.values())


def _unknown(run: Run) -> str:
    if run.unit is None:
        return ""
    try:
        read_ledger(run.folder)
    except UserError as error:
        return str(error)
    return ""


def rows(runs: Sequence[Run]) -> list[Row]:
    """Runs grouped by everything but the seed, labelled by everything that differs between the groups.

    Equal seeds are never merged: the same experiment run twice is two rows, which their folders distinguish.
    Runs whose clients also fine-tuned for themselves (`evaluate.tune`) have a second row, "…, tuned".
    """
    groups = []
    for members in _grouped(runs, without_noise):
        # One seed with two noises: a given budget determined the noise.
        for same in [members] if _different_seeds(members) else _grouped(members, settings_of):
            groups += [same] if _different_seeds(same) else [[run] for run in same]
    labels = named([members[0] for members in groups])
    repeated = {label for label in labels if labels.count(label) > 1}
    found = [
        Row(f"{label}, in {members[0].folder.name}" if label in repeated else label, tuple(members))
        for label, members in zip(labels, groups, strict=True)
    ]
    return [twin for row in found for twin in _with_tuned(row)]


def _with_tuned(row: Row) -> list[Row]:
    if not any(name.startswith("tuned_") for run in row.runs for record in run.metrics for name in record):
        return [row]
    return [row, Row(f"{row.label}, tuned".removeprefix(", "), row.runs, tuned=True)]


def judged_by(table: Sequence[Row]) -> Headline:
    """The metric that compares these runs; one of clients' own models only if every row has it."""
    recorded = [{name for run in row.runs for record in run.metrics for name in record} for row in table]
    names = {name for own in recorded for name in own}
    metric = headline(names)
    return metric if all(metric.name in own for own in recorded) else headline(names - {KEPT})


def keeps_parts(table: Sequence[Row]) -> bool:
    """Whether clients keep personal parameters: the test set then uses initial ones, which nobody trains."""
    return any(KEPT in record for row in table for run in row.runs for record in run.metrics)


def untrained(table: Sequence[Row]) -> bool:
    """Whether the rows are compared by such numbers."""
    metric = judged_by(table)
    return keeps_parts(table) and metric == metric.common


def find_row(table: Sequence[Row], label: str) -> Row:
    """The row with that label, or the only one whose label begins with it."""
    for row in table:
        if row.label == label:
            return row
    begun = [row for row in table if row.label.startswith(label)]
    if len(begun) == 1:
        return begun[0]
    found = f"{len(begun)} rows begin with {label!r}" if begun else f"no row is called {label!r}"
    raise UserError(f"{found}; there are {', '.join(repr(row.label) for row in begun or table)}")


def against(table: Sequence[Row], reference: Row) -> dict[str, dict[str, Difference]]:
    """By row and metric (`last`, and `own` if it was measured): the difference from the reference, paired
    over the seeds that both have. Rows that share no seed with the reference are left out.
    """
    metric = judged_by(table)
    found: dict[str, dict[str, Difference]] = {}
    for row in table:
        if row is reference:
            continue
        names = {
            "last": (metric.name, metric.name),
            "own": (row.own_name(metric), reference.own_name(metric)),
        }
        for title, (ours, theirs) in names.items():
            values, others = row.by_seed(ours), reference.by_seed(theirs)
            if values.keys() & others.keys():
                found.setdefault(row.label, {})[title] = paired(values, others)
    return found


def to_json(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The table as plain values; `epsilon` is the one that holds for all of a row's runs. Non-finite numbers
    become None, since JSON has none of them.
    """

    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    def plain(spread: Spread | None) -> dict[str, float | None] | None:
        return None if spread is None else {"mean": finite(spread.mean), "std": finite(spread.std)}

    metric = judged_by(table)
    return [
        {
            "label": row.label,
            "seeds": len(row.runs),
            "metric": metric.name,
            f"{metric.name}_last": plain(row.last(metric.name)),
            f"{metric.name}_best": plain(row.best(metric)),
            f"{metric.name}_own": plain(row.own(metric)),
            "epsilon": finite(row.epsilon),
            "unit": row.runs[0].unit,
            "simulation": row.runs[0].simulated,
            "rounds": min(run.rounds_done for run in row.runs),
            "unfinished": row.unfinished,
            "bytes_up": row.total("bytes_up"),
            "bytes_down": row.total("bytes_down"),
            "seconds": row.total("seconds"),
            "runs": [str(run.folder) for run in row.runs],
        }
        for row in table
    ]


def _different_seeds(runs: Sequence[Run]) -> bool:
    return len({run.config.get("seed") for run in runs}) == len(runs)


def _grouped(runs: Sequence[Run], by: Callable[[Run], dict[str, Any]]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(by(run), sort_keys=True, default=str), []).append(run)
    return list(groups.values())
