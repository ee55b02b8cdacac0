"""The ledger: what was spent on which data, on disk before anything is released.

An append-only file of JSON lines. The first line identifies the ledger: the unit, δ, a fingerprint of the
protected data, and a unique number. Each further line is one charge, and `Ledger.charge` returns only after
the charge is on disk. ε is never stored; it is always a replay of the charges.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
>>> cost = Part(PoissonGaussian(rate=0.1, noise=1.0))
>>> header = Header("client", 1e-5, cost, data="1,000 people")
>>> with Ledger.open(path, header) as ledger:
...     for round in range(3):
...         ledger.charge(Charge(round, (cost,)))
...     print(f"{ledger.epsilon().value:.2f}")
2.09
>>> with Ledger.open(path, header) as ledger:   # a resume repeats round 2
...     ledger.charge(Charge(2, (cost,)))
>>> [charge.round for charge in Ledger.read(path).charges]
[0, 1, 2, 2]

Rules
-----
- A round that is repeated after a crash is charged again: nobody knows what the first attempt released.
- Every line holds the hash of the line before it, a random number and its own hash, over the exact bytes. A
  file with wrong keys or types is refused. So a changed or moved line is detected, and so is a missing line
  that others follow. A run's checkpoints and metrics show that lines are missing at the end
  (`federation.statements`), unless somebody truncates all of these files. Two copies of a ledger that were
  both continued can be distinguished, even if they have the same charges.
- A truncated last line belongs to a charge that never returned, so nothing was released for it. It is counted
  anyway, as the most expensive charge that the run could have made.
- The file is created atomically with its first line, only if there is none, and is locked before it is read
  or written. The lock ends with its process.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tacit import system
from tacit.errors import UserError
from tacit.privacy.accountants import Epsilon
from tacit.privacy.charges import Carried, Charge, Contents, Header, Part, Tally, add, replay
from tacit.privacy.events import PoissonGaussian
from tacit.privacy.ledger_lines import line_of, parse, plain_charge, plain_header
from tacit.reading import read_bytes

__all__ = [
    "Carried",
    "Charge",
    "Contents",
    "Header",
    "Ledger",
    "Part",
    "PoissonGaussian",
    "Tally",
    "replay",
]


class Ledger:
    """An open ledger. Only one process can hold it; use it as a context manager or call `close`."""

    def __init__(self, fd: int, contents: Contents) -> None:
        self._fd = fd
        self.path, self.header, self.charges, self._hashes = (
            contents.path,
            contents.header,
            contents.charges,
            contents.hashes,
        )
        self._count()

    def _count(self) -> None:
        self.totals, self.tally = replay(self.charges), Tally()
        for charge in self.charges:
            self.tally.add(charge)

    @staticmethod
    def open(path: Path, header: Header, carried: Sequence[Charge] = ()) -> Ledger:
        """Open `path` for charges, or create it with `header` and the charges `carried` over from other runs.

        Refuses a ledger with another unit, relation or data, and one that another process holds.
        """
        if not path.exists():
            return _created(path, header, carried)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | system.BINARY)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # data written to a device would be lost
                raise UserError(f"{path} is not a regular file; restore it")
            _lock(fd, path)
            content = os.pread(fd, os.fstat(fd).st_size, 0)
            found = parse(path, content)
            _refuse_other(path, found.header, header)
            ledger = Ledger(fd, found)
            if found.charges and found.charges[-1].truncated and not content.endswith(b"\n"):
                # Nothing was released for the line truncated here; its replacement is written first of all.
                stand_in = found.charges.pop()
                found.hashes.pop()
                os.ftruncate(fd, content.rfind(b"\n") + 1)
                ledger._count()
                ledger.charge(stand_in)
            return ledger
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def read(path: Path) -> Contents:
        """The contents of a ledger, without opening it for writing; every line is checked."""
        if not path.exists():
            raise UserError(f"{path} does not exist: without a ledger nothing can be said about ε")
        try:
            content = read_bytes(path)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}), so nobody can say what was spent"
            ) from None
        return parse(path, content)

    @property
    def contents(self) -> Contents:
        """The ledger's current contents."""
        return Contents(self.path, self.header, self.charges, self._hashes)

    def charge(self, charge: Charge) -> None:
        """Write a charge to disk. Nothing that depends on its data may be released before this returns."""
        line, digest = line_of(plain_charge(charge), self._hashes[-1])
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
        add(self.totals, charge)
        self.tally.add(charge)
        self.charges.append(charge)
        self._hashes.append(digest)

    def epsilon(self, delta: float | None = None) -> Epsilon:
        """ε of everything charged so far (of the worst client, at example level)."""
        return self.totals.worst(self.header.delta if delta is None else delta).epsilon

    def would_exceed(self, charge: Charge, budget: float, delta: float | None = None) -> bool:
        """True unless ε with `charge` added is proved to stay ≤ `budget`; call this before the round."""
        expenses = [(part.event, part.steps, part.clients) for part in charge.parts]
        return self.totals.would_exceed(expenses, budget, self.header.delta if delta is None else delta)

    def close(self) -> None:
        """Close the file; later charges fail."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _created(path: Path, header: Header, carried: Sequence[Charge]) -> Ledger:
    """Write a new, locked ledger beside `path`, and rename it to `path` unless that exists by now."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | system.BINARY, 0o600)
    try:
        _lock(fd, beside)
        line, digest = line_of(plain_header(header), "")
        lines, hashes = [line], [digest]
        for charge in carried:
            line, digest = line_of(plain_charge(charge), hashes[-1])
            lines.append(line)
            hashes.append(digest)
        content = b"".join(lines)
        while content:
            content = content[os.write(fd, content) :]
        os.fsync(fd)
        try:
            os.link(beside, path)
        except FileExistsError:
            raise UserError(f"{path} is in use by another process; wait until that run has ended") from None
        system.sync(path.parent)  # the new name itself must survive a power cut
        system.unlink_open(beside)
        return Ledger(fd, Contents(path, header, list(carried), hashes))
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def _lock(fd: int, path: Path) -> None:
    """Refuse a second writer: each would miss the other's charges. The lock ends with its process.

    A record lock and not `flock`, since forked workers that outlive a killed run must not keep it.
    """
    try:
        system.lock(fd)
    except OSError as error:
        raise UserError(f"{path} is in use by another process; wait until that run has ended") from error


def _refuse_other(path: Path, found: Header, wanted: Header) -> None:
    if (found.unit, found.relation) != (wanted.unit, wanted.relation):
        raise UserError(
            f"{path} is of {found.unit}-level privacy ({found.relation}) and the run asks for "
            f"{wanted.unit}-level ({wanted.relation}); start a new run for that"
        )
    if found.data != wanted.data:
        raise UserError(
            f"{path} protects other data than the run has now (clients or records were added, removed or "
            "changed), so its charges would belong to others; restore the data, or start a new run"
        )
    if found.simulation and not wanted.simulation:
        raise UserError(f"{path} is of a simulation, whose noise is known; start a new run for a guarantee")
    if (
        not found.costliest.event.dominates(wanted.costliest.event)
        or found.costliest.steps < wanted.costliest.steps
    ):
        raise UserError(
            f"{path}: the run now has rounds that cost more than this ledger was made for (less noise, "
            "larger batches or more steps); start a new run for that"
        )
