"""Trackers hear what happens in a run; a run's own `metrics.jsonl` is written by one of them."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from tacit.errors import UserError
from tacit.federation.files import write_all
from tacit.reading import read_bytes
from tacit.system import BINARY

Record = dict[str, Any]
"""One round's metrics: plain values by name."""
METRICS = "metrics.jsonl"
"""The file of all rounds' records in a run's folder, a line each."""
CHECK = ', "check": "{:08x}"}}'
"""The end of a line of metrics: a CRC of the line without it, which no single flipped bit survives."""


class Tracker(Protocol):
    """A hook on a run, for `tacit.run(trackers=[…])`: any object with some of these methods.

    A class of one's own may inherit from this one, whose methods do nothing. A tracker that fails is told of
    once and not called again; it never ends a run.
    """

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        """The run begins, or goes on.

        Args:
            round: rounds that are done already.
            rounds: rounds in all.
            facts: plain values: `parameters` (trained), `frozen`, `clients`, and `notes` for a person.
        """
        return

    def clients(self, done: int, cohort: int) -> None:
        """Some of the round's clients are done. Not called where even the cohort's size is private.

        Args:
            done: so many clients.
            cohort: of so many.
        """
        return

    def round(self, record: Record) -> None:
        """A round has ended.

        Args:
            record: its metrics as plain values by name; the tracker's own copy.
        """
        return

    def close(self) -> None:
        """The run has ended, or stopped."""
        return


HOOKS = tuple(name for name in vars(Tracker) if not name.startswith("_"))
"""What a run calls of a tracker."""


def refuse_odd_trackers(trackers: Any) -> None:
    """Refuse what no run would ever call, so that nobody waits for what it would have told."""
    if not isinstance(trackers, list | tuple):
        raise UserError(f"trackers: give a list of them, such as trackers=[{type(trackers).__name__}(…)]")
    for tracker in trackers:
        if isinstance(tracker, type):
            name = tracker.__name__
            raise UserError(f"trackers: {name} is a class; pass an instance of it, trackers=[{name}(…)]")
        if not any(callable(getattr(tracker, hook, None)) for hook in HOOKS):
            raise UserError(
                f"trackers: this {type(tracker).__name__} has none of the methods that a run calls: "
                f"{', '.join(HOOKS)}"
            )


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
    """Metrics as JSON lines, one a round."""

    def __init__(self, file: Path, saved: Mapping[str, Any] | None = None) -> None:
        """Go on after what a checkpoint `saved` (see that method), cutting off rounds that are repeated.

        If the lines before are not those that were saved, the file is set aside as `*.damaged` and the sound
        ones are kept; `note` then says so.
        """
        self.note: str | None = None
        saved = saved or {"bytes": 0, "sha256": sha256().hexdigest()}
        content = read_bytes(file) if file.exists() else b""
        kept = content[: saved["bytes"]]
        self._hash = sha256(kept)
        if self._hash.hexdigest() != saved["sha256"]:
            lines = [line for line in kept.split(b"\n") if line and _read(line) is not None]
            kept = b"".join(line + b"\n" for line in lines)
            aside = file.with_name(f"{file.name}.damaged")
            if content:
                file.replace(aside)
            self._hash = sha256(kept)
            self.note = (
                f"{file} was damaged: the {len(lines)} sound lines are kept, all of it is in {aside.name}"
            )
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | BINARY, 0o600)
        try:
            if self.note:
                write_all(self._fd, kept)
            os.ftruncate(self._fd, len(kept))
            os.lseek(self._fd, len(kept), os.SEEK_SET)
        except OSError:
            self.close()
            raise
        self._size = len(kept)

    def saved(self) -> dict[str, Any]:
        """Length and hash of all that is written, on disk when this returns: for a checkpoint."""
        os.fsync(self._fd)
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        pass

    def clients(self, done: int, cohort: int) -> None:
        pass

    def round(self, record: Record) -> None:
        line = _line(record)
        try:
            write_all(self._fd, line)
        except OSError:  # no half a line: it may be tried again
            os.ftruncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
            raise
        self._hash.update(line)
        self._size += len(line)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_metrics(file: Path) -> list[Record]:
    """All complete lines of a metrics file (a line cut short by a kill is left out)."""
    records = []
    for number, record in enumerate(metrics_lines(file), start=1):
        if record is None:
            raise UserError(
                f"{file}: line {number} is damaged; `tacit verify {file.parent}` says what can be saved"
            )
        records.append(record)
    return records


def metrics_lines(file: Path) -> list[Record | None]:
    """The complete lines of a metrics file, with None for each damaged one."""
    if not file.exists():
        return []
    try:
        return [_read(line) for line in read_bytes(file).split(b"\n")[:-1]]
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


def _line(record: Record) -> bytes:
    body = json.dumps(record).encode()
    return body[:-1] + CHECK.format(crc32(body)).encode() + b"\n"


def _read(line: bytes) -> Record | None:
    """A line's record; None if it is damaged. Lines without a check are of an earlier version."""
    length = len(CHECK.format(0))
    body, check = line[:-length] + b"}", line[-length:]
    try:
        if check.startswith(b', "check": "'):
            whole = check == CHECK.format(crc32(body)).encode()
            record = json.loads(body) if whole else None
        else:
            record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "round" in record else None


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


def useless(metrics: Sequence[Record]) -> bool:
    """Whether the last model that was tested gives nothing that is a number.

    >>> useless([{"round": 1, "loss": 0.5}, {"round": 2, "loss": math.nan}, {"round": 3}])
    True
    """
    losses = [record["loss"] for record in metrics if isinstance(record.get("loss"), float)]
    return bool(losses) and math.isnan(losses[-1])


def troubles(metrics: Sequence[Record]) -> str | None:
    """The same over a whole run, for its end.

    >>> troubles([{"round": 1, "clients": 0}])
    'Nothing was learnt: chance drew no client in any round. Raise cohort, or rounds'
    """
    if useless(metrics):
        return (
            "Nothing was learnt: the model answers test records with what is not a number. Lower local.lr, "
            "or look for what makes it in the model"
        )
    if metrics and all(record.get("clients", 1) + len(record.get("skipped", ())) == 0 for record in metrics):
        return "Nothing was learnt: chance drew no client in any round. Raise cohort, or rounds"
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
    all_of_them = f" (in {none} of them all)" if none else ""
    how_often = f"In {len(bad)} of {drawn} rounds most clients failed{all_of_them}"
    return f"{how_often}; lower local.lr or set local.clip"
