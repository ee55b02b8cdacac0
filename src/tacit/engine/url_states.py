"""Client state in an object store, by URL: for clusters whose machines do not share a folder.

`engine: {kind: ray, state: s3://bucket/runs}`. Every worker reads and writes the store directly, through
fsspec, with its machine's credentials. The store's library (s3fs, gcsfs, …) must be installed on all
machines. Each run has its own place under the URL, with a random name that is noted in a file of the run's
folder, so any engine can resume with these states. An object store writes an object whole or not at all, and
a written object stays; `file://` is as reliable as the file system behind it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from tacit.engine.states import NONE, STATES, ClientStates, DirectoryStates
from tacit.errors import UserError
from tacit.vector import Vectors

NOTE = f"{STATES}.url"
"""The file in a run's folder that names the place of its states."""


class UrlStates:
    """Client states under a URL: `URL/CLIENT/VERSION.safetensors`."""

    def __init__(self, url: str, note: Path | None = None) -> None:
        """`url` is the run's place itself. With a `note` file, a new place is made under `url` and noted
        there.
        """
        self._url, self._note = url, note

    def __reduce__(self) -> tuple[type[UrlStates], tuple[str]]:
        """A pickled copy has only the place; it opens its own connection."""
        return UrlStates, (self.url,)

    @property
    def url(self) -> str:
        """The run's own place."""
        if self._note is None:
            return self._url
        if not self._note.exists():
            self._note.parent.mkdir(parents=True, exist_ok=True)
            place = f"{self._url.rstrip('/')}/{secrets.token_hex(16)}\n"
            self._note.write_text(place, encoding="utf-8")
        return self._note.read_text(encoding="utf-8").strip()

    @cached_property
    def _store(self) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs

            system, root = url_to_fs(self.url)
        except Exception as error:  # the store's library may raise anything
            raise UserError(f"engine.state: {self.url} cannot be opened ({error})") from None
        return system, root

    def load(self, client: int, version: str) -> Vectors:
        if version == NONE:
            return {}
        with self._asked(f"the state of client {client} cannot be read"):
            vectors: Vectors = load(self._read(client, version))
        return vectors

    def save(self, client: int, version: str, state: Mapping[str, Tensor]) -> None:
        vectors = {name: v.detach().as_subclass(Tensor).clone().contiguous() for name, v in state.items()}
        with self._asked(f"the state of client {client} cannot be written"):
            system, _ = self._store
            where = self._file(client, version)
            system.makedirs(where.rpartition("/")[0], exist_ok=True)
            system.pipe_file(where, save(vectors))

    def digest(self, client: int, version: str) -> str:
        content: bytes | None = None
        with self._asked(f"the state of client {client} cannot be read"), suppress(FileNotFoundError):
            content = self._read(client, version)
        if content is None:
            raise ValueError(f"{self._file(client, version)} is missing")
        return blake2b(content, digest_size=16).hexdigest()

    def sync(self, versions: Mapping[int, str]) -> None:
        """Nothing to do: the store keeps what it has accepted."""

    def prune(self, client: int, keep: set[str]) -> None:
        kept = {f"{version}.safetensors" for version in keep}
        with self._asked(f"old states of client {client} cannot be removed"):
            system, root = self._store
            folder = f"{root}/{client}"
            if system.exists(folder):
                for file in system.ls(folder, detail=False, refresh=True):
                    if file.rpartition("/")[2] not in kept:
                        system.rm_file(file)

    def clear(self) -> None:
        with self._asked("the states cannot be removed"):
            system, root = self._store
            if system.exists(root):
                system.rm(root, recursive=True)

    @contextmanager
    def _asked(self, failed: str) -> Iterator[None]:
        """Turn any error of the store's library into one that says what failed, and what to do."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"engine.state: {self.url}: {failed} ({error}); mend that, then resume") from None

    def _read(self, client: int, version: str) -> bytes:
        system, _ = self._store
        content: bytes = system.cat_file(self._file(client, version))
        return content

    def _file(self, client: int, version: str) -> str:
        return f"{self._store[1]}/{client}/{version}.safetensors"


def states_of(folder: Path, url: str | None = None) -> ClientStates:
    """Where the clients of a run keep their states: in the run's folder, or at the URL noted there; `url` for
    a new run.
    """
    note = folder / NOTE
    if note.exists() or (url is not None and not (folder / STATES).exists()):
        return UrlStates(url or "", note)
    return DirectoryStates(folder / STATES)
