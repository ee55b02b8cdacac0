"""Every number of a round as a TensorBoard scalar, in the run's own folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tacit.federation.trackers import numbers
from tacit.federation.tracking import Record, Tracker


class TensorBoard(Tracker):
    """Writes `RUN/tensorboard`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def round(self, record: Record) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["round"])

    def close(self) -> None:
        self._writer.close()
