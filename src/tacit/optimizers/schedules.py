"""Learning-rate schedules: from a round's number, counted from zero, to a factor of the base rate.

A schedule is a pure function of the step, so a resumed run needs nothing to continue it. `Within` is another
thing: the shape of the rate over the local steps of one round, on top of the round's own.

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
class Warmup:
    """A linear rise over the first `steps` steps, 1/steps to 1, times what the schedule `then` says of each.

    Paper 003, Table 7: 1,000 rounds for post-LayerNorm.

    >>> [Warmup(4, Constant())(step) for step in (0, 1, 3, 4)]
    [0.25, 0.5, 1.0, 1.0]
    """

    steps: int
    then: Schedule

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps) * self.then(step)


@dataclass(frozen=True)
class Within:
    """A factor for each of a round's local steps: a linear rise over `warmup` of them, then half a cosine.

    The cosine goes from 1 down to `floor`, which the step after the last would have (paper 004: "cosine decay
    is applied to local learning rates over the 50 local steps per round"). Without it the rate stays up.

    >>> [round(Within(cosine=True)(k, 4), 3) for k in range(4)], Within(warmup=2)(0, 4)
    ([1.0, 0.854, 0.5, 0.146], 0.5)
    """

    cosine: bool = False
    floor: float = 0.0
    warmup: int = 0

    def __call__(self, step: int, total: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if not self.cosine:
            return 1.0
        return Cosine(max(1, total - self.warmup), self.floor)(step - self.warmup)


@dataclass(frozen=True)
class PerRound:
    """`factor` for each step taken so far. Paper 002: .99."""

    factor: float

    def __call__(self, step: int) -> float:
        return float(self.factor**step)
