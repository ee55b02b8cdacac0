"""One table over many runs: those that differ only in their seed are one row."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tacit.errors import UserError
from tacit.federation import Record, read_metrics
from tacit.federation.verify import refuse_changed_config
from tacit.tasks import Headline, headline

CONFIG = "config.yaml"
SPEED = ("engine", "checkpoint", "trackers", "name")
"""Parts of a config that cannot change a result."""


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    folder: Path
    config: dict[str, Any]
    metrics: list[Record]

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(round, value) wherever the metric was recorded."""
        return [(r["round"], float(r[metric])) for r in self.metrics if metric in r]


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

    def best(self, metric: Headline) -> Spread | None:
        """The metric's best value in each run."""
        found = [series for run in self.runs if (series := run.series(metric.name))]
        return Spread.of([metric.best(v for _, v in series) for series in found])

    def own(self, metric: Headline) -> Spread | None:
        """The metric on the clients' own test splits."""
        return self.last(f"{'tuned' if self.tuned else 'personal'}_{metric.name}")

    def total(self, name: str) -> float:
        """Sum of a quantity over a run, averaged over the runs."""
        return statistics.fmean(sum(r.get(name, 0.0) for r in run.metrics) for run in self.runs)


def find_runs(places: Iterable[Path]) -> list[Run]:
    """The runs in these folders: a run itself, or a sweep with runs inside (not those that only tuned)."""
    runs: dict[Path, Run] = {}  # a run that is named twice is one seed, not two
    for place in places:
        files = [place / CONFIG] if (place / CONFIG).exists() else sorted(place.glob(f"*/{CONFIG}"))
        if not files:
            raise UserError(f"{place}: no run there, nor a sweep with runs inside")
        for file in files:
            refuse_changed_config(file.parent)
            try:
                config = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (OSError, yaml.YAMLError) as error:
                raise UserError(f"{file}: cannot be read ({str(error).splitlines()[0]})") from None
            metrics = read_metrics(file.parent / "metrics.jsonl")
            if metrics:
                runs[file.parent.resolve()] = Run(file.parent, config, metrics)
    if not runs:
        raise UserError("none of these runs has finished a round yet")
    return list(runs.values())


def rows(runs: Sequence[Run]) -> list[Row]:
    """Runs grouped by everything but the seed, labelled by what differs between the groups.

    Runs whose clients also fine-tuned for themselves (`evaluate.tune`) have a second row, "…, tuned".
    """
    groups = []
    for members in _grouped(runs, _without_noise):
        seeds = {run.config.get("seed") for run in members}
        # One seed with two noises: whoever set the budget also set the noise.
        groups += [members] if len(seeds) == len(members) else _grouped(members, _compared)
    flat = [_flat(_compared(members[0].config)) for members in groups]
    keys = [
        key for key in dict.fromkeys(k for f in flat for k in f) if len({str(f.get(key)) for f in flat}) > 1
    ]
    found = [Row(_label(values, keys), tuple(members)) for values, members in zip(flat, groups, strict=True)]
    return [twin for row in found for twin in _with_tuned(row)]


def _with_tuned(row: Row) -> list[Row]:
    if not any(name.startswith("tuned_") for run in row.runs for record in run.metrics for name in record):
        return [row]
    return [row, Row(f"{row.label}, tuned".removeprefix(", "), row.runs, tuned=True)]


def judged_by(table: Sequence[Row]) -> Headline:
    """The metric that these runs are compared by."""
    return headline({name for row in table for run in row.runs for record in run.metrics for name in record})


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
            "bytes_up": row.total("bytes_up"),
            "bytes_down": row.total("bytes_down"),
            "seconds": row.total("seconds"),
            "runs": [str(run.folder) for run in row.runs],
        }
        for row in table
    ]


def _grouped(runs: Sequence[Run], by: Callable[[Mapping[str, Any]], dict[str, Any]]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(by(run.config), sort_keys=True), []).append(run)
    return list(groups.values())


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in (*SPEED, "seed")}


def _without_noise(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same, but for noise that was found for a budget: that depends on the cohorts that a seed draws."""
    compared = _compared(config)
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


def _label(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The method's name, then what else tells rows apart; a preset's settings go without saying."""
    parts = [str(values["method.name"])] if "method.name" in values else []
    told = (
        "local.lr",
        "data.partition.alpha",
        "privacy.epsilon",
        "privacy.noise",
        "privacy.clip.per",
        "cohort.size",
        "server.optimizer",
        "rounds",
    )
    for key in keys:
        if values.get(key) is None:
            continue
        if key == "privacy.noise" and values.get("privacy.epsilon") is not None:
            continue  # it was found for the budget, which is told already
        if key in told or (key.startswith("method.") and key != "method.name"):
            parts.append(f"{key.rpartition('.')[2]} {values.get(key)}")
    return ", ".join(parts)
