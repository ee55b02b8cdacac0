"""Forms of a parameter's per-record gradients, each as small as the layer allows.

A layer hands over one of these as soon as the backward pass reaches it. All of them answer the same three
questions: the squared norm for each record, the sum weighted by clip factors, and (when a parameter is
used several times) the gradients themselves. Only `Explicit`, and a convolution's `Taps`, hold B × parameters
numbers.

>>> import torch
>>> left, right = torch.randn(3, 5, 4), torch.randn(3, 5, 2)        # 3 records of 5 tokens, weight 4 × 2
>>> gram = Outer(left, right)
>>> torch.allclose(gram.squares(), Explicit(gram.explicit()).squares(), rtol=1e-4)
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class PerRecord(Protocol):
    """The gradients g_1 … g_B of one parameter."""

    def squares(self) -> Tensor:
        """‖g_j‖² for each record, shape [B], at least float32."""

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        """out += Σ_j factors[j]·g_j, in place."""

    def explicit(self) -> Tensor:
        """The gradients themselves, shape [B, *parameter.shape]."""

    def keep(self, mask: Tensor) -> PerRecord:
        """The same gradients with those of records outside `mask` set to zero, whatever they were."""

    @property
    def bytes(self) -> int:
        """Memory held until the weighted sum, as far as shapes tell."""


def in_full(tensor: Tensor) -> Tensor:
    """Half precision is for the model's own products; norms and sums are taken in float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def zero_outside(mask: Tensor, tensor: Tensor) -> Tensor:
    """`where`, not a product: 0 · nan is nan."""
    return torch.where(mask.view(-1, *[1] * (tensor.dim() - 1)), tensor, tensor.new_zeros(()))


@dataclass(frozen=True)
class Explicit:
    """The per-record gradients in memory: for small parameters, and for those used more than once."""

    grads: Tensor

    def squares(self) -> Tensor:
        if self.grads.dim() <= 2:
            norms: Tensor = torch.linalg.vector_norm(self._matrix, dim=1)
            return norms.square()
        # Row by row: one float32 sum over millions of numbers would be off by 1e-4.
        norms = torch.linalg.vector_norm(self.grads.flatten(2), dim=2)
        return norms.square().sum(1)

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        out.view(-1).addmv_(self._matrix.t(), factors)

    @property
    def _matrix(self) -> Tensor:
        return self.grads.reshape(len(self.grads), -1)

    def explicit(self) -> Tensor:
        return self.grads

    def keep(self, mask: Tensor) -> Explicit:
        return Explicit(zero_outside(mask, self.grads))

    @property
    def bytes(self) -> int:
        return self.grads.numel() * self.grads.element_size()


@dataclass(frozen=True)
class Outer:
    """g_j = Σ_t left[j, t] ⊗ right[j, t], never multiplied out: every linear map's gradient is of this form.

    ‖g_j‖² = Σ_{t,s} (left_t · left_s)(right_t · right_s) needs only two T × T Gram matrices, and of these
    little more than half, for they are symmetric. Where tokens cancel, rounding could hide a norm that is far
    from zero: see `at_least`.
    """

    left: Tensor
    right: Tensor

    def squares(self) -> Tensor:
        if self.left.shape[1] == 1:
            left, right = (side.square().sum((1, 2)).add_(VANISHED) for side in (self.left, self.right))
            return left * right
        total, lengths = self.left.new_zeros(len(self.left)), []
        for start, stop in strips(self.left.shape[1]):
            left, right = (products(side[:, start:stop], side[:, start:]) for side in (self.left, self.right))
            lengths.append([gram.diagonal(dim1=1, dim2=2).clone() for gram in (left, right)])
            own, behind = left.mul_(right).tensor_split((stop - start,), 2)
            total.add_(own.sum((1, 2))).add_(behind.sum((1, 2)), alpha=2.0)
        roundings = sum(min(d, CHUNK) + d // CHUNK for d in (self.left.shape[2], self.right.shape[2]))
        left, right = (torch.cat(each, 1) for each in zip(*lengths, strict=True))
        return at_least(total, left, right, roundings)

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        left, right = self.left, self.right
        # Scale the narrower side: less to copy.
        if left.shape[2] <= right.shape[2]:
            left = left * factors.view(-1, 1, 1)
        else:
            right = right * factors.view(-1, 1, 1)
        out.addmm_(left.flatten(0, 1).t(), right.flatten(0, 1))

    def explicit(self) -> Tensor:
        return torch.bmm(self.left.transpose(1, 2), self.right)

    def keep(self, mask: Tensor) -> Outer:
        return Outer(zero_outside(mask, self.left), zero_outside(mask, self.right))

    @property
    def bytes(self) -> int:
        return (self.left.numel() + self.right.numel()) * self.left.element_size()


ROUNDINGS = 16
"""What adding up products of Gram matrices' elements may round, beside once for each token; always added."""
HIDDEN = 2.0**-10
"""The share of a squared norm that rounding may hide: 2⁻¹¹ of a norm. Noise makes up for four times that
(`NUMERICAL`, example level).
"""
CHUNK = 1024
"""Numbers that are multiplied and added up in one go: with more of them, rounding may hide more."""

VANISHED = 2.0**-102
"""More than 2²⁴ squares add up to that are too small for float32: beside a second factor that is as large as
it allows, what vanishes there may be most of a gradient.
"""


def strips(tokens: int) -> list[tuple[int, int]]:
    """Rows of a Gram matrix, to be multiplied with themselves and all rows behind them.

    Of 32 rows, or of 64 in larger matrices: shorter strips make slower products (measured with AVX2 and with
    AVX-512). Fewer than 48 rows are not worth cutting.
    """
    width = tokens if tokens < 48 else 32 if tokens < 96 else 64
    ends = [*range(tokens - width * (tokens // width - 1), tokens, width), tokens]
    return list(zip([0, *ends], ends, strict=False))


def products(rows: Tensor, others: Tensor) -> Tensor:
    """[B, S, d] and [B, T, d] → the products of every two tokens of a record, [B, S, T]."""
    parts = zip(torch.split(rows, CHUNK, 2), torch.split(others, CHUNK, 2), strict=True)
    found = [torch.bmm(left, right.transpose(1, 2)) for left, right in parts]
    for more in found[1:]:
        found[0].add_(more)
    return found[0]


def gram_squares(left: Tensor, right: Tensor, roundings: int) -> Tensor:
    """Σ_{t,s} left[…, t, s] · right[…, t, s] for each record of whole Gram matrices [B, …, T, T], which are
    scratch; an upper bound, tight but for rounding: see `at_least`.
    """
    lengths = (left.diagonal(dim1=-2, dim2=-1).clone(), right.diagonal(dim1=-2, dim2=-1))
    return at_least(left.mul_(right).flatten(1).sum(1), *lengths, roundings)


def at_least(total: Tensor, left: Tensor, right: Tensor, roundings: int) -> Tensor:
    """Each record's sum of products, or what it may be where rounding could hide much of it.

    `total` is what it came to (and is written to), `left` and `right` are the Gram matrices' diagonals,
    |l_t|² and |r_t|² [B, …, T]. Terms of both signs may add up to nearly nothing and leave only rounding,
    which a record made for that could use to pass unclipped. Each term is at most |l_t||l_s||r_t||r_s|,
    so all of them together are at most (Σ_t |l_t||r_t|)². A sum of n products is off by n/2 units of the
    precision at most, in whatever order it is taken; `roundings` is that n, of both matrices' elements
    together. Where such a share of what all terms may be is more than `HIDDEN` of the sum, it is added,
    but for that. Where products vanish on one side, `VANISHED` × (Σ_t |r_t|)² on the other bounds what
    they were worth.

    Returns:
        What the true sum exceeds by a share of `HIDDEN` at most.
    """
    sides = [side.clamp_min(0.0).sqrt_() for side in (left, right)]
    half_unit = torch.finfo(left.dtype).eps / 2
    most = (sides[0] * sides[1]).sum(-1).square()
    vanished = sum(side.sum(-1).square() for side in sides) * VANISHED
    total = total.clamp_min_(0.0).add_(_each(vanished + most * (ROUNDINGS * half_unit)))
    lost = _each(most) * ((roundings + left.shape[-1]) * half_unit)
    return torch.maximum(total, (total + lost).div_(1 + HIDDEN))


def _each(values: Tensor) -> Tensor:
    """[B, …] → [B]: what all groups of a record have together."""
    return values.flatten(1).sum(1) if values.dim() > 1 else values


def outer(left: Tensor, right: Tensor) -> Outer | Explicit:
    """Σ_t left_t ⊗ right_t for each record, in the cheaper form for these shapes."""
    left, right = in_full(left), in_full(right)
    tokens, m, n = left.shape[1], left.shape[2], right.shape[2]
    form = Outer(left, right)
    # The explicit form takes the place of the weighted product: its price is memory traffic alone.
    return Explicit(form.explicit()) if traffic(m * n) < tokens * tokens * (m + n) else form


def traffic(numbers: int) -> int:
    """Multiplications in Gram matrices that cost as much as writing and twice reading a record's gradient.

    Measured on CPUs with 2 MB of cache per core; a gradient that does not fit in half of it costs four
    times more. Being off by half changes the speed by a few per cent and the result not at all.
    """
    return numbers * (40 if numbers <= 2**18 else 100)


@dataclass(frozen=True)
class Rows:
    """Gradients that touch few rows of a table: row `index[i]` of record `record[i]` has `values[i]`."""

    record: Tensor
    index: Tensor
    values: Tensor
    shape: tuple[int, ...]
    lookups: tuple[int, int]
    """Records, and lookups of each."""

    @staticmethod
    def gather(index: Tensor, grads: Tensor, shape: tuple[int, ...]) -> Rows:
        """Lookups `index` [B, T] with output gradients [B, T, d]; a row looked up twice gets the sum."""
        records = index.shape[0]
        offsets = torch.arange(records, device=index.device).mul(shape[0]).unsqueeze(1)
        keys, places = torch.unique(index + offsets, return_inverse=True)
        grads = in_full(grads)
        values = grads.new_zeros(len(keys), grads.shape[-1])
        values.index_add_(0, places.flatten(), grads.flatten(0, 1))
        return Rows(keys // shape[0], keys % shape[0], values, shape, (records, index.shape[1]))

    def squares(self) -> Tensor:
        return self.values.new_zeros(self.lookups[0]).index_add_(0, self.record, self.values.square().sum(1))

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        out.index_add_(0, self.index, self.values * factors[self.record].unsqueeze(1))

    def explicit(self) -> Tensor:
        grads = self.values.new_zeros(self.lookups[0], *self.shape)
        grads[self.record, self.index] = self.values
        return grads

    def keep(self, mask: Tensor) -> Rows:
        kept = mask[self.record]
        return Rows(self.record[kept], self.index[kept], self.values[kept], self.shape, self.lookups)

    @property
    def bytes(self) -> int:
        return prod(self.lookups) * self.values.shape[1] * self.values.element_size()


def sum_of(forms: Sequence[PerRecord]) -> PerRecord:
    """Several uses of one parameter as one: per-record gradients add up, their norms do not."""
    if len(forms) == 1:
        return forms[0]
    total = forms[0].explicit()
    for form in forms[1:]:
        total += form.explicit()
    return Explicit(total)


def sum_by_record(grad: Tensor, shape: Sequence[int], records: int, axis: int = 0) -> Tensor:
    """Each record's gradient of a tensor of `shape` that was broadcast to `grad.shape`: [B, *shape].

    `axis` of `grad` counts the records. Where the tensor has more than one row there, it is axis 0 and
    these are
    copies for each record: record j's gradient lives in its own alone.
    """
    padded = [1] * (grad.dim() - len(shape)) + list(shape)
    if records == 1:
        return in_full(grad).sum_to_size(padded).reshape(1, *shape)
    split = in_full(grad).movedim(axis, 0)
    split = split.reshape(records, -1, *split.shape[1:])
    if padded[axis] != 1:
        blocks = split.new_zeros(records, *split.shape)
        each = torch.arange(records, device=split.device)
        blocks[each, each] = split
        return blocks.flatten(1, 2).sum_to_size([records, *padded]).reshape(records, *shape)
    split = split.sum(1)
    del padded[axis]
    return split.sum_to_size([records, *padded]).reshape(records, *shape)
