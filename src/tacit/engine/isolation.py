"""A resident model is restored before every client, so that no client leaves anything behind.

A client-level guarantee bounds what one client adds to a sum. It holds only if a client's upload does not
depend on the clients before it. A resident model has many places where something may be left: frozen
parameters, buffers, counters and caches in attributes, rows of an embedding with `max_norm`, the vectors of a
power iteration. `Pristine` remembers all of them and restores them, or reports what changed.

>>> class Counts(nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.seen, self.log = 0, []
>>> model = Counts()
>>> first = Pristine({"model": model})
>>> model.seen += 1; model.log.append("a record")
>>> first.restore()
>>> model.seen, model.log
(0, [])

What is seen, and when
----------------------
`Pristine` sees whatever can be reached from the model (and the task, and the algorithm): every module's
attributes, through lists, dicts, sets, objects and closures; every tensor there, by its memory and not by its
version counter, so that a write through `.data` shows; and random number generators.

- *Before every client*, and after every gradient under example-level privacy: all Python values; all tensors
  bit for bit, up to `KEPT` bytes in total, by C's `memcmp` (a millisecond); for the other tensors, their
  places in memory, and after a gradient how often torch wrote to them.
- *Under a guarantee, after every shard of clients, before its sum leaves the worker*: a keyed hash (GMAC) of
  the tensors beyond `KEPT`, such as the frozen base of a large model. These are not restored; a change is
  refused, and the sum with it. A change passes with a probability below 2⁻⁹⁰. A write that no counter shows
  (through `.data`, NumPy or a pointer), and that is undone before the shard ends, is left to the tape of
  `tacit.gradients`, which sees everything that goes through torch.
- *Never*: trained parameters and aggregated buffers, which the worker overwrites before every client; global
  variables and class attributes; what lives in C++ beside tensors (for that reason, scripted modules are
  refused under a guarantee); files and sockets. A model that keeps clients' data in such a place does so on
  purpose.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from operator import is_
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from torch import Tensor, nn

from tacit.errors import UserError

KEPT = 16 * 2**20
"""Bytes of tensors that are remembered by a copy, smallest tensors first."""
MANY = 200_000
"""How many containers and objects one model may consist of."""
_memcmp = ctypes.CDLL(None if os.name == "posix" else "msvcrt").memcmp
_memcmp.argtypes, _memcmp.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_CLOSED = (type, types.ModuleType, types.BuiltinFunctionType, Enum, logging.Logger, weakref.ref, *_PLAIN)
_REGISTERS = ("_parameters", "_buffers", "_modules")


class Pristine:
    """A snapshot of some objects, as far as Python can see."""

    def __init__(self, roots: Mapping[str, object], overwritten: Iterable[Tensor] = ()) -> None:
        """`roots`: the objects, by the names a user knows them by. `overwritten`: tensors whose memory is set
        by other code before every client.
        """
        self._root = ""
        self._places: list[_Place] = []
        self._empty: list[Any] = []
        self._empty_names: list[str] = []
        self._tensors: list[tuple[str, Tensor, Tensor, int]] = []
        self._counted: list[tuple[str, Tensor, int]] = []
        self._parameters: list[tuple[nn.Parameter, bool, Tensor | None]] = []
        self._own = {t.untyped_storage().data_ptr() for t in overwritten}
        self._alive: list[object] = []
        memory: dict[int, tuple[str, Tensor]] = {}
        for self._root, root in roots.items():
            self._walk(root, memory)
        self._kept: list[tuple[str, Tensor, Tensor]] = []
        self._large: list[tuple[str, Tensor]] = []
        room = KEPT
        for name, raw in sorted(memory.values(), key=lambda item: item[1].numel()):
            room -= raw.numel()
            if room >= 0:
                self._kept.append((name, raw, raw.clone()))
            else:
                self._large.append((name, raw))
        large = {raw.data_ptr() for _, raw in self._large}
        for name, tensor, _, _ in self._tensors:
            if tensor.untyped_storage().data_ptr() in large and not tensor.is_inference():
                self._counted.append((name, tensor, tensor._version))
        self._key = os.urandom(32)
        self._hashes: list[bytes] | None = None

    # --- before a client --------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore everything except large tensors: for those, see `refuse_large_changes`."""
        if any(self._empty):
            for container in filter(None, self._empty):
                container.clear()
        for place in self._places:
            if not place.same():
                place.restore()
        for _, tensor, first, pointer in self._tensors:
            if tensor.data_ptr() != pointer or tensor.shape != first.shape:
                tensor.data = first
        for parameter, trained, grad in self._parameters:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
            if parameter.grad is not grad:
                parameter.grad = grad
        for _, raw, copy in self._written():
            if raw.untyped_storage().nbytes() < raw.numel():
                raw.untyped_storage().resize_(raw.numel())
            raw.copy_(copy)

    # --- after a gradient -------------------------------------------------------------------------------

    def refuse_changes(self) -> None:
        """Raise if anything has changed, and name it. Large tensors are checked by their counters alone."""
        for name in sorted(self._changed(), key=_private):
            raise UserError(
                f"{name} changes as records pass, so it remembers them without clipping or noise; use a "
                "layer that keeps nothing between batches"
            )

    def _changed(self) -> Iterator[str]:
        if any(self._empty):
            yield from (name for name, c in zip(self._empty_names, self._empty, strict=True) if c)
        for place in self._places:
            if not place.same():
                yield from (f"attribute {path!r} of the {place.of}" for path in place.differences())
        for name, tensor, first, pointer in self._tensors:
            if tensor.data_ptr() != pointer or tensor.shape != first.shape:
                yield name
        yield from (name for name, tensor, version in self._counted if tensor._version != version)
        yield from (name for name, _, _ in self._written())

    def _written(self) -> list[tuple[str, Tensor, Tensor]]:
        """The tensors whose bytes have changed."""
        if not self._kept or self._kept[0][1].device.type == "cpu":
            return [item for item in self._kept if not _same_bytes(item[1], item[2])]
        # Ask once for all tensors: each question by itself would wait for the device.
        differ = torch.stack([(raw != copy).any() for _, raw, copy in self._kept])
        if not bool(differ.any()):
            return []
        return [item for item, changed in zip(self._kept, differ.tolist(), strict=True) if changed]

    # --- after a shard ----------------------------------------------------------------------------------

    def watch_large(self) -> None:
        """Hash the large tensors, so that a later change shows; called once, before the first client."""
        if self._hashes is None:
            self._hashes = [self._hash(raw) for _, raw in self._large]

    def refuse_large_changes(self) -> None:
        """Raise if a large tensor has changed since `watch_large` was first called."""
        for (name, raw), first in zip(self._large, self._hashes or (), strict=False):
            if self._hash(raw) != first:
                raise UserError(
                    f"{name} is not trained, but a client's pass through the model changed it, which would "
                    "reach the next client; let the model write to nothing but buffers, or train it"
                )

    def _hash(self, raw: Tensor) -> bytes:
        """GMAC under a key that only this object has, so nobody can construct a collision."""
        mac = Cipher(AES(self._key), GCM(bytes(12))).encryptor()
        data = raw.cpu().numpy().data
        for start in range(0, len(data), 1 << 30):
            mac.authenticate_additional_data(data[start : start + (1 << 30)])
        mac.finalize()
        return mac.tag

    # --- once -------------------------------------------------------------------------------------------

    def _walk(self, root: object, memory: dict[int, tuple[str, Tensor]]) -> None:
        """Record every container and tensor that can be reached from `root`."""
        ahead: list[tuple[str, object]] = [("", root)]
        seen: set[int] = {id(thing) for thing in self._alive}
        while ahead:
            path, thing = ahead.pop()
            if isinstance(thing, _CLOSED) or id(thing) in seen:
                continue
            seen.add(id(thing))
            self._alive.append(thing)  # an id is unique only while its object lives
            if len(self._alive) > MANY:
                raise UserError(
                    f"the {self._root} holds more than {MANY:,} objects, with {path!r} among them; keep data "
                    "outside of it"
                )
            ahead += self._note(path, thing, memory)

    def _note(self, path: str, thing: Any, memory: dict[int, tuple[str, Tensor]]) -> list[tuple[str, object]]:
        """Remember one object; return its parts with their paths."""
        if isinstance(thing, Tensor):
            self._note_tensor(path, thing, memory)
            if not isinstance(thing, nn.Parameter):
                return []
            self._parameters.append((thing, thing.requires_grad, thing.grad))
            return [(path, vars(thing))]
        if isinstance(thing, dict):
            self._note_place(_Dict(path, thing), thing)
            return [(_join(path, key), value) for key, value in thing.items()]
        if isinstance(thing, (list, deque)):
            self._note_place(_List(path, thing), thing)
        elif isinstance(thing, set):
            self._note_place(_Set(path, thing), thing)
        elif isinstance(thing, (np.ndarray, bytearray)):
            if isinstance(thing, bytearray) or (thing.dtype != object and thing.flags.writeable):
                self._remember(_State(path, thing.copy, functools.partial(_overwrite, thing)))
            return []
        elif isinstance(thing, torch.Generator):
            self._remember(_State(path, thing.get_state, thing.set_state))
            return []
        elif isinstance(thing, random.Random):
            self._remember(_State(path, thing.getstate, thing.setstate))
            return []
        elif isinstance(thing, np.random.Generator):
            bits = thing.bit_generator
            self._remember(_State(path, lambda: bits.state, functools.partial(setattr, bits, "state")))
            return []
        elif isinstance(thing, types.CellType):
            self._remember(_State(path, functools.partial(_content, thing), _setter(thing)))
            return [(path, _content(thing))]
        elif isinstance(thing, types.FunctionType):
            cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
            return [(_join(path, name), cell) for name, cell in cells]
        elif isinstance(thing, types.MethodType):
            return [(path, thing.__self__), (path, thing.__func__)]
        elif isinstance(thing, functools.partial):
            return [(path, thing.func), (path, thing.args), (path, thing.keywords)]
        if isinstance(thing, (tuple, list, deque, set, frozenset)):
            return [(_join(path, i), part) for i, part in enumerate(thing)]
        parts: list[tuple[str, object]] = [(path, vars(thing))] if hasattr(thing, "__dict__") else []
        slots = [s for kind in type(thing).__mro__ for s in _slots(kind) if hasattr(thing, s)]
        for slot in slots:
            value = getattr(thing, slot)
            setter = functools.partial(object.__setattr__, thing, slot)
            self._remember(_State(_join(path, slot), functools.partial(getattr, thing, slot), setter))
            parts.append((_join(path, slot), value))
        return parts

    def _remember(self, place: _Place) -> None:
        place.of = self._root
        self._places.append(place)

    def _note_place(self, place: _Place, container: Any) -> None:
        if container:
            self._remember(place)
        else:
            self._empty.append(container)
            self._empty_names.append(f"attribute {place.path!r} of the {self._root}")

    def _note_tensor(self, path: str, tensor: Tensor, memory: dict[int, tuple[str, Tensor]]) -> None:
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
        name = f"{kind} {path!r} of the {self._root}"
        self._tensors.append((name, tensor, tensor.detach(), tensor.data_ptr()))
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            # Bytes, not numbers: nan equals itself, and −0 is not 0.
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            memory.setdefault(storage.data_ptr(), (name, raw))


class _Place:
    """A container, and the values that it held at first."""

    of: str

    def __init__(self, path: str, holder: Any) -> None:
        self.path, self.holder = path, holder
        self.values: tuple[Any, ...] = tuple(self._now())

    def _now(self) -> Iterable[Any]:
        return self.holder  # type: ignore[no-any-return]

    def same(self) -> bool:
        """Whether nothing was added, removed or replaced. Changes inside a value are checked at that value's
        own place.
        """
        return len(self.holder) == len(self.values) and all(map(_same, self._now(), self.values))

    def restore(self) -> None:
        raise NotImplementedError

    def differences(self) -> Iterator[str]:
        yield self.path


class _Dict(_Place):
    """A dict; most often an object's attributes."""

    def __init__(self, path: str, holder: dict[Any, Any]) -> None:
        super().__init__(path, holder)
        self.keys = tuple(holder)

    def _now(self) -> Iterable[Any]:
        return self.holder.values()  # type: ignore[no-any-return]

    def same(self) -> bool:
        holder, values = self.holder, self.values
        if len(holder) != len(values):
            return False
        if all(map(is_, holder.values(), values)) and all(map(is_, holder, self.keys)):
            return True  # the usual case, at the speed of C
        return tuple(holder) == self.keys and super().same()

    def restore(self) -> None:
        self.holder.clear()
        self.holder.update(zip(self.keys, self.values, strict=True))

    def differences(self) -> Iterator[str]:
        first = dict(zip(self.keys, self.values, strict=True))
        for key in dict.fromkeys((*first, *self.holder)):
            if key not in first or key not in self.holder or not _same(first[key], self.holder[key]):
                yield _join(self.path, key)


class _List(_Place):
    def restore(self) -> None:
        self.holder.clear()
        self.holder.extend(self.values)


class _Set(_Place):
    def same(self) -> bool:
        return len(self.holder) == len(self.values) and self.holder.issuperset(self.values)

    def restore(self) -> None:
        self.holder.clear()
        self.holder.update(self.values)


class _State(_Place):
    """State that is read and written as a whole."""

    def __init__(self, path: str, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get, self._put = get, put
        super().__init__(path, None)

    def _now(self) -> Iterable[Any]:
        return (self._get(),)

    def same(self) -> bool:
        return _same(self._get(), self.values[0])

    def restore(self) -> None:
        self._put(self.values[0])


def _same_bytes(one: Tensor, two: Tensor) -> bool:
    """Compare two tensors of the same number of bytes at the speed of memory; `torch.equal` takes ten times
    as long.
    """
    size = one.numel()
    if one.device.type != "cpu":
        return torch.equal(one, two)
    if one.untyped_storage().nbytes() < size:  # the storage was made smaller
        return False
    return not _memcmp(one.data_ptr(), two.data_ptr(), size)


def _same(one: Any, two: Any) -> bool:
    """Whether these are one object, or two indistinguishable values."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return one.hex() == two.hex()  # type: ignore[no-any-return]
    if isinstance(one, (Tensor, np.ndarray)):
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        if isinstance(one, np.ndarray):
            return bool(one.tobytes() == two.tobytes())
        return not one.requires_grad and bool(torch.equal(one, two))
    if isinstance(one, (tuple, list)):
        return len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, dict):
        return tuple(one) == tuple(two) and all(map(_same, one.values(), two.values()))
    return isinstance(one, (*_PLAIN, bytearray, set, frozenset)) and bool(one == two)


def _private(name: str) -> bool:
    """Whether this is torch's internal name for something that also has a name in the model: a new buffer."""
    return "'_" in name or "._" in name


def _join(path: str, key: object) -> str:
    if isinstance(key, str) and key in _REGISTERS:
        return path
    return f"{path}.{key}" if path else str(key)


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return (name for name in names if not name.startswith("__"))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _setter(cell: types.CellType) -> Callable[[Any], None]:
    return functools.partial(setattr, cell, "cell_contents")


def _overwrite(array: Any, first: Any) -> None:
    array[:] = first
