"""Client level with BLT noise: correlated over all rounds, with a memory of only a few vectors.

Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024 (arXiv:2404.16706). It suits a fleet whose clients
take part at most once in b rounds and whose sampling is not secret: see the module `correlated`.

>>> from tacit.privacy import Clip, FixedSize, Workload
>>> fleet = BltNoise(4.0, 1e-5, Clip(0.5), FixedSize(50), rounds=40)
>>> fleet.separation(1000), fleet.sample(0, 0, Workload(1000)).size
(20, 50)
>>> fleet.charge(0, fleet.sample(0, 0, Workload(1000)), Workload(1000)).parts[0].event
MatrixRow(noise=4.0, square=1.000000001)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tacit.errors import UserError
from tacit.privacy.matrices import Matrix, optimal_blt
from tacit.privacy.mechanisms.correlated import Correlated
from tacit.privacy.sampling import FixedSize


@dataclass(frozen=True)
class BltNoise(Correlated):
    """The optimal BLT matrix with this many buffers."""

    buffers: int = 2
    """The number of vectors that the server keeps between rounds."""

    kind: ClassVar[str] = "blt"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sampling, FixedSize):
            raise UserError(
                "cohort.sampling: blt takes clients in turn and claims nothing for secret sampling; leave it "
                "out, or use privacy.mechanism: banded, which has a version with Poisson cohorts"
            )
        if not 1 <= self.buffers <= 6:
            raise UserError(f"privacy.mechanism.buffers {self.buffers}: choose 1 to 6")

    def matrix(self, population: int) -> Matrix:
        return optimal_blt(self.rounds, self.separation(population), self.buffers)

    def _how_correlated(self, population: int) -> str:
        return f"Correlated by a BLT matrix with {self.buffers} buffers over {self.rounds:,} rounds."
