"""The round loop, its checkpoints and its trackers."""

from tacit.federation.result import Result
from tacit.federation.run import Federation
from tacit.federation.server import Settings
from tacit.federation.tracking import Record, Tracker, read_metrics

__all__ = [
    "Federation",
    "Record",
    "Result",
    "Settings",
    "Tracker",
    "read_metrics",
]
