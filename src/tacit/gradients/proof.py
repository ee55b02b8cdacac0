"""What a forward pass did, and that it would have done the same for any other number of records.

Every torch function that a model calls becomes a line: the function, the axes and shapes of its tensors, and
every other argument by value. Where the axes go (`axes.follow`) is worked out once for each different line.

The number of records is a plain integer to a model, so nothing stops it from dividing by it. But the program
that ran is written down: it is compared, line by line, with the program that the same model runs on two
records. Functions and numbers must be the same; only sizes along the records' axis may differ, in proportion,
and only where a function takes a shape. Each different program is compared once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from tacit.gradients.axes import Followed, Unsupported, follow, function_name, tensors_in

TENSOR, OPEN, SLICE, INNER = "tensor", "(", ":", "int inside"
"""Marks in a line: a tensor's axes, shape and type follow; a sequence's length; three values; an integer that
stands in a sequence."""
PLAIN_TYPES = frozenset(
    (
        int,
        float,
        bool,
        str,
        type(None),
        complex,
        torch.dtype,
        torch.device,
        torch.memory_format,
        torch.layout,
        type(...),
        type,
        torch.strided.__class__,
    )
)
MANY = 50_000
"""Lines that are remembered; models whose arguments never repeat must not fill the memory."""


class Line:
    """One call, as often as it happens with the same arguments."""

    __slots__ = ("after", "coins", "draws", "func", "number", "outputs", "parts", "shapes", "written")

    def __init__(self, number: int, func: Any, parts: tuple[Any, ...]) -> None:
        self.number, self.func, self.parts = number, func, parts
        self.outputs: list[str] | None = None
        """Axes of the tensors returned; None for a constant's, all of them then being `.`."""
        self.after: list[tuple[int, str]] = []
        """Axes of tensors that it was given and changed in place."""
        self.written: list[int] = []
        self.shapes: list[tuple[int, ...]] | None = None
        """Shapes of what it returned; None where that was not (only) tensors."""
        self.draws = False
        """Whether it draws random numbers that are no record's own, as far as it can tell."""
        self.coins = False
        """Whether it draws any."""


class Book:
    """All lines seen so far, and the programs that were compared."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._numbers: dict[Any, Line] = {}
        self.compared: dict[Any, list[bool]] = {}
        """For each program that was compared: which of its draws all records share."""

    def find(self, records: int, func: Any, parts: tuple[Any, ...]) -> Line | None:
        return self._numbers.get((records, func, parts))

    def add(self, records: int, func: Any, parts: tuple[Any, ...]) -> Line:
        line = Line(len(self.lines), func, parts)
        self.lines.append(line)
        self._numbers[records, func, parts] = line
        return line

    def tidy(self) -> None:
        """Between passes: forget everything where it has become too much."""
        if len(self.lines) > MANY or len(self.compared) > MANY:
            self.lines, self._numbers, self.compared = [], {}, {}

    def compare(self, one: Sequence[int], size: int, two: Sequence[int], other: int) -> list[bool]:
        """Raise unless two programs, of `size` and of `other` records, are the same; which draws are shared."""  # noqa: E501
        shared = []
        for a, b in zip(one, two, strict=False):
            left, right = self.lines[a], self.lines[b]
            reason = _difference(left, size, right, other)
            if reason is not None:
                raise Unsupported(f"{function_name(left.func)} ({reason})")
            if left.draws:
                shared.append(_sizes(left) == _sizes(right))
        if len(one) != len(two):
            raise Unsupported("a model that does other things for another number of records")
        return shared


def follow_line(line: Line, axes: Sequence[str], args: Any, kwargs: Any, records: int) -> Followed | None:
    """Fill in where the axes go; a function of constants that cannot be followed makes a constant."""
    data = any("R" in a for a in axes)
    try:
        found = follow(line.func, axes, args, kwargs, records)
    except Unsupported:
        if data or line.func.__name__.startswith("_foreach"):
            raise
        if in_place(line.func):
            line.written, line.after = [0], [(0, "." * len(axes[0]))]
        return None
    line.outputs = found.outputs
    line.after = [(i, a) for i, (a, b) in enumerate(zip(found.inputs, axes, strict=True)) if a != b]
    line.written = found.written
    return found


def in_place(func: Any) -> bool:
    """Whether a function writes to its first argument, by torch's way of naming."""
    name = getattr(func, "__name__", "")
    return func is Tensor.__setitem__ or name[:3] == "__i" or (name[-1:] == "_" and name[:2] != "__")


def torchs_own(func: Any) -> bool:
    """Whether this function is part of torch: written in C, an operation of aten, or in torch's own files."""
    if isinstance(func, FunctionType):
        return func.__code__.co_filename.startswith(torch.__path__[0])
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return str(func).startswith("aten.")
    return isinstance(func, _WRITTEN_IN_C)


_WRITTEN_IN_C = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)


def _sizes(line: Line) -> list[Any]:
    shapes = [line.parts[i + 2] for i, part in enumerate(line.parts) if part is TENSOR]
    return [*shapes, line.shapes]


ANYWHERE = frozenset(
    f
    for name in [
        "view",
        "reshape",
        "expand",
        "repeat",
        "new_zeros",
        "new_ones",
        "new_empty",
        "broadcast_to",
        "tile",
    ]
    for f in (getattr(torch, name, None), getattr(Tensor, name, None))
    if f is not None
) | {torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn}
NESTED = frozenset(
    {torch.full, torch.randint, torch.normal, Tensor.new_full, torch.unflatten, Tensor.unflatten}
)
"""Functions that take a shape: in any of their integers, or in a sequence of integers only."""


def _difference(left: Line, size: int, right: Line, other: int) -> str | None:
    if left.func is not right.func and left.func != right.func:
        return "not called for another number of records"
    a, b = left.parts, right.parts
    if len(a) != len(b):
        return "called otherwise for another number of records"
    func, i, most = left.func, 0, 0
    while i < len(a):
        x, y = a[i], b[i]
        if x is TENSOR and y is TENSOR:
            differing = _differing(a[i + 1], a[i + 2], size, b[i + 1], b[i + 2], other)
            if differing is None or a[i + 3] != b[i + 3]:
                return "on another constant for another number of records"
            most = max(most, differing)
            i += 5
            continue
        if x != y and not (
            type(x) is int
            and type(y) is int
            and x * other == y * size
            and (
                func in ANYWHERE
                or (func in NESTED and a[i - 1] is INNER)
                or (func is torch.arange and "P" in (left.outputs or [""])[0] + (right.outputs or [""])[0])
            )
        ):
            return "the number of records is used as a number"
        i += 1
    if most:
        # A size that went with the number of records must still be there, or something counted them.
        if left.shapes is None or right.shapes is None or len(left.shapes) != len(right.shapes):
            return "the number of records is used as a number"
        for s, t in zip(left.shapes, right.shapes, strict=True):
            if len(s) != len(t) or sum(m != n for m, n in zip(s, t, strict=True)) < most:
                return "the number of records is used as a number"
    return None


def _differing(
    axes: str, shape: Sequence[int], size: int, others: str, other_shape: Sequence[int], other: int
) -> int | None:
    """How many dimensions went with the number of records; None if one differs in any other way."""
    if len(shape) != len(other_shape):
        return None
    count = 0
    for m, n, c, d in zip(shape, other_shape, axes, others, strict=True):
        if m == n:
            continue
        if m * other != n * size or (c in "." and d in "."):
            return None
        count += 1
    return count


class Draws:
    """Draws of one step that are no record's own: drawn once, and the same for all parts of the batch.

    That is, for all records that have decided the same before. Those that have decided otherwise may draw
    other numbers next, or of another distribution, and the first of them must not draw for the others: which
    coins a record has, and with whom it shares them, is a matter of its own decisions.
    """

    def __init__(self) -> None:
        self.outcomes: dict[int, list[Tensor]] = {}
        """What was drawn after the same decisions, which have a number: 0 where there was none."""
        self.shared: dict[int, list[bool]] = {}
        """Of the parts that are done: which of these draws all records share."""
        self._numbers: dict[tuple[int, Any], int] = {}
        self.python: Any = None
        self.begun = False
        """Whether a pass may have drawn something since the generators' state was kept."""

    def after(self, path: int, value: Any) -> int:
        """The number of these decisions and one more."""
        return self._numbers.setdefault((path, value), len(self._numbers) + 1)

    def forget(self) -> None:
        """The pass that was under way is none of a part's: what it alone drew was never drawn."""
        self.outcomes = {path: drawn for path, drawn in self.outcomes.items() if path in self.shared}

    def share(self, paths: Sequence[int], drawn: Sequence[int], shared: Sequence[bool]) -> None:
        """A part is done. `paths`: its decisions, more and more of them; `drawn`: those before each draw."""
        new: dict[int, list[bool]] = {path: [] for path in paths if path not in self.shared}
        for path, one in zip(drawn, shared, strict=True):
            if path in new:
                new[path].append(one)
        self.shared |= new

    def save(self) -> None:
        """Keep the state of Python's and numpy's generators, to start every part from."""
        self.python = (random.getstate(), np.random.get_state())  # noqa: NPY002

    def restore(self) -> None:
        if self.python is not None:
            random.setstate(self.python[0])
            np.random.set_state(self.python[1])  # noqa: NPY002


class Known:
    """Tensors that were there before any record: parameters, buffers, attributes, a loss function's own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors: dict[int, Tensor] = {}
        self._seen: list[Any] = []
        self.names: dict[int, str] = {}
        """Storages by address: whose memory it is."""
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self._add(tensor, name)  # first, so that they are called by their own names
        for name, part in module.named_modules():
            for key, value in vars(part).items():
                for tensor in _inside(value, 2):
                    self._add(tensor, f"{name}.{key}" if name else key)

    def _add(self, tensor: Tensor, name: str) -> None:
        if getattr(tensor, "_tacit", None) is None:
            self._tensors[id(tensor)] = tensor
            if tensor.layout is torch.strided and tensor.numel():
                self.names.setdefault(tensor.untyped_storage().data_ptr(), name)

    def add(self, losses: Callable[..., Any]) -> None:
        """Tensors that a loss function brings along: its object's, its closure's, its globals'."""
        function, owner = getattr(losses, "__func__", losses), getattr(losses, "__self__", None)
        if any(function is f and owner is o for f, o in self._seen):
            return
        self._seen.append((function, owner))
        values: list[Any] = [vars(owner)] if hasattr(owner, "__dict__") else []
        values += [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _full(cell)]
        code = getattr(function, "__code__", None)
        values += [getattr(function, "__globals__", {}).get(n) for n in (code.co_names if code else ())]
        for value in values:
            if isinstance(value, nn.Module) and value is not self._module:
                value = [*value.parameters(), *value.buffers()]
            for tensor in _inside(value, 2):
                self._add(tensor, "a tensor of the loss function")

    def __contains__(self, tensor: Tensor) -> bool:
        if self._tensors.get(id(tensor)) is tensor:
            return True
        # Buffers may be replaced between steps; during a step that is refused elsewhere.
        for part in self._module.modules():
            if any(tensor is t for t in (*part._buffers.values(), *part._parameters.values())):
                self._add(tensor, "a buffer")
                return self._tensors.get(id(tensor)) is tensor
        return False


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _inside(value: object, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for inner in value:
            yield from _inside(inner, depth - 1)
    elif depth and isinstance(value, dict):
        for inner in value.values():
            yield from _inside(inner, depth - 1)


__all__ = ["Book", "Draws", "Known", "Line", "follow_line", "tensors_in"]
