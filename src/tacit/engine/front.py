"""What frozen first layers make of a record, computed once and kept.

Where nothing before some layer of a network is trained and nothing there is random, that layer's input is the
same in every round: with a trained output layer, or adapters in the last layers alone, nearly all of a step
is spent on it. A worker computes it the first time it meets a record, and from then on starts in the middle.

- *The same results, kept or not.* Each record goes through the first layers by itself, in its own width.
  So what is kept depends on that record and the frozen numbers alone, never on who shared its batch, and a
  record for which there is no room is computed again to the same bits.
- *Who may.* The layers are the first ones of a `nn.ModuleList`, of code that is torch's, transformers',
  peft's or ours. A trial at the start, on ones in the shape of a record, must show that no gradient comes
  back to what they give, that no random number was drawn before it, that the network holds what it held, and
  that a loss keeps every bit when all that the other skipped layers give is NaN. Else everything stays as it
  is. Under a guarantee that shape is nobody's record's: a network may pass in one width and not in another,
  and records rounded one way or the other, by whose record came first, would tell of that one.
- *No memory.* Frequencies that grow with the longest text so far would let a record's outputs tell of others.
  So nothing is kept, or taken, unless the network holds what it held at first, before a record and after it:
  a batch for which it does not is left to the whole network.
- *Whoever comes next.* A process keeps the outputs of its last network, so that the runs of a sweep, which
  begin with the same frozen numbers, compute them once.
- *No guarantee rests on it.* What is kept enters the rest of the network as one more part of the batch, so
  that the tape of `tacit.gradients` follows it like any other; it never leaves the worker's memory.

On the CPU in float32 only: elsewhere one record at a time is no way to compute.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import is_
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.data import Batch, Records
from tacit.data.widths import blank
from tacit.engine.device import Compute
from tacit.gradients.plain import batch_size
from tacit.tasks import Task

KEPT = "kept"
"""The part of a batch that the rest of the network starts from."""
WORTH = 1_000_000
"""Numbers that the skipped layers have at least: below, one record at a time costs more than it saves."""
ROOM = 2**30
"""Bytes of outputs that a worker keeps at most."""
_TRUSTED = ("torch.", "transformers.", "peft.", "tacit.models.")

_TORCHS = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
_UNCLEAR = (" at 0x", "tensor(", "array(", "<locals>", "<lambda>")
"""In what is told of a network, something that it does not say all about."""
_FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError)

Call = Callable[[nn.Module, Batch], Any]
"""A task's `losses`, or its `evaluate`."""


class _Given(nn.Module):
    """Stands where a frozen layer was, and gives what it is told to; asked for anything else, it is that."""

    value: Tensor | None = None

    def __init__(self, layer: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        self.__dict__["layer"], self.in_tuple = layer, in_tuple  # beside the modules: it is none of its own

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        given = hidden if self.value is None else self.value
        return (given,) if self.in_tuple else given

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


class Held:
    """All that a network holds beside its parameters: attributes, buffers and which parts it is made of."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(part, _things(part)) for part in module.modules()]
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def still(self) -> bool:
        """Whether these are the same things, and the same numbers; training or not is no matter."""
        return all(
            len(now := _things(part)) == len(things) and all(map(is_, now, things))
            for part, things in self._held
        ) and all(torch.equal(buffer, first) for buffer, first in self._buffers)


def _things(part: nn.Module) -> list[Any]:
    own = [value for name, value in vars(part).items() if name != "training"]
    return [*own, *part._modules.values(), *part._buffers.values()]


@dataclass(frozen=True)
class Resumed:
    """A task whose model starts from a batch's `kept`, if there is one."""

    task: Task
    layers: nn.ModuleList
    stand_ins: tuple[_Given, ...]

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        with self._resumed(batch) as rest:
            return self.task.losses(model, rest)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        with self._resumed(batch) as rest:
            return self.task.evaluate(model, rest)

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        return self.task.summarise(sums)

    @contextmanager
    def _resumed(self, batch: Batch) -> Iterator[Batch]:
        if KEPT not in batch:
            yield batch
            return
        places, last = self.layers._modules, self.stand_ins[-1]
        own = dict(places)
        places.update((str(i), stand_in) for i, stand_in in enumerate(self.stand_ins))
        last.value = batch[KEPT]
        try:
            yield {name: tensor for name, tensor in batch.items() if name != KEPT}
        finally:
            last.value = None
            places.update(own)


@dataclass
class Outputs:
    """What first layers made of records so far, by mode and contents."""

    room: int = field(default_factory=lambda: ROOM)
    """Bytes that may still be kept."""
    found: dict[bytes, Tensor] = field(default_factory=dict)

    def keep(self, key: bytes, hidden: Tensor) -> None:
        if hidden.nbytes <= self.room:
            self.room -= hidden.nbytes
            self.found[key] = hidden


_latest: dict[bytes, Outputs] = {}
"""This process's last network, by what its outputs depend on."""


@dataclass
class Front:
    """The frozen first layers of a worker's model, and what they made of the records so far."""

    module: nn.Module
    original: Task
    task: Resumed
    first: Held
    """What the network holds before anybody's record."""
    outputs: Outputs = field(default_factory=Outputs)

    @classmethod
    def of(
        cls, module: nn.Module, task: Task, records: Records, compute: Compute, protected: bool = False
    ) -> Front | None:
        """The front of a model in training mode, if it has one that may be skipped; the most that may.

        `protected`: no record may decide by its shape whether there is one, so there is none for records that
        cannot say what they look like without that (`tacit.data.widths.Blank`).
        """
        if not compute.here or compute.precision != "float32" or compute.activation_checkpointing:
            return None
        stacks = _stacks(module)
        if not stacks or not len(records) or not all(_trusted(part) for part in module.modules()):
            return None
        one = blank(records)
        if one is None and protected:
            return None
        if one is None:
            one = records.prepare(records.take(np.zeros(1, np.int64)))
        made_up = {name: torch.ones_like(values) for name, values in one.items()}
        first, resumed = Held(module), None
        for layers, count in stacks:
            # Ones may be nothing that this network reads, and it may want more of a layer than its output.
            with _aside(), suppress(*_FAILURES):
                resumed = _tried(module, task, layers, count, made_up)
            if resumed is not None:
                return cls(module, task, resumed, first)
        return None

    def continued(self) -> Front:
        """With what this process kept for the run before, if that had the same frozen numbers: the runs of a
        sweep do.
        """
        name = self._name()
        if name is not None:
            if name not in _latest:
                _latest.clear()
                _latest[name] = self.outputs
            self.outputs = _latest[name]
        return self

    def _name(self) -> bytes | None:
        """Of all that outputs depend on beside the record, if it can be known again: the frozen numbers, the
        network around them, which of its layers they come from, and who asks.
        """
        if not type(self.original).__module__.startswith("tacit.tasks."):
            return None
        configs = [part.config for part in self.module.modules() if hasattr(part, "config")]
        attention = [getattr(config, "_attn_implementation", None) for config in configs]
        asks = type(self.original), vars(self.original)
        kinds = [(type(part).__module__, type(part).__qualname__) for part in self.module.modules()]
        held = {name: value for name, value in _held(self.module) if not name.endswith(".config")}
        tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
        plain = [(name, _told(value)) for name, value in held.items() if name not in tensors]
        stacks = [path for path, part in self.module.named_modules() if part is self.task.layers]
        skipped = stacks, len(self.task.stand_ins)
        told = repr((asks, self.module, kinds, skipped, plain, configs, attention, torch.get_num_threads()))
        if any(unclear in told for unclear in _UNCLEAR):
            return None
        digest = hashlib.blake2b(told.encode(), digest_size=32)
        named = (*self.module.named_parameters(), *self.module.named_buffers(), *tensors.items())
        for name, values in named:
            if not values.requires_grad:
                digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
                digest.update(_bytes(values))
        return digest.digest()

    def extended(self, batch: Batch, call: Call | None = None) -> Batch:
        """The batch with what the first layers make of each record, or as it is if they are to be asked
        again; `call` is how the model is asked.
        """
        size = batch_size(batch)
        if not size or not self.first.still():
            return batch
        mode = b"t" if self.module.training else b"e"
        kept = []
        for i in range(size):
            one = {name: values[i : i + 1] for name, values in batch.items()}
            key = _key(mode, one)
            hidden = self.outputs.found.get(key)
            if hidden is None:
                hidden = self._computed(one, call or self.original.losses)
                if hidden is None:
                    return batch
                self.outputs.keep(key, hidden)
            kept.append(hidden)
        return {**batch, KEPT: torch.cat(kept)}

    @torch.no_grad()
    def _computed(self, one: Batch, call: Call) -> Tensor | None:
        """What the first layers make of a record; None if that left something behind in the network."""
        last = self.task.layers[len(self.task.stand_ins) - 1]
        with _aside(), _captured(last) as seen:
            call(self.module, one)
        hidden: Tensor = seen[0].output
        return hidden.clone() if self.first.still() else None


def _trusted(part: nn.Module) -> bool:
    """Whether all that runs when a module is called is known code, hooks included."""
    hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    return all(f"{getattr(one, '__module__', '')}.".startswith(_TRUSTED) for one in (type(part), *hooks))


def _held(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What modules hold beside parameters, buffers and each other, by its place: heads, scales, tables."""
    for path, part in module.named_modules():
        yield from ((f"{path}.{name}", value) for name, value in vars(part).items() if name not in _TORCHS)


def _told(value: Any) -> str:
    """What an attribute is; a function by its name."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, FunctionType) else repr(value)


def _stacks(module: nn.Module) -> list[tuple[nn.ModuleList, int]]:
    """Lists of layers with how many of their first are frozen, where that is worth something; most first."""
    found: list[tuple[int, nn.ModuleList, int]] = []
    for part in module.modules():
        if not isinstance(part, nn.ModuleList):
            continue
        count = numbers = 0
        for layer in part:
            if any(p.requires_grad for p in layer.parameters()):
                break
            count += 1
            numbers += sum(p.numel() for p in layer.parameters())
        if numbers >= WORTH:
            found.append((numbers, part, count))
    return [(part, count) for _, part, count in sorted(found, key=lambda one: -one[0])]


def _tried(module: nn.Module, task: Task, layers: nn.ModuleList, count: int, batch: Batch) -> Resumed | None:
    """The task that skips so many layers, if a trial shows that nothing else changes."""
    first = Held(module)
    before = _States()
    with torch.enable_grad(), _captured(layers[count - 1]) as seen:
        loss = task.losses(module, batch)
    if len(seen) != 1 or not isinstance(seen[0].output, Tensor):  # called twice, or with more to say
        return None
    hidden, in_tuple = seen[0].output, seen[0].in_tuple
    drawn = seen[0].generators.drawn(before)
    if hidden.requires_grad or "torch" in drawn or len(hidden) != 1:
        return None
    if drawn:
        # Who seeds a generator itself and draws then (BigBird's attention does) draws the same for ever.
        random.seed()
        np.random.seed()  # noqa: NPY002
        with torch.no_grad(), _captured(layers[count - 1]) as later:
            task.losses(module, batch)
        if drawn & later[0].generators.drawn(seen[0].generators):
            return None
    if not first.still():
        return None
    resumed = Resumed(task, layers, tuple(_Given(layer, in_tuple) for layer in layers[:count]))
    for stand_in in resumed.stand_ins[:-1]:
        stand_in.value = torch.full_like(hidden, torch.nan)
    before.restore()
    with torch.no_grad():
        again = resumed.losses(module, {**batch, KEPT: hidden.detach()})
    for stand_in in resumed.stand_ins:
        stand_in.value = None
    same = torch.equal(loss.detach(), again) and bool(again.isfinite().all())
    return resumed if same else None


@dataclass(frozen=True)
class _Seen:
    """What a layer gave, and what generators were to go on from then."""

    output: Any
    in_tuple: bool
    generators: _States


class _States:
    """Of all generators that a network may draw from: torch's, Python's own and NumPy's global one."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy: Any = np.random.get_state()  # noqa: NPY002

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    def drawn(self, before: _States) -> set[str]:
        """From which of them something was drawn between the two."""
        same = {
            "torch": torch.equal(self._torch, before._torch),
            "python": self._python == before._python,
            "numpy": all(map(np.array_equal, self._numpy, before._numpy)),
        }
        return {name for name, alike in same.items() if not alike}


@contextmanager
def _aside() -> Iterator[None]:
    """Whatever is drawn meanwhile was never drawn."""
    before = _States()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def _captured(layer: nn.Module) -> Iterator[list[_Seen]]:
    seen: list[_Seen] = []

    def capture(_: nn.Module, args: Any, output: Any) -> None:
        in_tuple = isinstance(output, tuple) and len(output) == 1
        seen.append(_Seen(output[0] if in_tuple else output, in_tuple, _States()))

    handle = layer.register_forward_hook(capture)
    try:
        yield seen
    finally:
        handle.remove()


def _key(mode: bytes, one: Batch) -> bytes:
    """The contents of a record as a model gets them: 128 bits of them, of which no two are alike."""
    digest = hashlib.blake2b(mode, digest_size=16)
    for name, values in one.items():
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(_bytes(values))
    return digest.digest()


def _bytes(values: Tensor) -> memoryview:
    return values.detach().contiguous().view(-1).view(torch.uint8).numpy().data
