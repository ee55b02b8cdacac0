"""What clients remember between rounds (control variates, personal heads), one file for each version.

A new version never overwrites the one before it: the round loop decides which version counts, and records
that in its checkpoint. So a run killed at any moment resumes with exactly the memories of its checkpoint.
On a real client this store is the client's own disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file

from tacit.vector import Vectors

NONE = -1
"""The version of a client that has no memory yet."""


class MemoryStore:
    """Client memories under a directory: `CLIENT // 1000 / CLIENT / ROUND.safetensors`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, client: int, version: int) -> Vectors:
        """The memory a client wrote in round `version`; empty for a client that was never drawn."""
        if version == NONE:
            return {}
        vectors: Vectors = load_file(self._folder(client) / f"{version}.safetensors")
        return vectors

    def save(self, client: int, version: int, memory: Vectors) -> None:
        """Write a version atomically."""
        folder = self._folder(client)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{version}.partial"
        save_file({name: v.contiguous() for name, v in memory.items()}, partial)
        partial.replace(folder / f"{version}.safetensors")

    def sync(self, versions: Mapping[int, int]) -> None:
        """Force these versions to the disk: a checkpoint is about to rely on them."""
        for client, version in versions.items():
            handle = os.open(self._folder(client) / f"{version}.safetensors", os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def prune(self, client: int, keep: set[int]) -> None:
        """Remove all versions of a client except those that a checkpoint still names."""
        for file in self._folder(client).glob("*.safetensors"):
            if int(file.stem) not in keep:
                file.unlink()

    def clear(self) -> None:
        """Forget everything (a run that starts again from nothing)."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _folder(self, client: int) -> Path:
        return self.root / str(client // 1000) / str(client)
