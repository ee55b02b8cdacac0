"""Client states as the server of a federation knows them: which versions exist, and a hash of each.

The states themselves are on the clients' own disks. The server's folder has a small file for each version
that a client reported, with the hash that it reported. An order names version and hash, so a client that lost
its state, or has another one, says so instead of training on from it. The run's name is kept here too:
clients use it to keep the states of different runs apart.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from torch import Tensor

from tacit.engine import DirectoryStates
from tacit.engine.states import NONE
from tacit.errors import UserError
from tacit.federation.files import write_atomically
from tacit.vector import Vectors

NAME = "name"


class RemoteStates(DirectoryStates):
    """Versions of states that clients hold."""

    @property
    def run(self) -> str:
        """The run's random name."""
        file = self.root / NAME
        if not file.exists():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(file, secrets.token_hex(16))
        return file.read_text(encoding="utf-8").strip()

    def note(self, client: int, version: str, digest: str) -> None:
        """Note that a client reported this version."""
        file = self.file(client, version)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(file, digest)

    def told(self, client: int, version: str) -> str | None:
        """The hash that a client reported for a version."""
        if version == NONE:
            return None
        try:
            return self.file(client, version).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{self.file(client, version)} cannot be read ({error.strerror}); restore it"
            ) from None

    def kept(self, client: int) -> tuple[str, ...]:
        """Versions that a checkpoint may still name."""
        folder = self.file(client, NONE).parent
        return tuple(sorted(file.stem for file in folder.glob("*.safetensors")))

    def load(self, client: int, version: str) -> Vectors:
        if version == NONE:
            return {}
        raise UserError(f"the state of client {client} is on its own machine")

    def save(self, client: int, version: str, state: Mapping[str, Tensor]) -> None:
        raise UserError(f"the state of client {client} is on its own machine")
