"""Convolutions: per-record gradients for early layers, Gram matrices of pixels for late ones.

Early layers have many pixels and few weights. Their per-record weight gradients are computed by a convolution
whose groups are the records; where that is slow, as products of the output's gradient and the patches under
its pixels. Either is done for a few records at a time, so that they stay in the cache, and takes hardly
longer than the usual sum over records. Late layers have few pixels and many weights:
there ‖g_j‖² = Σ_{t,s} (u_t · u_s)(y_t · y_s) over pairs of output pixels, with u_t the patch under pixel t.
Patches need not be copied out for it: the product of two patches is a sum over the kernel of products of
single pixels, so one Gram matrix of the *input pixels*, shifted and added, gives it with kernel-size times
fewer multiplications.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.gradients.records import Explicit, PerRecord, gram_squares, in_full, traffic, zero_outside
from tacit.gradients.tape import Tape, Unsupported


@dataclass(frozen=True)
class Geometry:
    """How a kernel walks over an image."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def weight_grad(self, x: Tensor, grad: Tensor, weight: Tensor, groups: int) -> Tensor:
        """The usual gradient of the weight, summed over the first dimension."""
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            groups,
            [False, True, False],
        )
        return found[1]


@dataclass(frozen=True)
class Patches:
    """Per-record gradients of a convolution's weight, kept as its input and its output's gradient."""

    x: Tensor
    grad: Tensor
    geometry: Geometry
    shape: tuple[int, ...]
    """The weight's own."""

    def squares(self) -> Tensor:
        # A few records at a time, so that their Gram matrices stay in the cache.
        pixels = max(self.x[0, 0].numel(), self.grad[0, 0].numel())
        few = max(1, CACHED // (pixels**2 * self.geometry.groups))
        parts = zip(torch.split(self.x, few), torch.split(self.grad, few), strict=True)
        return torch.cat([self._squares(x, grad) for x, grad in parts])

    def _squares(self, x: Tensor, grad: Tensor) -> Tensor:
        g = self.geometry
        patches, grads = (
            gram.flatten(4).flatten(2, 3) for gram in (self._patch_gram(x, grad), _gram(grad, g.groups))
        )
        roundings = (x.shape[1] + grad.shape[1]) // g.groups + prod(g.kernel)
        return gram_squares(patches, grads, roundings)

    def _patch_gram(self, x: Tensor, grad: Tensor) -> Tensor:
        """Products of all pairs of patches: [B, groups, H, W, H, W] over output pixels."""
        g = self.geometry
        (height, width), (top, left) = grad.shape[2:], g.padding
        total = _gram(x, g.groups)
        if top or left:
            total = F.pad(total, (left, left, top, top) * 2)
        # The window is a rectangle, so it is summed along one axis after the other.
        rows = _windows(g.kernel[0], g.dilation[0], g.stride[0], height)
        total = _sum_of([total[:, :, w, :, w, :] for w in rows])
        columns = _windows(g.kernel[1], g.dilation[1], g.stride[1], width)
        return _sum_of([total[:, :, :, w, :, w] for w in columns])

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        weighted = self.grad * factors.view(-1, 1, 1, 1)
        shape = (self.grad.shape[1], self.x.shape[1] // self.geometry.groups, *self.geometry.kernel)
        empty = out.view(shape)
        out += self.geometry.weight_grad(self.x, weighted, empty, self.geometry.groups).reshape(out.shape)

    def explicit(self) -> Tensor:
        return _explicit(self.x, self.grad, self.geometry, len(self.x), self.shape).explicit()

    def keep(self, mask: Tensor) -> Patches:
        return Patches(zero_outside(mask, self.x), zero_outside(mask, self.grad), self.geometry, self.shape)

    @property
    def bytes(self) -> int:
        return (self.x.numel() + self.grad.numel()) * self.x.element_size()


def _windows(kernel: int, dilation: int, stride: int, outputs: int) -> list[slice]:
    """Where each element of the kernel lies as the kernel walks along one axis."""
    last = (outputs - 1) * stride + 1
    return [slice(k * dilation, k * dilation + last, stride) for k in range(kernel)]


def _sum_of(views: Sequence[Tensor]) -> Tensor:
    """The sum of views of one tensor, as a new tensor."""
    total = views[0] + views[1] if len(views) > 1 else views[0].clone()
    for view in views[2:]:
        total += view
    return total


def _gram(images: Tensor, groups: int) -> Tensor:
    """[B, C, H, W] → products of all pairs of pixels, [B, groups, H, W, H, W]."""
    b, c, h, w = images.shape
    flat = _matrices(images) if groups == 1 else images.reshape(b * groups, c // groups, h * w)
    return torch.bmm(flat.transpose(1, 2), flat).view(b, groups, h, w, h, w)


def _matrices(images: Tensor) -> Tensor:
    """[B, C, H, W] → [B, C, H·W], without a copy where channels come last, too."""
    if images.is_contiguous(memory_format=torch.channels_last):
        return images.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2)
    return images.flatten(2)


@dataclass(frozen=True)
class Taps:
    """Per-record gradients of a convolution's weight in memory, as [B, out, height · width, in].

    Channels last: in this order patches are copied in runs of whole pixels.
    """

    grads: Tensor
    shape: tuple[int, ...]
    """The weight's own."""

    @staticmethod
    def of(x: Tensor, grad: Tensor, geometry: Geometry, records: int, shape: tuple[int, ...]) -> Taps:
        """Those of a convolution without groups, on one image of each record or on several."""
        g = geometry
        (height, width), (top, left) = grad.shape[2:], g.padding
        x = x.permute(0, 2, 3, 1)
        x = F.pad(x, (0, 0, left, left, top, top)) if top or left else x.contiguous()
        images, c = x.shape[0], x.shape[3]
        image, row, column, _ = x.stride()
        walk = (row * g.stride[0], column * g.stride[1], row * g.dilation[0], column * g.dilation[1])
        patches = x.as_strided((images, height, width, *g.kernel, c), (image, *walk, 1))
        taps, each = prod(g.kernel), images // records
        # Two, not one, where the cache holds less: a second thread takes the second.
        few = max(1, max(2, PATCHES // (height * width * taps * c)) // each)
        found = x.new_empty(records, grad.shape[1], taps * c)
        parts = zip(
            torch.split(_matrices(grad), few * each),
            torch.split(patches, few * each),
            torch.split(found, few),
            strict=True,
        )
        for grads, under, out in parts:
            under = under.reshape(-1, height * width, taps * c)
            if each == 1:
                torch.bmm(grads, under, out=out)
            else:
                torch.sum(torch.bmm(grads, under).view(len(out), each, *out.shape[1:]), 1, out=out)
        return Taps(found.view(records, -1, taps, c), shape)

    def squares(self) -> Tensor:
        return Explicit(self.grads).squares()

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        total = torch.mv(self.grads.flatten(1).t(), factors).view(self.grads.shape[1:])
        out.flatten(2).add_(total.transpose(1, 2))

    def explicit(self) -> Tensor:
        return self.grads.transpose(2, 3).reshape(-1, *self.shape)

    def keep(self, mask: Tensor) -> Taps:
        return Taps(zero_outside(mask, self.grads), self.shape)

    @property
    def bytes(self) -> int:
        return self.grads.numel() * self.grads.element_size()


def _by_convolution(x: Tensor, grad: Tensor, geometry: Geometry) -> bool:
    """Whether convolutions whose groups are the records are no slower than `Taps`, and often twice as fast
    (measured on processors with vector units of both widths; a matrix product may know only the narrower).
    """
    inner, outer = x.shape[1], grad.shape[1]
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    if inner % 16 or outer % 16 or prod(geometry.kernel) == 1 or grad[0, 0].numel() < MANY:
        return False
    # Channels that come last are turned round first.
    return grad.is_contiguous() or torch.backends.cpu.get_cpu_capability() == "AVX512"


def _grouped(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    """[B, *weight.shape], by a convolution whose groups are the records'."""
    b, c_in, c_out = x.shape[0], x.shape[1], grad.shape[1]
    shape = (b * c_out, c_in // geometry.groups, *geometry.kernel)
    found = geometry.weight_grad(
        x.reshape(1, b * c_in, *x.shape[2:]),
        grad.reshape(1, b * c_out, *grad.shape[2:]),
        x.new_empty(1).expand(shape),
        b * geometry.groups,
    )
    return found.view(b, c_out, *shape[1:])


def convolution(
    tape: Tape,
    func: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """The rule for one and two dimensions; a signal is an image of one row."""
    dims = weight.dim() - 2
    if x.dim() != dims + 2:
        raise Unsupported(f"a convolution on shape {tuple(x.shape)}")
    tape.check(x, dims + 1)
    stride, dilation = _each(stride, dims), _each(dilation, dims)
    if isinstance(padding, str):
        x, padding = _pad_by_name(x, padding, tuple(weight.shape[2:]), dilation)
    padding = _each(padding, dims)
    geometry = Geometry(
        _two(weight.shape[2:], 1), _two(stride, 1), _two(padding, 0), _two(dilation, 1), groups
    )
    y = func(x, weight.detach(), None if bias is None else bias.detach(), stride, padding, dilation, groups)

    def grads(grad: Tensor, x: Tensor) -> Sequence[PerRecord | None]:
        grad, x = in_full(grad), in_full(x)
        if dims == 1:
            grad, x = grad.unsqueeze(2), x.unsqueeze(2)
        return (
            weight_form(x, grad, geometry, tape.records, tuple(weight.shape)) if tape.owned(weight) else None,
            Explicit(tape.per_record(grad.sum((2, 3))).sum(1)) if tape.owned(bias) else None,
        )

    return tape.watch(y, (weight, bias), (x,), grads)


def weight_form(
    x: Tensor, grad: Tensor, geometry: Geometry, records: int, shape: tuple[int, ...]
) -> PerRecord:
    """The cheaper form for these shapes."""
    pixels, outputs = x[0, 0].numel(), grad[0, 0].numel()
    gram = pixels**2 * x.shape[1] + outputs**2 * (
        grad.shape[1] + SHIFT * geometry.groups * prod(geometry.kernel)
    )
    explicit = traffic(prod(shape)) if geometry.groups == 1 else GROUPED * prod(shape)
    if x.shape[0] == records and gram < explicit:
        return Patches(x, grad, geometry, shape)
    return _explicit(x, grad, geometry, records, shape)


def _explicit(
    x: Tensor, grad: Tensor, geometry: Geometry, records: int, shape: tuple[int, ...]
) -> Taps | Explicit:
    if len(x) == records and geometry.groups == 1 and _by_convolution(x, grad, geometry):
        found = x.new_empty(records, *grad.shape[1:2], x.shape[1], *geometry.kernel)
        parts = zip(*(torch.split(tensor, FEW) for tensor in (x, grad, found)), strict=True)
        for images, grads, out in parts:
            out.copy_(_grouped(images, grads, geometry))
        return Explicit(found.view(records, *shape))
    if geometry.groups == 1:
        return Taps.of(x, grad, geometry, records, shape)
    return Explicit(_grouped(x, grad, geometry).view(records, -1, *shape).sum(1))


GROUPED = 130
"""Multiplications in Gram matrices that cost as much as one number of a grouped convolution's output."""
FEW = 8
"""Records that are one convolution's groups."""
MANY = 144
"""Output pixels from which on that pays."""
PATCHES = 2**19
"""Numbers of patches that a core's cache holds beside the gradients made from them."""
CACHED = 2**17
"""Numbers of a Gram matrix that a core's cache holds beside what is made from it."""
SHIFT = 8
"""Multiplications of a matrix product that take as long as one number of a shifted addition (measured)."""


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * dims if len(numbers) == 1 else numbers


def _two(numbers: Sequence[int], missing: int) -> tuple[int, int]:
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (missing, numbers[0])


def _pad_by_name(
    x: Tensor, name: str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """Padding by name, as numbers; where "same" is uneven the odd pixel is added by hand, as in torch."""
    if name == "valid":
        return x, (0,) * len(kernel)
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    odd = [extra for total in reversed(totals) for extra in (0, total % 2)]
    return (F.pad(x, odd) if any(odd) else x), tuple(total // 2 for total in totals)
