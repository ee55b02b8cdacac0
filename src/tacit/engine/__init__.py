"""Engines run clients. Which one runs a cohort changes how long it takes, and nothing else."""

from tacit.engine.contract import Engine, Order, Report, Tune, Visit, shards
from tacit.engine.inprocess import InProcess
from tacit.engine.local import Local
from tacit.engine.memory import MemoryStore
from tacit.engine.pool import Pool
from tacit.engine.worker import BUFFERS, ClientError, Job, Worker

__all__ = [
    "BUFFERS",
    "ClientError",
    "Engine",
    "InProcess",
    "Job",
    "Local",
    "MemoryStore",
    "Order",
    "Pool",
    "Report",
    "Tune",
    "Visit",
    "Worker",
    "shards",
]
