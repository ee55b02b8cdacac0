"""A clipping bound that follows a quantile of the clients' norms (Andrew, Thakkar, McMahan, Ramaswamy 2021).

Each client of the cohort adds one bit to its upload: whether its norm was within the bound C in force.
The noisy share b̃ of such clients moves the bound: C ← C·exp(−η(b̃ − γ)). The bits, shifted by ½ so that one
client moves their sum by ½, are one more query beside the update; the two together cost what one query with
the announced noise multiplier z would, if the update gets the slightly larger multiplier

    z_Δ = (z⁻² − (2σ_b)⁻²)^(−½).

>>> rule = Adaptive(quantile=0.5, count_noise=10.0)
>>> round(rule.update_noise(1.0), 6)
1.001252
>>> rule.moved(bound=2.0, share=1.0)  # everyone was within the bound: it shrinks
1.809674836071919

The noise of a round is always sized by the bound that was in force when its clients clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tacit.errors import UserError
from tacit.privacy.noise import Noise


@dataclass(frozen=True)
class Adaptive:
    """Follow the `quantile` γ of norms, with step η = `rate`; `count_noise` σ_b is in clients."""

    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise UserError(f"adaptive clipping to quantile {self.quantile}: choose one between 0 and 1")
        if not self.rate > 0 or not self.count_noise > 0:
            raise UserError(
                "adaptive clipping needs rate > 0 and count_noise > 0 (a twentieth of the cohort is usual)"
            )

    def update_noise(self, noise: float) -> float:
        """z_Δ: the multiplier for the update, such that update and bits together cost `noise`."""
        if noise == 0:
            return 0.0
        rest = noise**-2 - (2 * self.count_noise) ** -2
        if rest <= 0:
            raise UserError(
                f"count_noise {self.count_noise} spends more than the whole budget of noise {noise}; "
                f"raise count_noise above {noise / 2:g}"
            )
        return float(rest**-0.5)

    def share(self, within: int, arrived: int, expected: float, noise: Noise) -> float:
        """b̃, private: `within` of `arrived` clients had a norm ≤ C. Divides by the constant `expected`."""
        count = torch.tensor([within - arrived / 2], dtype=torch.float64)
        noise.add_(count, self.count_noise)
        return count.item() / expected + 0.5

    def moved(self, bound: float, share: float) -> float:
        """The next round's bound."""
        return bound * math.exp(-self.rate * (share - self.quantile))
