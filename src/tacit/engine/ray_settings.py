"""`engine: {kind: ray}`: which cluster, and how its machines are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tacit.engine.contract import Engine, Replay, free
from tacit.engine.device import DeviceSettings
from tacit.engine.kinds import Threads

if TYPE_CHECKING:
    from tacit.engine.worker import Job
    from tacit.vector import Vectors


class RaySettings(DeviceSettings):
    """`engine: {kind: ray}`: clients shared out among the machines of a Ray cluster."""

    kind: Literal["ray"] = "ray"
    address: Annotated[str, Field(pattern=r"^(auto|local|[^\s/]+:\d+)$")] = "auto"
    """A cluster's HOST:PORT; `local` starts one for this run, on this machine; `auto` takes the one that
    RAY_ADDRESS names or that runs here, and else starts one.
    """
    workers: Annotated[int, Field(ge=1, le=10_000)] | Literal["auto"] = "auto"
    """`auto`: as many as the cluster has room for, also when it grows."""
    threads: Threads = 1
    """Of each worker, which is also how many processors it takes of the cluster's."""
    gpus: Annotated[float, Field(ge=0)] = 0
    """Of each worker, which sees no others; half of one is 0.5."""
    state: (
        Literal["auto", "shared", "carried"] | Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://\S+$")]
    ) = "auto"
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
        from tacit.engine.ray import Patience, Ray

        return Ray(job, message, cohort, self, before_replay, Patience(nobody=self.wait))
