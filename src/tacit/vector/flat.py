"""A module whose parameters, gradients and buffers are views of flat vectors.

`Flat(module)` moves all trainable parameters into `values` and their `.grad` into `grad`. The module
stays an ordinary module: its forward, backward, `state_dict` and tied weights work as before, but an
optimizer step is one operation on one tensor.

>>> import torch
>>> flat = Flat(torch.nn.Linear(2, 1))
>>> _ = flat.values.fill_(1.0)
>>> flat.module(torch.tensor([[2.0, 3.0]])).item()
6.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tacit.errors import UserError
from tacit.lazy import torch
from tacit.vector.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor, nn

Vectors: TypeAlias = "dict[str, Tensor]"
"""Named 1-D tensors: a message, an upload, a client's state or the server's state."""
_BUFFERS = "buffers"
"""The reserved name of persistent floating-point buffers (BatchNorm's statistics) among named vectors. Only
this file uses it; other files call `read_buffers`, `buffers_in` and `write_buffers`.
"""


class Flat:
    """A module bound to one vector of parameters, one of gradients and one of buffers."""

    module: nn.Module
    layout: Layout
    values: Tensor
    """All trainable parameters: shared, then personal. The module computes in this memory."""
    grad: Tensor
    """Their gradients; autograd accumulates into this memory."""
    buffers: Tensor
    """Persistent floating-point buffers (BatchNorm's statistics); empty for most models."""

    def __init__(self, module: nn.Module, personal: Sequence[str] = ()) -> None:
        self.module = module
        self.layout = Layout.of(module, personal)
        parameters = dict(module.named_parameters())
        dtypes = {p.dtype for p in parameters.values() if p.requires_grad}
        if len(dtypes) > 1:
            found = ", ".join(sorted(map(str, dtypes)))
            raise UserError(f"model: trainable parameters of several dtypes ({found}); convert it to one")
        first = parameters[self.layout.segments[0].name]
        self.values = torch.empty(self.layout.size, dtype=first.dtype, device=first.device)
        self.grad = _untouched_zeros_like(self.values)
        for segment in self.layout.segments:
            parameter = parameters[segment.name]
            view = self.values[segment.slice].view(segment.shape)
            view.copy_(parameter.data)
            # `.data` keeps the Parameter object, so tied weights and hooks stay attached.
            parameter.data = view
            parameter.grad = self.grad[segment.slice].view(segment.shape)
        self.buffers = self._bind_buffers()

    def _bind_buffers(self) -> Tensor:
        vector = _buffer_vector(self.module)
        offset = 0
        for name, buffer in _buffers(self.module):
            owner, _, attribute = name.rpartition(".")
            view = vector[offset : offset + buffer.numel()].view(buffer.shape)
            self.module.get_submodule(owner)._buffers[attribute] = view
            offset += buffer.numel()
        return vector

    @property
    def named_buffers(self) -> Vectors:
        """The live buffers by their reserved name; empty if there are none."""
        return {_BUFFERS: self.buffers} if self.buffers.numel() else {}

    def load_buffers(self, vectors: Mapping[str, Tensor]) -> None:
        """Copy the buffers among named vectors into the module's; they must be there if it has any."""
        for name, live in self.named_buffers.items():
            live.copy_(vectors[name])

    @property
    def shared(self) -> Tensor:
        """The slice that clients and server train together."""
        return self.values[: self.layout.shared]

    @property
    def personal(self) -> Tensor:
        """The slice that never leaves the client; empty for most methods."""
        return self.values[self.layout.shared :]


def _untouched_zeros_like(vector: Tensor) -> Tensor:
    """Zeros. On the host they take no memory until something is written to them, unlike torch's own zeros."""
    if type(vector) is not torch.Tensor or vector.device.type != "cpu" or vector.dtype != torch.float32:
        return torch.zeros_like(vector)
    return torch.from_numpy(np.zeros(vector.shape, np.float32))


def read_values(module: nn.Module, layout: Layout) -> Tensor:
    """A copy of a module's trainable parameters as one vector, without binding the module to it."""
    parameters = dict(module.named_parameters())
    return torch.cat([parameters[segment.name].detach().flatten() for segment in layout.segments])


def write_values(module: nn.Module, layout: Layout, vector: Tensor) -> None:
    """Copy a vector (the whole vector, or only its shared slice) into a module's parameters."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, view in layout.views(vector):
            parameters[name].copy_(view)


def frozen_hash(module: nn.Module) -> str | None:
    """SHA-256 of the frozen parameters, with their names and shapes; None if there are none.

    A trained vector is only usable with the same frozen parameters.
    """
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    digest = sha256()
    for name, parameter in frozen:
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else None


def read_buffers(module: nn.Module) -> Vectors:
    """A copy of a module's buffers, as one float32 vector under their reserved name; empty if it has none."""
    vector = _buffer_vector(module)
    return {_BUFFERS: vector} if vector.numel() else {}


def buffers_in(vectors: Mapping[str, Tensor]) -> Vectors:
    """The buffers among named vectors, under their reserved name; empty if there are none."""
    return {_BUFFERS: vectors[_BUFFERS]} if _BUFFERS in vectors else {}


def write_buffers(module: nn.Module, vectors: Mapping[str, Tensor]) -> None:
    """Copy the buffers among named vectors, if there are any, into a module's."""
    if _BUFFERS not in vectors:
        return
    vector, offset = vectors[_BUFFERS], 0
    for _, buffer in _buffers(module):
        buffer.copy_(vector[offset : offset + buffer.numel()].view(buffer.shape))
        offset += buffer.numel()


def _buffer_vector(module: nn.Module) -> Tensor:
    found = [buffer.detach().flatten().float() for _, buffer in _buffers(module)]
    return torch.cat(found) if found else torch.empty(0)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    persistent = module.state_dict(keep_vars=True).keys()
    return [(n, b) for n, b in module.named_buffers() if n in persistent and b.is_floating_point()]
