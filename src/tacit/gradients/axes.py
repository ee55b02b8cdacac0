"""Which axis of a tensor counts the records, through every operation that torch itself is made of.

A tensor's *axes* is a string with one letter for each of its dimensions:

    R   rows belong to records, in order and the same number for each
    E   all rows are equal (zeros, a mask expanded over the batch): may meet the records' axis anywhere
    M   blocks of rows, one block for each record, are equal (a mask of windows repeated over the batch)
    C   rows are independent coins (the output of `torch.rand`): may become the records' axis
    P   row j holds the number j, as in `arange(len(x))`: may pick record j's own row and do nothing else
    .   anything else

`Follow` runs a torch function on tensors without data (torch's meta device) and sees each operation it is
made of. Every operation needs a rule here that says where the letters go. An operation that has none, that
selects, orders, shifts or adds up along R, or that lets R meet rows which differ by position, raises
`Unsupported`: nothing mixes records unless a rule says that it does not. How many records there are may
not become a number either, so a sum over equal rows is refused where it could count them.

>>> import torch
>>> follow(torch.Tensor.softmax, ("R..",), (torch.empty(4, 5, 6), -1), {}, records=4).outputs
['R..']
>>> shapes = torch.empty(4, 5, 6), torch.empty(6, 2)
>>> follow(torch.einsum, ("R..", ".."), ("btd,de->bte", *shapes), {}, records=4).outputs
['R..']
>>> follow(torch.mean, ("R..",), (torch.empty(4, 5, 6), 0), {}, records=4)
Traceback (most recent call last):
tacit.gradients.axes.Unsupported: torch.mean (aten.mean along the records)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._python_dispatch import TorchDispatchMode


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
        return Followed([mode.axes(t) for t in outputs], [mode.axes(t) for t in given], sorted(mode.written))


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches operations on tensors without data; the letters are kept as an attribute of each tensor."""

    def __init__(self, records: int, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = records
        self.written: set[int] = set()
        self._given = given
        self._views: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []

    def axes(self, tensor: Tensor) -> str:
        found: str | None = getattr(tensor, "_axes", None)
        if found is None:
            raise Unsupported("a tensor from elsewhere")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        rule = _RULES.get(packet)
        if rule is None and torch.Tag.pointwise in func.tags and func.namespace == "aten":
            rule = _pointwise
        if rule is None and func.namespace == "aten":
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if rule is None:
            raise Unsupported(f"no rule for {packet}")
        named = _named(func, args, kwargs)
        out = func(*args, **kwargs) if rule not in _SHAPED else None
        call = Call(self, func, named, out)
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
            tensor._axes = axes  # type: ignore[attr-defined]
            if not targets and call.is_view:
                self._views[id(tensor)] = tensors_in(args)[0]
                self._kept.append(tensor)
        return out

    def _write(self, tensor: Tensor, axes: str) -> None:
        """`tensor` has `axes` from now on, and so the tensor whose view it is must still be right."""
        before = self.axes(tensor)
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
        kept = "".join(c if c == "R" else "." for c in self.axes(root))
        root._axes = kept  # type: ignore[attr-defined]


@dataclass
class Call:
    """One operation with its arguments by name, and what it returned."""

    mode: Follow
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
        return self.mode.axes(tensor)

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
            if letter in "EMCP" and size > 1 and size % self.mode.records == 0:
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
        """Letters beside R: an E stays, coins and positions have been used."""
        if "R" not in axes:
            return axes
        for letter in "MCP":
            axes = axes.replace(letter, ".")
        return axes

    def aligned(self, *tensors: Tensor) -> str:
        return self.meet([(self.axes(t), t.shape) for t in tensors])


Rule = Callable[[Call], Any]


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


def _dims(value: Any, ndim: int) -> list[int]:
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return list(range(ndim))
    return [d % max(1, ndim) for d in (value if isinstance(value, (list, tuple)) else [value])]


# ---- rules ----------------------------------------------------------------------------------------------


def _pointwise(call: Call) -> str:
    tensors = call.tensors
    axes = call.aligned(*tensors)
    target = call.named[call.func._schema.arguments[0].name]
    if call.func._schema.is_mutable and isinstance(target, Tensor) and len(axes) != target.dim():
        raise call.refuse("in place")
    if len(tensors) == 1 and call.name in _FAITHFUL:
        return call.axes(tensors[0])
    return axes.replace("P", ".")


_FAITHFUL = {"aten.clone", "aten._to_copy", "aten.alias", "aten.detach", "aten.lift_fresh", "aten.contiguous"}


def _same(call: Call) -> str:
    """Copies, casts: the first tensor's own axes."""
    return call.axes(call.tensors[0])


def _overwrite(call: Call) -> str:
    """copy_: `self` becomes `src`, broadcast."""
    target, source = call["self"], call["src"]
    mine, letters = call.axes(target), []
    theirs, sizes = call.axes(source), [1] * (target.dim() - source.dim()) + list(source.shape)
    theirs = "." * (target.dim() - len(theirs)) + theirs
    for letter, size, now, wide in zip(theirs, sizes, mine, target.shape, strict=True):
        if size == 1 and wide != 1:
            if letter == "R":
                raise call.refuse("repeats one record")
            letters.append("R" if now == "R" else "E")
        elif now == "R" and wide != 1 and letter not in "REMC":
            raise call.refuse("of a constant that differs along the records")
        else:
            letters.append("R" if now == "R" else letter)
    if letters.count("R") > 1:
        raise call.refuse("of all records with all records")
    return call.only("".join(letters))


def _equal(call: Call) -> str:
    """zeros_like, full, fill_: all rows equal."""
    tensors = call.tensors
    if call.func._schema.is_mutable:
        mine = call.axes(call["self"])
        return mine if "R" in mine else "E" * len(mine)
    if tensors and list(tensors[0].shape) == list(call.out.shape) and "R" in call.axes(tensors[0]):
        return call.axes(tensors[0])
    return "E" * call.out.dim()  # type: ignore[no-any-return]


def _coins(call: Call) -> str:
    """Draws: rows independent, or each record's own; not where their chances differ by place."""
    fresh = call.func._schema.is_mutable or call.name.endswith(("_like", "randint_like"))
    given = [t for name, v in call.named.items() for t in tensors_in(v) if not (fresh and name == "self")]
    drawn, shape = call["self"] if fresh else None, call.out.shape
    if drawn is not None and "R" in call.axes(drawn):
        return call.aligned(drawn, *given)
    if not given:
        return "C" * len(shape)
    axes = call.aligned(*given)
    if len(axes) != len(shape):
        raise call.refuse("draws for data")
    return axes if "R" in axes else axes.replace("E", "C").replace("M", ".").replace("P", ".")


def _dropout(call: Call) -> list[str]:
    axes = call.axes(call["input"])
    return [axes if "R" in axes else axes.replace("E", "C")] * 2


def _reduce(call: Call) -> str:
    tensor = call["self"]
    dim = call.get("dim")
    dims = _dims(dim, tensor.dim())
    axes = call.touch(tensor, dims)
    if call.get("keepdim") and tensors_in(call.out)[0].dim() == tensor.dim():
        return axes
    return "".join(c for i, c in enumerate(axes) if i not in dims)


def _extreme(call: Call) -> str:
    """max and min: of two tensors, along a dimension, or of everything."""
    if "other" in call.named:
        return _pointwise(call)
    return _reduce(call)


def _along(call: Call) -> str:
    """softmax, cumsum, sort, topk, …: rows along `dim` see each other, all others do not."""
    tensor = call.tensors[0]
    return call.touch(tensor, _dims(call.get("dim", -1), tensor.dim()))


def _moved(call: Call) -> str:
    """flip, roll: equal rows stay equal."""
    tensor, axes = call["self"], list(call.axes(call["self"]))
    for dim in _dims(call["dims"], tensor.dim()):
        if axes[dim] == "R":
            raise call.refuse()
        axes[dim] = axes[dim] if axes[dim] in "EC" else "."
    return "".join(axes)


def _view(call: Call) -> str:
    source = call["self"]
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
            if letters[0] != "R" or new[out[0]] % call.mode.records:
                raise call.refuse("cuts or joins the records' axis")
            result[out[0]] = "R"
        elif len(wide) == 1 and len(out) == 1:
            result[out[0]] = letters[0]
        elif set(letters) in ({"E"}, {"C"}):
            for k in out:
                result[k] = letters[0]
        elif (
            letters[0] in "EM"
            and not old[wide[0]] % call.mode.records
            and not new[out[0]] % call.mode.records
        ):
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
            repeated = "." if n % call.mode.records else "M"
            result.append("E" if size == 1 or letter == "E" else repeated)
    return "".join(result)


def _permute(call: Call) -> str:
    axes = call.axes(call["self"])
    return "".join(axes[d] for d in _dims(call["dims"], len(axes)) or range(0))


def _transpose(call: Call) -> str:
    letters = list(call.axes(call["self"]))
    if letters:
        a, b = _dims([call["dim0"], call["dim1"]], len(letters))
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
    dims = _dims(call.get("dim"), source.dim()) if "dim" in call.named else range(source.dim())
    gone = {d for d in dims if source.shape[d] == 1}
    if any(axes[d] == "R" for d in gone):
        raise call.refuse()
    return "".join(c for d, c in enumerate(axes) if d not in gone)


def _select(call: Call) -> str:
    source = call["self"]
    (dim,) = _dims(call["dim"], source.dim())
    axes = call.axes(source)
    if axes[dim] == "R":
        raise call.refuse()
    return axes[:dim] + axes[dim + 1 :]


def _slice(call: Call) -> Any:
    """slice, split, narrow: a part of an axis, or all of it."""
    source = call["self"]
    (dim,) = _dims(call.get("dim", 0), source.dim())
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
    (dim,) = _dims(call["dimension"], source.dim())
    axes = call.axes(source)
    if axes[dim] == "R":
        raise call.refuse()
    return axes[:dim] + "." + axes[dim + 1 :] + "."


def _diagonal(call: Call) -> str:
    source = call["self"]
    pair = _dims([call["dim1"], call["dim2"]], source.dim())
    axes = call.touch(source, pair)
    return "".join(c for d, c in enumerate(axes) if d not in pair) + "."


def _last_two(call: Call) -> str:
    """tril, triu: what is kept depends on the place."""
    tensor = call["self"]
    return call.touch(tensor, [tensor.dim() - 2, tensor.dim() - 1])


def _cat(call: Call) -> str:
    tensors = call["tensors"]
    tensors = [t for t in tensors if t.dim() != 1 or t.shape[0]] or tensors
    (dim,) = _dims(call["dim"], tensors[0].dim())
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


def _matmul(call: Call) -> str:
    tensors = call.tensors
    left, right = tensors[-2:]
    if call.name in ("aten.addmm", "aten.baddbmm", "aten.addbmm"):
        left, right = tensors[1:3]
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
    if call.name in ("aten.addmm", "aten.baddbmm"):
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


def _space(dims: int) -> Rule:
    """Pooling, padding and resizing of the last `dims` dimensions."""

    def rule(call: Call) -> str:
        tensor = call.tensors[0]
        return call.touch(tensor, range(tensor.dim() - dims, tensor.dim()))

    return rule


def _images(call: Call) -> str:
    """[N, …] → [N, …], image by image."""
    tensor = call.tensors[0]
    if tensor.dim() != call.out.dim() and call.name not in ("aten.im2col", "aten.col2im"):
        raise call.refuse("of another shape")
    axes = call.touch(tensor, range(1, tensor.dim()))
    return axes[:1] + "." * (call.out.dim() - 1)  # type: ignore[no-any-return]


def _grid(call: Call) -> str:
    tensors = [call["input"], call["grid"]]
    for tensor in tensors:
        call.touch(tensor, range(1, tensor.dim()))
    first = call.meet([(call.axes(t)[:1], t.shape[:1]) for t in tensors])
    return first + "." * (call.out.dim() - 1)  # type: ignore[no-any-return]


def _pad(call: Call) -> str:
    tensor, pad = call["self"], call["pad"]
    dims = [tensor.dim() - 1 - i // 2 for i, n in enumerate(pad) if n]
    axes = list(call.axes(tensor))
    for dim in dims:
        if axes[dim] == "R":
            raise call.refuse()
        axes[dim] = "."
    return "".join(axes)


def _layer_norm(call: Call) -> list[str]:
    x, dims = call["input"], len(call["normalized_shape"])
    axes = call.touch(x, range(x.dim() - dims, x.dim()))
    _plain(call, "weight", "bias")
    means = axes[: len(axes) - dims] + "." * dims
    return [axes, *[means] * (len(tensors_in(call.out)) - 1)]


def _rms_norm(call: Call) -> str:
    x, dims = call["input"], len(call["normalized_shape"])
    _plain(call, "weight")
    return call.touch(x, range(x.dim() - dims, x.dim()))


def _group_norm(call: Call) -> list[str]:
    x = call["input"]
    axes = call.touch(x, range(1, x.dim()))
    _plain(call, "weight", "bias")
    return [axes, axes[0] + ".", axes[0] + "."]


def _batch_norm(call: Call) -> list[str]:
    """Statistics over all but the channels: right only where the records are channels (instance norm)."""
    x = call["input"]
    running = [call.get("running_mean"), call.get("running_var")]
    if call.get("training", call.get("train", True)):
        if any(t is not None for t in running):
            raise call.refuse("keeps running statistics")
        axes = call.touch(x, [d for d in range(x.dim()) if d != 1])
        for name in ("weight", "bias"):
            if call.get(name) is not None:
                call.meet([(axes[1:2], x.shape[1:2]), (call.axes(call[name]), call[name].shape)])
    else:
        _plain(call, "weight", "bias", "running_mean", "running_var")
        axes = call.axes(x)
        if axes[1] == "R":
            raise call.refuse()
    outputs = tensors_in(call.out)
    return [axes, *[axes[1] if t.dim() else "" for t in outputs[1:]]]


def _plain(call: Call, *names: str) -> None:
    for name in names:
        tensor = call.get(name)
        if tensor is not None and "R" in call.axes(tensor):
            raise call.refuse(f"with data as its {name}")


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


def _attention_made(call: Call) -> Tensor:
    q, v = call["query"], call["value"]
    axes = _attention(call)
    lead = torch.broadcast_shapes(q.shape[:-2], v.shape[:-2]) if not call.get("enable_gqa") else q.shape[:-2]  # type: ignore[no-untyped-call]
    return _made((*lead, q.shape[-2], v.shape[-1]), q.dtype, axes)


def _made(shape: Sequence[int], dtype: torch.dtype, axes: str) -> Tensor:
    out = torch.empty(tuple(shape), dtype=dtype, device="meta")
    out._axes = axes  # type: ignore[attr-defined]
    return out


def _ctc(call: Call) -> Tensor:
    scores, targets = call["log_probs"], call["targets"]
    if call["reduction"] != 0 or scores.dim() != 3 or targets.dim() != 2:
        raise call.refuse("adds up or has one record")
    call.touch(scores, [0, 2])
    call.touch(targets, [1])
    shapes = [(call.axes(scores)[1], scores.shape[1:2]), (call.axes(targets)[0], targets.shape[:1])]
    for name in ("input_lengths", "target_lengths"):
        if isinstance(call[name], Tensor):
            shapes.append((call.axes(call[name]), call[name].shape))
        elif len(set(call[name])) > 1:
            raise call.refuse("with lengths that differ by place")
    return _made(scores.shape[1:2], scores.dtype, call.meet(shapes))


def _one_hot(call: Call) -> Tensor:
    if call["num_classes"] < 0:
        raise call.refuse("asks data for the number of classes")
    tensor = call["self"]
    return _made((*tensor.shape, call["num_classes"]), torch.int64, call.axes(tensor).replace("P", ".") + ".")


def _embedding(call: Call) -> str:
    if "R" in call.axes(call["weight"]):
        raise call.refuse("with data as its table")
    return call.axes(call["indices"]).replace("P", ".") + "."


def _gather(call: Call) -> str:
    source, index = call["self"], call["index"]
    (dim,) = _dims(call["dim"], max(1, source.dim()))
    others = [t for t in (index, call.get("src")) if isinstance(t, Tensor)]
    shapes = []
    for tensor in (source, *others):
        axes = call.axes(tensor)
        if axes[dim] == "R":
            raise call.refuse()
        for d, letter in enumerate(axes):
            if d != dim and letter == "R" and any(t.shape[d] != tensor.shape[d] for t in (source, *others)):
                raise call.refuse()
        # Equal rows that are read at different places stay equal; coins and positions do not.
        shapes.append(
            (axes[:dim] + "." + axes[dim + 1 :], (*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :]))
        )
    if any(a[1] != shapes[0][1] for a in shapes):
        shapes = [(a if "R" in a else "." * len(a), shapes[-1][1]) for a, _ in shapes]
    return call.meet(shapes).replace("C", ".").replace("P", ".")


def _index_select(call: Call) -> str:
    source, index = call["self"], call["index"]
    (dim,) = _dims(call["dim"], source.dim())
    axes = call.axes(source)
    if axes[dim] == "R" or ("R" in axes and "R" in call.axes(index)):
        raise call.refuse()
    letter = call.axes(index) or "."
    return call.only(axes[:dim] + (letter if letter == "R" else ".") + axes[dim + 1 :])


def _index_add(call: Call) -> str:
    source, index, added = call["self"], call["index"], call["source"]
    (dim,) = _dims(call["dim"], source.dim())
    for tensor in (source, added):
        if call.axes(tensor)[dim] == "R":
            raise call.refuse()
    if "R" in call.axes(index):
        raise call.refuse("with data as its index")
    shapes = [
        (call.axes(t)[:dim] + "." + call.axes(t)[dim + 1 :], (*t.shape[:dim], 1, *t.shape[dim + 1 :]))
        for t in (source, added)
    ]
    return call.meet(shapes)


def _index(call: Call) -> str:
    """x[i, :, j]: advanced indices, broadcast together, take the place of the dimensions they index."""
    source, indices = call["self"], list(call["indices"])
    axes = call.axes(source)
    indices += [None] * (source.dim() - len(indices))
    used = [d for d, i in enumerate(indices) if i is not None]
    tensors = [indices[d] for d in used]
    if any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        raise call.refuse("with a mask: how many rows it takes depends on data")
    shapes = []
    for d, tensor in zip(used, tensors, strict=True):
        letters = call.axes(tensor)
        if axes[d] == "R":
            # The one index along the records' axis that keeps each record at its place.
            if letters.count("P") != 1 or source.shape[d] != call.mode.records:
                raise call.refuse()
            if any(n != 1 for n, c in zip(tensor.shape, letters, strict=True) if c != "P"):
                raise call.refuse()
            letters = letters.replace("P", "R")
        shapes.append((letters.replace("P", "."), tensor.shape))
    front = call.meet(shapes)
    rest = [c for d, c in enumerate(axes) if d not in used]
    joined = used == list(range(used[0], used[-1] + 1))
    place = used[0] if joined else 0
    result = call.only("".join(rest[:place]) + front + "".join(rest[place:]))
    if result.count("R") > 1:
        raise call.refuse("of all records with all records")
    return result.replace("C", ".").replace("P", ".")


def _nll(call: Call) -> list[str]:
    scores, target = call["self"], call["target"]
    if call["reduction"] != 0:
        raise call.refuse("adds up the losses")
    _plain(call, "weight")
    axes = call.touch(scores, [1 if scores.dim() > 1 else 0])
    axes = axes[:1] + axes[2:] if scores.dim() > 1 else ""
    size = (*scores.shape[:1], *scores.shape[2:]) if scores.dim() > 1 else ()
    return [call.meet([(axes, size), (call.axes(target), target.shape)]), ""]


def _loss(call: Call) -> str:
    if call["reduction"] != 0:
        raise call.refuse("adds up the losses")
    return _pointwise(call)


def _transformed(call: Call) -> str:
    """Fourier transforms along `dim`."""
    tensor = call["self"]
    return call.touch(tensor, _dims(call["dim"], tensor.dim()))


def _rows(call: Call) -> str:
    """multinomial: row by row."""
    tensor = call["self"]
    axes = call.touch(tensor, [tensor.dim() - 1])
    return axes if "R" in axes else axes.replace("E", "C")


def _prelu(call: Call) -> str:
    _plain(call, "weight")
    return call.axes(call["self"])


def _arange(call: Call) -> str:
    count = call.out.shape[0] == call.mode.records and call.get("start", 0) in (0, None)
    return "P" if count and call.get("step", 1) in (1, None) else "."


def _constant(call: Call) -> str:
    return "." * call.out.dim()  # type: ignore[no-any-return]


def _complex_view(call: Call) -> str:
    return call.axes(call["self"]) + "."


def _complex_of(call: Call) -> str:
    return call.axes(call["self"])[:-1]


def _bucketize(call: Call) -> str:
    if "R" in call.axes(call["boundaries"]):
        raise call.refuse("with data as its boundaries")
    return call.axes(call["self"]).replace("C", ".").replace("P", ".")


def _packets(*names: str) -> list[Any]:
    found = []
    for name in names:
        for form in (name, name + "_"):
            packet = getattr(torch.ops.aten, form, None)
            if packet is not None:
                found.append(packet)
    return found


def _table(*pairs: tuple[Rule, str]) -> dict[Any, Rule]:
    return {packet: rule for rule, names in pairs for packet in _packets(*names.split())}


_RULES: dict[Any, Rule] = _table(
    (_same, "clone contiguous _to_copy detach alias lift_fresh lift conj _conj resolve_conj to _prelu"),
    (
        _pointwise,
        "where masked_fill bernoulli_p polar complex rsub hardswish isfinite isinf isnan nan_to_num",
    ),
    (_equal, "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full"),
    (_equal, "new_empty scalar_tensor fill zero empty_strided new_empty_strided empty_permuted"),
    (_coins, "rand randn randint rand_like randn_like randint_like bernoulli uniform normal exponential"),
    (_coins, "random cauchy geometric log_normal poisson"),
    (_dropout, "native_dropout"),
    (_reduce, "sum mean prod amax amin argmax argmin all any var std norm linalg_vector_norm logsumexp"),
    (_reduce, "var_mean std_mean median nanmedian mode aminmax nansum nanmean count_nonzero kthvalue"),
    (_extreme, "max min"),
    (_along, "_softmax _log_softmax softmax log_softmax cumsum cumprod cummax cummin logcumsumexp sort topk"),
    (_along, "argsort glu renorm"),
    (_moved, "flip roll"),
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
    (_diagonal, "diagonal"),
    (_last_two, "tril triu"),
    (_cat, "cat"),
    (_stack, "stack"),
    (_matmul, "mm bmm matmul addmm baddbmm"),
    (_linear, "linear"),
    (_convolution, "convolution"),
    (_space(1), "max_pool1d avg_pool1d upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d"),
    (_space(1), "reflection_pad1d replication_pad1d adaptive_avg_pool1d adaptive_max_pool1d"),
    (_space(2), "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d"),
    (_space(2), "adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"),
    (_space(2), "_upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d"),
    (_space(2), "replication_pad2d max_pool2d"),
    (_space(3), "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d max_pool3d"),
    (_space(3), "upsample_nearest3d upsample_trilinear3d reflection_pad3d replication_pad3d pixel_shuffle"),
    (_space(3), "pixel_unshuffle channel_shuffle native_channel_shuffle"),
    (_images, "im2col col2im"),
    (_grid, "grid_sampler_2d grid_sampler_3d grid_sampler"),
    (_pad, "constant_pad_nd pad"),
    (_layer_norm, "native_layer_norm"),
    (_rms_norm, "rms_norm"),
    (_group_norm, "native_group_norm"),
    (_batch_norm, "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"),
    (_attention_made, "scaled_dot_product_attention"),
    (_ctc, "ctc_loss"),
    (_embedding, "embedding"),
    (_gather, "gather scatter scatter_add scatter_reduce"),
    (_index_select, "index_select"),
    (_index_add, "index_add"),
    (_index, "index"),
    (_nll, "nll_loss_forward nll_loss2d_forward"),
    (_loss, "mse_loss binary_cross_entropy smooth_l1_loss huber_loss soft_margin_loss"),
    (_loss, "binary_cross_entropy_with_logits"),
    (_one_hot, "one_hot"),
    (_transformed, "_fft_r2c _fft_c2c _fft_c2r"),
    (_rows, "multinomial"),
    (_prelu, "_prelu_kernel prelu"),
    (_arange, "arange"),
    (_constant, "eye linspace logspace tril_indices triu_indices randperm hann_window _efficientzerotensor"),
    (_complex_view, "view_as_real"),
    (_complex_of, "view_as_complex"),
    (_bucketize, "bucketize"),
)
_RULES[torch.ops.aten.floor_divide] = _pointwise
_RULES[torch.ops.aten.copy_] = _overwrite
_RULES[torch.ops.aten._conj] = _same
_SHAPED = {_attention_made, _ctc, _one_hot}
"""Rules that make the output themselves: without data, torch would ask for it or run something else."""
