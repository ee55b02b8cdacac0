"""Sampling: the draw whose probabilities the accountant relies on.

With `Poisson(rate)` each unit joins independently; for it, amplification by sampling is proved under
add-or-remove-one adjacency. An empty draw is valid. `FixedSize(size)` draws exactly `size` units without
replacement. That is a different mechanism with a different bound (replace-one adjacency), and is never
accounted as Poisson.

>>> Poisson(0.001).draw(Bits.named(0), population=1_000_000).size    # 1,000 are expected
1010
>>> FixedSize(3).draw(Bits.named(0), population=10).tolist()
[5, 8, 9]

Amplification holds only against adversaries who do not know who was sampled. Draws therefore come from secret
bits (`tacit.privacy.bits`), or from named bits in a simulation. Where sampling is no part of a guarantee
(runs without privacy, the cohorts of an example-level run), `repeatable` draws from a seeded generator.

A custom scheme (`Sampler`) only says who takes part. No amplification is known for it, so protected clients
are charged as if they had taken part in every round (`OwnSampling`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from tacit.errors import UserError
from tacit.privacy.bits import Bits, Ids


class Sampler(Protocol):
    """How a round's clients are chosen: the argument of `tacit.run(sampling=…)`.

    `Poisson` and `FixedSize` are samplers whose amplification is proved. Any other sampler may choose freely
    (in turn, by region, by public importance), and no amplification is claimed for it.
    """

    def repeatable(self, rng: np.random.Generator, population: int, round: int = 0) -> ArrayLike:
        """Choose the clients of a round.

        Args:
            rng: a generator for this round, seeded the same if the round is repeated.
            population: the number of clients; they are 0, …, population − 1.
            round: the number of the round, from 0.

        Returns:
            Numbers of clients, in any order, without duplicates. It may be empty.
        """

    def expected(self, population: int) -> float:
        """The expected cohort size: the constant that sums are divided by, whatever was drawn.

        Args:
            population: the number of clients.
        """


@dataclass(frozen=True)
class Poisson:
    """Every unit takes part independently with probability `rate`. Adjacency: add or remove one unit."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UserError(f"sampling rate {self.rate} is not a probability; choose 0 < rate ≤ 1")

    def draw(self, bits: Bits, population: int) -> Ids:
        """The ids that take part, sorted. There may be none."""
        return bits.bernoulli(population, self.rate)

    def repeatable(self, rng: np.random.Generator, population: int, round: int = 0) -> Ids:
        """The same distribution, at a cost that grows with the cohort: first its size, then a subset."""
        return _subset(rng, population, int(rng.binomial(population, self.rate)))

    def expected(self, population: int) -> float:
        """The expected cohort size: the constant that sums are divided by, whatever was drawn."""
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

    def repeatable(self, rng: np.random.Generator, population: int, round: int = 0) -> Ids:
        """The same distribution from a seeded generator."""
        self.expected(population)
        return _subset(rng, population, self.size)

    def expected(self, population: int) -> float:
        """The cohort's size."""
        if self.size > population:
            raise UserError(f"a cohort of {self.size} out of {population}: lower the cohort or add clients")
        return float(self.size)


@dataclass(frozen=True)
class OwnSampling:
    """A custom scheme. Adjacency: what a client sends, or zeros in its place; who takes part is public.

    The scheme sees no data, so the same clients take part in both neighbouring runs, and one client moves a
    round's sum by at most the clipping norm. Each round is therefore a Gaussian query on everyone, without
    amplification. A client that is drawn less often has better protection, but this is not claimed.
    """

    name: str
    """Its name in a statement."""
    sampler: Sampler | None = None
    """None in a statement that was read from a file."""

    def repeatable(self, rng: np.random.Generator, population: int, round: int = 0) -> Ids:
        """The sampler's cohort, sorted; a `UserError` if it has an unknown client, or one twice."""
        assert self.sampler is not None
        given = self.sampler.repeatable(rng, population, round)
        try:
            drawn = np.asarray(given)
        except ValueError:  # nested lists of different lengths
            drawn = np.asarray(None)
        if drawn.size and (drawn.ndim != 1 or drawn.dtype.kind not in "iu"):
            raise UserError(f"sampling: {self.name} must give a list of whole numbers, one for each client")
        ids: Ids = np.unique(drawn).astype(np.int64)
        if len(ids) != drawn.size:
            raise UserError(f"sampling: {self.name} drew a client twice in round {round + 1}; once is enough")
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < population:
            raise UserError(
                f"sampling: {self.name} drew client {ids[-1] if ids[-1] >= population else ids[0]} in round "
                f"{round + 1}; they are numbered 0 to {population - 1}"
            )
        return ids

    def expected(self, population: int) -> float:
        """The sampler's expected cohort size."""
        assert self.sampler is not None
        expected = float(self.sampler.expected(population))
        if not 0 < expected <= population:
            raise UserError(f"sampling: {self.name} expects {expected:g} of {population} clients in a round")
        return expected


Sampling = Poisson | FixedSize | OwnSampling


def as_sampling(sampler: Sampler) -> Sampling:
    """A sampler in the form that mechanisms use. A class that is not one of ours gets no amplification, even
    if it is derived from one. Ours are constructed anew, without attributes that were added to the object.
    """
    refuse_no_sampler(sampler)
    if type(sampler) is Poisson:
        return Poisson(sampler.rate)
    if type(sampler) is FixedSize:
        return FixedSize(sampler.size)
    if type(sampler) is OwnSampling:
        return sampler
    return OwnSampling(type(sampler).__name__, sampler)


def refuse_no_sampler(thing: Any) -> None:
    """Refuse an object that is not a sampler, because it lacks a method or is a class."""
    if isinstance(thing, type):
        name = thing.__name__
        raise UserError(f"sampling: {name} is a class; pass an instance of it, sampling={name}(…)")
    lacking = [name for name in ("repeatable", "expected") if not callable(getattr(thing, name, None))]
    if lacking:
        raise UserError(
            f"sampling: this {type(thing).__name__} has no {', '.join(lacking)}; give a "
            "tacit.privacy.Sampler such as Poisson(0.01), or set cohort.sampling in the config"
        )


def _subset(rng: np.random.Generator, population: int, size: int) -> Ids:
    ids: Ids = rng.choice(population, size, replace=False, shuffle=False)
    ids.sort()
    return ids
