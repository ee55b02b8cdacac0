"""Trackers hear what happens in a run; a run's own `metrics.jsonl` is written by one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tacit.errors import UserError

Record = dict[str, Any]
"""One round's metrics: plain values by name."""


class Tracker(Protocol):
    """A hook on a run. Any object with these methods can be passed to `tacit.run(trackers=[…])`."""

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        """The run begins (or goes on) at `round` of `rounds`."""

    def clients(self, done: int, cohort: int) -> None:
        """So many of the round's clients are done."""

    def round(self, record: Record) -> None:
        """A round has ended."""

    def close(self) -> None:
        """The run has ended, or stopped."""


class JsonLines:
    """Metrics as JSON lines, one a round. `size` lets a resumed run cut off rounds that it does again."""

    def __init__(self, file: Path, size: int) -> None:
        self._stream = file.open("ab")
        self._stream.truncate(size)
        self._stream.seek(size)

    @property
    def size(self) -> int:
        """Bytes written and on disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._stream.tell()

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        pass

    def clients(self, done: int, cohort: int) -> None:
        pass

    def round(self, record: Record) -> None:
        self._stream.write(json.dumps(record).encode() + b"\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class TensorBoard:
    """Every number of a round as a TensorBoard scalar, in the run's own folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "trackers: tensorboard is not installed; pip install 'tacit[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(folder))

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        pass

    def clients(self, done: int, cohort: int) -> None:
        pass

    def round(self, record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "round":
                self._writer.add_scalar(name, value, record["round"])

    def close(self) -> None:
        self._writer.close()


def read_metrics(file: Path) -> list[Record]:
    """All complete lines of a metrics file (a line cut short by a kill is left out)."""
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line]
