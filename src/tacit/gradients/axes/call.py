"""What a rule is told: one operation on tensors without data, and the letters of their axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name


class Unsupported(Exception):
    """Book-keeping cannot show that this operation keeps records apart, or has no rule for its gradient."""

    alone = False
    """Whether even `torch.func` must not see several records at once: the code is not torch's own."""

    def __init__(self, what: str, alone: bool = False) -> None:
        super().__init__(what)
        self.alone = alone or "meta" in what  # what cannot be done without data may look past `torch.func`


def tensors_in(*values: object) -> list[Tensor]:
    """All tensors among nested arguments."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def function_name(func: Any) -> str:
    """What a person calls this function."""
    return str(resolve_name(func) or getattr(func, "__name__", func))


def axes_of(tensor: Tensor) -> str:
    """The letters of a tensor; they are kept as an attribute of it."""
    found: str | None = getattr(tensor, "_axes", None)
    if found is None:
        raise Unsupported("a tensor from elsewhere")
    return found


@dataclass
class Call:
    """One operation with its arguments by name, and what it returned."""

    records: int
    func: Any
    named: dict[str, Any]
    out: Any

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.named.get(name, default)

    @property
    def name(self) -> str:
        return str(self.func._overloadpacket)

    @property
    def is_view(self) -> bool:
        schema = self.func._schema
        return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_in(*self.named.values())

    def axes(self, tensor: Tensor) -> str:
        return axes_of(tensor)

    def refuse(self, why: str = "along the records") -> Unsupported:
        return Unsupported(f"{self.name} {why}")

    def touch(self, tensor: Tensor, dims: Iterable[int], axes: str | None = None) -> str:
        """The axes of `tensor` after its rows along `dims` have seen each other."""
        letters = list(self.axes(tensor) if axes is None else axes)
        for dim in dims:
            letter = letters[dim]
            if letter == "R":
                raise self.refuse()
            size = tensor.shape[dim]
            if letter in "EMCP" and size > 1 and size % self.records == 0:
                raise self.refuse("may count the records")
            letters[dim] = "."
        return "".join(letters)

    def meet(self, shapes: Sequence[tuple[str, Sequence[int]]], shape: Sequence[int] | None = None) -> str:
        """The axes of what is broadcast together; each is letters and sizes, aligned at the end."""
        if not shapes:
            return ""
        dims = max(len(s) for _, s in shapes)
        result = []
        for back in range(dims, 0, -1):
            letters = [(a[-back], s[-back]) for a, s in shapes if len(s) >= back]
            sizes = {n for _, n in letters if n != 1}
            if not sizes:
                # Of size one everywhere: with one record, the records' axis is among them.
                result.append("R" if any(a == "R" for a, _ in letters) else ".")
                continue
            wide = [a for a, n in letters if n != 1]
            if "R" in wide:
                if any(a in ".P" for a in wide):
                    raise self.refuse("of data and a constant that differs along the records")
                result.append("R")
            elif any(a == "R" for a, _ in letters):
                raise self.refuse("repeats one record")
            elif all(a == "E" for a in wide):
                result.append("E")
            elif all(a in "EM" for a in wide):
                result.append("M")
            elif all(a in "EC" for a in wide):
                result.append("C")
            else:
                result.append(".")
        if result.count("R") > 1:
            raise self.refuse("of all records with all records")
        return self.only("".join(result))

    def only(self, axes: str) -> str:
        """Letters beside R: an E stays, draws and positions have been used."""
        if "R" not in axes:
            return axes
        for letter in "MCP":
            axes = axes.replace(letter, ".")
        return axes

    def aligned(self, *tensors: Tensor) -> str:
        return self.meet([(self.axes(t), t.shape) for t in tensors])


Rule = Callable[[Call], Any]
"""Where the letters of an operation's arguments go: one string for all outputs, or one for each."""
MAKERS: set[Rule] = set()
"""Rules that make the output themselves: without data, torch would ask for it or run something else."""


def makes(rule: Rule) -> Rule:
    """Mark a rule that returns the output itself, with its letters."""
    MAKERS.add(rule)
    return rule


def made(shape: Sequence[int], dtype: torch.dtype, axes: str) -> Tensor:
    out = torch.empty(tuple(shape), dtype=dtype, device="meta")
    out._axes = axes  # type: ignore[attr-defined]
    return out


def plain(call: Call, *names: str) -> None:
    """Refuse data where a layer has its weights."""
    for name in names:
        tensor = call.get(name)
        if tensor is not None and "R" in call.axes(tensor):
            raise call.refuse(f"with data as its {name}")


def dims_of(value: Any, ndim: int) -> list[int]:
    """Dimensions as torch takes them, counted from the front; None and an empty list mean all."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return list(range(ndim))
    return [d % max(1, ndim) for d in (value if isinstance(value, (list, tuple)) else [value])]


def table(*pairs: tuple[Rule, str]) -> dict[Any, Rule]:
    """Rules by operation, for the names given and their in-place twins."""
    return {packet: rule for rule, names in pairs for packet in _packets(*names.split())}


def _packets(*names: str) -> list[Any]:
    found = []
    for name in names:
        for form in (name, name + "_"):
            packet = getattr(torch.ops.aten, form, None)
            if packet is not None:
                found.append(packet)
    return found
