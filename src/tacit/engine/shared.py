"""Memory that several processes see: named vectors, and objects whose large arrays are not copied.

Both are files in the system's shared-memory folder, mapped by every process and removed by their maker.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from tacit.vector import Vectors

ALIGN = 16
"""Floats between possible starts of a vector (64 bytes, a cache line)."""


def shared_folder() -> Path:
    """A fresh folder for shared files, in memory where the system offers that."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="tacit-", dir=memory if usable else None))


def map_vectors(file: Path, sizes: Mapping[str, int]) -> Vectors:
    """Named float32 vectors in a shared file, made (as zeros) if it is not there yet."""
    starts: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        starts[name] = end
        end += -(-size // ALIGN) * ALIGN
    whole = torch.from_file(str(file), shared=True, size=max(end, 1), dtype=torch.float32)
    return {name: whole[start : start + sizes[name]] for name, start in starts.items()}


def dump(thing: Any, file: Path) -> bytes:
    """Pickle an object; its large arrays go to `file`, from where every reader maps them.

    cloudpickle carries classes and functions of the user's own script by value, and the reader gets this
    process's import path, so a model or a data source need not be installed or registered anywhere.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = cloudpickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    lengths = []
    with file.open("wb") as stream:
        for buffer in buffers:
            raw = buffer.raw()
            lengths.append(raw.nbytes)
            stream.write(raw)
            stream.write(b"\0" * (-raw.nbytes % 64))
    return pickle.dumps((sys.path, body, lengths))


def load(data: bytes, file: Path) -> Any:
    """The object that `dump` wrote, on top of the shared arrays."""
    path, body, lengths = pickle.loads(data)
    sys.path[:] = path
    if not any(lengths):
        return pickle.loads(body, buffers=[b""] * len(lengths))
    with file.open("r+b") as stream:
        # Copy-on-write: torch warns about read-only memory, and a worker must never change another's data.
        mapped = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
    buffers, start = [], 0
    for length in lengths:
        buffers.append(mapped[start : start + length])
        start += -(-length // 64) * 64
    return pickle.loads(body, buffers=buffers)
