"""Where each parameter lives in the flat vector.

A `Layout` is a plain description: names, shapes, offsets, layers, and which slice is shared with the
server and which stays with the client. Shared segments come first, so `vector[: layout.shared]` is what
a client sends and `vector[layout.shared :]` is what it keeps.

>>> from torch import nn
>>> layout = Layout.of(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), personal=("1.*",))
>>> layout.size, layout.shared, layout.layers
(23, 15, ('0', '1'))
>>> [s.name for s in layout.segments]
['0.weight', '0.bias', '1.weight', '1.bias']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from tacit.errors import UserError
from tacit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Segment:
    """One parameter tensor inside the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + self.size)

    @property
    def layer(self) -> str:
        """The module that owns the tensor: a weight and its bias are one layer."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Layout:
    """Names, shapes and offsets of a model's trainable parameters; shared ones first, then personal ones."""

    segments: tuple[Segment, ...]
    shared: int
    heads: tuple[tuple[str, int], ...] = ()
    """Attention modules by name, and the number of heads of each."""

    @staticmethod
    def of(module: nn.Module, personal: Sequence[str] = ()) -> Layout:
        """The layout of `module`'s trainable parameters; names matching a `personal` glob go last.

        The pattern `head` stands for the output layers, whatever the module calls them.
        A parameter that is used under several names (tied weights) has one segment, under its first name.
        A model without trainable parameters, a pattern that matches none of them, and patterns that match all
        are refused (`UserError`).
        """
        named = [(n, tuple(p.shape)) for n, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise UserError("the model has no trainable parameters; set requires_grad on at least one")
        personal = [glob for pattern in personal for glob in _globs(module, pattern)]
        for pattern in personal:
            if not any(fnmatchcase(n, pattern) for n, _ in named):
                names = [n for n, _ in named]
                shown = names if len(names) < 7 else [*names[:4], "…", names[-1]]
                last = f"{names[-1].rpartition('.')[0]}.*".removeprefix(".")
                raise UserError(
                    f"method.personal: {pattern!r} matches no parameter; choose among those of the model: "
                    f"{', '.join(shown)} (the last layer: [{last!r}])"
                )
        is_personal = {n: any(fnmatchcase(n, p) for p in personal) for n, _ in named}
        segments, offset, shared = [], 0, 0
        for keep in (False, True):
            for name, shape in named:
                if is_personal[name] == keep:
                    segments.append(Segment(name, shape, offset))
                    offset += prod(shape)
            if not keep:
                shared = offset
        if shared == 0:
            raise UserError(
                "every parameter is personal, and nothing is left to learn together; choose fewer"
            )
        return Layout(tuple(segments), shared, tuple(heads_of(module).items()))

    @cached_property
    def size(self) -> int:
        return sum(s.size for s in self.segments)

    @cached_property
    def shared_segments(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.offset < self.shared)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Layer names in order of first appearance."""
        return tuple(dict.fromkeys(s.layer for s in self.segments))

    def layer_slices(self, shared_only: bool = True) -> tuple[tuple[str, tuple[slice, ...]], ...]:
        """For each layer, the slices of the vector that belong to it."""
        slices: dict[str, list[slice]] = {}
        for s in self.shared_segments if shared_only else self.segments:
            slices.setdefault(s.layer, []).append(s.slice)
        return tuple((layer, tuple(parts)) for layer, parts in slices.items())

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's view of `vector` (the whole vector, or only its shared slice)."""
        for s in self.segments:
            if s.offset + s.size <= vector.numel():
                yield s.name, vector[s.slice].view(s.shape)

    def layer_norms(self, vector: Tensor) -> Tensor:
        """L2 norm of each layer of a shared vector, in the order of `layer_slices()`."""
        squares = [
            torch.stack([torch.linalg.vector_norm(vector[part].float()) for part in parts]).square().sum()
            for _, parts in self.layer_slices()
        ]
        return torch.stack(squares).sqrt()


HEAD = "head"
"""The pattern that stands for a model's output layers."""


def output_layers(module: nn.Module) -> tuple[str, ...]:
    """Names of the output layers: `head`, or the layers that a transformers model has around its body."""
    children = {name: part for name, part in module.named_children() if any(True for _ in part.parameters())}
    if HEAD in children:
        return (HEAD,)
    body = getattr(module, "base_model", module)
    return () if body is module else tuple(name for name, part in children.items() if part is not body)


def _globs(module: nn.Module, pattern: str) -> tuple[str, ...]:
    layers = output_layers(module) if pattern == HEAD else ()
    return tuple(f"{layer}.*" for layer in layers) or (pattern,)


def heads_of(module: nn.Module) -> dict[str, int]:
    """The number of heads of each attention module, by its name; empty if there is none.

    Supports this package's ViT, torch's own attention, and that of transformers (ViT, Swin, BERT, RoBERTa,
    GPT-2, …). All of them store the number on the attention module. In Swin it differs from stage to stage.
    """
    found = {}
    for name, part in module.named_modules():
        for attribute in ("num_attention_heads", "num_heads", "heads"):
            heads = getattr(part, attribute, None)
            if isinstance(heads, int) and not isinstance(heads, bool):
                found[name] = heads
                break
    return found
