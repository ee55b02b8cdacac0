"""Sweeps: one config, many runs.

A `sweep:` section names keys and the values each should take; the product of them is run. Values under
`tune:` are not compared but chosen: for every other combination the value with the best accuracy on
validation records, with the first seed, is kept for all seeds.

    sweep:
      method: [dp-fedadamw, dp-fedavg]
      seed: [0, 1, 2]
      tune: {local.lr: [0.03, 0.1, 0.3]}
      validation: 0.1

`validation` is held out of each client's records in the runs that choose, and in those only; without it the
config's own `data.validation` is used, which is held out in every run.

`cases:` is for what a product cannot say: families that differ in several keys at once, or in their grids.
Each case is a whole setting, with lists and a `tune` of its own if it likes; the runs are every case with
every combination of the other lists.

    sweep:
      cases:
        - {method: [fedavg, scaffold], local.lr: 0.1, local.weight_decay: 0.001}
        - {method: fedadamw, tune: {local.lr: [0.0003, 0.001]}}
      seed: [0, 1, 2]

`--set 'sweep.seed=[3, 4]'` changes or adds such a list from the command line, `cases` too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.config.loading import load, override, read_values
from tacit.config.methods import build_algorithm
from tacit.config.misfits import refuse_misfits
from tacit.config.parts import build_sampling
from tacit.config.schema import Config
from tacit.errors import UserError
from tacit.privacy.calibration import solve_noise
from tacit.privacy.events import Spend
from tacit.privacy.rounding import rounded_up
from tacit.privacy.steps import round_event
from tacit.privacy.tuning import tuned_epsilon

SECTION = "sweep"
Point = dict[str, Any]
"""Dotted keys, and the value of each in one run."""


@dataclass(frozen=True)
class Family:
    """Runs with common lists: those of one case, or all of a sweep without cases."""

    grid: Mapping[str, list[Any]]
    tune: Mapping[str, list[Any]]

    @property
    def points(self) -> list[Point]:
        return _product(self.grid)


@dataclass(frozen=True)
class Sweep:
    """A base config, and the runs to make from it."""

    base: Mapping[str, Any]
    families: tuple[Family, ...]
    name: str
    validation: float | None = None
    """The share that the tuning runs hold out, in addition to the config's own."""

    @property
    def points(self) -> list[Point]:
        """Every combination to compare."""
        return [point for family in self.families for point in family.points]

    def family(self, point: Point) -> Family:
        """The family of a point, whatever its seed."""
        bare = without_seed(point)
        return next(f for f in self.families if bare in map(without_seed, f.points))

    def candidates(self, point: Point) -> list[Point]:
        """The runs that choose a point's tuned values: first seed, judged on validation records.

        Refuses a choice that a guarantee would have to pay for.
        """
        family = self.family(point)
        if not family.tune:
            return []
        judged: Point = {"evaluate.split": "validation"}
        if self.validation is not None:
            judged["data.validation"] = self.validation
        first = {**point, "seed": family.grid.get("seed", [self.base.get("seed", 0)])[0]}
        runs = [{**first, **values, **judged} for values in _product(family.tune)]
        for run in runs:
            _refuse_unpaid_choice(self.config(run), len(runs))
        return runs

    @property
    def choosing(self) -> list[Point]:
        """All tuning runs, each once: the seeds of a point share them."""
        found = {slug(run): run for point in self.points for run in self.candidates(point)}
        return list(found.values())

    def config(self, point: Point) -> Config:
        """The checked config of one run."""
        return load(self.base, point)


def without_seed(point: Point) -> Point:
    """A point without its seed."""
    return {key: value for key, value in point.items() if key != "seed"}


def read_sweep(file: Path, overrides: Mapping[str, Any]) -> Sweep | None:
    """The sweep in a config file; None if the file is a single run. Every point is checked at once."""
    if SECTION in overrides:
        raise UserError("--set sweep: set one list of it at a time, for example --set 'sweep.seed=[0, 1]'")
    ours = {key: value for key, value in overrides.items() if key.startswith(f"{SECTION}.")}
    values, _ = read_values(file)
    if SECTION not in values and not ours:
        return None
    section = values.pop(SECTION, {})
    if not isinstance(section, dict):
        raise UserError(f"{file}: sweep: name keys and a list of values for each")
    section = dict(section)
    tune = dict(section.pop("tune", None) or {})
    for key, value in ours.items():
        key = key.removeprefix(f"{SECTION}.")
        (tune if key.startswith("tune.") else section)[key.removeprefix("tune.")] = value
    validation, cases = section.pop("validation", None), section.pop("cases", None)
    families = _families(file, section, tune, cases)
    swept = {key for family in families for key in (*family.grid, *family.tune)}
    for key, value in overrides.items():
        if key not in ours:
            _refuse_overruled(key, swept, cases is not None)
            override(values, key, value)
    tuned = any(family.tune for family in families)
    if tuned and not validation and not values.get("data", {}).get("validation"):
        raise UserError(
            f"{file}: sweep.tune needs records to choose by; set sweep.validation, for example to 0.1 (held "
            "out by the runs that choose), or set data.validation (held out by all)"
        )
    name = re.sub(r"[^\w.-]+", "-", str(values.get("name") or file.stem)).lstrip(".")  # a folder of runs/
    sweep = Sweep(values, families, name or "sweep", validation if tuned else None)
    names: set[str] = set()
    for point in sweep.points:
        candidate = point
        try:
            for candidate in (point, *sweep.candidates(point)):
                config = sweep.config(candidate)
                algorithm = build_algorithm(config.method.name, config.method.options)
                refuse_misfits(config, algorithm)
                if sweep.family(point).tune:
                    _refuse_untrained_choice(config, algorithm.personal_part)
        except UserError as error:
            raise UserError(f"{file}: sweep point {slug(candidate)}: {error}") from None
        if slug(point) in names:
            raise UserError(f"{file}: sweep: two of its runs are both {slug(point)}; leave one out")
        names.add(slug(point))
    return sweep


def _refuse_unpaid_choice(config: Config, candidates: int) -> None:
    """Choosing values by protected records costs privacy, and here nothing would pay for it: the tuning runs
    are judged by exact numbers, and their count is fixed (see `tacit.privacy.tuning`).
    """
    if config.claimed is not None:
        raise UserError(
            "sweep.tune chooses by looking at records that privacy protects, which nobody accounts for; set "
            "privacy.entropy: seed (a simulation, which claims nothing), fix the values that are tuned, or "
            "choose by hand the best of a random number of runs, judged by public records: "
            f"{_price(config, candidates)}"
        )


def _refuse_untrained_choice(config: Config, personal: Sequence[str]) -> None:
    """Refuse to choose values by a part of the model that nobody trains."""
    if personal and not config.evaluate.clients:
        raise UserError(
            f"sweep.tune: clients of {config.method.name} keep {', '.join(personal)} to themselves, and "
            "validation records would judge the initial one, which nobody trains; set data.holdout: 0.1 and "
            "evaluate.clients: 100 to choose by clients' own models"
        )


def _price(config: Config, candidates: int) -> str:
    """The cost of an accounted choice, as far as it is known before any data is read."""
    trials = max(2, candidates)
    ask = f"`tacit plan FILE --trials {trials}` tells what that costs"
    section, clients = config.privacy, getattr(config.data.partition, "clients", None)
    if section is None or section.unit != "client" or section.mechanism is not None or clients is None:
        return ask
    if section.noise_by_layer or section.aggregation == "secure":
        return ask
    sampling = build_sampling(config, clients)

    def spent(noise: float) -> Spend:
        return {round_event(sampling, clients, noise): config.rounds}

    noise = section.noise
    if noise is None and section.epsilon is not None:
        noise = solve_noise(lambda z: [spent(z)], section.epsilon, section.delta)
    if not isinstance(noise, float) or not noise:
        return ask
    paid = tuned_epsilon(spent(noise), section.delta, trials)
    return (
        f"with {trials} of them on average, ε = {rounded_up(paid.epsilon)} where one run has "
        f"{rounded_up(paid.alone)} ({ask})"
    )


def _families(
    file: Path, shared: Mapping[str, Any], tune: Mapping[str, Any], cases: Any
) -> tuple[Family, ...]:
    if cases is None:
        return (_family(file, shared, tune),)
    if not isinstance(cases, list) or not cases or not all(isinstance(c, dict) for c in cases):
        raise UserError(
            f"{file}: sweep.cases: give a list of settings, each a mapping of keys (got {cases!r})"
        )
    if not all(isinstance(case.get("tune") or {}, dict) for case in cases):
        raise UserError(f"{file}: sweep.cases: `tune` names keys and a list of values for each")
    families = []
    for case in cases:
        own = {k: v if isinstance(v, list) else [v] for k, v in case.items() if k != "tune"}
        for key in own.keys() & shared.keys():
            raise UserError(f"{file}: sweep.{key}: a case gives it too; leave one of the two out")
        families.append(_family(file, {**own, **shared}, {**tune, **(case.get("tune") or {})}))
    return tuple(families)


def _family(file: Path, grid: Mapping[str, Any], tune: Mapping[str, Any]) -> Family:
    for key, choices in [*grid.items(), *tune.items()]:
        if not isinstance(choices, list) or not choices:
            raise UserError(f"{file}: sweep.{key}: give a list of values (got {choices!r})")
    return Family(grid, tune)


def _refuse_overruled(key: str, swept: Iterable[str], cases: bool) -> None:
    """A key that a sweep varies cannot also be set for all its runs: the sweep would silently override it."""
    for other in swept:
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
            where = " (or 'sweep.cases=[...]' if a case gives them)" if cases else ""
            raise UserError(
                f"--set {key}: the sweep gives {other} values of its own; change them with "
                f"--set 'sweep.{other}=[...]' (sweep.tune.{other} if they are tuned){where}"
            )


def load_one(file: Path, overrides: Mapping[str, Any]) -> Config:
    """The config of a file; for a sweep, that of its first run."""
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
