"""Who takes part: the draw whose probabilities the accountant relies on.

`Poisson(rate)` lets each unit join independently; it is what amplification by sampling is proved for under
add-or-remove-one adjacency. An empty draw is a valid draw. `FixedSize(size)` draws exactly `size` units
without replacement, which is another mechanism with another bound (replace-one adjacency). It is never
accounted as Poisson.

>>> Poisson(0.001).draw(Bits.named(0), population=1_000_000).size    # 1,000 are expected
1010
>>> FixedSize(3).draw(Bits.named(0), population=10).tolist()
[5, 8, 9]

Amplification holds only against those who do not know who was sampled: draws come from secret bits
(`tacit.privacy.bits`), or from named ones in a simulation. Where sampling carries no part of a guarantee
(runs without privacy, the cohorts of an example-level run), `repeatable` draws from a seeded generator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacit.errors import UserError
from tacit.privacy.bits import Bits, Ids


@dataclass(frozen=True)
class Poisson:
    """Every unit takes part independently with probability `rate`. Adjacency: add or remove one unit."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UserError(f"sampling rate {self.rate} is not a probability; choose 0 < rate ≤ 1")

    def draw(self, bits: Bits, population: int) -> Ids:
        """The ids that take part, sorted. It may be empty."""
        return bits.bernoulli(population, self.rate)

    def repeatable(self, rng: np.random.Generator, population: int) -> Ids:
        """The same distribution, at the cost of the cohort: its size first, then a subset of that size."""
        return _subset(rng, population, int(rng.binomial(population, self.rate)))

    def expected(self, population: int) -> float:
        """The expected cohort: the constant that sums are divided by, whatever was drawn."""
        return self.rate * population


@dataclass(frozen=True)
class FixedSize:
    """Exactly `size` units, uniformly without replacement. Adjacency: replace one unit by another."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"a cohort of {self.size} is empty; choose at least 1")

    def draw(self, bits: Bits, population: int) -> Ids:
        """The ids that take part, sorted."""
        self.expected(population)
        return bits.subset(population, self.size)

    def repeatable(self, rng: np.random.Generator, population: int) -> Ids:
        """The same distribution from a seeded generator."""
        self.expected(population)
        return _subset(rng, population, self.size)

    def expected(self, population: int) -> float:
        """The cohort's size."""
        if self.size > population:
            raise UserError(f"a cohort of {self.size} out of {population}: lower the cohort or add clients")
        return float(self.size)


Sampling = Poisson | FixedSize


def _subset(rng: np.random.Generator, population: int, size: int) -> Ids:
    ids: Ids = rng.choice(population, size, replace=False, shuffle=False)
    ids.sort()
    return ids
