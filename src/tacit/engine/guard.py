"""Between a client's code and the server: what the client is shown, and what is taken from it.

A client's code is somebody else's. It gets the round's message as vectors of the worker's own, never the
server's; after each client they are compared, bit for bit, with the server's, so a client that wrote to
them (in place, through `.data` or through `.numpy()`) is named, and neither the server nor the next client
ever sees what it wrote. What it sends is copied before it is measured: vectors that share memory with each
other or with the message, or that a thread of the client's still writes to, are bounded as they were at
that moment.

What this does not hold: code that searches the process for objects that it was not given (`gc`, `ctypes`).
Who does not trust the code itself needs a process for each client.

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

import numpy as np
import torch
from torch import Tensor

from tacit.vector import Vectors


class Shown:
    """A message as clients see it, beside the one that counts."""

    def __init__(self, original: Vectors, seen: Vectors) -> None:
        """`seen` holds the values of `original` in other memory."""
        self._original, self._seen = original, dict(seen)

    @classmethod
    def copy_of(cls, original: Vectors, into: Vectors | None = None) -> Shown:
        """A copy to show; `into` is memory from an earlier round, used again where it fits."""
        seen = {}
        for name, vector in original.items():
            room = (into or {}).get(name)
            fits = room is not None and room.shape == vector.shape and room.dtype == vector.dtype
            seen[name] = room.copy_(vector) if room is not None and fits else vector.detach().clone()
        return cls(original, seen)

    @property
    def message(self) -> Vectors:
        """For one client: handles of its own, so that reshaping or renaming one changes nothing here."""
        return {name: vector.detach() for name, vector in self._seen.items()}

    @property
    def memory(self) -> Vectors:
        """What `copy_of` may use again."""
        return self._seen

    def refuse_if_written(self) -> None:
        """Raise ValueError if a bit of a vector is not the server's; the vectors are mended first."""
        written = [name for name, vector in self._seen.items() if not _same(vector, self._original[name])]
        for name in written:
            self._seen[name].copy_(self._original[name])
        if written:
            raise ValueError(
                f"its code wrote to the message's {', '.join(map(repr, written))}, which is the server's; "
                "let it work on a clone"
            )


def received(upload: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Vectors:
    """Copies of what a client sent, if that is one plain vector of numbers for each of `sizes`."""
    if not isinstance(upload, Mapping):
        raise ValueError(f"the algorithm sent a {type(upload).__name__}; a client returns named vectors")
    found = {}
    for name, vector in upload.items():
        dense = isinstance(vector, Tensor) and vector.layout == torch.strided
        if not dense or not vector.dtype.is_floating_point:
            what = f"{vector.layout} {vector.dtype}" if isinstance(vector, Tensor) else type(vector).__name__
            raise ValueError(f"the algorithm sent {name!r} as {what}; uploads are dense vectors of floats")
        # A subclass could answer for its own size or norm; a copy in plain memory cannot.
        found[name] = vector.detach().as_subclass(Tensor)
    got = {name: vector.numel() for name, vector in found.items()}
    if got != dict(sizes):
        raise ValueError(
            f"the algorithm sent {got} but its uploads() declares {dict(sizes)}; make the two agree"
        )
    return {name: vector.reshape(-1).clone() for name, vector in found.items()}


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: numbers that are equal but not the same (0 and −0) differ, one NaN is itself."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.uint8
    one, other = a.view(bits), b.detach().view(bits)
    if one.device.type == "cpu" and other.device.type == "cpu":
        return np.array_equal(
            one.numpy(), other.numpy()
        )  # as quick as a copy; torch.equal takes six times that
    return torch.equal(one, other)
