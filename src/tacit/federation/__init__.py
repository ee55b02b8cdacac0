"""The round loop, its checkpoints and its trackers."""

from typing import TYPE_CHECKING

from tacit.lazy import lazily

if TYPE_CHECKING:
    from tacit.federation.result import Result
    from tacit.federation.run import Federation
    from tacit.federation.settings import Settings
    from tacit.federation.tracking import Record, Tracker, read_metrics

__all__ = [
    "Federation",
    "Record",
    "Result",
    "Settings",
    "Tracker",
    "read_metrics",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tacit.federation.result": "Result",
        "tacit.federation.run": "Federation",
        "tacit.federation.settings": "Settings",
        "tacit.federation.tracking": "Record Tracker read_metrics",
    },
)
