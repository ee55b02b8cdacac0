"""Client level with banded noise: each round cancels part of the noise of the few rounds before it.

Two guarantees, depending on the sampling (`tacit.privacy.mechanisms.correlated` has what they share):

- `FixedSize`: clients take turns, and no amplification is claimed;
- `Poisson` (Choquette-Choo et al. 2023, arXiv:2306.08153): there are as many groups of clients as the matrix
  has bands. Round t belongs to group t mod bands, and each of its clients joins, in secret, with probability
  `bands` × the rate. A client's participations are `bands` rounds apart, so their columns of C share no row.
  For each client, one turn of all groups is one Gaussian query of sensitivity ‖c‖, in which the client takes
  part with that probability. Everyone pays for it when the turn begins.

An interrupted round shares its sample with the rounds after it. Given the sample, what it released is a
Gaussian query of sensitivity c₀ = 1. For every q, also one that depends on earlier answers,
(1 − q)·N(0) + q·N(1) against N(0) is post-processing of N(1) against N(0). The round is therefore charged as
a query on everyone, without amplification.

>>> from tacit.privacy import Clip, Poisson, Workload
>>> fleet = BandedNoise(2.0, 1e-5, Clip(0.5), Poisson(0.01), rounds=40, bands=4)
>>> [len(fleet.charge(t, fleet.sample(t, 0, Workload(1000)), Workload(1000)).parts) for t in range(6)]
[1, 0, 0, 0, 1, 0]
>>> fleet.costliest(Workload(1000)).event.rate, fleet.turn().rate
(1.0, 0.04)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from tacit.errors import UserError
from tacit.privacy.bits import Ids
from tacit.privacy.events import PoissonGaussian, Spend
from tacit.privacy.groups import any_group_epsilon
from tacit.privacy.ledger import Charge, Part
from tacit.privacy.matrices import Banded, Matrix, best_bands
from tacit.privacy.mechanisms.base import COHORT, Description, Observer, Workload
from tacit.privacy.mechanisms.correlated import Correlated
from tacit.privacy.sampling import Poisson
from tacit.privacy.totals import Profile


@dataclass(frozen=True)
class BandedNoise(Correlated):
    """The banded square root of the prefix sums."""

    bands: int | None = None
    """Coefficients of the matrix; None: the optimal number for prefix sums (only for clients in turn)."""

    kind: ClassVar[str] = "banded"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bands is not None and self.bands < 1:
            raise UserError(f"privacy.mechanism.bands {self.bands}: choose at least 1")
        if isinstance(self.sampling, Poisson):
            if self.bands is None:
                raise UserError(
                    "privacy.mechanism.bands: with Poisson cohorts give the number of bands, for example 4; "
                    "more bands correlate over more rounds and leave less to amplification"
                )
            if self.sampling.rate * self.bands > 1:
                raise UserError(
                    f"privacy.mechanism.bands {self.bands}: a cohort is drawn from one of as many groups, "
                    f"and is larger than a group; lower it to {int(1 / self.sampling.rate)}"
                )

    @property
    def amplified(self) -> bool:
        """Whether secret sampling is part of the guarantee."""
        return isinstance(self.sampling, Poisson)

    def matrix(self, population: int) -> Matrix:
        if self.bands is not None:
            return Banded.square_root(self.bands)
        return best_bands(self.rounds, self.separation(population))

    def separation(self, population: int) -> int:
        if not self.amplified:
            return super().separation(population)
        assert self.bands is not None
        return self.bands

    def sample(self, round: int, attempt: int, workload: Workload) -> Ids:
        group = self.group(round, workload)
        if not isinstance(self.sampling, Poisson):
            return group
        bits = self.bits(workload.seed, round, attempt, COHORT)
        return group[bits.bernoulli(len(group), self.turn().rate)]

    def expected(self, population: int) -> float:
        return self.sampling.expected(population) if self.amplified else super().expected(population)

    def turn(self, noise: float | None = None) -> PoissonGaussian:
        """What one turn of all groups costs a client, with Poisson cohorts: its column, and its metrics."""
        assert isinstance(self.sampling, Poisson) and self.bands is not None
        column = Banded.square_root(self.bands).column
        length = math.sqrt(math.fsum([*(c * c for c in column), self.measured])) * (1 + 1e-12)
        rate = min(1.0, self.sampling.rate * self.bands)
        return PoissonGaussian(rate, (self.noise if noise is None else noise) / length)

    def charge(self, round: int, cohort: Ids, workload: Workload, attempt: int = 0) -> Charge:
        charge = super().charge(round, cohort, workload, attempt)
        if not self.amplified or attempt:
            return charge
        assert self.bands is not None
        return Charge(round, () if round % self.bands else (Part(self.turn()),))

    def costliest(self, workload: Workload) -> Part:
        return (
            Part(PoissonGaussian(1.0, self.turn().noise)) if self.amplified else super().costliest(workload)
        )

    def planned(self, workload: Workload, rounds: int, noise: float) -> Sequence[Spend]:
        if not self.amplified:
            return super().planned(workload, rounds, noise)
        assert self.bands is not None
        return [{self.turn(noise): -(-rounds // self.bands)}]

    def group_epsilon(self, spent: Profile, size: int) -> float:
        """With Poisson cohorts by a bound for any mechanism: clients of several groups share rows of C, for
        which no better one is proved here.
        """
        if not self.amplified:
            return super().group_epsilon(spent, size)
        return any_group_epsilon(dict(spent), self.delta, size)

    def describe(self, population: int, epsilon: float, worst: Profile) -> Description:
        plain = super().describe(population, epsilon, worst)
        if not self.amplified:
            return plain
        seen = Observer(
            "whoever sees every released model, but not who took part",
            epsilon,
            "Who is sampled stays secret; which group a client is in is public.",
        )
        sampling = (
            f"Sampling: {population:,} clients in {self.bands} groups, by a public draw; each round takes "
            f"the next group, of which each client joins with probability {self.turn().rate:g}. Neighbours: "
            "what a client sends, or zeros in its place."
        )
        return replace(plain, sampling=sampling, observers=(seen, *plain.observers[1:]))

    def _how_correlated(self, population: int) -> str:
        bands = len(self.matrix(population).numbers)
        return f"Correlated by a banded matrix with {bands} bands over {self.rounds:,} rounds."
