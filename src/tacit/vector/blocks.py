"""A partition of the shared parameters into blocks, and means over them.

FedAdamW and DP-FedAdamW send one number for each block, the mean of the block's second moments, instead of
one for each coordinate. There are three partitions of the same vector:

- "architecture" (DP-FedAdamW, paper 000; the default). A transformer layer has a block for each head's
  slice of Q, of K and of V, one for the attention's output projection and one for the MLP. Everything
  before the first layer is one block and everything after the last is another: Σ(3·heads + 2) + 2 blocks.
  The paper's counts leave no block for the remaining tensors, so they join a neighbour: the norm before the
  attention and tables of relative positions join the projection; every other norm of the layer, and patch
  merging after it, join the MLP; the last norm joins the output. Convolutional networks have a block for
  each residual block or plain layer, with the norms that follow it. LoRA factors and other networks use
  "tensor".
- "fine" (FedAdamW, paper 004, its Algorithm 3). Embedding and output are divided by token (row), Q and K by
  head; V, projection and MLP by output neuron (with its bias); every other tensor is one block.
- "tensor". Each parameter tensor is a block.

`most` and `least` bound the number of blocks by B = min(most, ⌊d/least⌋) for d coordinates. If a partition
has more, neighbours are joined as evenly as possible.

>>> import torch
>>> layout = Layout.of(torch.nn.Linear(2, 3))
>>> partition = blocks(layout, "tensor")
>>> partition.names, partition.mean(torch.arange(9.0))
(('weight', 'bias'), tensor([2.5000, 7.0000]))
>>> partition.spread(torch.tensor([1.0, 2.0]))
tensor([1., 1., 1., 1., 1., 1., 2., 2., 2.])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from tacit.lazy import Tensor, torch
from tacit.vector.layout import Layout, Segment

Kind = Literal["architecture", "fine", "tensor"]


@dataclass(frozen=True)
class Piece:
    """Part of one tensor: `groups` consecutive blocks, from `first` on, that repeat `times` times.

    It is viewed as (times, groups, run) with strides (stride, run, 1), so a slice of rows and a slice of
    columns cost the same, and no index is ever stored.
    """

    first: int
    groups: int
    offset: int
    times: int
    stride: int
    run: int

    def of(self, vector: Tensor) -> Tensor:
        start = vector.storage_offset() + self.offset
        return vector.as_strided((self.times, self.groups, self.run), (self.stride, self.run, 1), start)


@dataclass(frozen=True)
class Blocks:
    """Each of the `size` shared coordinates is in exactly one of the named blocks."""

    names: tuple[str, ...]
    pieces: tuple[Piece, ...]
    size: int
    joined: tuple[int, ...] = ()
    """The block that each block of the pieces was joined into; empty if none were joined."""

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def sizes(self) -> Tensor:
        """How many coordinates each block has."""
        sizes = torch.zeros(len(self.joined or self.names), dtype=torch.long, device="cpu")
        for p in self.pieces:
            sizes[p.first : p.first + p.groups] += p.times * p.run
        return self._join(sizes)

    def _join(self, values: Tensor) -> Tensor:
        if not self.joined:
            return values
        into = torch.tensor(self.joined, device=values.device)
        return torch.zeros(len(self), dtype=values.dtype, device=values.device).index_add_(0, into, values)

    def at_most(self, number: int) -> Blocks:
        """The same partition with neighbours joined, so that at most `number` blocks are left."""
        if number >= len(self):
            return self
        joined = tuple(i * number // len(self) for i in range(len(self)))
        first = [joined.index(i) for i in range(number)]
        return Blocks(tuple(self.names[i] for i in first), self.pieces, self.size, joined)

    def mean(self, vector: Tensor) -> Tensor:
        """The mean of each block of a shared vector, summed in at least float32."""
        wide = torch.promote_types(vector.dtype, torch.float32)
        sums = torch.zeros(len(self.joined or self.names), dtype=wide, device=vector.device)
        vector = self._checked(vector, self.size)
        for p in self.pieces:
            sums[p.first : p.first + p.groups] += p.of(vector).sum((0, 2), dtype=wide)
        return (self._join(sums) / self.sizes.to(vector.device)).to(vector.dtype)

    def spread(self, values: Tensor) -> Tensor:
        """A shared vector that holds each block's value at all of its coordinates."""
        values = self._checked(values, len(self))
        if self.joined:
            values = values[torch.tensor(self.joined, device=values.device)]
        vector = torch.empty(self.size, dtype=values.dtype, device=values.device)
        for p in self.pieces:
            p.of(vector).copy_(values[p.first : p.first + p.groups, None])
        return vector

    @staticmethod
    def _checked(vector: Tensor, size: int) -> Tensor:
        if vector.shape != (size,):
            raise ValueError(f"expected a vector of {size} numbers, got shape {tuple(vector.shape)}")
        return vector.contiguous()


@lru_cache
def blocks(layout: Layout, kind: Kind = "architecture", most: int = 0, least: int = 1) -> Blocks:
    """Partition the shared part of `layout`; a personal part is never sent, so it has no blocks.

    There are at most `most` blocks (0: no bound), and at most ⌊d/least⌋.
    """
    if kind not in ("architecture", "fine", "tensor"):
        raise ValueError(f"unknown kind of blocks {kind!r}; choose architecture, fine or tensor")
    segments = layout.shared_segments
    transformer = Transformer(segments, dict(layout.heads))
    cuts: Iterable[Cut] = (Cut(s.name, s) for s in segments)
    if kind != "tensor" and transformer.inside:
        cuts = transformer.cuts(fine=kind == "fine")
    elif kind == "architecture" and any(len(s.shape) > 2 for s in segments):
        cuts = _convolutional(segments)
    largest = max(1, layout.shared // max(least, 1))
    return _assemble(cuts, layout.shared).at_most(min(most or largest, largest))


@dataclass(frozen=True)
class Cut:
    """Block `key` gets `length` places of a segment's `axis`, from `start` on; by default the whole tensor.

    With `groups` > 1 the places are divided evenly among that many blocks. Cuts with the same key go to the
    same blocks; this is how a bias joins its matrix.
    """

    key: str
    segment: Segment
    axis: int = 0
    start: int = 0
    length: int | None = None
    groups: int = 1


def _assemble(cuts: Iterable[Cut], size: int) -> Blocks:
    first: dict[str, int] = {}
    names: list[str] = []
    pieces = []
    for cut in cuts:
        if cut.key not in first:
            first[cut.key] = len(names)
            names += [cut.key] if cut.groups == 1 else [f"{cut.key}[{i}]" for i in range(cut.groups)]
        shape = cut.segment.shape or (1,)
        inner = torch.Size(shape[cut.axis + 1 :]).numel()
        times = torch.Size(shape[: cut.axis]).numel()
        stride = shape[cut.axis] * inner
        run = (cut.length or shape[cut.axis]) // cut.groups * inner
        offset = cut.segment.offset + cut.start * inner
        pieces.append(Piece(first[cut.key], cut.groups, offset, times, stride, run))
    return Blocks(tuple(names), tuple(pieces), size)


def _convolutional(segments: tuple[Segment, ...]) -> Iterator[Cut]:
    """A residual block is the innermost numbered module with several convolutions, such as `layer1.0`."""
    convolutions = [s.layer for s in segments if len(s.shape) > 2]
    several = [p for p in _numbered(segments) if sum(_under(c, p) for c in convolutions) > 1]
    matrices = {s.layer for s in segments if len(s.shape) > 1}
    key = ""
    for s in segments:
        around = [p for p in several if _under(s.layer, p)]
        if around:
            key = max(around, key=len)
        elif s.layer in matrices or not key:
            key = s.layer
        # Otherwise it is a norm outside any residual block: it stays with the layer before it.
        yield Cut(key, s)


class Transformer:
    """Which part of which layer each segment belongs to."""

    PARTS: Mapping[str, str] = {
        **dict.fromkeys(("query", "q_proj", "q", "q_lin"), "Q"),
        **dict.fromkeys(("key", "k_proj", "k", "k_lin"), "K"),
        **dict.fromkeys(("value", "v_proj", "v", "v_lin"), "V"),
        **dict.fromkeys(("qkv", "c_attn", "in_proj"), "QKV"),  # one matrix: all of Q, then of K, then of V
    }

    def __init__(self, segments: tuple[Segment, ...], heads: Mapping[str, int]) -> None:
        self.segments = segments
        self.attentions: dict[str, tuple[str, int]] = {}
        """For each sub-layer of attention (`layer.0.attention`): its layer (`layer.0`) and its heads."""
        for name, number in heads.items():
            parts = name.split(".")
            depth = max((i + 1 for i, part in enumerate(parts) if part.isdigit()), default=0)
            self.attentions[".".join(parts[: depth + 1])] = (".".join(parts[:depth]), number)
        layers = {layer for layer, _ in self.attentions.values()}
        self.inside = [i for i, s in enumerate(segments) if any(_under(s.layer, layer) for layer in layers)]
        self.matrices = {s.layer: s for s in segments if len(s.shape) > 1 and s.name.endswith(".weight")}
        # Conv1D of transformers keeps inputs in rows; its fused (d, 3d) matrix identifies it.
        self.columns = any(
            s.layer.endswith("c_attn") and s.shape[-1] == 3 * s.shape[0] for s in self.matrices.values()
        )

    def cuts(self, fine: bool) -> Iterator[Cut]:
        layer = ""
        for i, s in enumerate(self.segments):
            around = [pair for pair in self.attentions.items() if _under(s.layer, pair[1][0])]
            if around:
                layer = around[0][1][0]
            if "lora_" in s.name:
                yield Cut(s.name, s)
            elif not around:
                between = self.inside[0] < i < self.inside[-1]
                role = "embedding" if i < self.inside[0] else f"{layer}.mlp" if between else "output"
                yield self._by_neuron(s) if fine and not between else Cut(s.name if fine else role, s)
            else:
                yield from self._in_layer(s, around, fine)

    def _in_layer(self, s: Segment, around: list[tuple[str, tuple[str, int]]], fine: bool) -> Iterator[Cut]:
        layer = around[0][1][0]
        own = [(name, heads) for name, (_, heads) in around if _under(s.name, name)]
        parts = self.PARTS.get(_last(s), "") if own else ""
        axis = self._outputs(s)
        length = s.shape[axis] // max(len(parts), 1)
        if parts and length % own[0][1] == 0:
            for j, part in enumerate(parts):
                by_neuron = fine and part == "V"
                groups = length if by_neuron else own[0][1]
                yield Cut(f"{own[0][0]}.{part}", s, axis, j * length, length, groups)
        elif fine:
            yield self._by_neuron(s)
        elif own or _first_norm(s.layer.removeprefix(layer)):
            yield Cut(f"{own[0][0] if own else around[0][0]}.projection", s)
        else:
            yield Cut(f"{layer}.mlp", s)

    def _by_neuron(self, s: Segment) -> Cut:
        """A matrix by its outputs, with its bias; a table of positions by its rows; anything else as one."""
        if s.layer in self.matrices and s.name.endswith((".weight", ".bias")):
            axis = self._outputs(s)
            return Cut(s.layer, s, axis, groups=s.shape[axis])
        if len(s.shape) == 3 and s.shape[0] == 1:
            return Cut(s.name, s, axis=1, groups=s.shape[1])
        return Cut(s.name, s)

    def _outputs(self, s: Segment) -> int:
        """The axis of a tensor that counts outputs."""
        return 1 if self.columns and len(s.shape) == 2 and _last(s).startswith("c_") else 0


def _last(s: Segment) -> str:
    """The last name before `weight` or `bias`: `q_proj` of `attention.q_proj.weight`."""
    owner = s.name.removesuffix("weight").removesuffix("bias").rstrip("._")
    return owner.rpartition(".")[2]


def _first_norm(name: str) -> bool:
    """Whether a module of a transformer layer is the norm in front of its attention."""
    name = name.lower()
    return ("norm" in name or "ln" in name) and name.endswith(("before", "before_attn", "1"))


def _under(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(module + ".")


def _numbered(segments: tuple[Segment, ...]) -> set[str]:
    """Every module on the path to a tensor whose name is a number, as in a Sequential or a ModuleList."""
    paths = set()
    for s in segments:
        parts = s.layer.split(".")
        paths |= {".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()}
    return paths
