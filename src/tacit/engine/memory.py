"""What clients remember between rounds (control variates, personal heads), one file for each version.

A new version never overwrites the one before it: the round loop decides which version counts, and records
that, with the file's hash, in its checkpoint. So a run killed at any moment resumes with exactly the
memories of its checkpoint. On a real client this store is the client's own disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tacit.errors import UserError
from tacit.reading import read_bytes
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
        file = self.file(client, version)
        try:
            vectors: Vectors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: this client's state cannot be read ({error}); restore it") from None
        return vectors

    def save(self, client: int, version: int, memory: Mapping[str, Tensor]) -> None:
        """Write a version atomically."""
        folder = self.file(client, version).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = folder / f"{version}.partial"
        # Copies: safetensors refuses vectors that share memory, and a client may still hold on to them.
        vectors = {name: v.detach().as_subclass(Tensor).clone().contiguous() for name, v in memory.items()}
        try:
            save_file(vectors, partial)
            partial.chmod(0o600)  # it is made of one client's records
            partial.replace(folder / f"{version}.safetensors")
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{folder}: the client's state could not be written ({error}); make room, then resume"
            ) from None

    def digest(self, client: int, version: int) -> str:
        """A hash of a version's file, which must be there."""
        return blake2b(read_bytes(self.file(client, version)), digest_size=16).hexdigest()

    def sync(self, versions: Mapping[int, int]) -> None:
        """Force these versions, and their names, to the disk: a checkpoint is about to rely on them."""
        folders: set[Path] = {self.root} if versions else set()
        for client, version in versions.items():
            file = self.file(client, version)
            _sync(file)
            folders |= {file.parent, file.parent.parent}
        for folder in folders:
            _sync(folder)

    def prune(self, client: int, keep: set[int]) -> None:
        """Remove all versions of a client except those that a checkpoint still names."""
        for file in self.file(client, 0).parent.glob("*"):
            if not (file.stem.isdecimal() and int(file.stem) in keep and file.suffix == ".safetensors"):
                file.unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget everything (a run that starts again from nothing)."""
        shutil.rmtree(self.root, ignore_errors=True)

    def file(self, client: int, version: int) -> Path:
        """Where a client's memory of a round is."""
        return self.root / str(client // 1000) / str(client) / f"{version}.safetensors"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
