"""One table over many runs: those that differ only in their seed are one row.

Rows are told apart by every key that may change a result, by the objects that a run was given and by the data
it was trained on; runs of equal settings and equal seeds are never taken for two seeds of one experiment.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from tacit.config.loading import parse
from tacit.config.methods import METHODS
from tacit.errors import UserError
from tacit.federation import Record, read_metrics
from tacit.federation.checkpoint import CONFIG, LINEAGE
from tacit.federation.ending import Ending, read_ending
from tacit.federation.lineage import read_lineage
from tacit.federation.passed import Passed, read_passed
from tacit.federation.tracking import METRICS
from tacit.federation.verify import refuse_changed_config
from tacit.reading import read_text
from tacit.report.paired import Difference, paired
from tacit.tasks import Headline, headline

KINDS: dict[str, Any] = {
    "name": str, "seed": int, "rounds": int, "data": dict, "model": dict, "method": dict, "cohort": dict,
    "local": dict, "server": dict, "evaluate": dict, "privacy": dict | NoneType,
}  # fmt: skip
"""What a run's config has at least to be, whichever version wrote it."""
SPEED = ("engine", "checkpoint", "trackers", "name")
"""Parts of a config that cannot change a result."""
LOOKING = ("every", "batch", "layers")
"""Nor can these keys of `evaluate`."""
UNSAID = ("bound", "name", "size", "kind", "class", "code")
"""Last parts of a key that say less than the part before them."""


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    folder: Path
    config: dict[str, Any]
    metrics: list[Record]
    passed: Mapping[str, Passed] = field(default_factory=dict)
    """Objects it was given instead of names."""
    content: str | None = None
    """A hash of its records."""
    ending: Ending | None = None

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(round, value) wherever the metric was recorded."""
        return [(r["round"], float(r[metric])) for r in self.metrics if metric in r]

    @property
    def rounds_done(self) -> int:
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def planned(self) -> int:
        return int(self.config.get("rounds", 0))

    @property
    def finished(self) -> bool:
        """It ran all its rounds, or ended for a reason of its own (a spent budget)."""
        return self.rounds_done >= self.planned or (self.ending is not None and self.ending.finished)

    @property
    def unit(self) -> str | None:
        """Whom it protects, if anyone."""
        privacy = self.config.get("privacy")
        return str(privacy["unit"]) if privacy else None

    @property
    def simulated(self) -> bool:
        """Its noise can be repeated, so its ε is no claim."""
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
        if not all(map(math.isfinite, values)):  # ε without noise: `statistics` takes no roots of these
            return Spread(statistics.fmean(values), 0.0 if len(set(values)) == 1 else math.nan)
        return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class Row:
    """All seeds of one configuration."""

    label: str
    runs: tuple[Run, ...]
    tuned: bool = False
    """The same runs, but clients are judged after each has fine-tuned the model for itself."""

    def last(self, metric: str) -> Spread | None:
        """The metric at the end of each run."""
        return Spread.of([series[-1][1] for run in self.runs if (series := run.series(metric))])

    def by_seed(self, metric: str) -> dict[int, float]:
        """The same, for each seed."""
        return {
            int(run.config.get("seed", 0)): series[-1][1]
            for run in self.runs
            if (series := run.series(metric))
        }

    @property
    def epsilon(self) -> float | None:
        """The ε that holds for each of its runs: the largest of theirs."""
        return max((series[-1][1] for run in self.runs if (series := run.series("epsilon"))), default=None)

    def best(self, metric: Headline) -> Spread | None:
        """The metric's best value in each run."""
        found = [series for run in self.runs if (series := run.series(metric.name))]
        return Spread.of([metric.best(v for _, v in series) for series in found])

    def own(self, metric: Headline) -> Spread | None:
        """The metric on the clients' own test splits."""
        return self.last(self.own_name(metric))

    def own_name(self, metric: Headline) -> str:
        return f"{'tuned' if self.tuned else 'personal'}_{metric.name}"

    def total(self, name: str) -> float:
        """Sum of a quantity over a run, averaged over the runs."""
        return statistics.fmean(sum(r.get(name, 0.0) for r in run.metrics) for run in self.runs)

    @property
    def rounds(self) -> str:
        """Rounds done; of how many, where a run is not finished.

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
        """Where its runs are, as a shell would write it.

        >>> runs = [Run(Path("runs/sweep") / f"lr=0.1,seed={seed}", {}, []) for seed in (9, 10)]
        >>> Row("", tuple(runs)).place, Row("", (runs[0],)).place
        ('runs/sweep/lr=0.1,seed={9,10}', 'runs/sweep/lr=0.1,seed=9')
        """
        parents = {run.folder.parent for run in self.runs}
        if len(self.runs) == 1 or len(parents) > 1:
            return ", ".join(str(run.folder) for run in self.runs)
        names = [run.folder.name for run in self.runs]
        places = zip(*names, strict=False)
        same = "".join(
            letters[0] for letters in itertools.takewhile(lambda letters: len({*letters}) == 1, places)
        )
        shared = re.sub(r"\w*$", "", same)  # no number is cut in two
        ends = ",".join(name.removeprefix(shared) for name in names)
        return str(parents.pop() / f"{shared}{{{ends}}}")

    @property
    def other_weights(self) -> bool:
        """Whether its networks were objects that began with different weights: as seeds do, and as others."""
        return len({run.passed["model"].weights for run in self.runs if "model" in run.passed}) > 1


def read_run(folder: Path) -> Run:
    """A run's folder, read; one that cannot be is named."""
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
    # A run of an earlier version has none: its config has to be enough.
    content = read_lineage(folder)[0].content if (folder / LINEAGE).exists() else None
    return Run(folder, config, metrics, read_passed(folder) or {}, content, read_ending(folder))


def first(error: Exception) -> str:
    """What an error says, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().split("\n")[0][:120]


def find_runs(places: Iterable[Path]) -> list[Run]:
    """The runs in these folders: a run itself, or a sweep with runs inside (not those that only tuned)."""
    runs: dict[Path, Run] = {}  # a run that is named twice is one seed, not two
    for place in places:
        files = [place / CONFIG] if (place / CONFIG).exists() else sorted(place.glob(f"*/{CONFIG}"))
        if not files:
            raise UserError(f"{place}: no run there, nor a sweep with runs inside")
        for file in files:
            run = read_run(file.parent)
            if run.metrics:
                runs[file.parent.resolve()] = run
    if not runs:
        raise UserError("none of these runs has finished a round yet")
    return list(runs.values())


def rows(runs: Sequence[Run]) -> list[Row]:
    """Runs grouped by everything but the seed, labelled by everything that differs between the groups.

    Equal seeds are never merged: the same experiment twice is two rows, told apart by their folders. Runs
    whose clients also fine-tuned for themselves (`evaluate.tune`) have a second row, "…, tuned".
    """
    groups = []
    for members in _grouped(runs, _without_noise):
        # One seed with two noises: whoever set the budget also set the noise.
        for same in [members] if _different_seeds(members) else _grouped(members, _compared):
            groups += [same] if _different_seeds(same) else [[run] for run in same]
    labels = _labels([members[0] for members in groups])
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
    """The metric that these runs are compared by."""
    return headline({name for row in table for run in row.runs for record in run.metrics for name in record})


def find_row(table: Sequence[Row], label: str) -> Row:
    """The row of that label, or the one whose label begins with it."""
    for row in table:
        if row.label == label:
            return row
    begun = [row for row in table if row.label.startswith(label)]
    if len(begun) == 1:
        return begun[0]
    found = f"{len(begun)} rows begin with {label!r}" if begun else f"no row is called {label!r}"
    raise UserError(f"{found}; there are {', '.join(repr(row.label) for row in begun or table)}")


def against(table: Sequence[Row], reference: Row) -> dict[str, dict[str, Difference]]:
    """By row and by metric (`last`, and `own` where it was measured): the difference from the reference,
    paired over the seeds that both have. Rows that share no seed with it are left out.
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


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted keys that may change a result and differ between two resolved configs, with both values.

    >>> differences({"seed": 0, "local": {"lr": 0.1}, "name": "a"}, {"seed": 0, "local": {"lr": 0.2}})
    ['local.lr 0.1, not 0.2']
    """
    a, b = (_flat({k: v for k, v in c.items() if k not in SPEED}) for c in (one, other))
    return [f"{key} {a.get(key)}, not {b.get(key)}" for key in {**a, **b} if a.get(key) != b.get(key)]


def to_json(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The table for a program."""

    def plain(spread: Spread | None) -> dict[str, float] | None:
        return None if spread is None else {"mean": spread.mean, "std": spread.std}

    metric = judged_by(table)
    return [
        {
            "label": row.label,
            "seeds": len(row.runs),
            "metric": metric.name,
            f"{metric.name}_last": plain(row.last(metric.name)),
            f"{metric.name}_best": plain(row.best(metric)),
            f"{metric.name}_own": plain(row.own(metric)),
            "epsilon": plain(row.last("epsilon")),
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


def _compared(run: Run) -> dict[str, Any]:
    """Everything that may change a result but the seed: settings, objects, and the records."""
    compared = {key: value for key, value in run.config.items() if key not in (*SPEED, "seed")}
    looked = compared.get("evaluate") or {}
    compared["evaluate"] = {key: value for key, value in looked.items() if key not in LOOKING}
    for role, one in run.passed.items():
        section = {"algorithm": "method", "dataset": "data"}.get(role, role)
        if role != "dataset":  # the partition of a data set is the config's business, a network is none of it
            compared.pop(section, None)
        compared[f"{role} object"] = {"class": one.name, "options": one.options, "code": one.fingerprint}
    if run.content is not None:
        compared["records"] = run.content
    return compared


def _without_noise(run: Run) -> dict[str, Any]:
    """The same, but for noise that was found for a budget: that depends on the cohorts that a seed draws."""
    compared = _compared(run)
    privacy = compared.get("privacy")
    if privacy and privacy.get("epsilon") is not None:
        compared["privacy"] = {key: value for key, value in privacy.items() if key != "noise"}
    return compared


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, Mapping):
        return {prefix: values}
    return {
        k: v for key, value in values.items() for k, v in _flat(value, f"{prefix}.{key}".strip(".")).items()
    }


def _labels(runs: Sequence[Run]) -> list[str]:
    """The method's name, then every key whose value tells rows apart.

    What goes without saying is left out: a preset's own settings beside its name, the noise that was found
    for a budget, and keys of a section that some rows have and share (those without it say so).
    """
    flat = [_flat(_compared(run)) for run in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    absent = [key for key in keys if any(other.startswith(f"{key}.") for other in keys)]  # a null section

    def differs(key: str) -> bool:
        section = next((s for s in absent if key.startswith(f"{s}.")), None)
        having = [values for values in flat if section is None or section not in values]
        return len({json.dumps(values.get(key), default=str) for values in having}) > 1

    said = (*absent, "method.name", _OBJECT)
    shown = [key for key in keys if key not in said and differs(key)]
    labels = _written(runs, flat, [key for key in shown if not key.endswith(_CODE)], absent)
    # A fingerprint says nothing to a person: it is shown where nothing else tells two rows apart.
    return labels if len(set(labels)) == len(labels) else _written(runs, flat, shown, absent)


def _written(
    runs: Sequence[Run], flat: Sequence[Mapping[str, Any]], shown: Sequence[str], absent: Sequence[str]
) -> list[str]:
    words = _words(shown)
    labels = []
    for run, values in zip(runs, flat, strict=True):
        algorithm = run.passed.get("algorithm")
        method = algorithm.name if algorithm else str((run.config.get("method") or {}).get("name", "fedavg"))
        preset = {} if algorithm or method not in METHODS else _flat(dict(METHODS[method].settings))
        parts = [method]
        for key in shown:
            value = values.get(key)
            if value is None or preset.get(key, _MISSING) == value:
                continue
            if key == "privacy.noise" and values.get("privacy.epsilon") is not None:
                continue
            parts.append(f"{words[key]} {_value(key, value)}")
        parts += [f"no {key}" for key in absent if key in values and _tells(key, flat)]
        labels.append(", ".join(parts))
    return labels


_MISSING = object()
_CODE = " object.code"
_OBJECT = "algorithm object.class"
"""Said first, as the row's method."""


def _tells(section: str, flat: Sequence[Mapping[str, Any]]) -> bool:
    return len({section in values for values in flat}) > 1


def _words(keys: Sequence[str]) -> dict[str, str]:
    """Short names for keys: the last part that says something, or all of it where that is not one key's own.

    >>> _words(["privacy.clip.bound", "local.lr", "server.lr", "cohort.size"])
    {'privacy.clip.bound': 'clip', 'local.lr': 'local.lr', 'server.lr': 'server.lr', 'cohort.size': 'cohort'}
    """

    def short(key: str) -> str:
        parts = key.split(".")
        while len(parts) > 1 and parts[-1] in UNSAID:
            parts.pop()
        return parts[-1]

    known = [short(key) for key in keys]
    return {
        key: word if known.count(word) == 1 else key.removesuffix(".bound")
        for key, word in zip(keys, known, strict=True)
    }


def _value(key: str, value: Any) -> str:
    if key in ("records",) or key.endswith(_CODE):
        return str(value)[:6]
    return f"{value:g}" if isinstance(value, float) else str(value)
