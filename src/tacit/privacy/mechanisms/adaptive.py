"""Client level with a clipping norm that follows a quantile of the clients' norms.

Andrew, Thakkar, McMahan and Ramaswamy 2021 (arXiv:1905.03871). Each client of the cohort adds one bit to
its upload: whether its norm was within the current clipping norm C. The noisy share b̃ of such clients moves
C: C ← C·exp(−η(b̃ − γ)). The bits are a second query on the same cohort. Both queries together cost as much
as one query with the configured multiplier z, if the update gets the slightly larger multiplier

    z_Δ = (z⁻² − (2σ_b)⁻²)^(−½).

Bits are counted as ±1, so that one client moves their sum by 1, in integers, and its noise is 2σ_b.

>>> from tacit.privacy import Clip, Poisson
>>> mechanism = AdaptiveClip(1.0, 1e-5, Clip(2.0), Poisson(0.1), quantile=0.5, count_noise=10.0)
>>> round(mechanism.sum_noise, 6)
1.001252
>>> mechanism.moved(2.0, share=1.0)  # everyone was within the norm: it shrinks
1.809674836071919

The noise of a round is always sized by the clipping norm that its clients used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from tacit.errors import UserError
from tacit.lazy import torch
from tacit.privacy.bits import Bits
from tacit.privacy.gaussian import add_rounded_gaussian_
from tacit.privacy.mechanisms.base import QUANTILE, Arrivals, Description, State, Workload
from tacit.privacy.mechanisms.client import ClientLevel
from tacit.privacy.settings import AdaptiveClipping
from tacit.privacy.totals import Profile
from tacit.vector import Vectors

BOUND = "bound"
"""The state: the current clipping norm."""


@dataclass(frozen=True)
class AdaptiveClip(AdaptiveClipping, ClientLevel):
    """Client level with a clipping norm that moves; see the module."""

    kind: ClassVar[str] = "adaptive-clip"

    def __post_init__(self) -> None:
        ClientLevel.__post_init__(self)
        if math.isinf(self.clip.bound):
            raise UserError("privacy.adaptive needs a finite clip to start from, such as 1.0")
        options = {"quantile": self.quantile, "rate": self.rate, "count_noise": self.count_noise}
        AdaptiveClipping(**options)  # runs its checks
        whole = super().sum_noise
        if self.noise and whole**-2 <= (2 * self.count_noise) ** -2:
            raise UserError(
                f"privacy.adaptive.count_noise {self.count_noise} spends more than the whole budget of noise "
                f"{self.noise}; raise it above {whole / 2:g}"
            )

    @property
    def sum_noise(self) -> float:
        """z_Δ: with it, update and bits together (and metrics, if there are any) cost as much as `noise`."""
        if not self.noise:
            return 0.0
        return float((super().sum_noise ** -2 - (2 * self.count_noise) ** -2) ** -0.5)

    def init(self) -> State:
        return {BOUND: self.clip.bound}

    def clipping_norm(self, state: State) -> float:
        return float(state[BOUND])

    def release(
        self, total: Vectors, arrivals: Arrivals, state: State, round: int, attempt: int, workload: Workload
    ) -> tuple[Vectors, State]:
        mean, state = super().release(total, arrivals, state, round, attempt, workload)
        bits = self.bits(workload.seed, round, attempt, QUANTILE)
        share = self.share(arrivals, self.expected(workload.population), bits)
        return mean, {BOUND: self.moved(state[BOUND], share)}

    def share(self, arrivals: Arrivals, expected: float, bits: Bits) -> float:
        """b̃, private: the share of clients with a norm ≤ C. Divides by the constant `expected`."""
        count = torch.tensor([2 * arrivals.within - arrivals.arrived])
        if self.noise:
            add_rounded_gaussian_(count, 2 * self.count_noise, bits)
        return int(count) / 2 / expected + 0.5

    def moved(self, bound: float, share: float) -> float:
        """The next round's clipping norm, kept between 2⁻¹⁰⁰ and 2¹⁰⁰ whatever the noise is."""
        step = min(max(-self.rate * (share - self.quantile), -50.0), 50.0)
        return min(max(bound * math.exp(step), 2.0**-100), 2.0**100)

    def describe(self, population: int, epsilon: float, worst: Profile) -> Description:
        plain = super().describe(population, epsilon, worst)
        return replace(plain, clipping=plain.clipping[:-1] + ", following a quantile of the norms.")
