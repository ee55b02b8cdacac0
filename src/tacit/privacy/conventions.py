"""Three conventions for a round's noise, and how it would scale to a larger population.

A cohort of S clients is drawn, each update is clipped to C, and the noise can be stated on

- the **sum** of the updates: σ_sum · C. This is the noise multiplier z of every accountant, and `noise`
  everywhere in this package;
- the **average**: σ_avg · C, with σ_avg = σ_sum / S. Paper 003 calls it σ_DP;
- each **client**'s update, which leads to the above on the average: σ_client · C, with σ_client = σ_sum / √S.

The three describe one mechanism (003, Appendix H.1; all clients weigh the same). Training depends on the
noise on the average; privacy depends on the noise on the sum. So if a run's model is good at some σ_avg, the
same training with a larger cohort has a larger multiplier, and a smaller ε. That is an **extrapolation**:
nobody trained on that population, and the run does not guarantee it (003, Table 1).

>>> noise = to_sum(30e-6, "average", cohort=51_200)
>>> round(noise, 3), round(from_sum(noise, 51_200)["client"], 6)
(1.536, 0.006788)
>>> here = Scale(34_753, 1024).cost(to_sum(30e-6, "average", 1024), 1024, 20, 1e-9)
>>> there = Scale(1_737_650, 51_200).cost(to_sum(30e-6, "average", 1024), 1024, 20, 1e-9)
>>> here.value > 1000, there.value < 3
(True, True)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal, get_args

from tacit.errors import UserError
from tacit.privacy.accountants import Epsilon
from tacit.privacy.calibration import cost
from tacit.privacy.rounding import rounded_up
from tacit.privacy.sampling import Poisson
from tacit.privacy.steps import round_event

Convention = Literal["sum", "average", "client"]


def to_sum(value: float, convention: str, cohort: float) -> float:
    """The noise multiplier on the sum, from a number in any of the three conventions."""
    if convention not in get_args(Convention):
        raise UserError(f"noise on {convention!r}: it is stated on one of {', '.join(get_args(Convention))}")
    return value * {"sum": 1.0, "average": cohort, "client": sqrt(cohort)}[convention]


def from_sum(noise: float, cohort: float) -> Mapping[str, float]:
    """The same noise in all three conventions."""
    return {"sum": noise, "average": noise / cohort, "client": noise / sqrt(cohort)}


@dataclass(frozen=True)
class Scale:
    """A hypothetical population, and the Poisson cohort that would be drawn from it."""

    population: int
    cohort: int

    def __post_init__(self) -> None:
        if not 1 <= self.cohort <= self.population:
            raise UserError(f"a cohort of {self.cohort:,} out of {self.population:,} clients cannot be drawn")

    @staticmethod
    def parse(text: str) -> Scale:
        """Parse `POPULATION:COHORT`.

        >>> Scale.parse("1737650:51200")
        Scale(population=1737650, cohort=51200)
        """
        population, colon, cohort = text.replace(",", "").replace("_", "").partition(":")
        if not colon or not population.isdigit() or not cohort.isdigit():
            raise UserError(f"{text}: write it as POPULATION:COHORT, for example 7000000:200000")
        return Scale(int(population), int(cohort))

    def noise(self, noise: float, cohort: float) -> float:
        """The multiplier that keeps the noise on the average as it is for `noise` and `cohort` clients."""
        return noise * self.cohort / cohort

    def cost(self, noise: float, cohort: float, rounds: int, delta: float) -> Epsilon:
        """ε of `rounds` rounds on this population, at a run's own noise on the average; an extrapolation."""
        event = round_event(
            Poisson(self.cohort / self.population), self.population, self.noise(noise, cohort)
        )
        return cost(event, rounds, delta)

    def text(self, epsilon: Epsilon, noise: float, rounds: int) -> str:
        """One line that cannot be mistaken for a guarantee."""
        share = 1 / self.population
        loose = f" δ is not below 1/{self.population:,}: too large for so many." * (epsilon.delta >= share)
        return (
            f"Not this run, an extrapolation: {self.population:,} clients, {self.cohort:,} a round, noise "
            f"{noise:.4g} (as much on the average), {rounds:,} rounds: ε = {rounded_up(epsilon.value)} "
            f"(RDP {rounded_up(epsilon.rdp)}) at δ = {epsilon.delta:g}, if training went the same.{loose}"
        )
