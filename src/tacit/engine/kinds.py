"""The `engine` section of a config: settings that can open an engine.

Each engine has one file, and one line in `tacit.engine.ENGINES`. An object of your own with an `open` of this
shape can be passed to `tacit.run(engine=…)`. Commands that run nothing also read settings, so the engine (and
with it torch) is imported only when it is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import Field

from tacit.engine.contract import Engine, Replay, free
from tacit.engine.device import Compute, DeviceSettings
from tacit.system import cores, starts_workers

if TYPE_CHECKING:
    from tacit.engine.worker import Job
    from tacit.vector import Vectors

Threads = Annotated[int, Field(ge=1, le=256)]
"""Threads of each worker: more may change a result in its last bits."""
Workers = Annotated[int, Field(ge=1, le=256)]


class EngineSettings(Protocol):
    """Settings of an engine; `kind` is its name in the registry."""

    def open(self, job: Job, message: Vectors, cohort: int, before_replay: Replay = free) -> Engine:
        """Start the engine for a run.

        Args:
            job: everything that workers need to train as any client.
            message: an example of what will be sent; its names and lengths are fixed for the run.
            cohort: the number of clients expected in a round.
            before_replay: called before any client trains a second time in a round.
        """


class AutoSettings(DeviceSettings):
    """`engine: {workers: auto}`: processes of this machine, or none where there is nothing to share out."""

    kind: Literal["auto"] = "auto"
    workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = "auto"
    """Processes; 0 runs clients in the main process; `auto` is one for each core, or for each accelerator."""
    threads: Threads = 1

    def open(self, job: Job, message: Vectors, cohort: int, before_replay: Replay = free) -> Engine:
        from tacit.engine.inprocess import InProcess
        from tacit.engine.pool import Pool

        computes = self.computes()
        most = min(share(computes), cohort)
        workers = most if self.workers == "auto" else self.workers
        if workers == 0 or (self.workers == "auto" and (workers == 1 or not starts_workers())):
            return InProcess(job, self.threads, computes[0])
        return Pool(job, message, workers, self.threads, before_replay, computes=computes)


class InProcessSettings(DeviceSettings):
    """`engine: {kind: in-process}`: clients one after the other, in the main process."""

    kind: Literal["in-process"] = "in-process"
    threads: Threads = 1

    def open(self, job: Job, message: Vectors, cohort: int, before_replay: Replay = free) -> Engine:
        from tacit.engine.inprocess import InProcess

        return InProcess(job, self.threads, self.one())


class PoolSettings(DeviceSettings):
    """`engine: {kind: pool}`: clients shared out among processes of this machine."""

    kind: Literal["pool"] = "pool"
    workers: Workers | Literal["auto"] = "auto"
    """Processes; `auto` is one for each core, or for each accelerator."""
    threads: Threads = 1

    def open(self, job: Job, message: Vectors, cohort: int, before_replay: Replay = free) -> Engine:
        from tacit.engine.pool import Pool

        computes = self.computes()
        workers = min(share(computes), max(cohort, 1)) if self.workers == "auto" else self.workers
        return Pool(job, message, workers, self.threads, before_replay, computes=computes)


def share(computes: Sequence[Compute]) -> int:
    """How many workers a machine has room for: one for each accelerator, else one for each core."""
    return cores() if all(compute.here for compute in computes) and len(computes) == 1 else len(computes)
