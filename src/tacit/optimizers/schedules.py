"""Learning-rate schedules: they map a round's number, counted from zero, to a factor of the base rate.

Each is a section of a config (`local.schedule`, `server.schedule`); `over` turns it into a function for a run
of the given number of rounds. The function is pure, so a resumed run needs no state to continue it. `Within`
is different: it shapes the rate over the local steps of one round, on top of the round's factor.

>>> cosine = Cosine(floor=0.1).over(100)
>>> cosine(0), cosine(100)
(1.0, 0.1)
>>> round(PerRound(0.99).over(200)(10), 6)
0.904382
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY
from functools import partial
from math import cos, pi
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from tacit.section import section

Schedule = Callable[[int], float]
"""A function from the round to a factor."""
Count = Annotated[int, Field(ge=0)]
Factor = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]


@section
class _Warmed:
    """What every schedule over rounds can begin with.

    Paper 003, Table 7: 1,000 rounds for post-LayerNorm.

    >>> [Constant(warmup=4).over(9)(step) for step in (0, 1, 3, 4)]
    [0.25, 0.5, 1.0, 1.0]
    """

    _: KW_ONLY
    warmup: Count = 0
    """Rounds of a linear rise at the start, 1/warmup to 1, on top of the schedule's own shape."""

    def over(self, rounds: int) -> Schedule:
        """The schedule as a function from the round to a factor."""
        return partial(self._factor, rounds)

    def _factor(self, rounds: int, step: int) -> float:
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return rise * self._shape(step, rounds)

    def _shape(self, step: int, rounds: int) -> float:
        return 1.0


@section
class Constant(_Warmed):
    """Always 1."""

    _: KW_ONLY
    kind: Literal["constant"] = "constant"


@section
class Cosine(_Warmed):
    """Half a cosine over all rounds, from 1 down to `floor`, and `floor` from there on."""

    floor: Share = 0.0
    _: KW_ONLY
    kind: Literal["cosine"] = "cosine"

    def _shape(self, step: int, rounds: int) -> float:
        return _half_cosine(step, rounds, self.floor)


@section
class Exponential(_Warmed):
    """1 until round `start`, then falling smoothly by a factor of `rate` in `every` rounds.

    Paper 003: rate .6, every 750, start 750.
    """

    rate: Factor
    every: PositiveInt
    start: Count = 0
    _: KW_ONLY
    kind: Literal["exponential"] = "exponential"

    def _shape(self, step: int, rounds: int) -> float:
        return float(self.rate ** (max(step - self.start, 0) / self.every))


@section
class PerRound(_Warmed):
    """× `factor` every round. Paper 002: .99."""

    factor: Factor
    _: KW_ONLY
    kind: Literal["factor"] = "factor"

    def _shape(self, step: int, rounds: int) -> float:
        return float(self.factor**step)


@section
class Step(_Warmed):
    """1 before round `start`, then × `factor` at once, and again every `every` rounds.

    Paper 003's central training: factor .5, every 50,000.

    >>> step = Step(every=10, start=20).over(40)
    >>> [step(round) for round in (0, 19, 20, 29, 30)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: PositiveInt
    factor: Factor = 0.5
    start: Count = 0
    _: KW_ONLY
    kind: Literal["step"] = "step"

    def _shape(self, step: int, rounds: int) -> float:
        return float(self.factor ** max(0, (step - self.start) // self.every + 1))


AnySchedule = Annotated[Constant | Cosine | Exponential | PerRound | Step, Field(discriminator="kind")]


@section
class Within:
    """A factor for each of a round's local steps: a linear rise over `warmup` of them, then half a cosine.

    The cosine goes from 1 down to `floor`, which the step after the last would have (paper 004: "cosine decay
    is applied to local learning rates over the 50 local steps per round"). Without it the rate stays up.

    >>> [round(Within(cosine=True)(k, 4), 3) for k in range(4)], Within(warmup=2)(0, 4)
    ([1.0, 0.854, 0.5, 0.146], 0.5)
    """

    cosine: bool = False
    floor: Share = 0.0
    warmup: Count = 0

    def __call__(self, step: int, total: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if not self.cosine:
            return 1.0
        return _half_cosine(step - self.warmup, max(1, total - self.warmup), self.floor)


def _half_cosine(step: int, total: int, floor: float) -> float:
    return floor + (1 - floor) * (1 + cos(pi * min(step / total, 1))) / 2
