"""The only door from clients' uploads to the server's state.

A `Release` draws the cohort and turns the sum of its uploads into the mean that the algorithm's server part
sees. Everything the server learns of the clients passes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tacit import randomness
from tacit.engine import Report
from tacit.privacy.sampling import Sampling
from tacit.vector import Vectors


class Release(Protocol):
    """How cohorts are drawn and uploads are let through."""

    @property
    def expected(self) -> float:
        """Expected number of clients in a cohort."""

    def draw(self, round: int) -> NDArray[np.int64]:
        """The clients of a round."""

    def mean(self, round: int, total: Vectors, reports: Sequence[Report]) -> Vectors | None:
        """The mean upload, in place of the sum; None when there is nothing to release."""

    def facts(self) -> dict[str, Any]:
        """Plain values for the round's record."""


@dataclass(frozen=True)
class PlainRelease:
    """No guarantee: a seeded cohort, and the weighted mean of whoever answered."""

    sampling: Sampling
    population: int
    seed: int

    @property
    def expected(self) -> float:
        return self.sampling.expected(self.population)

    def draw(self, round: int) -> NDArray[np.int64]:
        return self.sampling.draw(randomness.generator(self.seed, "cohort", round), self.population)

    def mean(self, round: int, total: Vectors, reports: Sequence[Report]) -> Vectors | None:
        weight = sum(report.weight for report in reports)
        return {name: vector / weight for name, vector in total.items()} if weight else None

    def facts(self) -> dict[str, Any]:
        return {}
