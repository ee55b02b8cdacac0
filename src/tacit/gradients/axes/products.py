"""Products of matrices, linear layers, convolutions and attention."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.gradients.axes.call import Call, made, makes, table


def _matmul(call: Call) -> str:
    tensors = call.tensors
    left, right = tensors[-2:]
    a, b = call.axes(left), call.axes(right)
    call.touch(left, [left.dim() - 1])
    call.touch(right, [max(0, right.dim() - 2)])
    rows = (a[-2:-1], left.shape[-2:-1])
    columns = (b[-1:], right.shape[-1:]) if right.dim() > 1 else ("", ())
    batch = call.meet([(a[:-2], left.shape[:-2]), (b[:-2], right.shape[:-2])])
    axes = call.only(batch + rows[0] + columns[0])
    if axes.count("R") > 1:
        raise call.refuse("of all records with all records")
    # What was equal or independent in one factor is so in the product only where it is one of the batch.
    if len(tensors) == 3:  # addmm, baddbmm and their in-place twins
        axes = call.meet([(axes, call.out.shape), (call.axes(tensors[0]), tensors[0].shape)])
    return axes.replace("P", ".")


def _linear(call: Call) -> str:
    x, weight = call["input"], call["weight"]
    axes = call.touch(x, [x.dim() - 1])
    for other in (weight, call.get("bias")):
        if other is not None and "R" in call.axes(other):
            raise call.refuse("with data as its weight")
    return axes if weight.dim() == 2 else axes[:-1]


def _convolution(call: Call) -> str:
    x = call["input"]
    axes = call.touch(x, range(1, x.dim()))
    for other in (call["weight"], call.get("bias")):
        if other is not None and "R" in call.axes(other):
            raise call.refuse("with data as its weight")
    return axes


def _attention(call: Call) -> str:
    q, k, v = call["query"], call["key"], call["value"]
    shapes = []
    for tensor in (q, k, v):
        axes = call.axes(tensor)
        if "R" in axes[-2:]:
            raise call.refuse()
        shapes.append((axes[:-2], tensor.shape[:-2]))
    if call.get("enable_gqa"):
        # Heads are shared among queries: their numbers differ, and they are not the records' axis.
        if any("R" in a[-1:] for a, _ in shapes):
            raise call.refuse()
        shapes = [(a[:-1] + ".", (*s[:-1], 1)) for a, s in shapes]
    mask = call.get("attn_mask")
    if mask is not None:
        axes = call.axes(mask)
        if "R" in axes[-2:]:
            raise call.refuse()
        shapes.append((axes[:-2], mask.shape[:-2]))
    return call.only(call.meet(shapes)) + ".."


@makes
def _attention_made(call: Call) -> Tensor:
    q, v = call["query"], call["value"]
    axes = _attention(call)
    lead = torch.broadcast_shapes(q.shape[:-2], v.shape[:-2]) if not call.get("enable_gqa") else q.shape[:-2]  # type: ignore[no-untyped-call]
    return made((*lead, q.shape[-2], v.shape[-1]), q.dtype, axes)


RULES = table(
    (_matmul, "mm bmm matmul addmm baddbmm"),
    (_linear, "linear"),
    (_convolution, "convolution"),
    (_attention_made, "scaled_dot_product_attention"),
)
