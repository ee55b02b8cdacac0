"""Client level with more or less noise on some layers (paper 003, H.5, Figures 15 and 16).

Layer h of a sum gets a rounded Gaussian of standard deviation f_h·z·C. If each layer is divided by its own
noise, the release is a Gaussian mechanism with noise 1, and one client moves it by at most

    L = max √(Σ_h ‖x_h‖² ÷ (f_h·z·C)²)     over all uploads x that clipping allows.

- *A bound for each layer* (mode `clip`): ‖x_h‖ ≤ C_h for every h at once, so L² = Σ_h (C_h/C)² ÷ (f_h·z)².
- *One bound for everything*: all of C can be in the layer with the least noise, so L = 1 ÷ (z·min f). The
  same holds for mode `normalize`, which does not change uploads whose whole norm is ≤ C.

So a round is charged as noise 1/L = z ÷ `worst`; `worst` = L·z depends only on clip, factors and layers.
A layer without noise hides nothing. The whole run then gives no guarantee at all, however much noise the
other layers have. This is for studies, as in the paper, and is refused unless the run claims nothing anyway.

In integers. Rounding lengthens each bound's part to `Grid.reach`, which is checked for every upload. The
noise is larger by the factor by which that lengthens L (`stretched`, almost 1), so the charge stays the same.

>>> import torch
>>> from tacit.privacy import Clip, Poisson
>>> layout = Layout.of(torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 3)))
>>> layers = by_layer({"1": 0.5}, Clip(1.0, "uniform"), {"delta": layout.shared}, layout)
>>> mechanism = LayeredNoise(1.0, 1e-5, Clip(1.0, "uniform"), Poisson(0.1), factors={"1": 0.5}, groups=layers)
>>> round(mechanism.worst ** 2, 6)                 # ½/1² + ½/½²
2.5
>>> mechanism.costliest(Workload(population=100)).event
PoissonGaussian(rate=0.1, noise=0.632455532033675...)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from tacit.errors import UserError
from tacit.privacy.bits import Bits
from tacit.privacy.bounding import Bounding
from tacit.privacy.clipping import Clip, by_pattern, layers_of
from tacit.privacy.events import Spend
from tacit.privacy.gaussian import add_rounded_gaussian_
from tacit.privacy.grid import Grid
from tacit.privacy.ledger import Part
from tacit.privacy.mechanisms.base import Description, State, Workload
from tacit.privacy.mechanisms.client import ClientLevel
from tacit.privacy.steps import round_event
from tacit.privacy.totals import Profile
from tacit.vector import Layout, Vectors

KEY = "privacy.noise_by_layer"
Place = tuple[str, int, int, float]
"""An upload, the first and last position of a part of it, and the factor on the noise there."""
Groups = tuple[tuple[float, tuple[Place, ...]], ...]
"""For each bound: its share of the clipping norm, and the places that it bounds together."""


def by_layer(factors: Mapping[str, float], clip: Clip, sizes: Mapping[str, int], layout: Layout) -> Groups:
    """What `LayeredNoise` must know about a model: its bounds, and the noise at each place.

    Args:
        factors: factors by patterns of layer names; the first match counts, and layers without one have 1.
        clip: the clipping rule.
        sizes: names and lengths of what a client sends.
        layout: which parameters are where in the vector.

    Raises:
        UserError: a pattern that no layer matches.
    """
    layers = layers_of(sizes, layout)
    found = by_pattern(factors, [name for name, _ in layers], KEY)
    places = [
        tuple((name, part.start, part.stop, factor) for name, part in parts)
        for (_, parts), factor in zip(layers, found, strict=True)
    ]
    if clip.per == "global" or clip.mode == "normalize":
        return ((1.0, tuple(place for layer in places for place in layer)),)
    bounds = clip.bind(sizes, layout, 1.0).groups
    return tuple((group.bound, layer) for group, layer in zip(bounds, places, strict=True))


@dataclass(frozen=True)
class LayeredNoise(ClientLevel):
    """Independent noise on each round's sum, `noise` times a factor that differs by layer; see the module."""

    factors: dict[str, float] = field(default_factory=dict, hash=False)
    """The factors as they were configured, for the statement."""
    groups: Groups = ()
    """Made by `by_layer` from the model."""

    kind: ClassVar[str] = "layered"

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = tuple((float(share), tuple(map(tuple, places))) for share, places in self.groups)
        object.__setattr__(self, "groups", plain)  # a file has lists
        if not self.groups:
            raise ValueError("noise by layer needs the layers of a model; see by_layer")
        if not all(0 <= f < math.inf for f in self._factors):
            raise UserError(f"{KEY}: a factor on the noise must be a number ≥ 0; choose another")
        if self.noise_at != "server" or self.deployed or self.metrics is not None:
            raise UserError(
                f"{KEY}: the server of a simulation makes such noise; leave it out with real clients, "
                "privacy.noise_at: clients and privacy.metrics"
            )
        if math.isinf(self.worst) and (not self.simulated or self.epsilon is not None):
            raise UserError(
                f"{KEY}: a layer without noise hides nothing, so no guarantee holds and no budget is kept; "
                "give it some, or set privacy.entropy: seed (a simulation, which claims nothing) and leave "
                "privacy.epsilon out"
            )

    @property
    def _factors(self) -> list[float]:
        return [factor for _, places in self.groups for *_, factor in places]

    def _length(self, bounds: Sequence[float]) -> float:
        """How far one client moves the sum, in units of the noise, if it uses up each bound where the noise
        is least.
        """
        least = [min(factor for *_, factor in places) for _, places in self.groups]
        if not all(least):
            return math.inf
        return math.hypot(*(bound / factor for bound, factor in zip(bounds, least, strict=True)))

    @cached_property
    def worst(self) -> float:
        """The factor by which the noise is worth less than `noise` everywhere; infinite if it is worth
        nothing.
        """
        return self._length([share for share, _ in self.groups])

    def worth(self, noise: float) -> float:
        """The multiplier that is accounted for, where `noise` is the nominal one."""
        return noise / self.worst

    def costliest(self, workload: Workload) -> Part:
        return Part(round_event(self.sampling, workload.population, self.worth(self.noise)))

    def planned(self, workload: Workload, rounds: int, noise: float) -> Sequence[Spend]:
        return super().planned(workload, rounds, self.worth(noise))

    def bounding(self, state: State, sizes: Mapping[str, int], layout: Layout, drawn: int) -> Bounding:
        if by_layer(self.factors, self.clip, sizes, layout) != self.groups:
            raise ValueError("the noise by layer was made for other layers than those that clients send")
        return super().bounding(state, sizes, layout, drawn)

    def grid(self, state: State, dimension: int) -> Grid:
        largest = self.sum_noise * max(1.0, *self._factors)
        return Grid.fit(self.clipping_norm(state), dimension, largest)

    def stretched(self, grid: Grid) -> float:
        """The factor on the noise that makes the charge also cover what rounding adds to an upload."""
        if math.isinf(self.worst):
            return 1.0
        sizes = [sum(stop - start for _, start, stop, _ in places) for _, places in self.groups]
        bounds = [share * self.clip.bound for share, _ in self.groups]
        reached = [float(grid.reach(bound, size)) for bound, size in zip(bounds, sizes, strict=True)]
        return max(1.0, self._length(reached) / (self.worst * grid.radius)) * (1 + 1e-9)

    def add_noise_(self, total: Vectors, std: float, grid: Grid, bits: Bits) -> None:
        std *= self.stretched(grid)
        for _, places in self.groups:
            for name, start, stop, factor in places:
                add_rounded_gaussian_(total[name][start:stop], std * factor, bits)

    def noise_norm(self, dimension: int) -> float:
        squares = [
            factor**2 * (stop - start) for _, places in self.groups for _, start, stop, factor in places
        ]
        return self.sum_noise * math.sqrt(math.fsum(squares))

    def describe(self, population: int, epsilon: float, worst: Profile) -> Description:
        plain = super().describe(population, epsilon, worst)
        told = ", ".join(f"{factor:g} times that on {pattern}" for pattern, factor in self.factors.items())
        value = (
            "a layer without noise hides nothing, so no guarantee holds"
            if math.isinf(self.worst)
            else f"together they are worth {self.worth(self.noise):.4g} everywhere, which is what is charged"
        )
        return replace(plain, noise=f"{plain.noise} By layer: {told}, the first that matches; {value}.")
