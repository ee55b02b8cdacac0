"""Events: one noisy access to the data, as small values that a ledger can write and an accountant can read.

>>> PoissonGaussian(rate=0.1, noise=1.0).relation
'add-remove'

`noise` is always the noise's standard deviation ÷ the clipping bound C, whatever the sensitivity is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

Relation = Literal["add-remove", "replace-one"]
"""Which data sets are neighbours: one unit is there or not there, or one is replaced by another."""


@dataclass(frozen=True, order=True)
class PoissonGaussian:
    """Each unit joins with probability `rate`; the sum of contributions of norm ≤ C gets N(0, (noise·C)²)."""

    rate: float
    noise: float

    relation: ClassVar[Relation] = "add-remove"


@dataclass(frozen=True, order=True)
class FixedSizeGaussian:
    """`size` of `population` units without replacement; their sum gets N(0, (noise·C)²)."""

    size: int
    population: int
    noise: float

    relation: ClassVar[Relation] = "replace-one"

    @property
    def rate(self) -> float:
        return self.size / self.population


Event = PoissonGaussian | FixedSizeGaussian
Spend = Mapping[Event, int]
"""Events and how often each happened, in any (adaptive) order."""
