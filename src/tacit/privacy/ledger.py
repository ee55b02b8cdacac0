"""The ledger: what was spent, on disk before anything is released.

An append-only file of JSON lines. The first line says what the ledger is of; each further line is one
charge, and `Ledger.charge` returns only after the disk has it. ε is never stored: it is always a replay of
the charges.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
>>> cost = Part(PoissonGaussian(rate=0.1, noise=1.0))
>>> with Ledger.open(path, Header("client", 1e-5, cost)) as ledger:
...     for round in range(3):
...         ledger.charge(Charge(round, (cost,)))
...     print(f"{ledger.epsilon().value:.2f}")
2.09
>>> with Ledger.open(path, Header("client", 1e-5, cost)) as ledger:   # a resume repeats round 2
...     ledger.charge(Charge(2, (cost,)))
>>> print(path.read_text().splitlines()[1:])
['{"round":0,"last":2,"parts":[{"rate":0.1,"noise":1.0}]}', '{"round":2,"parts":[{"rate":0.1,"noise":1.0}]}']

Rules
-----
- A round that is played again after a crash is charged again: nobody knows what the first one let out.
- Equal charges of consecutive rounds are merged into one line when a ledger is opened (written anew beside
  the old file, synced, then renamed over it). During a run a charge is one short line at the end of the file.
- A last line that is cut off belongs to a charge that never returned, so nothing was released for it. It is
  counted all the same, as the most expensive charge the run could have made.
- Damage anywhere else is refused: then nobody can say what was spent.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tacit.errors import UserError
from tacit.privacy.accounting import Epsilon
from tacit.privacy.events import Event, FixedSizeGaussian, PoissonGaussian, Relation
from tacit.privacy.odometer import Odometer

_VERSION = 1


@dataclass(frozen=True)
class Part:
    """`steps` repetitions of an event, paid by `clients` (example level), or by everyone (None)."""

    event: Event
    steps: int = 1
    clients: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Charge:
    """What the rounds from `round` to `last` cost each."""

    round: int
    parts: tuple[Part, ...]
    last: int | None = None
    torn: bool = False
    """Stands for a line that was cut off."""

    @property
    def times(self) -> int:
        return 1 if self.last is None else self.last - self.round + 1


@dataclass(frozen=True)
class Header:
    """What a ledger is of, and `costliest`: no charge of this run costs any client more than this."""

    unit: str
    delta: float
    costliest: Part

    @property
    def relation(self) -> Relation:
        return self.costliest.event.relation


class Ledger:
    """An open ledger. Only one process can hold it; use it as a context manager or call `close`."""

    def __init__(self, fd: int, path: Path, header: Header, entries: list[Charge]) -> None:
        self._fd, self.path, self.header, self.entries = fd, path, header, entries
        self.odometer = replay(entries)

    @staticmethod
    def open(path: Path, header: Header) -> Ledger:
        """Open `path` for charges, mending a torn end and merging equal charges; or start it anew."""
        if not path.exists():
            return Ledger(_write(path, header, []), path, header, [])
        fd = os.open(path, os.O_RDWR)
        try:
            _lock(fd, path)
            found, entries = _parse(path, os.pread(fd, os.fstat(fd).st_size, 0), header.costliest)
            if (found.unit, found.relation) != (header.unit, header.relation):
                raise UserError(
                    f"{path} is of {found.unit}-level privacy ({found.relation}) and the run asks for "
                    f"{header.unit}-level ({header.relation}); start a new run for that"
                )
            header = replace(header, costliest=_dominating([found.costliest, header.costliest]))
            return Ledger(_write(path, header, entries), path, header, entries)
        finally:
            os.close(fd)

    @staticmethod
    def read(path: Path) -> tuple[Header, list[Charge]]:
        """Header and charges of a ledger, without opening it for writing."""
        if not path.exists():
            raise UserError(f"{path} does not exist: without a ledger nothing can be said about ε")
        return _parse(path, path.read_bytes(), None)

    def charge(self, charge: Charge) -> None:
        """Put a charge on disk. Only after this returns may anything that depends on its data be released."""
        line = _line(charge)
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError("the disk took only a part of the line")
            os.fsync(self._fd)
        except OSError as error:
            self.close()
            raise UserError(
                f"{self.path}: the charge could not be written ({error}) and nothing was released; "
                "make room on the disk, then resume"
            ) from error
        _tally(self.odometer, charge)
        _append(self.entries, charge)

    def epsilon(self, delta: float | None = None) -> Epsilon:
        """ε of everything charged so far (of the worst client, at example level)."""
        return self.odometer.worst(self.header.delta if delta is None else delta).epsilon

    def would_exceed(self, charge: Charge, budget: float, delta: float | None = None) -> bool:
        """Whether ε with `charge` added is not proved to stay ≤ `budget`; ask before the round."""
        expenses = [(part.event, part.steps * charge.times, part.clients) for part in charge.parts]
        return self.odometer.would_exceed(expenses, budget, self.header.delta if delta is None else delta)

    def close(self) -> None:
        """Let the file go; a later charge would fail."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def replay(entries: Iterable[Charge]) -> Odometer:
    """Everyone's totals after these charges."""
    odometer = Odometer()
    for entry in entries:
        _tally(odometer, entry)
    return odometer


def _tally(odometer: Odometer, charge: Charge) -> None:
    for part in charge.parts:
        odometer.add(part.event, part.steps * charge.times, part.clients)


def _append(entries: list[Charge], charge: Charge) -> None:
    """Add a charge, merged with the one before if it is the same for the next round."""
    if entries:
        before = entries[-1]
        last = before.round if before.last is None else before.last
        same = before.parts == charge.parts and not before.torn and not charge.torn
        if same and charge.round == last + 1:
            entries[-1] = replace(before, last=charge.round if charge.last is None else charge.last)
            return
    entries.append(charge)


def _dominating(parts: Iterable[Part]) -> Part:
    """One part for everyone that costs at least as much as any of `parts`, which share one relation."""
    parts = list(parts)
    steps = max(part.steps for part in parts)
    noise = min(part.event.noise for part in parts)
    most = max(parts, key=lambda part: part.event.rate).event
    return Part(replace(most, noise=noise), steps)


# --- the file -------------------------------------------------------------------------------------------


def _write(path: Path, header: Header, entries: Sequence[Charge]) -> int:
    """Write a whole ledger beside `path`, put it in place in one step, and return it open and locked."""
    beside = path.with_name(path.name + ".new")
    fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    _lock(fd, beside)
    first = {
        "ledger": _VERSION,
        "unit": header.unit,
        "delta": header.delta,
        "costliest": _plain(header.costliest),
    }
    content = _dump(first) + b"".join(_line(entry) for entry in entries)
    while content:
        content = content[os.write(fd, content) :]
    os.fsync(fd)
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name itself must survive a power cut
    os.close(folder)
    return fd


def _lock(fd: int, path: Path) -> None:
    """Refuse a second writer: each would miss the other's charges. The lock ends with its process.

    A record lock and not `flock`, since forked workers that outlive a killed run must not keep it.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(f"{path} is in use by another process; wait until that run has ended") from error
    if os.fstat(fd).st_ino != path.stat().st_ino:
        raise UserError(f"{path} was replaced by another process just now; wait until that run has ended")


def _parse(path: Path, content: bytes, costliest: Part | None) -> tuple[Header, list[Charge]]:
    first, *lines = content.split(b"\n")
    try:
        plain = json.loads(first)
        if plain["ledger"] != _VERSION:
            raise UserError(f"{path} was written by another version of this program; use that one to go on")
        header = Header(plain["unit"], plain["delta"], _part(plain["costliest"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: line 1 is not a ledger's; restore the file, or start a new run") from error
    entries: list[Charge] = []
    for number, line in enumerate(lines, start=2):
        final = number == len(lines) + 1
        if final and not line:
            break
        try:
            plain = json.loads(line)
            parts = tuple(_part(part) for part in plain["parts"])
            charge = Charge(plain["round"], parts, plain.get("last"), plain.get("torn", False))
        except (ValueError, KeyError, TypeError) as error:
            if not final:
                raise UserError(
                    f"{path}: line {number} is damaged, so nobody can say what was spent; restore the file"
                ) from error
            neighbours = [header.costliest, *([costliest] if costliest else [])]
            neighbours += entries[-1].parts if entries else ()
            following = (entries[-1].last or entries[-1].round) + 1 if entries else 0
            charge = Charge(following, (_dominating(neighbours),), torn=True)
        _append(entries, charge)
    return header, entries


def _line(charge: Charge) -> bytes:
    plain: dict[str, Any] = {"round": charge.round}
    if charge.last is not None:
        plain["last"] = charge.last
    if charge.torn:
        plain["torn"] = True
    return _dump(plain | {"parts": [_plain(part) for part in charge.parts]})


def _plain(part: Part) -> dict[str, Any]:
    plain = asdict(part.event)
    if part.steps != 1:
        plain["steps"] = part.steps
    if part.clients is not None:
        plain["clients"] = list(part.clients)
    return plain


def _part(plain: Mapping[str, Any]) -> Part:
    event: Event
    if "rate" in plain:
        event = PoissonGaussian(plain["rate"], plain["noise"])
    else:
        event = FixedSizeGaussian(plain["size"], plain["population"], plain["noise"])
    clients = plain.get("clients")
    return Part(event, plain.get("steps", 1), None if clients is None else tuple(clients))


def _dump(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"
