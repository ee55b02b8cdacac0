"""Runs a function on tensors without data, and follows the letters through every operation it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tacit.gradients.axes import elements, lookups, losses, norms, pictures, products, reductions, shapes
from tacit.gradients.axes.call import MAKERS, Call, Rule, Unsupported, axes_of, function_name, tensors_in

RULES: dict[Any, Rule] = {
    packet: rule
    for kind in (elements, reductions, shapes, products, pictures, norms, lookups, losses)
    for packet, rule in kind.RULES.items()
}
"""The rule of every operation that has one, beside those that torch tags as pointwise."""


@dataclass(frozen=True)
class Followed:
    """Where the axes went."""

    outputs: list[str]
    """Axes of each tensor that the function returns, in order."""
    inputs: list[str]
    """Axes of each tensor that it was given, afterwards: in-place functions change them."""
    written: list[int]
    """Which of the tensors that it was given it writes to."""


def follow(func: Any, axes: Sequence[str], args: Any, kwargs: Any, records: int) -> Followed:
    """Run `func` on tensors shaped like those in `args` and `kwargs`, whose axes are given in order."""
    refused = None
    for promoted in _promotions(func, axes, args, records):
        try:
            found = _follow(func, promoted, args, kwargs, records)
        except Unsupported as reason:
            refused = refused or reason
            continue
        if promoted is axes and not any("R" in a for a in axes):
            _still_equal(found, func, axes, args, kwargs, records)
        return found
    raise Unsupported(f"{function_name(func)} ({refused})")


def _still_equal(
    found: Followed, func: Any, axes: Sequence[str], args: Any, kwargs: Any, records: int
) -> None:
    """Where a constant was written to in part: the axes along which all its rows were treated alike."""
    for i in found.written:
        if "E" not in axes[i] or any("C" in a for a in axes):
            continue
        letters = list(found.inputs[i])
        for d, letter in enumerate(axes[i]):
            if letter == "E" and letters[d] != "E":
                alone = "." * d + "R" + "." * (len(letters) - d - 1)
                try:
                    tried = _follow(func, [*axes[:i], alone, *axes[i + 1 :]], args, kwargs, records)
                except Unsupported:
                    continue
                if tried.inputs[i][d] == "R":
                    letters[d] = "E"
        found.inputs[i] = "".join(letters)
        if func is Tensor.__setitem__:
            found.outputs[0] = found.inputs[i]


def _promotions(func: Any, axes: Sequence[str], args: Any, records: int) -> Iterable[Sequence[str]]:
    """The axes as they are; and, if data is written into equal rows, with those taken for the records'."""
    yield axes
    name = getattr(func, "__name__", "")
    if name.endswith("_") and axes and "R" not in axes[0] and any("R" in a for a in axes[1:]):
        target = tensors_in(args)[0]
        for i, letter in enumerate(axes[0]):
            if letter in "EC" and target.shape[i] % records == 0:
                yield ["." * i + "R" + "." * (len(axes[0]) - i - 1), *axes[1:]]


def _follow(func: Any, axes: Sequence[str], args: Any, kwargs: Any, records: int) -> Followed:
    given: list[Tensor] = []

    def hollow(value: Any) -> Any:
        if isinstance(value, Tensor):
            twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            twin._axes = axes[len(given)]  # type: ignore[attr-defined]
            given.append(twin)
            return twin
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, (tuple, list)):
            inner = [hollow(v) for v in value]
            return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
        if isinstance(value, dict):
            return {k: hollow(v) for k, v in value.items()}
        if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda", "mps", "xpu"):
            return "meta"
        return value

    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        args, kwargs = hollow(args), hollow(kwargs)
        mode = Follow(records, given)
        try:
            with mode:
                out = func(*args, **kwargs)
        except Unsupported:
            raise
        except (
            Exception
        ) as error:  # no rule, no shape without data, or a mistake that the real call will show
            raise Unsupported(str(error).split("\n")[0][:80] or type(error).__name__) from None
        outputs = tensors_in(args[0] if func is Tensor.__setitem__ else out)
        return Followed([axes_of(t) for t in outputs], [axes_of(t) for t in given], sorted(mode.written))


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches operations on tensors without data; the letters are kept as an attribute of each tensor."""

    def __init__(self, records: int, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = records
        self.written: set[int] = set()
        self._given = given
        self._views: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        rule = RULES.get(packet)
        if rule is None and torch.Tag.pointwise in func.tags and func.namespace == "aten":
            rule = elements.pointwise
        if rule is None and func.namespace == "aten":
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if rule is None:
            raise Unsupported(f"no rule for {packet}")
        named = _named(func, args, kwargs)
        out = func(*args, **kwargs) if rule not in MAKERS else None
        call = Call(self.records, func, named, out)
        found = rule(call)
        if out is None:
            return found
        outputs = tensors_in(out)
        letters = [found] * len(outputs) if isinstance(found, str) else list(found)
        targets = [
            named[a.name]
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        for target in targets:
            for tensor in tensors_in(target):
                self._write(tensor, letters[0])
        for tensor, axes in zip(outputs, letters, strict=True):
            if len(axes) != tensor.dim():
                raise Unsupported(f"{packet}: a rule gave {axes!r} for {tuple(tensor.shape)}")
            if "R" in axes and tensor.shape[axes.index("R")] % self.records:
                raise Unsupported(f"{packet} leaves records with other numbers of rows")
            tensor._axes = axes  # type: ignore[attr-defined]
            if not targets and call.is_view:
                self._views[id(tensor)] = tensors_in(args)[0]
                self._kept.append(tensor)
        return out

    def _write(self, tensor: Tensor, axes: str) -> None:
        """`tensor` has `axes` from now on, and so the tensor whose view it is must still be right."""
        before = axes_of(tensor)
        root = tensor
        while id(root) in self._views:
            root = self._views[id(root)]
        self.written.update(i for i, t in enumerate(self._given) if t is root or t is tensor)
        tensor._axes = axes  # type: ignore[attr-defined]
        if tensor is root:
            return
        if any("R" in pair and pair != ("R", "R") for pair in zip(before, axes, strict=True)):
            raise Unsupported("data written into a part of a tensor")
        # What was equal or independent in the whole need not be so any more.
        kept = "".join(c if c == "R" else "." for c in axes_of(root))
        root._axes = kept  # type: ignore[attr-defined]


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            named[argument.name] = args[i]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value if argument.has_default_value() else None
    return named
