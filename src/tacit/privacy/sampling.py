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

A scheme of one's own (`Sampler`) says who takes part and no more: what its probabilities are worth is not
known here, so whoever is protected is charged as if they had taken part in every round (`OwnSampling`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from tacit.errors import UserError
from tacit.privacy.bits import Bits, Ids


class Sampler(Protocol):
    """How a round's clients are chosen: what `tacit.run(sampling=…)` takes.

    `Poisson` and `FixedSize` are samplers whose amplification is proved. Any other may be as it likes (in
    turn, by region, by an importance that is public), and no amplification is claimed for it.
    """

    def repeatable(self, rng: np.random.Generator, population: int, round: int = 0) -> ArrayLike:
        """Choose the clients of a round.

        Args:
            rng: a generator of this round's own; the same again if the round is repeated.
            population: the number of clients; they are 0, …, population − 1.
            round: the number of the round, from 0.

        Returns:
            Numbers of clients, in any order, none of them twice. It may be empty.
        """

    def expected(self, population: int) -> float:
        """The constant that sums are divided by, whatever was drawn: the expected size of a cohort.

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
        """The ids that take part, sorted. It may be empty."""
        return bits.bernoulli(population, self.rate)

    def repeatable(self, rng: np.random.Generator, population: int, round: int = 0) -> Ids:
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
    """A scheme of one's own. Adjacency: what a client sends, or zeros in its place; who takes part is public.

    Since the scheme sees no data, who takes part is the same for both neighbours, and one client moves a
    round's sum by at most the clipping norm: each round is a Gaussian query on everyone, without any gain
    from sampling. A client that is drawn less often is protected better than that; it is not claimed.
    """

    name: str
    """How a statement calls it."""
    sampler: Sampler | None = None
    """None in a statement that was read."""

    def repeatable(self, rng: np.random.Generator, population: int, round: int = 0) -> Ids:
        """The sampler's cohort, sorted; a `UserError` if these are not clients, or one is there twice."""
        assert self.sampler is not None
        given = self.sampler.repeatable(rng, population, round)
        try:
            drawn = np.asarray(given)
        except ValueError:  # lists of several lengths
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
        """What the sampler expects."""
        assert self.sampler is not None
        expected = float(self.sampler.expected(population))
        if not 0 < expected <= population:
            raise UserError(f"sampling: {self.name} expects {expected:g} of {population} clients in a round")
        return expected


Sampling = Poisson | FixedSize | OwnSampling


def as_sampling(sampler: Sampler) -> Sampling:
    """A sampler as mechanisms know it: a class that is not one of ours gets no amplification, whatever it is
    derived from. Ours are made anew, so that nothing that was hung on the object comes along.
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
    """Refuse what cannot be a sampler, since it has not all of its methods, or is a class."""
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
