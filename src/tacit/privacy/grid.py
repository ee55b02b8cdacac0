"""The grid for sums under a guarantee: integer multiples of a unit, where 2ᵇ units make up the clipping norm.

A float32 sum depends on its order, and the last bits of floats can reveal what the noise hides in real
numbers. So each client's bounded upload is rounded to integers before it is added to anything. Integers add
up exactly, in any order, on any number of workers. `fit` chooses b by the dimension d, so fine that rounding
moves a vector by less than a thousandth of the clipping norm.

>>> grid = Grid.fit(clip=1.0, dimension=1_000_000, noise=1.0)
>>> grid.bits, grid.radius == 2**grid.bits
(20, True)
>>> grid.unit * grid.radius         # 2ᵇ units are the clipping norm, and a little for the rounding
1.000478...

Sensitivity, in grid units. At client level a client's upload k satisfies Σk² ≤ 2²ᵇ, checked in integers for
every upload. Rounding to the nearest integer adds at most √d/2 to the norm; the unit is C ÷ (2ᵇ − √d/2 − 1),
so that the norm never exceeds 2ᵇ. At example level sums are rounded, not contributions: see
`tacit.privacy.mechanisms.example`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tacit.errors import UserError
from tacit.lazy import Tensor, torch
from tacit.privacy.gaussian import LARGEST_STD, STRETCH

FINE = 10
"""Bits beyond √d: rounding moves a vector by at most 2⁻¹¹ of the clipping norm."""
COARSE = 4
"""The same for very large noise, which is much larger than the rounding."""
LEAST_BITS = 20


@dataclass(frozen=True)
class Grid:
    """`radius` = 2^bits grid units bound a privacy unit's contribution; `unit` is the size of a grid unit."""

    bits: int
    unit: float

    @property
    def radius(self) -> int:
        return 1 << self.bits

    def reach(self, norm: float, dimension: int) -> int:
        """The largest norm, in grid units, of a rounded vector with this dimension and norm ≤ `norm`."""
        longer = norm / self.unit + (math.isqrt(max(dimension, 1)) + 1) / 2
        return min(self.radius, math.ceil(longer) + 1)

    def decoded(self, total: Tensor, factor: float) -> Tensor:
        """Integers in grid units as float32, times `factor`."""
        values = torch.empty(total.numel())
        for part, whole in zip(torch.split(values, STRETCH), torch.split(total, STRETCH), strict=True):
            part.copy_(whole.double().mul_(self.unit * factor))
        return values

    @staticmethod
    def fit(clip: float, dimension: int, noise: float) -> Grid:
        """The grid for vectors of `dimension` coordinates and norm ≤ `clip`, with noise of `noise` × clip."""
        root = math.isqrt(max(dimension, 1)) + 1
        wanted = max(LEAST_BITS, (root - 1).bit_length() + FINE)
        most = math.floor(math.log2(LARGEST_STD / 2 / noise)) if noise else wanted
        bits = min(wanted, most)
        if bits < root.bit_length() + COARSE:
            raise UserError(
                f"privacy.noise {noise:g}: so much noise on {dimension:,} coordinates cannot be sampled "
                f"exactly; lower it below {LARGEST_STD / 2 ** (root.bit_length() + COARSE + 1):.2g}"
            )
        margin = -(-root // 2) + 1
        return Grid(bits, clip / ((1 << bits) - margin))
