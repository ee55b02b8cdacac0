"""The tape: sees every use of a parameter in a forward pass, and what the backward pass says about it.

While a `Tape` is active, every torch function that a model calls passes through it. It sorts tensors into
three kinds: *data* (computed from the batch), *owned* (a trainable parameter, or computed from parameters
alone, such as an expanded class token), and the rest (constants, frozen weights). Where the two first
meet, a rule takes over: it runs the very same function with the parameter detached, so that autograd
computes no weight gradient, and asks to be called with the gradient of the output.

Watching functions rather than modules means that tied weights, modules called twice, bare parameters
and weights used behind a module's back are all seen. What no rule knows raises `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from tacit.gradients import engine
from tacit.gradients.plain import Batch, batch_size
from tacit.gradients.records import Explicit, PerRecord, in_full, sum_by_record, sum_of

Rule = Callable[..., Any]
"""rule(tape, function, *args, **kwargs): what `function` returns, with its parameters under watch."""


class Unsupported(Exception):
    """A parameter is used in a way that no rule knows."""


@dataclass(frozen=True)
class _Mark:
    """What a tensor is made of; kept as an attribute of the tensor itself, so it lives exactly as long."""

    token: object
    parameters: frozenset[int] = frozenset()
    """Indices of the parameters it was computed from; empty for data."""
    core: Tensor | None = None
    """For an owned tensor expanded over records: the same with a first dimension of one."""


_NONE: frozenset[int] = frozenset()


class _Anchor(torch.autograd.Function):
    """The identity, but the output has a gradient even where no input of the layer needs one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)  # the same memory, and later in-place functions stay allowed
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class _Spread(torch.autograd.Function):
    """An owned tensor broadcast to one copy per record; its gradient goes to the tape, unsummed."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tensor: Tensor, shape: Sequence[int], found: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.found = found
        return tensor.expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.found(grads[0])
        return None, None, None, None


class Tape(TorchFunctionMode):
    """Watches one forward pass over `batch`; `backward` returns each parameter's per-record gradients."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        batch: Batch,
        rules: Mapping[Any, Rule],
        probe: Callable[[Tensor, str], None] | None = None,
    ) -> None:
        super().__init__()
        self.records = batch_size(batch)
        self.anchor = torch.zeros((), requires_grad=True)
        self._saved: list[list[Tensor]] = []
        self._probe = probe
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._rules = rules
        self._token = object()
        self._data = _Mark(self._token)
        self._own_marks = {key: _Mark(self._token, frozenset((i,))) for key, i in self._index.items()}
        self._uses = [0] * len(self._parameters)
        self._found: list[list[PerRecord]] = [[] for _ in self._parameters]
        self._squares: list[Tensor | None] = [None] * len(self._parameters)
        self._lifted: list[tuple[Tensor, frozenset[int], Tensor]] = []
        for tensor in batch.values():
            tensor._tacit = self._data  # type: ignore[attr-defined]

    # ---- forward ------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        data, parameters = False, _NONE
        for tensor in tensors_in(args, kwargs):
            mark = self._mark(tensor)
            if mark is self._data:
                data = True
            elif mark is not None:
                parameters |= mark.parameters
        if parameters and data and torch.is_grad_enabled():
            rule = self._rules.get(func)
            if rule is None:
                raise Unsupported(f"{_function_name(func)} on {self._name(parameters)}")
            out = rule(self, func, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if data:
            # `x[i] = data` returns nothing, but x is data from now on.
            for tensor in tensors_in(args[0] if func is Tensor.__setitem__ else out):
                tensor._tacit = self._data  # type: ignore[attr-defined]
            return out
        if parameters:
            for tensor in tensors_in(out):
                if tensor.requires_grad and id(tensor) not in self._index:
                    core = self._core(func, args, kwargs, tensor)
                    tensor._tacit = _Mark(self._token, parameters, core)  # type: ignore[attr-defined]
        return out

    def _mark(self, tensor: Tensor) -> _Mark | None:
        own = self._own_marks.get(id(tensor))
        if own is not None:
            return own
        mark: _Mark | None = getattr(tensor, "_tacit", None)
        return mark if mark is not None and mark.token is self._token else None

    def _core(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        """One record's share of `out`, where its first dimension merely repeats over the records."""
        if self.records == 1 or out.dim() == 0 or out.shape[0] != self.records:
            return None
        if func in (Tensor.expand, Tensor.repeat):
            source, sizes = args[0], args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            if len(sizes) > source.dim() or source.shape[0] == 1:
                return self._own(func(source, 1, *sizes[1:]), source)
        if func is torch.nn.functional.embedding and bool((args[0] == args[0][:1]).all()):
            return self._own(func(args[0][:1], *args[1:], **kwargs), args[1])
        return None

    def _own(self, core: Tensor, source: Tensor) -> Tensor:
        mark = self._mark(source)
        assert mark is not None
        core._tacit = _Mark(self._token, mark.parameters)  # type: ignore[attr-defined]
        return core

    def owned(self, tensor: object) -> bool:
        """Is this tensor a trainable parameter, or computed from such alone?"""
        mark = self._mark(tensor) if isinstance(tensor, Tensor) else None
        return mark is not None and mark is not self._data

    def is_data(self, tensor: object) -> bool:
        """Was this tensor computed from the batch?"""
        return isinstance(tensor, Tensor) and self._mark(tensor) is self._data

    def check(self, tensor: Tensor, features: int = 1) -> None:
        """Refuse what could not be split by record later."""
        if self.records > 1 and (tensor.dim() <= features or tensor.shape[0] % self.records):
            raise Unsupported(f"a layer's input has shape {tuple(tensor.shape)} for {self.records} records")

    def per_record(self, tensor: Tensor, features: int = 1) -> Tensor:
        """[B·k, …, *features] → [B, T, *features]: records first, all other dimensions as one."""
        self.check(tensor, features)
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
        self.check(output)
        if not output.requires_grad:
            output = _Anchor.apply(output, self.anchor)  # type: ignore[no-untyped-call]
        held = [tensor.detach() for tensor in saved]
        self._saved.append(held)
        versions = [tensor._version for tensor in held]

        def arrived(grad: Tensor) -> None:
            self.inspect(grad, *targets)
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

    def _expect(self, target: Tensor | None) -> _Mark | None:
        mark = self._mark(target) if target is not None else None
        if mark is None or mark is self._data:
            return None
        for index in mark.parameters:
            self._uses[index] += 1
        return mark

    def spread(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """`tensor` broadcast to `shape`, whose first dimension is the records'; its gradient is watched."""
        mark = self._expect(tensor)
        assert mark is not None
        core = tensor if mark.core is None else mark.core
        if not shape or shape[0] % self.records:
            raise Unsupported(f"{self._name(mark.parameters)} meets data of shape {tuple(shape)}")

        def found(grad: Tensor) -> None:
            self.inspect(grad, tensor)
            self.give(core, Explicit(sum_by_record(grad, core.shape, self.records)))

        out: Tensor = _Spread.apply(self.anchor, core.detach(), shape, found)  # type: ignore[no-untyped-call]
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
            engine.grad(losses, torch.ones_like(losses), (self.anchor,))
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

    def inspect(self, grad: Tensor, *targets: Tensor | None) -> None:
        """Show the probe, if there is one, a gradient that arrived and whose layer it belongs to."""
        if self._probe is not None:
            marks = [self._mark(t) for t in targets if t is not None]
            self._probe(grad, self._name(frozenset().union(*(m.parameters for m in marks if m))))

    def _name(self, parameters: frozenset[int]) -> str:
        return ", ".join(self._names[i] for i in sorted(parameters))


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


def _function_name(func: Any) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func))
