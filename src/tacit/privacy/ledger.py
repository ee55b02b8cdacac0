"""The ledger: what was spent on which data, on disk before anything is released.

An append-only file of JSON lines. The first line says what the ledger is of: the unit, δ, a fingerprint of
the data that its charges protect, and a number that no other ledger has. Each further line is one charge,
and `Ledger.charge` returns only after the disk has it. ε is never stored: it is always a replay of the
charges.

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
- A round that is repeated after a crash is charged again: nobody knows what the first one let out.
- Every line holds the hash of the line before it, a random number and its own hash, over exactly the bytes
  that are there; keys and types are as they must be or the file is refused. So a changed, missing or moved
  line is noticed, and two copies of a ledger that both went on can be told from each other even if they
  charged the same.
- A last line that is cut off belongs to a charge that never returned, so nothing was released for it. It is
  counted all the same, as the most expensive charge the run could have made.
- The file is created with its first line in one step, only if there is none, and locked before it is read or
  written. The lock ends with its process.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any

from tacit import system
from tacit.errors import UserError
from tacit.privacy.accountants import Epsilon
from tacit.privacy.events import Event, Relation, plain_event, read_event
from tacit.privacy.events import PoissonGaussian as PoissonGaussian
from tacit.privacy.totals import ClientTotals
from tacit.reading import from_json, read_bytes

VERSION = 2


@dataclass(frozen=True)
class Part:
    """`steps` repetitions of an event, paid by `clients` (example level), or by everyone (None)."""

    event: Event
    steps: int = 1
    clients: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Carried:
    """Where charges came from that were spent on the same data before this run: another run's ledger."""

    ledger: str
    head: str
    """The hash of that ledger's last line when its charges were taken along."""
    rounds: int


@dataclass(frozen=True)
class Charge:
    """What a round costs, or what was carried over from a run before it."""

    round: int
    parts: tuple[Part, ...]
    truncated: bool = False
    """Stands for a line that was cut off."""
    carried: Carried | None = None


@dataclass(frozen=True)
class Header:
    """What a ledger is of, and `costliest`: no charge of this run costs any client more than this."""

    unit: str
    delta: float
    costliest: Part
    data: str
    """A fingerprint of what the charges protect."""
    simulation: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(16), compare=False)

    @property
    def relation(self) -> Relation:
        return self.costliest.event.relation


@dataclass(frozen=True)
class Contents:
    """A ledger as it was read: `hashes[i]` is that of the header (i = 0) or of charge i − 1."""

    path: Path
    header: Header
    charges: list[Charge]
    hashes: list[str]

    @property
    def head(self) -> str:
        return self.hashes[-1]

    @property
    def rounds(self) -> int:
        """Charges of this run's own rounds."""
        return sum(charge.carried is None for charge in self.charges)


@dataclass
class Tally:
    """How many rounds were charged, one charge after the other."""

    rounds: int = 0
    carried: int = 0
    attempts: Counter[int] = field(default_factory=Counter)
    """How often each of the run's own rounds was charged."""

    def add(self, charge: Charge) -> None:
        if charge.carried is not None:
            self.carried += charge.carried.rounds
        else:
            self.rounds += 1
            self.attempts[charge.round] += 1


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
        """Open `path` for charges, or start it with `header` and what is `carried` over from other runs.

        Refuses a ledger of another unit, relation or data, and one that another process holds.
        """
        if not path.exists():
            return _created(path, header, carried)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | system.BINARY)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # what is written to a device is nowhere
                raise UserError(f"{path} is not a regular file; restore it")
            _lock(fd, path)
            content = os.pread(fd, os.fstat(fd).st_size, 0)
            found = _parse(path, content)
            _refuse_other(path, found.header, header)
            ledger = Ledger(fd, found)
            if found.charges and found.charges[-1].truncated and not content.endswith(b"\n"):
                # Nothing was released for what is cut off here; its stand-in is written before anything else.
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
        """What a ledger holds, without opening it for writing; every line is checked."""
        if not path.exists():
            raise UserError(f"{path} does not exist: without a ledger nothing can be said about ε")
        try:
            content = read_bytes(path)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}), so nobody can say what was spent"
            ) from None
        return _parse(path, content)

    @property
    def contents(self) -> Contents:
        """What it holds now."""
        return Contents(self.path, self.header, self.charges, self._hashes)

    def charge(self, charge: Charge) -> None:
        """Put a charge on disk. Only after this returns may anything that depends on its data be released."""
        line, digest = _line(_plain_charge(charge), self._hashes[-1])
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
        _add(self.totals, charge)
        self.tally.add(charge)
        self.charges.append(charge)
        self._hashes.append(digest)

    def epsilon(self, delta: float | None = None) -> Epsilon:
        """ε of everything charged so far (of the worst client, at example level)."""
        return self.totals.worst(self.header.delta if delta is None else delta).epsilon

    def would_exceed(self, charge: Charge, budget: float, delta: float | None = None) -> bool:
        """Whether ε with `charge` added is not proved to stay ≤ `budget`; ask before the round."""
        expenses = [(part.event, part.steps, part.clients) for part in charge.parts]
        return self.totals.would_exceed(expenses, budget, self.header.delta if delta is None else delta)

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


def replay(charges: Iterable[Charge]) -> ClientTotals:
    """Everyone's totals after these charges."""
    totals = ClientTotals()
    for charge in charges:
        _add(totals, charge)
    return totals


def _add(totals: ClientTotals, charge: Charge) -> None:
    for part in charge.parts:
        totals.add(part.event, part.steps, part.clients)


def dominating(parts: Iterable[Part]) -> Part:
    """One part for everyone that costs at least as much as any of `parts`, of one kind of event."""
    first, *others = parts
    event = first.event
    for part in others:
        event = event.joined(part.event)
    return Part(event, max(part.steps for part in [first, *others]))


# --- the file -------------------------------------------------------------------------------------------


def _created(path: Path, header: Header, carried: Sequence[Charge]) -> Ledger:
    """Write a new ledger beside `path`, locked, and give it that name unless another has it by now."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | system.BINARY, 0o600)
    try:
        _lock(fd, beside)
        line, digest = _line(_plain_header(header), "")
        lines, hashes = [line], [digest]
        for charge in carried:
            line, digest = _line(_plain_charge(charge), hashes[-1])
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


def _parse(path: Path, content: bytes) -> Contents:
    first, *lines = content.split(b"\n")
    _refuse_first_version(path, first)
    damaged = f"{path}: line {{}} is damaged, so nobody can say what was spent; restore the file"
    try:
        plain, digest = _checked(first, "")
        header = _read_header(plain)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: line 1 is not a ledger's; restore the file, or start a new run") from error
    contents = Contents(path, header, [], [digest])
    for number, line in enumerate(lines, start=2):
        final = number == len(lines) + 1
        if final and not line:
            break
        if final:  # no line's end: the disk, or a kill, cut it off
            rounds = [charge.round for charge in contents.charges if charge.carried is None]
            contents.charges.append(Charge(max(rounds, default=-1) + 1, (header.costliest,), truncated=True))
            contents.hashes.append("")
            break
        try:
            plain, digest = _checked(line, contents.hashes[-1])
            contents.charges.append(_read_charge(plain))
            contents.hashes.append(digest)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(damaged.format(number)) from error
    if not lines:
        raise UserError(f"{path}: line 1 is cut off, so nobody can say what was spent; restore the file")
    return contents


def _refuse_first_version(path: Path, line: bytes) -> None:
    try:
        version = from_json(line).get("ledger")
    except (ValueError, AttributeError):
        return
    if version not in (None, VERSION):
        raise UserError(
            f"{path} was written by another version of this program (ledger {version}, not {VERSION}). "
            "Ledgers of version 1 belong to noise that could be told from the data; start a new run"
        )


def _line(plain: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    """A line of the file, and its hash."""
    body = {"after": before, "nonce": secrets.token_hex(8), **plain}
    digest = sha256(_dump(body)).hexdigest()
    return _dump(body | {"hash": digest}) + b"\n", digest


def _checked(line: bytes, before: str) -> tuple[dict[str, Any], str]:
    """A line's values and its hash; ValueError if a single byte is not as it was written."""
    plain = from_json(line)
    if type(plain) is not dict or _dump(plain) != line:
        raise ValueError("not as this program writes it")
    digest = plain.pop("hash")
    if sha256(_dump(plain)).hexdigest() != digest or plain.pop("after") != before:
        raise ValueError("its hash, or that of the line before it, is another")
    _typed(plain.pop("nonce"), str)
    return plain, digest


def _dump(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()


def _plain_header(header: Header) -> dict[str, Any]:
    return {
        "ledger": VERSION,
        "id": header.id,
        "unit": header.unit,
        "delta": header.delta,
        "data": header.data,
        "simulation": header.simulation,
        "costliest": _plain_part(header.costliest),
    }


def _read_header(plain: dict[str, Any]) -> Header:
    kinds = {"id": str, "unit": str, "delta": float, "data": str, "simulation": bool}
    values = {name: _typed(plain.pop(name), kind) for name, kind in kinds.items()}
    costliest = _read_part(plain.pop("costliest"))
    if plain.keys() != {"ledger"}:
        raise ValueError(f"unknown keys {plain.keys() - {'ledger'}}")
    return Header(costliest=costliest, **values)


def _plain_charge(charge: Charge) -> dict[str, Any]:
    plain: dict[str, Any] = {"round": charge.round}
    if charge.truncated:
        plain["truncated"] = True
    if charge.carried is not None:
        plain["carried"] = {
            "ledger": charge.carried.ledger,
            "head": charge.carried.head,
            "rounds": charge.carried.rounds,
        }
    return plain | {"parts": [_plain_part(part) for part in charge.parts]}


def _read_charge(plain: dict[str, Any]) -> Charge:
    number = _typed(plain.pop("round"), int)
    truncated = _typed(plain.pop("truncated", False), bool)
    carried = plain.pop("carried", None)
    parts = tuple(_read_part(part) for part in _typed(plain.pop("parts"), list))
    if plain or number < -1:
        raise ValueError(f"unknown keys {plain.keys()}")
    if carried is not None:
        kinds = {"ledger": str, "head": str, "rounds": int}
        if _typed(carried, dict).keys() != kinds.keys():
            raise ValueError(f"carried has {kinds.keys()}")
        carried = Carried(**{name: _typed(carried[name], kind) for name, kind in kinds.items()})
    return Charge(number, parts, truncated, carried)


def _plain_part(part: Part) -> dict[str, Any]:
    plain: dict[str, Any] = {"event": plain_event(part.event), "steps": part.steps}
    if part.clients is not None:
        plain["clients"] = list(part.clients)
    return plain


def _read_part(plain: Mapping[str, Any]) -> Part:
    if _typed(plain, dict).keys() - {"clients"} != {"event", "steps"}:
        raise ValueError(f"a part has an event, steps and perhaps clients, not {plain.keys()}")
    steps, clients = _typed(plain["steps"], int), plain.get("clients")
    if steps < 0:
        raise ValueError("steps are counted from 0")
    if "clients" in plain:
        clients = tuple(_typed(client, int) for client in _typed(clients, list))
    return Part(read_event(_typed(plain["event"], dict)), steps, clients)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not a {kind.__name__}")
    return value
