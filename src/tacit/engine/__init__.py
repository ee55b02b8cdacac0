"""Engines run clients. Which one runs a cohort changes how long it takes, and nothing else."""

from tacit.engine.contract import Engine, Order, Participant, Report, Tune, shards
from tacit.engine.inprocess import InProcess, InProcessSettings
from tacit.engine.kinds import AutoSettings, EngineSettings
from tacit.engine.local import Local
from tacit.engine.pool import Pool, PoolSettings
from tacit.engine.ray_settings import RaySettings
from tacit.engine.states import ClientStates, DirectoryStates
from tacit.engine.worker import ClientError, Job, Worker
from tacit.section import Section

ENGINES: dict[str, type[Section]] = {
    "auto": AutoSettings,
    "in-process": InProcessSettings,
    "pool": PoolSettings,
    "ray": RaySettings,
}
"""Every kind that a config's `engine.kind` may name: the section it is, which opens it."""

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
