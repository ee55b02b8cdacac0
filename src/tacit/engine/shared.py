"""Memory that several processes see: named vectors, and objects whose large arrays are not copied.

Both are files in the system's shared-memory folder, mapped by every process and removed by their maker. The
frozen parameters of a model are such arrays: a large base is in memory once, however many workers there are.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from tacit.vector import Vectors

ALIGN = 16
"""Numbers between possible starts of a vector (64 bytes or more, a cache line)."""


def shared_folder(needed: int) -> Path:
    """A fresh folder for `needed` bytes of shared files, in memory where the system offers that much.

    Containers often have 64 MB of it, and to write beyond that would end the process.
    """
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1.2 * needed
    return Path(tempfile.mkdtemp(prefix="tacit-", dir=memory if usable else None))


def map_vectors(file: Path, sizes: Mapping[str, int], dtype: torch.dtype = torch.float32) -> Vectors:
    """Named vectors in a shared file, made (as zeros) if it is not there yet."""
    starts: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        starts[name] = end
        end += -(-size // ALIGN) * ALIGN
    whole = torch.from_file(str(file), shared=True, size=max(end, 1), dtype=dtype)
    return {name: whole[start : start + sizes[name]] for name, start in starts.items()}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Gives frozen parameters as buffers beside the pickle; notes which buffer is whose."""

    def __init__(self, stream: io.BytesIO) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.frozen: list[tuple[nn.Parameter, pickle.PickleBuffer]] = []
        super().__init__(stream, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is nn.Parameter and _is_frozen(thing):
            memory = thing.detach().contiguous().view(-1).view(torch.uint8).numpy()
            buffer = pickle.PickleBuffer(memory.data)
            self.frozen.append((thing, buffer))
            return _parameter, (buffer, thing.dtype, tuple(thing.shape))
        return super().reducer_override(thing)


def _is_frozen(parameter: nn.Parameter) -> bool:
    return not parameter.requires_grad and parameter.device.type == "cpu" and parameter.numel() > 0


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _parameter(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(_tensor(buffer, dtype, shape), requires_grad=False)


def dump(thing: Any, file: Path) -> bytes:
    """Pickle an object; its large arrays go to `file`, from where every reader maps them.

    cloudpickle carries classes and functions of the user's own script by value, and the reader gets this
    process's import path, so a model or a data source need not be installed or registered anywhere. The
    object's own frozen parameters move into the file too, which gives their memory back.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(thing)
    lengths = []
    with file.open("wb") as output:
        for buffer in pickler.buffers:
            raw = buffer.raw()
            lengths.append(raw.nbytes)
            output.write(raw)
            output.write(b"\0" * (-raw.nbytes % 64))
    mapped = {id(b): part for b, part in zip(pickler.buffers, _map(file, lengths), strict=True)}
    for parameter, buffer in pickler.frozen:
        parameter.data = _tensor(mapped[id(buffer)], parameter.dtype, tuple(parameter.shape))
    return pickle.dumps((sys.path, stream.getvalue(), lengths))


def load(data: bytes, file: Path) -> Any:
    """The object that `dump` wrote, on top of the shared arrays."""
    path, body, lengths = pickle.loads(data)
    sys.path[:] = path
    return pickle.loads(body, buffers=_map(file, lengths))


def _map(file: Path, lengths: list[int]) -> list[memoryview | bytes]:
    """The parts of a file of those lengths, each at a multiple of 64 bytes."""
    if not any(lengths):
        return [b""] * len(lengths)
    with file.open("r+b") as stream:
        # Copy-on-write: torch warns about read-only memory, and a worker must never change another's data.
        mapped = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
    parts: list[memoryview | bytes] = []
    start = 0
    for length in lengths:
        parts.append(mapped[start : start + length])
        start += -(-length // 64) * 64
    return parts
