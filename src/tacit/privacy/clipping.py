"""Clipping: all uploads of one client together have norm ≤ C.

A rule (`Clip`) is bound once to the vectors that a client sends. The resulting `Bound` then shrinks copies of
each upload; it never writes to the client's own vectors, so these may share memory. All vectors count
together: a second vector outside the bound would leak what the first one hides.

>>> bound = Clip(5.0).bind({"delta": 2, "c": 1})
>>> upload = {"delta": torch.tensor([6.0, 0.0]), "c": torch.tensor([8.0])}
>>> bounded, norm = bound.apply(upload)
>>> print(norm, round(float(bounded["delta"][0]), 4), round(float(bounded["c"][0]), 4))
10.0 3.0 4.0

Per-layer rules give each layer h its own C_h with √ΣC_h² = C, so the sensitivity stays C: "uniform" has
C_h = C/√H; "dim" has C_h = C·√(d_h/Σd). Weights α shift the bound between layers (H.5 of the paper named
below): C_h = C·√(α_h·d_h/Σαd), and C·√(α_h/Σα) for "uniform". The noise on a sum is the same everywhere. So a
layer with four times the α has half the noise relative to what it may send, for the same ε. There are two
modes:

- `clip` (Definition 3 of "Federated learning with differential privacy for speech recognition"): each
  layer is shrunk to C_h if it is longer, and never enlarged;
- `normalize` (that paper's code): nothing happens while the whole norm is ≤ C; beyond it every layer is
  rescaled to exactly C_h, including short ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from tacit.errors import UserError
from tacit.lazy import Tensor, torch
from tacit.privacy.grid import Grid
from tacit.section import section
from tacit.vector import Layout, Vectors

Per = Literal["global", "uniform", "dim"]
Mode = Literal["clip", "normalize"]

_STRETCH = 1 << 15  # in the processor's cache, and small enough that torch does not split it over threads
_BEYOND = "a bounded upload is longer than its bound in whole numbers, so it was not added"
_NOTHING = 1e-150
"""Shorter vectors are not rescaled: their squares have too few digits in float64, or none."""
_SAFE = 1 - 2.0**-21
"""Rounding to float32 moves each coordinate by up to 2⁻²⁴ of itself; this stays below C."""


@section
class Clip:
    """A clipping rule: the clipping norm C, its division over layers, and what happens beyond it."""

    bound: Annotated[float, Field(gt=0, allow_inf_nan=True)]
    """Infinity means no clipping; this is allowed only where the noise is 0."""
    per: Per = "global"
    """One bound for everything, or one for each layer, either equal or growing with the layer's dimension."""
    mode: Mode = "clip"
    """Only shrink, or rescale each layer to exactly its bound once the whole norm exceeds C."""
    weights: dict[str, PositiveFloat] = field(default_factory=dict, hash=False)
    """α by patterns of layer names (`"*.mlp*": 2`); the first match counts, others have 1."""

    def __post_init__(self) -> None:
        if self.weights and self.per == "global":
            raise UserError(
                "privacy.clip.weights: one bound for everything has no layers to weigh; set per: dim"
            )

    @property
    def how(self) -> str:
        """How C is divided, for a statement."""
        said = {"global": "over everything", "uniform": "per layer, C/√H each", "dim": "per layer, by size"}
        weights = ", ".join(f"{alpha:g} for {pattern}" for pattern, alpha in self.weights.items())
        return said[self.per] + (f", weighted ({weights})" if weights else "")

    def bind(
        self, sizes: Mapping[str, int], layout: Layout | None = None, bound: float | None = None
    ) -> Bound:
        """The rule for uploads of exactly these named sizes; `bound` overrides C (adaptive clipping).

        A vector as long as the model's shared part is divided into the layout's layers; others are one layer.
        """
        c = self.bound if bound is None else bound
        if self.per == "global":
            parts = tuple((name, slice(0, size)) for name, size in sizes.items())
            groups: tuple[Group, ...] = (Group(parts, c),)
        else:
            layers = layers_of(sizes, layout)
            bounds = self._split([(name, _size(parts)) for name, parts in layers], c)
            groups = tuple(Group(parts, b) for (_, parts), b in zip(layers, bounds, strict=True))
        return Bound(c, self.mode, dict(sizes), groups)

    def groups(self, layout: Layout) -> list[tuple[tuple[slice, ...], float]]:
        """The same rule for one per-example gradient: segments of the whole flat vector, and their C_h."""
        if self.per == "global":
            return [(tuple(s.slice for s in layout.segments), self.bound)]
        layers = layout.layer_slices(shared_only=False)
        sizes = [(name, sum(part.stop - part.start for part in parts)) for name, parts in layers]
        return [(parts, b) for (_, parts), b in zip(layers, self._split(sizes, self.bound), strict=True)]

    def _split(self, layers: Sequence[tuple[str, int]], c: float) -> list[float]:
        """C_h of each layer, by its name and dimension."""
        weights = by_pattern(self.weights, [name for name, _ in layers], "privacy.clip.weights")
        sizes = [size if self.per == "dim" else 1 for _, size in layers]
        shares = [weight * size for weight, size in zip(weights, sizes, strict=True)]
        return [c * math.sqrt(share / sum(shares)) for share in shares]


def by_pattern(values: Mapping[str, float], layers: Sequence[str], key: str) -> list[float]:
    """The value of each layer: that of the first pattern that matches its name, otherwise 1.

    Raises:
        UserError: a pattern of the config's `key` that no layer matches.
    """
    for pattern in values:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise UserError(f"{key}: no layer matches {pattern!r}; there are {', '.join(layers)}")
    return [next((v for p, v in values.items() if fnmatchcase(name, p)), 1.0) for name in layers]


Parts = tuple[tuple[str, slice], ...]


@dataclass(frozen=True)
class Group:
    """Slices of the uploads that are bounded together."""

    parts: Parts
    bound: float

    @property
    def dimension(self) -> int:
        return _size(self.parts)


@dataclass(frozen=True)
class Bound:
    """A rule bound to uploads: scaled by `scales`, they have a joint norm of at most `bound`, in exact
    arithmetic. In mode `clip`, each group's norm is also at most its own bound.
    """

    bound: float
    mode: Mode
    sizes: dict[str, int]
    groups: tuple[Group, ...]

    @property
    def dimension(self) -> int:
        """Coordinates of all uploads together."""
        return sum(self.sizes.values())

    def scales(self, uploads: Vectors) -> tuple[float, list[float]]:
        """The joint norm of `uploads`, and the factor ≤ 1 (`normalize`: any) for each group of the rule.

        If a value is not finite, the norm is infinite and all factors are 0: the client adds nothing.
        """
        self._check(uploads)
        squares = [sum(_square(uploads[name][part]) for name, part in group.parts) for group in self.groups]
        norm = math.sqrt(sum(squares))
        if not math.isfinite(norm):
            return math.inf, [0.0] * len(self.groups)
        if self.mode == "normalize" and _within(norm, self.bound):
            return norm, [1.0] * len(self.groups)
        norms = [math.sqrt(square) for square in squares]
        return norm, [self._factor(n, group.bound) for n, group in zip(norms, self.groups, strict=True)]

    def _factor(self, norm: float, bound: float) -> float:
        keeps = norm < _NOTHING if self.mode == "normalize" else _within(norm, bound)
        return 1.0 if keeps else bound / norm * _SAFE

    def apply(self, uploads: Vectors) -> tuple[Vectors, float]:
        """Bounded copies of `uploads` in float32, and their joint norm before that."""
        norm, factors = self.scales(uploads)
        bounded = {name: torch.zeros(size, device=uploads[name].device) for name, size in self.sizes.items()}
        for group, factor in zip(self.groups, factors, strict=True):
            for name, part, values in _pieces(uploads, group, factor):
                bounded[name][part] = values.float()
        return bounded, norm

    def add_rounded_(self, uploads: Vectors, grid: Grid, into: Vectors) -> float:
        """Add the bounded `uploads`, in integer grid units, to int64 sums; returns their norm before that.

        The added integers satisfy Σk² ≤ 2²ᵇ, and in mode `clip` each group is within its own reach. This
        holds by construction, and is also checked in integers first.
        """
        norm, factors = self.scales(uploads)
        if not math.isfinite(norm):
            return norm
        square = 0
        for group, factor in zip(self.groups, factors, strict=True):
            before = square
            for _, _, k in _rounded(uploads, group, factor, grid):
                # In float64 first: a sum that could leave 64 bits is far beyond the bound.
                if float(k.double().square().sum()) > 2.0 * grid.radius**2:
                    raise ArithmeticError(_BEYOND)
                square += int(k.mul(k).sum())
            own = group.bound if self.mode == "clip" else self.bound
            if square - before > grid.reach(own, group.dimension) ** 2:
                raise ArithmeticError(_BEYOND)
        if square > grid.radius**2:
            raise ArithmeticError(_BEYOND)
        for group, factor in zip(self.groups, factors, strict=True):
            for name, part, k in _rounded(uploads, group, factor, grid):
                into[name][part].add_(k)
        return norm

    def _check(self, uploads: Vectors) -> None:
        found = {name: vector.numel() for name, vector in uploads.items()}
        if found != self.sizes:
            raise UserError(
                f"the client part returned {found} where {self.sizes} was announced: an upload unknown to "
                "the clipping rule would escape it; return the same names and sizes in every round"
            )


def _pieces(uploads: Vectors, group: Group, factor: float) -> Iterator[tuple[str, slice, Tensor]]:
    """A group of the uploads, scaled, in float64, a stretch at a time."""
    for name, part in group.parts:
        for start in range(part.start, part.stop, _STRETCH):
            piece = slice(start, min(start + _STRETCH, part.stop))
            # Always a copy: a float64 vector would otherwise be scaled in place, and so scaled twice.
            values = uploads[name][piece].detach().to(torch.float64, copy=True)
            yield name, piece, values.mul_(factor) if factor else torch.zeros_like(values)


def _rounded(
    uploads: Vectors, group: Group, factor: float, grid: Grid
) -> Iterator[tuple[str, slice, Tensor]]:
    for name, part, values in _pieces(uploads, group, factor):
        yield name, part, values.div_(grid.unit).round_().long()


def _within(norm: float, bound: float) -> bool:
    """norm ≤ bound with room for the rounding of a sum of squares in float64."""
    return norm * (1 + 1e-9) <= bound


def _square(vector: Tensor) -> float:
    """The sum of squares in float64, a stretch at a time: exact to 1e-12, no overflow, one pass over memory.

    float32 sums over 10⁸ coordinates are wrong by 1e-4, and torch's float64 norm of a float32 vector is
    ten times slower than this.
    """
    scratch = torch.empty(min(_STRETCH, vector.numel()), dtype=torch.float64, device=vector.device)
    total = 0.0
    for stretch in torch.split(vector, _STRETCH):
        wide = scratch[: stretch.numel()].copy_(stretch)
        norm = torch.linalg.vector_norm(wide).item()
        total += norm * norm  # infinite on overflow, where a power would raise
    return total


def layers_of(sizes: Mapping[str, int], layout: Layout | None) -> list[tuple[str, Parts]]:
    """Names and places of the layers of uploads with these sizes. A vector as long as the model's shared part
    has the layers of the layout; any other vector is one layer, under its own name.
    """
    return [layer for name, size in sizes.items() for layer in _layers(name, size, layout)]


def _layers(name: str, size: int, layout: Layout | None) -> list[tuple[str, Parts]]:
    if layout is not None and size == layout.shared:
        return [(layer, tuple((name, part) for part in parts)) for layer, parts in layout.layer_slices()]
    return [(name, ((name, slice(0, size)),))]


def _size(parts: Parts) -> int:
    return sum(part.stop - part.start for _, part in parts)
