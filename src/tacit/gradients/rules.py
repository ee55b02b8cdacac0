"""One rule for each function that may join a parameter to data.

A rule runs the function it stands for with the parameters detached, and tells the tape how the output's
gradient becomes per-record gradients of the parameters. It never runs anything twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.gradients.attention import learnt_mask, multi_head
from tacit.gradients.convolution import convolution
from tacit.gradients.norms import group_norm, layer_norm, rms_norm
from tacit.gradients.records import Explicit, PerRecord, Rows, in_full, outer
from tacit.gradients.tape import Rule, Tape, Unsupported


def linear(tape: Tape, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b, with any leading dimensions."""
    axis = tape.axis(x)
    if axis < 0:
        raise Unsupported("linear with data as its weight")

    def grads(grad: Tensor, x: Tensor) -> Sequence[PerRecord | None]:
        grad = tape.per_record(grad, axis=axis)
        return (
            outer(grad, tape.per_record(x, axis=axis)) if tape.owned(weight) else None,
            Explicit(in_full(grad).sum(1)) if tape.owned(bias) else None,
        )

    y = func(x, weight.detach(), None if bias is None else bias.detach())
    return tape.watch(y, (weight, bias), (x,), grads)


def addmm(tape: Tape, func: Any, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y = b + x W: transformers' Conv1D."""
    if not tape.is_data(x) or bias.dim() != 1:
        raise Unsupported("addmm with other than bias, data, weight")
    tape.check(x)

    def grads(grad: Tensor, x: Tensor) -> Sequence[PerRecord | None]:
        grad = tape.per_record(grad)
        return (
            outer(tape.per_record(x), grad) if tape.owned(weight) else None,
            Explicit(in_full(grad).sum(1)) if tape.owned(bias) else None,
        )

    return tape.watch(func(bias.detach(), x, weight.detach()), (weight, bias), (x,), grads)


def matmul(tape: Tape, func: Any, x: Tensor, weight: Tensor) -> Tensor:
    """y = x W for a matrix W."""
    if not tape.is_data(x) or tape.is_data(weight) or weight.dim() != 2 or x.dim() < 2:
        raise Unsupported("matmul other than data times a matrix")
    axis = tape.axis(x)

    def grads(grad: Tensor, x: Tensor) -> Sequence[PerRecord | None]:
        return (outer(tape.per_record(x, axis=axis), tape.per_record(grad, axis=axis)),)

    return tape.watch(func(x, weight.detach()), (weight,), (x,), grads)


def embedding(
    tape: Tape,
    func: Any,
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table. The padding row gets no gradient, as in plain training."""
    if max_norm is not None or scale_grad_by_freq or not tape.is_data(index):
        raise Unsupported("an embedding with max_norm or scale_grad_by_freq")
    tape.check(index, 0)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]

    def grads(grad: Tensor, index: Tensor) -> Sequence[PerRecord | None]:
        index, grad = tape.per_record(index, 0), tape.per_record(grad)
        if padding_idx is not None:
            grad = grad.masked_fill((index == padding_idx).unsqueeze(-1), 0.0)
        return (Rows.gather(index, grad, tuple(weight.shape)),)

    return tape.watch(func(index, weight.detach()), (weight,), (index,), grads)


def elementwise(tape: Tape, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Sums, products and quotients of data and a broadcast parameter: positions, scales, biases."""
    if tape.owned(args[0]) and getattr(func, "__name__", "").rstrip("_") != getattr(func, "__name__", ""):
        raise Unsupported("data written into a parameter in place")
    tensors = [a for a in args if isinstance(a, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    data = next(t for t in tensors if tape.is_data(t))
    axis = tape.axis(data) + len(shape) - data.dim()
    out: Tensor = func(*(tape.spread(a, shape, axis) if tape.owned(a) else a for a in args), **kwargs)
    return out


def masked_fill(tape: Tape, func: Any, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """A learnt number, or 0 in a parameter, wherever a mask says so."""
    return elementwise(tape, torch.where, mask, value, x)


def concatenate(tape: Tape, func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Tensor:
    """A class token beside the tokens of the data."""
    data = next(t for t in tensors if tape.is_data(t))
    axis = tape.axis(data)
    if dim % data.dim() == axis:
        raise Unsupported("a parameter concatenated along the dimension of the records")
    out: Tensor = func(
        [tape.spread(t, t.shape, axis) if tape.owned(t) else t for t in tensors], dim, **kwargs
    )
    return out


def like(tape: Tape, func: Any, x: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`other` only lends its type or shape."""
    if not tape.is_data(x):
        raise Unsupported("a parameter shaped like data")
    out: Tensor = func(x, other.detach(), *args, **kwargs)
    return out


def _spellings(*names: str) -> list[Any]:
    """torch.add, Tensor.add, Tensor.add_ and the operators are different functions to torch."""
    forms = ("{}", "{}_", "__{}__", "__r{}__", "__i{}__")
    found = [getattr(torch, name, None) for name in names]
    found += [getattr(Tensor, form.format(name), None) for name in names for form in forms]
    return [f for f in found if f is not None]


RULES: dict[Any, Rule] = {
    F.linear: linear,
    torch.addmm: addmm,
    F.embedding: embedding,
    torch.conv1d: convolution,
    torch.conv2d: convolution,
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.rms_norm: rms_norm,
    torch.cat: concatenate,
    torch.concat: concatenate,
    F.scaled_dot_product_attention: learnt_mask,
    F.multi_head_attention_forward: multi_head,
    **dict.fromkeys(_spellings("matmul", "mm"), matmul),
    **dict.fromkeys(_spellings("add", "sub", "mul", "div", "true_divide", "truediv"), elementwise),
    **dict.fromkeys((torch.where, Tensor.where), elementwise),
    **dict.fromkeys((torch.masked_fill, Tensor.masked_fill), masked_fill),
    **dict.fromkeys((Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as), like),
}
