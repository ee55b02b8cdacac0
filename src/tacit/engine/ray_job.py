"""The job as it is sent to a cluster: pickled once, its large buffers once to each machine, and a file by
which a worker shows that it sees the run's folder.
"""

from __future__ import annotations

import secrets
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from tacit.engine import shared
from tacit.engine.ray_worker import joined
from tacit.engine.states import DirectoryStates
from tacit.engine.worker import Job
from tacit.errors import UserError

LARGE, GROUP = 1 << 20, 1 << 26
"""Bytes: smaller buffers are each worker's own; larger ones are shared by machine, in groups of this size."""
SEEN = ".seen-"
"""How the file's name begins by which a worker shows that it sees the run's folder."""


class SentJob:
    """A job on its way to a cluster's workers."""

    def __init__(self, job: Job) -> None:
        # A copy: buffers that are views of one vector would each be pickled with all of it. Parameters are
        # not: they are read where they are.
        model = deepcopy(job.model, {id(p): p for p in job.model.parameters()})
        states = job.states
        if isinstance(states, DirectoryStates):
            states = DirectoryStates(states.root.resolve())  # a worker has another current folder
        self._body, self._large = shared.dump_apart(replace(job, model=model, states=states), LARGE)
        self.size = len(self._body) + sum(buffer.nbytes for buffer in self._large)
        """Bytes."""
        self._data: list[Any] | None = None

    def put(self, ray: Any) -> list[Any]:
        """The job in the object store: once, when the first worker has been found fit to have it."""
        if self._data is None:
            groups: list[list[memoryview]] = []
            for buffer in self._large:
                if not groups or sum(b.nbytes for b in groups[-1]) + buffer.nbytes > GROUP:
                    groups.append([])
                groups[-1].append(buffer)
            lengths = [[buffer.nbytes for buffer in group] for group in groups]
            self._data = [ray.put((shared.import_path(), self._body, lengths))]
            self._data += [ray.put(joined(group)) for group in groups]
            self._large = []
        return self._data

    def forget(self) -> None:
        """Let go of what is in the object store."""
        self._data = None


class Token:
    """A file in the run's folder, by which a worker shows that it sees the folder."""

    def __init__(self, root: Path) -> None:
        root = root.resolve()
        self._secret = secrets.token_hex(16)
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            for left in root.parent.glob(f"{SEEN}*"):  # of a run that was killed: nobody else has the folder
                left.unlink(missing_ok=True)
            self.path = root.parent / f"{SEEN}{self._secret}"
            self.path.write_text(self._secret, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{root.parent}: cannot be written ({error.strerror})") from None

    def seen(self, told: str | None) -> bool:
        """Whether a worker has read it."""
        return told == self._secret

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
