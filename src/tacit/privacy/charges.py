"""What is charged: events, how often and to whom; and the totals of many charges."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tacit.privacy.events import Event, Relation
from tacit.privacy.totals import ClientTotals


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


def replay(charges: Iterable[Charge]) -> ClientTotals:
    """Everyone's totals after these charges."""
    totals = ClientTotals()
    for charge in charges:
        add(totals, charge)
    return totals


def add(totals: ClientTotals, charge: Charge) -> None:
    for part in charge.parts:
        totals.add(part.event, part.steps, part.clients)
