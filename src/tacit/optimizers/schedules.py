"""Learning-rate schedules: from a round's number, counted from zero, to a factor of the base rate.

A schedule is a pure function of the step, so a resumed run needs nothing to continue it.

>>> Cosine(100)(0), Cosine(100, floor=0.1)(100)
(1.0, 0.1)
>>> round(PerRound(0.99)(10), 6)
0.904382
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi

Schedule = Callable[[int], float]
"""Any function from the step to a factor."""


@dataclass(frozen=True)
class Constant:
    """Always 1."""

    def __call__(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine:
    """Half a cosine, from 1 at step 0 down to `floor` at step `total`, and `floor` from there on."""

    total: int
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        return self.floor + (1 - self.floor) * (1 + cos(pi * min(step / self.total, 1))) / 2


@dataclass(frozen=True)
class Exponential:
    """1 until `start`, then falling smoothly by a factor of `rate` in `every` steps.

    Paper 003: rate .6, every 750, start 750.
    """

    rate: float
    every: int
    start: int = 0

    def __call__(self, step: int) -> float:
        return float(self.rate ** (max(step - self.start, 0) / self.every))


@dataclass(frozen=True)
class Step:
    """1 before `start`, then × `factor` at once, and again every `every` steps.

    Paper 003's central training: factor .5, every 50,000.

    >>> [Step(0.5, every=10, start=20)(step) for step in (0, 19, 20, 29, 30)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    factor: float
    every: int
    start: int = 0

    def __call__(self, step: int) -> float:
        return float(self.factor ** max(0, (step - self.start) // self.every + 1))


@dataclass(frozen=True)
class PerRound:
    """`factor` for each step taken so far. Paper 002: .99."""

    factor: float

    def __call__(self, step: int) -> float:
        return float(self.factor**step)
