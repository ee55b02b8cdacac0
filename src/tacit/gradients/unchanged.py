"""That a gradient leaves a model as it found it.

What a forward pass writes into parameters, buffers or attributes would carry records past the clipping, to
later records, later steps and out. Identities and version counters tell most of it at no cost. Code that is
computed record by record has not been followed, so there the contents themselves are compared.
"""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.errors import UserError

_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_DEEP, _LONG = 4, 10_000
"""How far containers are looked into."""


def refuse_change(name: str) -> None:
    raise UserError(
        f"{name!r} of the model changes as records pass, so it remembers them without clipping or noise; "
        "use a layer that keeps no statistics and leaves its parameters alone"
    )


class Unchanged:
    """A model's tensors, to be looked at before and after each gradient."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = [
            (f"{name}.{key}" if name else key, owner, key)
            for name, part in module.named_modules()
            for owner in (part._parameters, part._buffers)
            for key in owner
        ]

    def state(self) -> list[tuple[Tensor | None, int]]:
        """Every parameter and buffer, and how often it was written to."""
        tensors = [owner.get(key) for _, owner, key in self._places]
        return [(tensor, 0 if tensor is None else tensor._version) for tensor in tensors]

    def check(self, before: list[tuple[Tensor | None, int]]) -> None:
        for (name, _, _), (old, version), (new, now) in zip(self._places, before, self.state(), strict=True):
            if new is not old or now != version:
                refuse_change(name)

    def contents(self, attributes: bool = True) -> dict[str, Any]:
        """What is in every parameter, buffer and attribute."""
        found: dict[str, Any] = {}
        for name, owner, key in self._places:
            tensor = owner.get(key)
            found[name] = None if tensor is None else _hash(tensor)
        if not attributes:
            return found
        seen: dict[int, Any] = {}
        for name, part in self._module.named_modules():
            for key, value in vars(part).items():
                if key not in _OWN and not (isinstance(part, nn.RNNBase) and key.startswith("_flat_weight")):
                    found[f"{name}.{key}" if name else key] = _print(value, _DEEP, seen)
        return found

    def check_contents(self, before: dict[str, Any], attributes: bool = True) -> None:
        after = self.contents(attributes)
        for name in [*before, *after]:
            if name not in before or name not in after or before[name] != after[name]:
                refuse_change(name)


def _hash(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return (id(tensor), tensor._version)
    whole: Any = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return (tuple(tensor.shape), str(tensor.dtype), zlib.crc32(whole))


def _print(value: Any, depth: int, seen: dict[int, Any]) -> Any:
    """Something that is equal as long as the value is."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, Tensor):
        return _hash(value) if not isinstance(value, nn.Parameter) else id(value)
    if isinstance(value, np.ndarray):
        return (value.shape, hash(value.tobytes()))
    if isinstance(value, weakref.ref):
        return _print(value(), depth, seen)
    if isinstance(value, nn.Module) or callable(value) or depth == 0:
        return id(value)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = id(value)
    if isinstance(value, dict):
        found: Any = [(repr(k), _print(v, depth - 1, seen)) for k, v in list(value.items())[:_LONG]]
    elif isinstance(value, (list, tuple, set, frozenset)):
        found = [_print(v, depth - 1, seen) for v in list(value)[:_LONG]]
    elif hasattr(value, "__dict__"):
        found = [(k, _print(v, depth - 1, seen)) for k, v in vars(value).items()]
    else:
        found = id(value)
    seen[id(value)] = found
    return found
