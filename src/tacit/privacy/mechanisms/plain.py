"""No guarantee: a repeatable cohort, and the weighted mean of the clients that answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tacit import randomness
from tacit.privacy.bits import Ids
from tacit.privacy.mechanisms.base import Arrivals, State, Workload
from tacit.privacy.sampling import Sampling
from tacit.vector import Layout, Vectors


@dataclass(frozen=True)
class Unprotected:
    """An `Aggregation` that claims and charges nothing."""

    sampling: Sampling

    @property
    def clients_release(self) -> bool:
        return False

    def sample(self, round: int, attempt: int, workload: Workload) -> Ids:
        return repeatable_cohort(self.sampling, workload.population, workload.seed, round)

    def charge(self, round: int, cohort: Ids, workload: Workload, attempt: int = 0) -> None:
        return None

    def init(self) -> State:
        return {}

    def bounding(self, state: State, sizes: Mapping[str, int], layout: Layout, drawn: int) -> None:
        return None

    def release(
        self, total: Vectors, arrivals: Arrivals, state: State, round: int, attempt: int, workload: Workload
    ) -> tuple[Vectors | None, State]:
        return weighted_mean(total, arrivals), state

    def expected(self, population: int) -> float:
        return self.sampling.expected(population)


def repeatable_cohort(sampling: Sampling, population: int, seed: int, round: int) -> Ids:
    """A round's cohort where sampling is no part of a guarantee: a function of the seed."""
    return sampling.repeatable(randomness.generator(seed, "cohort", round), population, round)


def weighted_mean(total: Vectors, arrivals: Arrivals) -> Vectors | None:
    """The sum divided, in place, by the total weight; None if the weight is 0."""
    weight = arrivals.weight
    return {name: vector.div_(weight) for name, vector in total.items()} if weight else None
