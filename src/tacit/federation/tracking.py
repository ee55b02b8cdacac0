"""Trackers hear what happens in a run; a run's own `metrics.jsonl` is written by one of them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tacit.errors import UserError

Record = dict[str, Any]
"""One round's metrics: plain values by name."""


class Tracker(Protocol):
    """A hook on a run, for `tacit.run(trackers=[…])`: any object with some of these methods.

    A class of one's own may inherit from this one, whose methods do nothing. A tracker that fails is told of
    once and not called again; it never ends a run.
    """

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        """The run begins (or goes on) at `round` of `rounds`."""
        return

    def clients(self, done: int, cohort: int) -> None:
        """So many of the round's clients are done."""
        return

    def round(self, record: Record) -> None:
        """A round has ended."""
        return

    def close(self) -> None:
        """The run has ended, or stopped."""
        return


class Guarded:
    """A tracker that cannot end a run: its first error is a warning, and its last."""

    def __init__(self, tracker: object) -> None:
        self._tracker: object | None = tracker

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        self._call("start", round, rounds, facts)

    def clients(self, done: int, cohort: int) -> None:
        self._call("clients", done, cohort)

    def round(self, record: Record) -> None:
        self._call("round", dict(record))  # its own: what it does to a record is nobody else's business

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str, *arguments: Any) -> None:
        method = getattr(self._tracker, name, None)
        if method is None:
            return
        try:
            method(*arguments)
        except Exception as error:  # whatever it does, the run is worth more
            kind, self._tracker = type(self._tracker).__name__, None
            warnings.warn(
                f"tracker {kind} failed in {name} and is not called again; the run goes on "
                f"({type(error).__name__}: {error})",
                RuntimeWarning,
                stacklevel=2,
            )


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
    records: list[Record] = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
            int(records[-1]["round"])
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{file}, line {number}: no record of a round; restore the file, or start a new run"
            ) from None
    return records


def trouble(record: Record) -> str | None:
    """A sentence on a round in which most clients sent nothing of use, or None.

    >>> trouble({"round": 3, "clients": 0, "skipped": [4, 9]})
    'round 3: all 2 clients sent infinities or nothing that is a number, and count for nothing'
    >>> trouble({"round": 3, "clients": 2, "skipped": [4]})
    """
    failed, sound = len(record.get("skipped", ())), int(record.get("clients", 0))
    if failed <= sound:
        return None
    who = f"all {failed}" if not sound else f"{failed} of {failed + sound}"
    return (
        f"round {record['round']}: {who} clients sent infinities or nothing that is a number, and count for "
        "nothing"
    )


def troubles(metrics: Sequence[Record]) -> str | None:
    """The same over a whole run, for its end."""
    bad = [record for record in metrics if trouble(record)]
    if not bad:
        return None
    none = sum(not record.get("clients") for record in bad)
    drawn = sum(1 for record in metrics if record.get("clients") or record.get("skipped"))
    if none == drawn:
        return (
            f"Nothing was learnt: in all {drawn} rounds every client failed (infinities, or not a number"
            "), so the model is noise. Lower local.lr or set local.clip"
        )
    how_often = f"In {len(bad)} of {drawn} rounds most clients failed ({none} times all of them)"
    return f"{how_often}; lower local.lr or set local.clip"
