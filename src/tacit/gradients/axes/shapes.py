"""Views: the same elements in another shape or order, in parts, or beside others."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from tacit.gradients.axes.call import Call, dims_of, table, tensors_in


def _view(call: Call) -> str:
    source = call["self"]
    if call.out.dtype != source.dtype:
        # The same bytes as other numbers: those along the last axis are cut or joined.
        return call.axes(source) if call.out.shape == source.shape else call.touch(source, [source.dim() - 1])
    return reshaped(call, call.axes(source), source.shape, call.out.shape)


def reshaped(call: Call, axes: str, old: Sequence[int], new: Sequence[int]) -> str:
    """Axes after a reshape, which keeps the order of all elements."""
    if prod(old) == 0:
        raise call.refuse("of nothing")
    result = ["."] * len(new)
    i = j = 0
    while i < len(old) or j < len(new):
        left: list[int] = []
        right: list[int] = []
        a = b = 1
        while True:
            if (a <= b or j >= len(new)) and i < len(old) and (a < b or not left):
                a *= old[i]
                left.append(i)
                i += 1
            elif j < len(new) and (b < a or not right):
                b *= new[j]
                right.append(j)
                j += 1
            if a == b and (left or i >= len(old)) and (right or j >= len(new)):
                break
        wide, out = [k for k in left if old[k] != 1], [k for k in right if new[k] != 1]
        letters = [axes[k] for k in wide]
        if not wide:
            # Groups of ones: a records' axis of one record stays in front.
            if any(axes[k] == "R" for k in left) and right:
                result[right[0]] = "R"
            continue
        if "R" in letters:
            if letters[0] != "R" or new[out[0]] % call.records:
                raise call.refuse("cuts or joins the records' axis")
            result[out[0]] = "R"
        elif len(wide) == 1 and len(out) == 1:
            result[out[0]] = letters[0]
        elif set(letters) in ({"E"}, {"C"}):
            for k in out:
                result[k] = letters[0]
        elif letters[0] in "EM" and not old[wide[0]] % call.records and not new[out[0]] % call.records:
            result[out[0]] = "M"
    return call.only("".join(result))


def _expand(call: Call) -> str:
    source = call["self"]
    axes, shape = call.axes(source), call.out.shape
    new = len(shape) - source.dim()
    result = ["E"] * new
    for letter, was, now in zip(axes, source.shape, shape[new:], strict=True):
        if was == now:
            result.append(letter)
        elif letter == "R":
            raise call.refuse("repeats one record")
        else:
            result.append("E")
    return "".join(result)


def _repeat(call: Call) -> str:
    source, times = call["self"], call["repeats"]
    new = len(times) - source.dim()
    result = ["E" if n != 1 else "." for n in times[:new]]
    for letter, size, n in zip(call.axes(source), source.shape, times[new:], strict=True):
        if n == 1:
            result.append(letter)
        elif letter == "R":
            raise call.refuse()
        else:
            repeated = "." if n % call.records else "M"
            result.append("E" if size == 1 or letter == "E" else repeated)
    return "".join(result)


def _permute(call: Call) -> str:
    axes = call.axes(call["self"])
    return "".join(axes[d] for d in dims_of(call["dims"], len(axes)) or range(0))


def _transpose(call: Call) -> str:
    letters = list(call.axes(call["self"]))
    if letters:
        a, b = dims_of([call["dim0"], call["dim1"]], len(letters))
        letters[a], letters[b] = letters[b], letters[a]
    return "".join(letters)


def _t(call: Call) -> str:
    return call.axes(call["self"])[::-1]


def _unsqueeze(call: Call) -> str:
    axes = call.axes(call["self"])
    dim = call["dim"] % (len(axes) + 1)
    return axes[:dim] + "." + axes[dim:]


def _squeeze(call: Call) -> str:
    source = call["self"]
    axes = call.axes(source)
    dims = dims_of(call.get("dim"), source.dim()) if "dim" in call.named else range(source.dim())
    gone = {d for d in dims if source.shape[d] == 1}
    if any(axes[d] == "R" for d in gone):
        raise call.refuse()
    return "".join(c for d, c in enumerate(axes) if d not in gone)


def _select(call: Call) -> str:
    source = call["self"]
    (dim,) = dims_of(call["dim"], source.dim())
    axes = call.axes(source)
    if axes[dim] == "R":
        raise call.refuse()
    return axes[:dim] + axes[dim + 1 :]


def _slice(call: Call) -> Any:
    """slice, split, narrow: a part of an axis, or all of it."""
    source = call["self"]
    (dim,) = dims_of(call.get("dim", 0), source.dim())
    axes = call.axes(source)

    def part(out: Tensor) -> str:
        if out.shape[dim] == source.shape[dim] and call.get("step", 1) == 1:
            return axes
        if axes[dim] == "R":
            raise call.refuse()
        return axes if axes[dim] in "EC" else axes[:dim] + "." + axes[dim + 1 :]

    return [part(out) for out in tensors_in(call.out)]


def _unbind(call: Call) -> str:
    return _select(call)


def _unfold(call: Call) -> str:
    source = call["self"]
    (dim,) = dims_of(call["dimension"], source.dim())
    axes = call.axes(source)
    if axes[dim] == "R":
        raise call.refuse()
    return axes[:dim] + "." + axes[dim + 1 :] + "."


def _cat(call: Call) -> str:
    tensors = call["tensors"]
    tensors = [t for t in tensors if t.dim() != 1 or t.shape[0]] or tensors
    (dim,) = dims_of(call["dim"], tensors[0].dim())
    shapes = []
    for tensor in tensors:
        axes = call.axes(tensor)
        if axes[dim] == "R":
            raise call.refuse()
        shapes.append(
            (axes[:dim] + "." + axes[dim + 1 :], (*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :]))
        )
    return call.meet(shapes)


def _stack(call: Call) -> str:
    tensors = call["tensors"]
    axes = call.aligned(*tensors)
    dim = call["dim"] % (len(axes) + 1)
    return axes[:dim] + "." + axes[dim:]


RULES = table(
    (_view, "view _unsafe_view reshape _reshape_alias view_copy"),
    (_expand, "expand"),
    (_repeat, "repeat"),
    (_permute, "permute"),
    (_transpose, "transpose"),
    (_t, "t numpy_T"),
    (_unsqueeze, "unsqueeze"),
    (_squeeze, "squeeze"),
    (_select, "select"),
    (_slice, "slice split split_with_sizes narrow"),
    (_unbind, "unbind"),
    (_unfold, "unfold"),
    (_cat, "cat"),
    (_stack, "stack"),
)
