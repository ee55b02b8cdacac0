"""Events: one private access to the data, as tagged data that ledgers write and accountants read.

An event is a frozen dataclass with a `kind`, its name in a ledger. Its class defines everything else about
it: the neighbouring relation of its guarantee, its form in dp_accounting, and when it certainly costs at
least as much as another event. A new mechanism with another kind of access adds a class, here or in its own
file, with `@event`; ledgers, accountants and totals need no change.

>>> PoissonGaussian(rate=0.1, noise=1.0).relation
'add-remove'
>>> read_event({"kind": "poisson-gaussian", "rate": 0.1, "noise": 1.0})
PoissonGaussian(rate=0.1, noise=1.0)

`noise` is always the noise's standard deviation ÷ the clipping norm C, whatever the sensitivity is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

Relation = Literal["add-remove", "replace-one"]
"""Which data sets are neighbours: one unit is added or removed, or one is replaced by another."""


@dataclass(frozen=True)
class Event:
    """The base of all events. Numbers are checked when an event is made, so a ledger cannot hold invalid
    ones.
    """

    kind: ClassVar[str]
    relation: ClassVar[Relation]

    @property
    def key(self) -> tuple[Any, ...]:
        """A sort key for events of all kinds."""
        return self.kind, *(getattr(self, field.name) for field in fields(self))

    def dp_event(self) -> Any:
        """The same access as a `dp_accounting.DpEvent`; by default one that no accountant supports."""
        from tacit.privacy.library import dp_accounting

        return dp_accounting.UnsupportedDpEvent()

    def dominates(self, other: Event) -> bool:
        """Whether this event certainly costs at least as much as `other`."""
        return self == other

    def joined(self, other: Event) -> Event:
        """An event that dominates both."""
        if self.dominates(other):
            return self
        if other.dominates(self):
            return other
        raise ValueError(f"nothing dominates both {self} and {other}")


LEAST, MOST = 1e-50, 1e100
"""The range of noise whose square the accountants can compute with. Less noise counts as none, and more as
the maximum: ε can only be overstated.
"""

E = TypeVar("E", bound=type[Event])
EVENTS: dict[str, type[Event]] = {}
"""Every class of events by its kind."""


def event(cls: E) -> E:
    """Register a class of events for ledgers."""
    if EVENTS.setdefault(cls.kind, cls) is not cls:
        raise ValueError(f"two classes of events are called {cls.kind!r}")
    return cls


@event
@dataclass(frozen=True)
class PoissonGaussian(Event):
    """Each unit joins with probability `rate`; the sum of contributions of norm ≤ C gets N(0, (noise·C)²).

    A rate of 1 is the Gaussian mechanism without sampling.
    """

    rate: float
    noise: float

    kind: ClassVar[str] = "poisson-gaussian"
    relation: ClassVar[Relation] = "add-remove"

    def __post_init__(self) -> None:
        if not (0 < self.rate <= 1 and 0 <= self.noise < math.inf):
            raise ValueError(f"rate {self.rate} and noise {self.noise} are no event's")

    def dp_event(self) -> Any:
        from tacit.privacy.library import dp_accounting

        if self.noise < LEAST:
            return dp_accounting.NonPrivateDpEvent()
        gaussian = dp_accounting.GaussianDpEvent(min(self.noise, MOST))
        return dp_accounting.PoissonSampledDpEvent(self.rate, gaussian)

    def dominates(self, other: Event) -> bool:
        return isinstance(other, PoissonGaussian) and self.rate >= other.rate and self.noise <= other.noise

    def joined(self, other: Event) -> Event:
        if not isinstance(other, PoissonGaussian):
            return super().joined(other)
        return PoissonGaussian(max(self.rate, other.rate), min(self.noise, other.noise))


@event
@dataclass(frozen=True)
class FixedSizeGaussian(Event):
    """`size` of `population` units without replacement; their sum gets N(0, (noise·C)²).

    dp_accounting's bound takes the standard deviation ÷ the *sensitivity*. The sensitivity is 2C when a unit
    is replaced, hence the factor of one half.
    """

    size: int
    population: int
    noise: float

    kind: ClassVar[str] = "fixed-size-gaussian"
    relation: ClassVar[Relation] = "replace-one"

    def __post_init__(self) -> None:
        if not (1 <= self.size <= self.population and 0 <= self.noise < math.inf):
            raise ValueError(f"{self.size} of {self.population} with noise {self.noise} is no event")

    @property
    def rate(self) -> float:
        return self.size / self.population

    def dp_event(self) -> Any:
        from tacit.privacy.library import dp_accounting

        if self.noise < LEAST:
            return dp_accounting.NonPrivateDpEvent()
        gaussian = dp_accounting.GaussianDpEvent(min(self.noise, MOST) / 2)
        return dp_accounting.SampledWithoutReplacementDpEvent(self.population, self.size, gaussian)

    def dominates(self, other: Event) -> bool:
        return isinstance(other, FixedSizeGaussian) and self.rate >= other.rate and self.noise <= other.noise

    def joined(self, other: Event) -> Event:
        if not isinstance(other, FixedSizeGaussian):
            return super().joined(other)
        larger = max(self, other, key=lambda e: e.rate)
        return FixedSizeGaussian(larger.size, larger.population, min(self.noise, other.noise))


@event
@dataclass(frozen=True)
class MatrixRow(Event):
    """A round of a matrix mechanism, which increased the squared sensitivity of all rounds together by
    `square`.

    Each round's sum gets noise that is correlated with that of other rounds: C⁻¹z, z independent N(0,
    (noise·C)²). The privacy is that of Cx + z, one Gaussian query; the squares of its rounds add up, as those
    of several queries do (`tacit.privacy.matrices`).
    """

    noise: float
    square: float

    kind: ClassVar[str] = "matrix-row"
    relation: ClassVar[Relation] = "add-remove"

    def __post_init__(self) -> None:
        if not (0 <= self.noise < math.inf and 0 < self.square < math.inf):
            raise ValueError(f"noise {self.noise} and a squared sensitivity of {self.square} are no event's")

    @property
    def as_gaussian(self) -> PoissonGaussian:
        """The Gaussian query with the same cost."""
        return PoissonGaussian(1.0, self.noise / math.sqrt(self.square))

    def dp_event(self) -> Any:
        return self.as_gaussian.dp_event()

    def dominates(self, other: Event) -> bool:
        return isinstance(other, MatrixRow) and self.noise <= other.noise and self.square >= other.square

    def joined(self, other: Event) -> Event:
        if not isinstance(other, MatrixRow):
            return super().joined(other)
        return MatrixRow(min(self.noise, other.noise), max(self.square, other.square))


def unsampled(event: Event) -> PoissonGaussian | None:
    """The event as a Gaussian query on all units; None if it is not one."""
    if isinstance(event, MatrixRow):
        return event.as_gaussian
    return event if isinstance(event, PoissonGaussian) and event.rate == 1 else None


SampledGaussian = PoissonGaussian | FixedSizeGaussian

Spend = Mapping[Event, int]
"""How often each event happened, in any (adaptive) order."""


_TYPES: dict[Any, dict[str, type]] = {}


def _types(cls: type[Event]) -> dict[str, type]:
    """The type of each of an event's numbers: int or float. Cached: a ledger asks thousands of times."""
    if cls not in _TYPES:
        hints = get_type_hints(cls)
        _TYPES[cls] = {field.name: hints[field.name] for field in fields(cls)}
    return _TYPES[cls]


def plain_event(event: Event) -> dict[str, Any]:
    """An event as plain values for JSON, its kind first."""
    numbers = {name: kind(getattr(event, name)) for name, kind in _types(type(event)).items()}
    return {"kind": event.kind} | numbers


def read_event(plain: Mapping[str, Any]) -> Event:
    """The event that `plain_event` wrote. ValueError unless every key and type is exactly right."""
    cls = EVENTS.get(plain.get("kind", ""))
    if cls is None:
        raise ValueError(f"no event is of kind {plain.get('kind')!r}")
    wanted = _types(cls)
    given = {name: value for name, value in plain.items() if name != "kind"}
    if given.keys() != wanted.keys() or any(type(given[name]) is not kind for name, kind in wanted.items()):
        raise ValueError(f"an event of kind {cls.kind} has {wanted}, not {given}")
    return cls(**given)
