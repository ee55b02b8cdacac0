"""Engines run clients. Which one runs a cohort changes how long it takes, and nothing else."""

from typing import TYPE_CHECKING

from tacit.engine.contract import Engine, Order, Participant, Report, Tune, shards
from tacit.engine.kinds import AutoSettings, EngineSettings, InProcessSettings, PoolSettings
from tacit.engine.ray_settings import RaySettings
from tacit.engine.settings import Local
from tacit.lazy import lazily
from tacit.section import Section

if TYPE_CHECKING:
    from tacit.engine.inprocess import InProcess
    from tacit.engine.pool import Pool
    from tacit.engine.states import ClientStates, DirectoryStates
    from tacit.engine.worker import Job, Worker
    from tacit.errors import ClientError

ENGINES: dict[str, type[Section]] = {
    "auto": AutoSettings,
    "in-process": InProcessSettings,
    "pool": PoolSettings,
    "ray": RaySettings,
}
"""The settings class of each `engine.kind` in a config; it opens the engine."""

__all__ = [
    "ENGINES",
    "AutoSettings",
    "ClientError",
    "ClientStates",
    "DirectoryStates",
    "Engine",
    "EngineSettings",
    "InProcess",
    "InProcessSettings",
    "Job",
    "Local",
    "Order",
    "Participant",
    "Pool",
    "PoolSettings",
    "RaySettings",
    "Report",
    "Tune",
    "Worker",
    "shards",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tacit.engine.inprocess": "InProcess",
        "tacit.engine.pool": "Pool",
        "tacit.engine.states": "ClientStates DirectoryStates",
        "tacit.engine.worker": "Job Worker",
        "tacit.errors": "ClientError",
    },
    *__all__,
)
