"""The tape: sees every torch function of a forward pass, and what the backward pass says about parameters.

While a `Tape` is active, every torch function that a model calls passes through it. It sorts tensors into
three kinds: *data* (computed from the batch, with an axis that counts the records), *owned* (a trainable
parameter, or computed from parameters alone, such as an expanded class token), and constants. Where the axes
go is worked out by `axes`, once for each different call. Where owned tensors meet data, a rule takes over: it
runs the very same function with the parameter detached, so that autograd computes no weight gradient, and
asks to be called with the gradient of the output.

Watching functions rather than modules means that tied weights, modules called twice, bare parameters
and weights used behind a module's back are all seen. A tensor that the tape did not see made, a function that
leaves torch, a graph with a node that is not torch's own: whatever cannot be shown to keep records apart, or
has no rule for its gradient, raises `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from tacit.gradients import autograd, generators
from tacit.gradients.axes import Unsupported, function_name, tensors_in
from tacit.gradients.functions import AGREED, COMPARISONS, DATA, FREE, GRAD, WANTS
from tacit.gradients.marks import Anchor, Mark, Spread, Token, Watched
from tacit.gradients.plain import Batch, batch_size
from tacit.gradients.proof import (
    INNER,
    OPEN,
    PLAIN_TYPES,
    SLICE,
    TENSOR,
    Book,
    Draws,
    Known,
    Line,
    follow_line,
    in_place,
    torchs_own,
)
from tacit.gradients.records import Explicit, PerRecord, in_full, sum_by_record, sum_of
from tacit.gradients.steady import STEADY
from tacit.gradients.unchanged import refuse_change
from tacit.gradients.unseen import teach_transformers

Rule = Callable[..., Any]
"""rule(tape, function, *args, **kwargs): what `function` returns, with its parameters under watch."""


_NONE: frozenset[int] = frozenset()


class Differs(Unsupported):
    """Records decide otherwise about what is computed: those that agree can be watched together."""

    def __init__(self, reason: str, groups: list[list[int]]) -> None:
        super().__init__(reason)
        self.groups = groups
        """The records' places, those of one decision together."""


class Tape(TorchFunctionMode):
    """Watches one forward pass over `batch`; `backward` returns each parameter's per-record gradients."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        batch: Batch,
        rules: Mapping[Any, Rule],
        known: Known,
        book: Book | None = None,
        draws: Draws | None = None,
        replay: bool = False,
    ) -> None:
        """`replay`: this pass is a comparison with one that has been; whatever it drew for all is drawn again."""  # noqa: E501
        super().__init__()
        self.records = batch_size(batch)
        self._device = next(iter(batch.values())).device
        self.anchor = torch.zeros((), requires_grad=True)
        self.program: list[int] = []
        self.watchers = 0
        """Dispatch modes that are ours."""
        self._saved: list[list[Tensor]] = []
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._rules, self._known = rules, known
        self._book = Book() if book is None else book
        self._draws, self._replay, self._drawn = draws or Draws(), replay, 0
        self.drawn: list[int] = []
        """What had been decided before each draw that is no record's own (see `Draws`)."""
        self._seeds = generators.seeds(self._device) if replay else None
        self._token = Token(self.refuse)
        teach_transformers()
        self._marks: dict[tuple[str, bool], Mark] = {}
        self._obstacle: Unsupported | None = None
        self.paths = [0]
        """What records have decided about the program so far: nothing at first, then more and more."""
        self._written: dict[int, int] = {}
        self._coined: dict[int, torch.UntypedStorage] = {}
        """Memory that random numbers were written into; held, so that nothing else comes to stand there."""
        self._versions: dict[int, int] = {}
        self._clock = 0
        self._own_marks = {
            id(p): Mark(self._token, "." * p.dim(), frozenset((i,))) for i, p in enumerate(self._parameters)
        }
        self._uses = [0] * len(self._parameters)
        self._found: list[list[PerRecord]] = [[] for _ in self._parameters]
        self._squares: list[Tensor | None] = [None] * len(self._parameters)
        self._lifted: list[tuple[Tensor, frozenset[int], Tensor]] = []
        self.batch = {name: tensor.detach() for name, tensor in batch.items()}
        for tensor in self.batch.values():
            self._tag(tensor, "R" + "." * (tensor.dim() - 1))

    # ---- forward ------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FREE:
            return func(*args, **kwargs) if kwargs else func(*args)
        try:
            return self._seen(func, args, kwargs or {})
        except Unsupported as obstacle:
            self.refuse(obstacle)

    def refuse(self, obstacle: Unsupported) -> NoReturn:
        """Raise, and again when the pass is over: a model may catch what it likes."""
        self._obstacle = obstacle
        raise obstacle

    def _seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._len_torch_dispatch_stack() != self.watchers:
            raise Unsupported("a mode that may change what operations do", alone=True)
        if self._seeds is not None and generators.seeds(self._device) != self._seeds:
            # A record's draws would be those of its place, and its place is a matter of the others.
            raise Unsupported("a model that seeds torch's generator", alone=True)
        tensors: list[Tensor] = []
        marks: list[Mark] = []
        parts: list[Any] = []
        self._describe(args, tensors, marks, parts, False)
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                self._describe((value,), tensors, marks, parts, False)
        if func in COMPARISONS and len(marks) == 2 and "R" not in marks[0].axes and "R" in marks[1].axes:
            # Python asks the more special class first, and in a comparison of programs that is the data's:
            # with the data in front, both write the same line.
            return self._seen(COMPARISONS[func], (args[1], args[0]), kwargs)
        data, parameters = False, _NONE
        for mark in marks:
            if mark.parameters:
                parameters = parameters | mark.parameters if parameters else mark.parameters
            elif "R" in mark.axes:
                data = True
        key = tuple(parts)
        line = self._book.find(self.records, func, key)
        if line is None:
            return self._first(func, args, kwargs, tensors, marks, key, data, parameters)
        self.program.append(line.number)
        return self._call(line, func, args, kwargs, tensors, marks, data, parameters)

    def _describe(
        self, values: Sequence[Any], tensors: list[Tensor], marks: list[Mark], parts: list[Any], inner: bool
    ) -> None:
        """Append the line's entries for `values`."""
        for value in values:
            kind = type(value)
            if kind in PLAIN_TYPES:
                parts.append(INNER if inner and kind is int else kind)
                parts.append(value if value == value else "nan")
            elif isinstance(value, Tensor):
                if kind is not Tensor and kind is not Parameter and kind is not Watched:
                    raise Unsupported(f"a {kind.__name__} for a tensor", alone=True)
                mark = self._mark(value)
                tensors.append(value)
                marks.append(mark)
                parts += (TENSOR, mark.axes, value.shape, value.dtype, bool(mark.parameters))
            elif isinstance(value, (tuple, list)):
                parts += (OPEN, len(value))
                self._describe(value, tensors, marks, parts, True)
            elif kind is slice:
                parts.append(SLICE)
                self._describe((value.start, value.stop, value.step), tensors, marks, parts, False)
            elif isinstance(value, dict):
                for name, held in value.items():
                    parts.append(name)
                    self._describe((held,), tensors, marks, parts, True)
            elif isinstance(value, torch.Generator):
                if value is not torch.default_generator:  # where it starts from is nobody's business to know
                    raise Unsupported("draws from a generator of the model's own", alone=True)
                parts.append("generator")
            elif isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size <= 4096):
                parts += ("numpy", str(value.dtype), value.shape, value.tobytes())
            elif isinstance(value, (int, float)):
                parts += (int if isinstance(value, int) else float, value)
            else:
                raise Unsupported(f"a value of type {kind.__name__} given to a torch function", alone=True)

    def _first(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        marks: list[Mark],
        key: tuple[Any, ...],
        data: bool,
        parameters: frozenset[int],
    ) -> Any:
        """A call with arguments that have not been seen: where do the axes go?"""
        if func in AGREED and data and len(args) == 1 and not kwargs and not args[0].requires_grad:
            if self._has_coins(tensors, marks):
                # Passes in which records agree would be kept, and others drawn again: who shares a batch
                # would have a say in a record's coins.
                raise Unsupported(f"{function_name(func)} (random numbers leave torch)")
            return self._agreed(func, args[0], marks[0].axes)
        if data and (func == WANTS or func is Tensor.requires_grad_):
            return args[0]  # what a model wants of its input's gradient does not concern its parameters
        if not torchs_own(func):
            raise Unsupported(f"{function_name(func)}, which is not torch's own", alone=True)
        line = Line(-1, func, key)
        if kwargs.get("out") is not None:
            raise Unsupported(f"{function_name(func)} with out=")
        ruled = bool(parameters) and data and torch.is_grad_enabled()
        if ruled and func not in self._rules:
            raise Unsupported(f"{function_name(func)} on {self._name(parameters)}")
        if func == DATA:
            line.outputs = [marks[0].axes]
        elif func == GRAD:
            raise Unsupported("the gradient of another batch", alone=True)
        elif self.records > 1 and not (ruled and func in COMPOSED):
            follow_line(line, [m.axes for m in marks], args, kwargs, self.records)
        elif self.records == 1 and tensors and in_place(func):
            line.written = [0]
            if data and "R" not in marks[0].axes:
                line.after = [(0, self._alone(tensors[0]))]
        state = generators.state(self._device)
        self.program.append(-1)
        place = len(self.program) - 1
        out = self._call(line, func, args, kwargs, tensors, marks, data, parameters)
        line.coins = not generators.same(state, generators.state(self._device))
        line.draws = line.coins and not data
        if line.coins and func not in COMPOSED:  # not known before the first time
            self._tag_all(line, func, args, kwargs, out, data, parameters, coins=True)
            self._coin(line, tensors)
        outputs = tensors_in(out)
        if data and not outputs and func is not Tensor.__setitem__:
            raise Unsupported(f"{function_name(func)} (data leaves torch)", alone=True)
        line.shapes = [tuple(t.shape) for t in outputs] if outputs or func is Tensor.__setitem__ else None
        if line.draws:
            # Not known before the first time: a draw that should have been the one of another part.
            self._draw(line, out, fresh=True)
        kept = self._book.add(self.records, func, key)
        for name in ("outputs", "after", "written", "shapes", "draws", "coins"):
            setattr(kept, name, getattr(line, name))
        self.program[place] = kept.number
        return out

    def _call(
        self,
        line: Line,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        marks: list[Mark],
        data: bool,
        parameters: frozenset[int],
    ) -> Any:
        if line.written:
            self._refuse_writes(func, line, tensors)
        run = STEADY.get(func, func) if data else func
        if line.draws and self._again(line):
            out = self._drawn_before(line, args)
        elif parameters and data and torch.is_grad_enabled():
            rule = self._rules.get(func)
            if rule is None:
                raise Unsupported(f"{function_name(func)} on {self._name(parameters)}")
            try:
                out = rule(self, run, *args, **kwargs)
            except TypeError as error:  # an option that the rule does not know
                raise Unsupported(f"{function_name(func)} on {self._name(parameters)} ({error})") from error
            if func in COMPOSED:
                return out
        else:
            out = run(*args, **kwargs) if kwargs else run(*args)
            if line.draws:
                self._draw(line, out, fresh=False)
        for i in line.written:
            target = tensors[i]
            self._versions[target.untyped_storage().data_ptr()] = target._version
        for i, axes in line.after:
            self._wrote(tensors[i], axes)
        coins = line.coins or self._has_coins(tensors, marks)
        if coins and line.written:
            self._coin(line, tensors)
        self._tag_all(line, func, args, kwargs, out, data, parameters, coins)
        return out

    def _tag_all(
        self,
        line: Line,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        data: bool,
        parameters: frozenset[int],
        coins: bool,
    ) -> None:
        outputs = [out] if isinstance(out, Tensor) else tensors_in(out)
        axes = line.outputs
        if axes is not None and func is not Tensor.__setitem__:
            if len(axes) != len(outputs):
                raise Unsupported(f"{function_name(func)} (returned {len(outputs)} tensors, not {len(axes)})")
        else:
            axes = [self._alone(t) if data else "." * t.dim() for t in outputs]
        for tensor, letters in zip(outputs, axes, strict=True):
            if data or not parameters:
                self._tag(tensor, letters, coins)
            elif id(tensor) not in self._index:
                if tensor.requires_grad:
                    core = self._core(func, args, kwargs, tensor, letters)
                    mark = Mark(self._token, letters, parameters, core, coins=coins)
                    tensor._tacit = mark  # type: ignore[attr-defined]
                else:
                    self._tag(tensor, letters, coins)

    def _tag(self, tensor: Tensor, axes: str, coins: bool = False) -> None:
        if self._written:
            mark = Mark(self._token, axes, order=self._clock, coins=coins)
        else:
            found = self._marks.get((axes, coins))
            if found is None:
                found = self._marks[axes, coins] = Mark(self._token, axes, coins=coins)
            mark = found
        if tensor._version:
            self._versions[tensor.untyped_storage().data_ptr()] = tensor._version
        tensor._tacit = mark  # type: ignore[attr-defined]
        if self._replay and "R" in axes and type(tensor) is Tensor:
            tensor.__class__ = Watched

    @staticmethod
    def _alone(tensor: Tensor) -> str:
        """With one record every tensor made from it is its own."""
        return "R" + "." * (tensor.dim() - 1) if tensor.dim() else ""

    def _mark(self, tensor: Tensor) -> Mark:
        mark: Mark | None = getattr(tensor, "_tacit", None)
        if mark is None or mark.token is not self._token:
            own = self._own_marks.get(id(tensor))
            if own is not None:
                return own
            return self._elsewhere(tensor, mark)
        if tensor._version:
            memory = tensor.untyped_storage().data_ptr()
            # The model's own memory is looked after by `Unchanged`.
            if self._versions.get(memory) != tensor._version and memory not in self._known.names:
                raise Unsupported("a tensor that was written to unseen", alone=True)
        if self._written and "R" not in mark.axes and not mark.parameters:
            when = self._written.get(tensor.untyped_storage().data_ptr())
            if when is not None and mark.order < when:
                raise Unsupported("a view of a tensor that data was written into")
        return mark

    def _elsewhere(self, tensor: Tensor, mark: Mark | None) -> Mark:
        """A tensor that this tape did not see made: one of the model's own, or nobody knows."""
        made_before = mark is not None and not mark.parameters and set(mark.axes) <= {"."}
        if tensor.requires_grad or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise Unsupported("a tensor with a gradient of its own", alone=True)
        if not made_before and (mark is not None or tensor not in self._known):
            raise Unsupported("a tensor of unknown origin", alone=True)
        axes = "." * tensor.dim()
        found = self._marks.get((axes, False))
        if found is None:
            found = self._marks[axes, False] = Mark(self._token, axes)
        return found

    def _refuse_writes(self, func: Any, line: Line, tensors: list[Tensor]) -> None:
        for i in line.written:
            target = tensors[i]
            if target.layout is torch.strided and target.numel():
                name = self._known.names.get(target.untyped_storage().data_ptr())
                if name is not None:
                    refuse_change(name)
            if id(target) in self._index or (target.requires_grad and target.is_leaf):
                raise Unsupported("data written into a parameter in place")

    def _wrote(self, tensor: Tensor, axes: str) -> None:
        """Other views of this memory, marked before, are no longer what they were."""
        self._clock += 1
        self._written[tensor.untyped_storage().data_ptr()] = self._clock
        self._tag(tensor, axes)

    def _has_coins(self, tensors: Sequence[Tensor], marks: Sequence[Mark]) -> bool:
        """Whether random numbers are in one of these."""
        for mark in marks:
            if mark.coins:
                return True
        return bool(self._coined) and any(_memory(tensor) in self._coined for tensor in tensors)

    def _coin(self, line: Line, tensors: Sequence[Tensor]) -> None:
        """Random numbers were written: other views of that memory have them, too."""
        for target in (tensors[i] for i in line.written):
            if memory := _memory(target):
                self._coined[memory] = target.untyped_storage()

    def _agreed(self, func: Any, tensor: Tensor, axes: str) -> Tensor:
        """A reduction of everything: a constant if every record by itself has the same, as it then would alone."""  # noqa: E501
        each = tensor.movedim(axes.index("R"), 0).reshape(self.records, -1)
        name = func.__name__
        values = (
            getattr(each, name)(1) if name in ("all", "any", "amax", "amin") else getattr(each, "a" + name)(1)
        )
        groups: dict[Any, list[int]] = {}
        for place, value in enumerate(values.tolist()):
            groups.setdefault(value if value == value else "nan", []).append(place)
        self.paths.append(self._draws.after(self.paths[-1], next(iter(groups))))
        self._drawn = 0
        if len(groups) > 1:
            reason = f"{function_name(func)} (data leaves torch, and differs between records)"
            raise Differs(reason, list(groups.values()))
        out: Tensor = func(tensor)
        self._tag(out, "")
        return out

    # ---- draws that no record owns ---------------------------------------------------------------------

    @property
    def decided(self) -> bool:
        """Whether records have had a say in what is computed."""
        return len(self.paths) > 1

    def _again(self, line: Line) -> bool:
        """Whether the next draw has been made before, for other parts of the same batch."""
        i, path, draws = self._drawn, self.paths[-1], self._draws
        if self._replay:
            drawn = draws.outcomes.get(path, [])
            return i < len(drawn) and [tuple(drawn[i].shape)] == line.shapes
        if path not in draws.shared:
            return False
        if i >= len(draws.shared[path]):
            raise Unsupported(
                "a model that draws another number of random numbers for another part of a batch"
            )
        return draws.shared[path][i]

    def _outcome(self) -> Tensor:
        return self._draws.outcomes[self.paths[-1]][self._drawn]

    def _drawn_before(self, line: Line, args: tuple[Any, ...]) -> Tensor:
        outcome = self._outcome()
        self._went_on()
        return args[0].copy_(outcome) if line.written else outcome.clone()

    def _draw(self, line: Line, out: Any, fresh: bool) -> None:
        path = self.paths[-1]
        known = self._replay or path in self._draws.shared
        if fresh and known and self._again(line):
            out.data.copy_(self._outcome())  # by `data`: not a write that needs to be seen
        if not known:
            drawn = tensors_in(out)
            outcome = drawn[0].detach().clone() if drawn else torch.empty(0)
            self._draws.outcomes.setdefault(path, []).append(outcome)
        self._went_on()

    def _went_on(self) -> None:
        self.drawn.append(self.paths[-1])
        self._drawn += 1

    def _core(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, axes: str
    ) -> Tensor | None:
        """One record's share of `out`, where its first dimension merely repeats over the records."""
        if self.records == 1 or out.dim() == 0 or out.shape[0] != self.records or axes[0] != "E":
            return None
        if func in (Tensor.expand, Tensor.repeat):
            source, sizes = args[0], args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            if len(sizes) > source.dim() or source.shape[0] == 1:
                return self._own(func(source, 1, *sizes[1:]), source)
        if func is torch.nn.functional.embedding:
            return self._own(func(args[0][:1], *args[1:], **kwargs), args[1])
        return None

    def _own(self, core: Tensor, source: Tensor) -> Tensor:
        mark = self._mark(source)
        core._tacit = Mark(self._token, "." * core.dim(), mark.parameters)  # type: ignore[attr-defined]
        return core

    def owned(self, tensor: object) -> bool:
        """Is this tensor a trainable parameter, or computed from such alone?"""
        return isinstance(tensor, Tensor) and bool(self._mark(tensor).parameters)

    def is_data(self, tensor: object) -> bool:
        """Was this tensor computed from the batch?"""
        return isinstance(tensor, Tensor) and "R" in self._mark(tensor).axes

    def axis(self, tensor: Tensor) -> int:
        """Which axis of a tensor counts the records."""
        return self._mark(tensor).axes.find("R")

    def check(self, tensor: Tensor, features: int = 1) -> None:
        """Refuse an input that does not have its records in front, before its features."""
        if tensor.dim() <= features or self.axis(tensor) != 0:
            raise Unsupported(f"a layer's input of shape {tuple(tensor.shape)} without its records in front")

    def per_record(self, tensor: Tensor, features: int = 1, axis: int = 0) -> Tensor:
        """[…, B·k, …, *features] → [B, T, *features]: records first, all other dimensions as one."""
        tensor = tensor.movedim(axis, 0) if axis else tensor
        return tensor.reshape(self.records, -1, *tensor.shape[tensor.dim() - features :])

    def watch(
        self,
        output: Tensor,
        targets: Sequence[Tensor | None],
        saved: Sequence[Tensor],
        grads: Callable[..., Sequence[PerRecord | None]],
    ) -> Tensor:
        """Have `grads(output gradient, *saved)` called in the backward pass, for the targets' gradients."""
        self.expect(*targets)
        if not output.requires_grad:
            output = Anchor.apply(output, self.anchor)  # type: ignore[no-untyped-call]
        held = [tensor.detach() for tensor in saved]
        self._saved.append(held)
        versions = [tensor._version for tensor in held]

        def arrived(grad: Tensor) -> None:
            if [tensor._version for tensor in held] != versions:
                raise RuntimeError("a layer's input was changed in place after the layer had used it")
            found = grads(grad, *held)
            held.clear()  # the graph outlives this hook; the activations must not
            for target, form in zip(targets, found, strict=True):
                if form is not None and target is not None:
                    self.give(target, form)

        output.register_hook(arrived)  # type: ignore[no-untyped-call]
        return output

    @property
    def held(self) -> Iterator[Tensor]:
        """The layer inputs that wait for the backward pass."""
        return (tensor for held in self._saved for tensor in held)

    def expect(self, *targets: Tensor | None) -> None:
        """Announce a use of `targets`, to be followed by `give` in the backward pass."""
        for target in targets:
            self._expect(target)

    def _expect(self, target: Tensor | None) -> Mark | None:
        mark = self._mark(target) if target is not None else None
        if mark is None or not mark.parameters:
            return None
        for index in mark.parameters:
            self._uses[index] += 1
        return mark

    def spread(self, tensor: Tensor, shape: Sequence[int], axis: int) -> Tensor:
        """`tensor` broadcast to `shape`, whose dimension `axis` is the records'; its gradient is watched."""
        mark = self._expect(tensor)
        assert mark is not None
        core = tensor if mark.core is None else mark.core
        padded = [1] * (len(shape) - core.dim()) + list(core.shape)
        copies = (
            axis == 0 and mark.core is None and len(padded) == len(mark.axes) and mark.axes[:1] in ("E", "M")
        )
        if self.records > 1 and (axis < 0 or (padded[axis] != 1 and not copies)):
            raise Unsupported(f"{self._name(mark.parameters)} meets data of shape {tuple(shape)}")

        def found(grad: Tensor) -> None:
            self.give(core, Explicit(sum_by_record(grad, core.shape, self.records, axis)))

        out: Tensor = Spread.apply(self.anchor, core.detach(), shape, found)  # type: ignore[no-untyped-call]
        return out

    # ---- backward -----------------------------------------------------------------------------------

    def give(self, target: Tensor, form: PerRecord) -> None:
        """Take a target's per-record gradients from a rule."""
        index = self._index.get(id(target))
        if index is None:
            mark = self._mark(target)
            assert mark is not None
            self._lifted.append((target, mark.parameters, form.explicit()))
            return
        self._found[index].append(form)
        if self._uses[index] == 1:
            self._squares[index] = form.squares()  # now, while activations and gradients are in the cache

    def backward(self, losses: Tensor) -> list[tuple[PerRecord, Tensor] | None]:
        """For each parameter its per-record gradients and their squared norms; None where it has no part."""
        if losses.requires_grad:
            # Asking for the anchor alone keeps autograd from touching any parameter's own `.grad`.
            autograd.grad(losses, torch.ones_like(losses), (self.anchor,))
        for target, parameters, grads in self._lifted:
            for index, pulled in zip(
                sorted(parameters), self._pull_back(target, parameters, grads), strict=True
            ):
                if pulled is not None:
                    self._found[index].append(Explicit(in_full(pulled)))
        results: list[tuple[PerRecord, Tensor] | None] = []
        for forms, squares in zip(self._found, self._squares, strict=True):
            if not forms:
                results.append(None)
                continue
            form = sum_of(forms)
            results.append((form, form.squares() if squares is None else squares))
        self._found, self._lifted = [], []
        return results

    def _pull_back(
        self, target: Tensor, parameters: frozenset[int], grads: Tensor
    ) -> Sequence[Tensor | None]:
        """From per-record gradients of a tensor made of parameters to those of the parameters."""
        inputs = [self._parameters[i] for i in sorted(parameters)]
        return torch.autograd.grad(
            target,
            inputs,
            grads.to(target.dtype),
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )

    def say_again(self) -> None:
        """Raise what was raised before, if the model has caught it."""
        if self._obstacle is not None:
            raise self._obstacle

    def finish(self, losses: Tensor) -> None:
        """The forward pass is over: one loss for each record, in order, by a graph that is torch's own."""
        self._token.active = False
        self.say_again()
        mark = self._mark(losses)
        if mark.parameters or (mark.axes not in ("R", "E", "C") and self.records > 1):
            raise Unsupported("losses that are not one for each record, in order")
        self._refuse_foreign_nodes(losses)

    def _refuse_foreign_nodes(self, losses: Tensor) -> None:
        """Every node of the backward pass must be torch's own or ours, and end in no parameter."""
        seen, stack = set(), [losses.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, BackwardCFunction):
                function = getattr(type(node), "_forward_cls", None)
                if function is None or not function.__module__.startswith("tacit.gradients."):
                    raise Unsupported(f"a gradient of the model's own ({type(node).__name__})", alone=True)
            elif hasattr(node, "variable") and node.variable is not self.anchor:
                raise Unsupported("a parameter whose use was not seen", alone=True)
            stack += [following for following, _ in node.next_functions]

    def _name(self, parameters: frozenset[int]) -> str:
        return ", ".join(self._names[i] for i in sorted(parameters))


def _memory(tensor: Tensor) -> int:
    """Where a tensor's numbers are; 0 of one that has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.numel() else 0


COMPOSED: set[Any] = {torch.nn.functional.multi_head_attention_forward}
"""Functions whose rule calls smaller functions, which the tape then sees instead."""

__all__ = ["Rule", "Tape", "Unsupported", "tensors_in"]
