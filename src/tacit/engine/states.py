"""Client state: what clients keep between rounds (control variates, personal heads), stored in versions.

A version is named by the round, the attempt at that round, and the repetition of the client's work in that
attempt. A new version never overwrites another: the round loop decides which one counts, and records it, with
its hash, in its checkpoint. So a run killed at any moment resumes with exactly the states of its checkpoint.
A worker that was given up for lost, but still writes, writes to a version that nobody will name. On a real
client the store is the client's own disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tacit.engine.contract import NONE as NONE
from tacit.errors import UserError
from tacit.reading import read_bytes
from tacit.system import sync
from tacit.vector import Vectors

STATES = "client-states"
"""The subfolder of a run that holds client states."""


def version(round: int, attempt: int, replay: int) -> str:
    """The name of the version that a client writes in one repetition of one attempt at a round."""
    return f"{round}-{attempt}-{replay}"


class ClientStates(Protocol):
    """Where client state is kept. Workers load and save; the round loop calls everything else."""

    def load(self, client: int, version: str) -> Vectors:
        """A version of a client's state.

        Args:
            client: its number.
            version: which one; empty vectors for `NONE`.

        Raises:
            UserError: it cannot be read.
        """

    def save(self, client: int, version: str, state: Mapping[str, Tensor]) -> None:
        """Keep a version, whole or not at all.

        Args:
            client: its number.
            version: a name that was not used before.
            state: named vectors.

        Raises:
            UserError: it cannot be written.
        """

    def digest(self, client: int, version: str) -> str:
        """A hash of a version.

        Args:
            client: its number.
            version: which one.

        Raises:
            ValueError: it is not there.
        """

    def sync(self, versions: Mapping[int, str]) -> None:
        """Return once these versions would survive a power cut: a checkpoint is about to rely on them.

        Args:
            versions: the version of each client.
        """

    def prune(self, client: int, keep: set[str]) -> None:
        """Remove all versions of a client but some.

        Args:
            client: its number.
            keep: those that a checkpoint still names.
        """

    def clear(self) -> None:
        """Remove everything (for a run that starts from scratch)."""


class DirectoryStates:
    """Client states under a directory: `CLIENT // 1000 / CLIENT / VERSION.safetensors`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, client: int, version: str) -> Vectors:
        if version == NONE:
            return {}
        file = self.file(client, version)
        try:
            vectors: Vectors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: this client's state cannot be read ({error}); restore it") from None
        return vectors

    def save(self, client: int, version: str, state: Mapping[str, Tensor]) -> None:
        folder = self.file(client, version).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = folder / f"{version}.partial"
        # Copies: safetensors refuses vectors that share memory, and a client may still hold references to
        # them.
        vectors = {name: v.detach().as_subclass(Tensor).clone().contiguous() for name, v in state.items()}
        try:
            save_file(vectors, partial)
            partial.chmod(0o600)  # it derives from one client's records
            partial.replace(folder / f"{version}.safetensors")
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{folder}: the client's state could not be written ({error}); make room, then resume"
            ) from None

    def digest(self, client: int, version: str) -> str:
        file = self.file(client, version)
        if not file.exists():
            raise ValueError(f"{file} is missing")
        return blake2b(read_bytes(file), digest_size=16).hexdigest()

    def sync(self, versions: Mapping[int, str]) -> None:
        folders: set[Path] = {self.root} if versions else set()
        for client, version in versions.items():
            file = self.file(client, version)
            sync(file)
            folders |= {file.parent, file.parent.parent}
        for folder in folders:
            sync(folder)

    def prune(self, client: int, keep: set[str]) -> None:
        kept = {f"{version}.safetensors" for version in keep}
        for file in self.file(client, NONE).parent.glob("*"):
            if file.name not in kept:
                file.unlink(missing_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def file(self, client: int, version: str) -> Path:
        """Where a version of a client's state is."""
        return self.root / str(client // 1000) / str(client) / f"{version}.safetensors"
