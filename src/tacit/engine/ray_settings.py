"""`engine: {kind: ray}`: which cluster, how many workers, and how long to wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tacit.engine.contract import Engine, Replay, free
from tacit.engine.device import DeviceSettings
from tacit.engine.kinds import Threads
from tacit.section import shaped

if TYPE_CHECKING:
    from tacit.engine.worker import Job
    from tacit.vector import Vectors

ADDRESS = shaped(r"auto|local|[^\s/]+:\d+", "auto, local, or a cluster's HOST:PORT")
STATE = shaped(
    r"auto|shared|carried|[a-z][a-z0-9+.-]*://\S+",
    "auto, shared, carried, or the URL of an object store, such as s3://bucket/folder",
)


@dataclass(frozen=True)
class Patience:
    """How long to wait, in seconds, and how often to try."""

    nobody: float = 600.0
    """Without any worker."""
    look: float = 10.0
    """Between two looks at what the cluster has room for."""
    settle: float = 30.0
    """At the start, for the other workers, once the first is there."""
    least: float = 300.0
    times: float = 20.0
    """A task may take so many times the longest one of its kind before, and `least` in any case."""
    losses: int = 3
    """Of one shard, or of workers that could not start, in a row."""


class RaySettings(DeviceSettings):
    """`engine: {kind: ray}`: clients shared out among the machines of a Ray cluster."""

    kind: Literal["ray"] = "ray"
    address: Annotated[str, ADDRESS] = "auto"
    """A cluster's HOST:PORT; `local` starts one for this run, on this machine; `auto` takes the one that
    RAY_ADDRESS names or that runs here, and else starts one.
    """
    workers: Annotated[int, Field(ge=1, le=10_000)] | Literal["auto"] = "auto"
    """`auto`: as many as the cluster has room for, also when it grows."""
    threads: Threads = 1
    """Of each worker, which is also how many processors it takes of the cluster's."""
    gpus: Annotated[float, Field(ge=0)] = 0
    """Of each worker, which sees no others; half of one is 0.5."""
    state: Annotated[str, STATE] = "auto"
    """Client state: in the run's folder, which every machine sees (`shared`), sent along with its work
    (`carried`), or in an object store (its URL). `auto`: one of the first two, as each machine can.
    """
    isa: Literal["same", "avx2", "any"] = "same"
    """Processors that differ change results in their last bits: refuse those (`same`), hold all of them to
    AVX2, or take any and say so.
    """
    insecure: bool = False
    """Use a cluster that lets in whoever reaches it."""
    wait: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without any worker after which the run is given up (saved, to be resumed)."""

    @property
    def states_url(self) -> str | None:
        """Where client states are, if that is neither the run's folder nor the driver."""
        return self.state if "://" in self.state else None

    def open(self, job: Job, message: Vectors, cohort: int, before_replay: Replay = free) -> Engine:
        from tacit.engine.ray import Ray

        return Ray(job, message, cohort, self, before_replay, Patience(nobody=self.wait))
