"""What a client does to its upload before it is added to the others': bound it, round it, perhaps add its
own noise.

Client level only: at example level the gradients were noised, and an upload is post-processing of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.privacy.bits import Bits
from tacit.privacy.clipping import Bound
from tacit.privacy.gaussian import add_rounded_gaussian_
from tacit.privacy.grid import Grid
from tacit.vector import Vectors


@dataclass(frozen=True)
class Bounding:
    """The rule, the grid (None: no noise, so nothing is claimed and sums stay float32), and a noise share."""

    bound: Bound
    grid: Grid | None = None
    share: float = 0.0
    """Standard deviation of the client's own share of the noise, in grid units."""
    always: bool = False
    """Add the share to nothing too, where an upload is left out: nobody is to know."""

    def add_(self, upload: Vectors, into: Vectors, bits: Bits | None = None) -> float:
        """Add the bounded upload to the sums `into`; returns its joint norm before, infinite if it is left
        out.

        Unit: one client. With a grid, one upload moves the int64 sums by at most 2ᵇ units in L2 norm (add or
        remove one), whatever the client's code returned. `bits` are for its share of the noise.
        """
        if self.grid is None:
            bounded, norm = self.bound.apply(upload)
            for name, vector in bounded.items():
                into[name].add_(vector)
            return norm
        norm = self.bound.add_rounded_(upload, self.grid, into)
        if self.share and (self.always or norm < float("inf")):
            assert bits is not None
            for vector in into.values():
                add_rounded_gaussian_(vector, self.share, bits)
        return norm
