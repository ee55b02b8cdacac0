"""Memory that several processes share: named vectors, and objects whose large arrays are not copied.

Shared memory has no name in any folder: it is a file descriptor that workers inherit. Nothing is left of it
after the last process that maps it has ended, however that process ended. The frozen parameters of a model
are such arrays, so a large base is in memory once, however many workers there are.

>>> place = Place.make("example", vectors_size({"theta": 3}))
>>> vectors = map_vectors(place, {"theta": 3})
>>> _ = vectors["theta"].fill_(7)
>>> seen = map_vectors(place, {"theta": 3}, private=True)["theta"]   # as a worker shows it to clients
>>> _ = seen.add_(100)
>>> seen.tolist(), vectors["theta"].tolist()
([107.0, 107.0, 107.0], [7.0, 7.0, 7.0])
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from tacit.vector import Vectors

ALIGN = 16
"""Numbers between possible starts of a vector (64 bytes or more, a cache line)."""


@dataclass
class Place:
    """Shared memory: an open file without a name."""

    fd: int
    size: int

    @staticmethod
    def make(label: str, size: int) -> Place:
        """`size` bytes of zeros; `label` only shows up in a listing of the process's open files."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(f"tacit-{label}", os.MFD_CLOEXEC)
        else:  # other systems: a file that is unlinked while it is still empty
            handle, name = tempfile.mkstemp(prefix="tacit-")
            Path(name).unlink()
            fd = handle
        size = max(size, mmap.PAGESIZE)
        os.truncate(fd, size)
        return Place(fd, size)

    def map(self, private: bool = False) -> mmap.mmap:
        """Its bytes. `private`: pages written here are this mapping's alone; the others still follow the
        shared memory.
        """
        return mmap.mmap(self.fd, self.size, access=mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE)

    def close(self) -> None:
        """Close the descriptor; existing mappings stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def vectors_size(sizes: Mapping[str, int], dtype: torch.dtype = torch.float32) -> int:
    """Bytes that vectors of these lengths take in a place."""
    return dtype.itemsize * sum(_aligned(size) for size in sizes.values())


def map_vectors(
    place: Place, sizes: Mapping[str, int], dtype: torch.dtype = torch.float32, private: bool = False
) -> Vectors:
    """Named vectors in a place, the same for everyone who maps them with these sizes."""
    whole = torch.frombuffer(place.map(private), dtype=dtype)
    vectors, start = {}, 0
    for name, size in sizes.items():
        vectors[name] = whole[start : start + size]
        start += _aligned(size)
    return vectors


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles parameters as out-of-band buffers, where torch would copy them several times, and records which
    buffer belongs to which frozen parameter.
    """

    def __init__(self, stream: io.BytesIO, least: int = 0) -> None:
        """`least`: a buffer with fewer bytes stays in the pickle, so its reader has a copy of its own."""
        self.buffers: list[pickle.PickleBuffer] = []
        self.frozen: list[tuple[nn.Parameter, pickle.PickleBuffer]] = []

        def keep(buffer: pickle.PickleBuffer) -> bool:
            inside = buffer.raw().nbytes < least
            if not inside:
                self.buffers.append(buffer)
            return inside

        super().__init__(stream, protocol=5, buffer_callback=keep)

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is nn.Parameter and thing.device.type == "cpu" and thing.numel() > 0:
            memory = thing.detach().contiguous().view(-1).view(torch.uint8).numpy()
            buffer = pickle.PickleBuffer(memory.data)
            if not thing.requires_grad:
                self.frozen.append((thing, buffer))
            return _parameter, (buffer, thing.dtype, tuple(thing.shape), thing.requires_grad)
        return super().reducer_override(thing)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _parameter(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], trained: bool) -> nn.Parameter:
    return nn.Parameter(_tensor(buffer, dtype, shape), requires_grad=trained)


def dump(thing: Any) -> tuple[bytes, Place]:
    """Pickle an object; its large arrays go into shared memory, from which every reader maps them.

    cloudpickle carries classes and functions of the user's own script by value, and the reader gets this
    process's import path, so a model or a data source need not be installed or registered anywhere. The
    object's own frozen parameters move into shared memory too, which gives their memory back.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(thing)
    raws = [buffer.raw() for buffer in pickler.buffers]
    lengths = [raw.nbytes for raw in raws]
    place = Place.make("job", sum(-(-length // 64) * 64 for length in lengths))
    try:
        with place.map() as memory:
            start = 0
            for raw in raws:
                memory[start : start + raw.nbytes] = raw
                start += -(-raw.nbytes // 64) * 64
        mapped = {id(b): part for b, part in zip(pickler.buffers, _map(place, lengths), strict=True)}
        for parameter, buffer in pickler.frozen:
            parameter.data = _tensor(mapped[id(buffer)], parameter.dtype, tuple(parameter.shape))
        return pickle.dumps((import_path(), stream.getvalue(), lengths)), place
    except BaseException:
        place.close()
        raise


def dump_apart(thing: Any, least: int) -> tuple[bytes, list[memoryview]]:
    """Pickle an object, with its buffers of `least` bytes or more returned apart, as they lie in memory.

    >>> body, large = dump_apart({"a": torch.arange(3).numpy(), "b": torch.arange(300).numpy()}, 1000)
    >>> len(large), load_apart(body, large)["b"][-1].item()
    (1, 299)
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, least)
    pickler.dump(thing)
    return stream.getvalue(), [buffer.raw() for buffer in pickler.buffers]


def load_apart(body: bytes, large: list[memoryview]) -> Any:
    """The object that `dump_apart` wrote, on top of its large buffers."""
    return pickle.loads(body, buffers=large)


def import_path() -> list[str]:
    """This process's import path. The current folder comes last, where it cannot shadow a known module."""
    here = str(Path.cwd())
    named = [entry for entry in sys.path if entry not in ("", here)]
    return named if len(named) == len(sys.path) else [*named, here]


def load(data: bytes, place: Place) -> Any:
    """The object that `dump` wrote, on top of the shared arrays."""
    path, body, lengths = pickle.loads(data)
    sys.path[:] = path
    return pickle.loads(body, buffers=_map(place, lengths))


def _map(place: Place, lengths: list[int]) -> list[memoryview | bytes]:
    """The parts of a place of those lengths, each at a multiple of 64 bytes."""
    if not any(lengths):
        return [b""] * len(lengths)
    # A private mapping: torch warns about read-only memory, and a worker must never change another's data.
    mapped = memoryview(place.map(private=True))
    parts: list[memoryview | bytes] = []
    start = 0
    for length in lengths:
        parts.append(mapped[start : start + length])
        start += -(-length // 64) * 64
    return parts
