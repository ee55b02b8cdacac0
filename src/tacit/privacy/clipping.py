"""What one client may add to a sum: all its uploads together have norm ≤ C.

A rule (`Clip`) is bound once to the vectors a client sends; the `Bound` then shrinks each upload in place.
All vectors count together: a second vector that escaped the bound would leak what the first one hides.

>>> bound = Clip(5.0).bind({"delta": 2, "c": 1})
>>> upload = {"delta": torch.tensor([6.0, 0.0]), "c": torch.tensor([8.0])}
>>> bound.apply(upload)
10.0
>>> print(upload["delta"].tolist()[0].__round__(4), upload["c"].tolist()[0].__round__(4))
3.0 4.0

Per-layer rules give each layer h its own C_h with √ΣC_h² = C, so the sensitivity is the same C:
"uniform" C_h = C/√H; "dim" C_h = C·√(d_h/Σd). Two modes:

- `clip` (Definition 3 of "Federated learning with differential privacy for speech recognition"): each
  layer is shrunk to C_h if it is longer, never grown;
- `normalize` (that paper's code): nothing happens while the whole is ≤ C; beyond it every layer is
  rescaled to exactly C_h, also the short ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tacit.errors import UserError
from tacit.vector import Layout, Vectors

Per = Literal["global", "uniform", "dim"]
Mode = Literal["clip", "normalize"]

_STRETCH = 1 << 15  # in the processor's cache, and small enough that torch does not split it over threads
_SAFE = 1 - 2.0**-21
"""Scaling rounds each float32 coordinate and the factor itself by up to 2⁻²⁴ each; this stays below C."""


@dataclass(frozen=True)
class Clip:
    """A clipping rule: the bound C, how it is divided over layers, and what happens beyond it."""

    bound: float
    per: Per = "global"
    mode: Mode = "clip"

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise UserError(f"clip bound {self.bound} would erase every update; choose a number > 0")

    def bind(
        self, sizes: Mapping[str, int], layout: Layout | None = None, bound: float | None = None
    ) -> Bound:
        """The rule for uploads of exactly these named sizes; `bound` overrides C (adaptive clipping).

        A vector as long as the model's shared part is divided into the layout's layers; another is one layer.
        """
        c = self.bound if bound is None else bound
        if self.per == "global":
            parts = tuple((name, slice(0, size)) for name, size in sizes.items())
            groups: tuple[Group, ...] = (Group(parts, c),)
        else:
            layers = [parts for name, size in sizes.items() for parts in _layers(name, size, layout)]
            groups = tuple(Group(parts, b) for parts, b in zip(layers, self._split(layers, c), strict=True))
        return Bound(c, self.mode, dict(sizes), groups)

    def groups(self, layout: Layout) -> list[tuple[tuple[slice, ...], float]]:
        """The same rule for one record's gradient: segments of the whole flat vector, and their C_h."""
        if self.per == "global":
            return [(tuple(s.slice for s in layout.segments), self.bound)]
        layers = [tuple(("", part) for part in parts) for _, parts in layout.layer_slices(shared_only=False)]
        bounds = self._split(layers, self.bound)
        return [(tuple(s for _, s in parts), b) for parts, b in zip(layers, bounds, strict=True)]

    def _split(self, layers: list[Parts], c: float) -> list[float]:
        if self.per == "uniform":
            return [c / math.sqrt(len(layers))] * len(layers)
        sizes = [_size(parts) for parts in layers]
        return [c * math.sqrt(size / sum(sizes)) for size in sizes]


Parts = tuple[tuple[str, slice], ...]


@dataclass(frozen=True)
class Group:
    """Slices of the uploads that are bounded together."""

    parts: Parts
    bound: float


@dataclass(frozen=True)
class Bound:
    """A rule bound to uploads: after `apply`, their joint norm is at most `bound`, in exact arithmetic."""

    bound: float
    mode: Mode
    sizes: dict[str, int]
    groups: tuple[Group, ...]

    def apply(self, uploads: Vectors) -> float:
        """Shrink `uploads` to the rule, in place; returns their joint norm before that.

        Half-precision vectors are replaced by float32 ones first, since rounding to half could exceed C.
        An upload with a value that is not finite becomes all zeros: its owner adds nothing, the norm is inf.
        """
        self._check(uploads)
        for name, vector in uploads.items():
            if vector.dtype != torch.float32:
                uploads[name] = vector.float()
        squares = [sum(_square(uploads[name][part]) for name, part in group.parts) for group in self.groups]
        norm = math.sqrt(sum(squares))
        if not math.isfinite(norm):
            for vector in uploads.values():
                vector.zero_()
            return math.inf
        if self.mode == "normalize" and _within(norm, self.bound):
            return norm
        for group, square in zip(self.groups, squares, strict=True):
            self._scale(uploads, group, math.sqrt(square))
        return norm

    def _scale(self, uploads: Vectors, group: Group, norm: float) -> None:
        keeps = norm == 0 if self.mode == "normalize" else _within(norm, group.bound)
        if keeps:
            return
        factor = group.bound / norm * _SAFE
        for name, part in group.parts:
            piece = uploads[name][part]
            # Near the ends of float32 the factor itself would lose its digits; go through float64 there.
            if factor < 2.0**-100 or factor > 2.0**100:
                piece.copy_(piece.double() * factor)
            else:
                piece.mul_(factor)

    def _check(self, uploads: Vectors) -> None:
        found = {name: vector.numel() for name, vector in uploads.items()}
        if found != self.sizes:
            raise UserError(
                f"the client part returned {found} where {self.sizes} was announced: an upload unknown to "
                "the clipping rule would escape it; return the same names and sizes in every round"
            )


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
        total += torch.linalg.vector_norm(wide).item() ** 2
    return total


def _layers(name: str, size: int, layout: Layout | None) -> list[Parts]:
    if layout is not None and size == layout.shared:
        return [tuple((name, part) for part in parts) for _, parts in layout.layer_slices()]
    return [((name, slice(0, size)),)]


def _size(parts: Parts) -> int:
    return sum(part.stop - part.start for _, part in parts)
