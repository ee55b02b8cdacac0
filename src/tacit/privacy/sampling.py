"""Who takes part: the draw whose probabilities the accountant relies on.

`Poisson(rate)` tosses one coin per unit; it is what amplification by sampling is proved for under
add-or-remove-one adjacency. Tossing the coins one by one would cost as much as the population, so the number
of heads is drawn first (a binomial) and then which units they are (a uniform subset of that size): the same
distribution, at the cost of the cohort. An empty draw is a valid draw.

`FixedSize(size)` draws exactly `size` units without replacement, which is another mechanism with another
bound (replace-one adjacency). It is never accounted as Poisson.

>>> rng = np.random.default_rng(0)
>>> Poisson(0.001).draw(rng, population=10_000_000).size  # 10,000 are expected
10124
>>> FixedSize(3).draw(rng, population=10).tolist()
[2, 4, 6]

Amplification holds only against those who do not know the coins. `secret_rng()` takes them from the operating
system; a seeded generator is for simulations.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tacit.errors import UserError

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Poisson:
    """Every unit takes part independently with probability `rate`. Adjacency: add or remove one unit."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UserError(f"sampling rate {self.rate} is not a probability; choose 0 < rate ≤ 1")

    def draw(self, rng: np.random.Generator, population: int) -> Ids:
        """The ids that take part, sorted. It may be empty."""
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

    def draw(self, rng: np.random.Generator, population: int) -> Ids:
        """The ids that take part, sorted."""
        self.expected(population)
        return _subset(rng, population, self.size)

    def expected(self, population: int) -> float:
        """The cohort's size."""
        if self.size > population:
            raise UserError(f"a cohort of {self.size} out of {population}: lower the cohort or add clients")
        return float(self.size)


Sampling = Poisson | FixedSize


def secret_rng() -> np.random.Generator:
    """A generator seeded with 256 fresh bits of the operating system's entropy; make one for each draw."""
    return np.random.default_rng(secrets.randbits(256))


def _subset(rng: np.random.Generator, population: int, size: int) -> Ids:
    ids: Ids = rng.choice(population, size, replace=False, shuffle=False)
    ids.sort()
    return ids
