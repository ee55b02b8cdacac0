"""The job as it is sent to a cluster: pickled once, with its large buffers sent once to each machine, and a
file by which a worker shows that it sees the run's folder.
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
"""Bytes. Each worker has its own copy of smaller buffers; larger ones are shared per machine, in groups of
this size.
"""
SEEN = ".seen-"
"""Prefix of the file by which a worker shows that it sees the run's folder."""


class SentJob:
    """A job on its way to a cluster's workers."""

    def __init__(self, job: Job) -> None:
        # A copy: buffers that are views of one vector would each be pickled with all of it. Parameters are
        # not copied: workers read them in place.
        model = deepcopy(job.model, {id(p): p for p in job.model.parameters()})
        states = job.states
        if isinstance(states, DirectoryStates):
            states = DirectoryStates(states.root.resolve())  # a worker's current folder differs
        self._body, self._large = shared.dump_apart(replace(job, model=model, states=states), LARGE)
        self.size = len(self._body) + sum(buffer.nbytes for buffer in self._large)
        """Bytes."""
        self._data: list[Any] | None = None

    def put(self, ray: Any) -> list[Any]:
        """Put the job into the object store: once, when the first worker has been found fit."""
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
        """Release the job from the object store."""
        self._data = None


class Token:
    """A file in the run's folder, by which a worker shows that it sees the folder."""

    def __init__(self, root: Path) -> None:
        root = root.resolve()
        self._secret = secrets.token_hex(16)
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            for left in root.parent.glob(f"{SEEN}*"):  # left by a killed run: only one run uses the folder
                left.unlink(missing_ok=True)
            self.path = root.parent / f"{SEEN}{self._secret}"
            self.path.write_text(self._secret, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{root.parent}: cannot be written ({error.strerror})") from None

    def seen(self, told: str | None) -> bool:
        """Whether what a worker reported is this file's content."""
        return told == self._secret

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
