"""The round loop, its checkpoints and its trackers."""

from tacit.federation.loop import Federation, Result, Settings
from tacit.federation.tracking import Record, TensorBoard, Tracker, read_metrics

__all__ = [
    "Federation",
    "Record",
    "Result",
    "Settings",
    "TensorBoard",
    "Tracker",
    "read_metrics",
]
