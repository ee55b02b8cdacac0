"""A guard between a client's code and the server: what the client sees, and what is accepted from it.

A client's code comes from somebody else. It gets the round's message as vectors that belong to the worker,
never the server's own. After each client these are compared bit for bit with the server's. A client that
wrote to them (in place, through `.data` or through `.numpy()`) is named, and neither the server nor the next
client ever sees what it wrote. What the client sends is copied before it is measured. Vectors that share
memory with each other or with the message, or that one of the client's threads still writes to, are therefore
bounded as they were at that moment.

This does not stop code that searches the process for objects that it was not given (`gc`, `ctypes`). If you
do not trust the code itself, run each client in a process of its own.

>>> server = {"theta": torch.zeros(3)}
>>> shown = Shown.copy_of(server)
>>> shown.message["theta"].data.add_(100)
tensor([100., 100., 100.])
>>> shown.refuse_if_written()
Traceback (most recent call last):
ValueError: its code wrote to the message's 'theta', which is the server's; let it work on a clone
>>> server["theta"], shown.message["theta"]
(tensor([0., 0., 0.]), tensor([0., 0., 0.]))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.vector import Vectors


class Shown:
    """A message as clients see it, next to the server's original."""

    def __init__(self, original: Vectors, seen: Vectors) -> None:
        """`seen` holds the values of `original` in other memory."""
        self._original, self._seen = original, dict(seen)

    @classmethod
    def copy_of(cls, original: Vectors, into: Vectors | None = None) -> Shown:
        """A copy to show to clients; `into` is memory from an earlier round, reused if it fits."""
        seen = {}
        for name, vector in original.items():
            room = (into or {}).get(name)
            fits = room is not None and room.shape == vector.shape and room.dtype == vector.dtype
            seen[name] = room.copy_(vector) if room is not None and fits else vector.detach().clone()
        return cls(original, seen)

    @property
    def message(self) -> Vectors:
        """The message for one client, as new handles: reshaping or renaming one changes nothing here."""
        return {name: vector.detach() for name, vector in self._seen.items()}

    @property
    def memory(self) -> Vectors:
        """Memory that `copy_of` may reuse."""
        return self._seen

    def refuse_if_written(self) -> None:
        """Raise ValueError if any bit of a vector differs from the server's, after restoring the vectors."""
        written = [name for name, vector in self._seen.items() if not _same(vector, self._original[name])]
        for name in written:
            self._seen[name].copy_(self._original[name])
        if written:
            raise ValueError(
                f"its code wrote to the message's {', '.join(map(repr, written))}, which is the server's; "
                "let it work on a clone"
            )


def received(upload: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Vectors:
    """Copies of what a client sent; refused unless it is one plain numeric vector for each of `sizes`."""
    if not isinstance(upload, Mapping):
        raise ValueError(f"the algorithm sent a {type(upload).__name__}; a client returns named vectors")
    found = {}
    for name, vector in upload.items():
        dense = isinstance(vector, Tensor) and vector.layout == torch.strided
        if not dense or not vector.dtype.is_floating_point:
            what = f"{vector.layout} {vector.dtype}" if isinstance(vector, Tensor) else type(vector).__name__
            raise ValueError(f"the algorithm sent {name!r} as {what}; uploads are dense vectors of floats")
        # A tensor subclass could lie about its size or norm; a copy in plain memory cannot.
        found[name] = vector.detach().as_subclass(Tensor)
    got = {name: vector.numel() for name, vector in found.items()}
    if got != dict(sizes):
        raise ValueError(
            f"the algorithm sent {got} but its uploads() declares {dict(sizes)}; make the two agree"
        )
    return {name: vector.reshape(-1).clone() for name, vector in found.items()}


def refuse_no_state(state: Any) -> None:
    """Raise ValueError unless this is what a client can keep: a dense tensor by each name, or nothing."""
    if state is None:
        return
    if not isinstance(state, Mapping):
        raise ValueError(f"the algorithm keeps a {type(state).__name__}; a client keeps tensors by name")
    for name, kept in state.items():
        if not isinstance(kept, Tensor) or kept.layout != torch.strided:
            what = f"a {kept.layout} tensor" if isinstance(kept, Tensor) else f"a {type(kept).__name__}"
            raise ValueError(
                f"the algorithm keeps {name!r} as {what}; a client keeps dense tensors, such as "
                "torch.tensor(3)"
            )


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit: equal numbers with different bits (0 and −0) differ, and a NaN equals itself."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.uint8
    one, other = a.view(bits), b.detach().view(bits)
    if one.device.type == "cpu" and other.device.type == "cpu":
        return np.array_equal(
            one.numpy(), other.numpy()
        )  # as fast as a copy; torch.equal takes six times as long
    return torch.equal(one, other)
