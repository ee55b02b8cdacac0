"""Sweeps: one config, many runs.

A `sweep:` section names keys and the values each should take; the product of them is run. Values under
`tune:` are not compared but chosen: for every other combination the value with the best accuracy on the
validation split (`data.validation`), with the first seed, is kept for all seeds.

    sweep:
      method: [dp-fedadamw, dp-fedavg]
      seed: [0, 1, 2]
      tune: {local.lr: [0.03, 0.1, 0.3]}

`--set 'sweep.seed=[3, 4]'` changes or adds such a list from the command line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tacit.config.loading import load, override, parse
from tacit.config.methods import build_algorithm
from tacit.config.schema import Config
from tacit.errors import UserError

SECTION = "sweep"
Point = dict[str, Any]
"""Dotted keys and the value each has in one run."""


@dataclass(frozen=True)
class Sweep:
    """A base config and the runs to make of it."""

    base: Mapping[str, Any]
    grid: Mapping[str, list[Any]]
    tune: Mapping[str, list[Any]]
    name: str

    @property
    def points(self) -> list[Point]:
        """Every combination to compare."""
        return _product(self.grid)

    def candidates(self, point: Point) -> list[Point]:
        """The runs that choose a point's tuned values: first seed, judged on validation records."""
        first = {**point, "seed": self.grid.get("seed", [self.base.get("seed", 0)])[0]}
        return [{**first, **values, "evaluate.split": "validation"} for values in _product(self.tune)]

    def config(self, point: Point) -> Config:
        """The checked config of one run."""
        return load(self.base, point)


def read_sweep(file: Path, overrides: Mapping[str, Any]) -> Sweep | None:
    """The sweep that a config file asks for; None if it is a single run. Every point is checked at once."""
    try:
        values, _ = parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None  # the ordinary loader explains what is wrong with it
    if SECTION in overrides:
        raise UserError("--set sweep: set one list of it at a time, for example --set 'sweep.seed=[0, 1]'")
    ours = {key: value for key, value in overrides.items() if key.startswith(f"{SECTION}.")}
    if not isinstance(values, dict) or (SECTION not in values and not ours):
        return None
    section = values.pop(SECTION, {})
    if not isinstance(section, dict):
        raise UserError(f"{file}: sweep: name keys and a list of values for each")
    tune = section.pop("tune", {}) or {}
    for key, value in ours.items():
        key = key.removeprefix(f"{SECTION}.")
        (tune if key.startswith("tune.") else section)[key.removeprefix("tune.")] = value
    for key, choices in [*section.items(), *tune.items()]:
        if not isinstance(choices, list) or not choices:
            raise UserError(f"{file}: sweep.{key}: give a list of values (got {choices!r})")
    for key, value in overrides.items():
        if key not in ours:
            _refuse_overruled(key, [*section, *tune])
            override(values, key, value)
    if tune and not values.get("data", {}).get("validation"):
        raise UserError(
            f"{file}: sweep.tune needs records to choose by; set data.validation, for example to 0.1"
        )
    name = re.sub(r"[^\w.-]+", "-", str(values.get("name") or file.stem)).lstrip(".")  # a folder of runs/
    sweep = Sweep(values, section, tune, name or "sweep")
    for point in sweep.points:
        for candidate in (point, *sweep.candidates(point)):
            try:
                method = sweep.config(candidate).method
                build_algorithm(method.name, method.options)
            except UserError as error:
                raise UserError(f"{file}: sweep point {slug(candidate)}: {error}") from None
    return sweep


def _refuse_overruled(key: str, swept: Iterable[str]) -> None:
    """What a sweep varies cannot be set for all of its runs: the sweep would have the last word, silently."""
    for other in swept:
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
            raise UserError(
                f"--set {key}: the sweep gives {other} values of its own; change them with "
                f"--set 'sweep.{other}=[...]' (sweep.tune.{other} if they are tuned)"
            )


def load_one(file: Path, overrides: Mapping[str, Any]) -> Config:
    """The config of a file; of a sweep, its first run."""
    sweep = read_sweep(file, overrides)
    return load(file, overrides) if sweep is None else sweep.config(sweep.points[0])


def slug(point: Point) -> str:
    """A folder name for a point.

    >>> slug({"method": "dp-fedavg", "local.lr": 0.1, "seed": 2})
    'method=dp-fedavg,lr=0.1,seed=2'
    >>> slug({"method": {"name": "fedprox", "mu": 0.1}})
    'method=fedprox+mu=0.1'
    """
    parts = []
    for key, value in point.items():
        if isinstance(value, dict):
            value = "+".join(str(v) if k in ("name", "kind") else f"{k}={v}" for k, v in value.items())
        parts.append(f"{key.rpartition('.')[2]}={value}")
    return re.sub(r"[^\w.,=+-]+", "-", ",".join(parts)) or "run"


def _product(grid: Mapping[str, list[Any]]) -> list[Point]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
