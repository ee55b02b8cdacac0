"""What one owner's records have paid, over all runs: the owner's own ledgers, on its own disk.

A run's server has a ledger too, but an owner need not believe it. Here each run has its own file (see
`tacit.privacy.ledger`), and the budget covers all runs together that touch some of the same records.

What is counted
---------------
*Example level*: the client's own noisy steps, at its own sampling rate. Even an observer of every upload, the
server included, learns no more than this ε says.

*Client level*: the server adds the noise. The charge is one Gaussian release for each round in which the
client takes part, as if everybody knew that it did, since an observer of the network does. So sampling
clients does not reduce this ε, and this ε holds only if the server adds the promised noise. Neighbours: the
client's upload, or zero in its place.

*Client level under secure aggregation*: the clients' noise, without the shares of as many colluders as the
run assumes. It holds against the server too, whatever the server does.

*Correlated noise*: also the server's, carried from round to round. It is sized for clients that take part
once in b rounds, so the first round pays for the whole run, and a client that comes before its turn is
refused.

*No privacy*: an update that leaves without noise has no finite ε, and is charged as infinite.

Client-level protection covers single records too, so its charges also count against an example-level budget.
The reverse does not hold: protecting single records bounds nothing for all of them together. For an owner
with a client-level budget, such a round therefore counts as one without noise. So does a rehearsal, whose
noise anybody can repeat, unless the owner allows rehearsals.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tacit import system
from tacit.data.identity import Identity
from tacit.deploy.policy import Allow, NotAllowed
from tacit.errors import UserError
from tacit.federation.files import sealed, unsealed, write_atomically
from tacit.privacy import (
    Charge,
    Header,
    Ledger,
    Mechanism,
    Part,
    PoissonGaussian,
    SecureSum,
    Workload,
    replay,
)
from tacit.privacy.accountants import Epsilon
from tacit.privacy.ledger import Contents
from tacit.privacy.mechanisms.base import NotDue

LOCK = "lock"
UNPROTECTED = Part(PoissonGaussian(1.0, 0.0))
"""An update that leaves without noise: ε is infinite, whatever the unit."""


class OverBudget(UserError):
    """The owner's budget has no room for this charge."""


def own_cost(mechanism: Mechanism | None, workload: Workload, client: int) -> Part:
    """What one round costs a participating client."""
    return UNPROTECTED if mechanism is None else mechanism.cost_to(client, workload)


def due_parts(
    mechanism: Mechanism | None, workload: Workload, client: int, round: int, before: Sequence[int]
) -> tuple[Part, ...]:
    """What a client pays for taking part in a round, after the rounds `before` of the same run. Raises
    `NotAllowed` if the noise does not allow the client to take part now.
    """
    if mechanism is None:
        return (UNPROTECTED,)
    try:
        return mechanism.due(client, round, before, workload)
    except NotDue as error:
        raise NotAllowed(str(error)) from None


@dataclass(frozen=True)
class Account:
    """One run's charges on this owner's records."""

    run: str
    data: Identity
    contents: Contents
    secure: bool = False
    """Whether updates left only under masks."""

    @property
    def unprotected(self) -> bool:
        """Whether updates left without noise."""
        return self.contents.header.costliest == UNPROTECTED

    def narrower(self, unit: str) -> bool:
        """Whether the run protects less than that unit: single records, and not all of them together."""
        return unit == "client" and self.contents.header.unit == "example"

    def charges(self, allow: Allow, data: Identity | None = None) -> Sequence[Charge]:
        """The charges that this run adds, under this owner's policy: to the cost of a run on `data`, or to
        the total.

        If the owner is the unit of protection, it does not matter which records were used.
        """
        header, charges = self.contents.header, self.contents.charges
        if allow.unit != "client" and data is not None and not self._touches(data):
            return ()
        if self.narrower(allow.unit) or (header.simulation and not allow.simulation):
            return [replace(charge, parts=(UNPROTECTED,)) for charge in charges]
        return charges

    def _touches(self, data: Identity) -> bool:
        return self.data.overlaps(data) or self.data.fingerprint == data.fingerprint


class OwnLedgers:
    """The ledgers of one owner. Each run's ledger belongs to one process. An owner who takes part in several
    federations runs one client, and so one process, for each; all of them share one folder of ledgers. A
    process that charges locks the folder, and has first read what the others charged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open: dict[str, tuple[Identity, Ledger, bool]] = {}
        self._others: dict[str, Account] = {}
        self._read: dict[str, tuple[int, int]] = {}
        self._look()

    def charge(
        self,
        run: str,
        round: int,
        parts: tuple[Part, ...],
        cost: Part,
        mechanism: Mechanism | None,
        data: Identity,
        allow: Allow,
    ) -> None:
        """Write a round's parts to disk, unless they would exceed the budget over all runs; `cost` is the
        most that a round of the run costs.
        """
        with self._alone():
            self.refuse_over(parts, data, allow)
            ledger = self._ledger(run, cost, mechanism, data, allow.delta)
            try:
                ledger.charge(Charge(round, parts))
            except BaseException:
                # It is unknown how much of the line was written: it is read again, and counts in any case.
                del self._open[run]
                raise

    def rounds(self, run: str) -> list[int]:
        """The rounds of a run that were paid for here, in order; a repeated round appears again."""
        for account in self.accounts():
            if account.run == run:
                return [charge.round for charge in account.contents.charges]
        return []

    def refuse_over(self, parts: Sequence[Part], data: Identity, allow: Allow) -> None:
        """Raise `OverBudget` if these parts would exceed the budget over all runs."""
        self._look()
        if allow.epsilon is None:
            return
        expense = [(part.event, part.steps, None) for part in parts]
        paid = replay(charge for account in self.accounts() for charge in account.charges(allow, data))
        if paid.would_exceed(expense, allow.epsilon, allow.delta):
            raise OverBudget(f"this round would exceed the budget of ε = {allow.epsilon:g} over all runs")

    def close(self) -> None:
        for _, ledger, _ in self._open.values():
            ledger.close()
        self._open.clear()

    def _ledger(
        self, run: str, cost: Part, mechanism: Mechanism | None, data: Identity, delta: float
    ) -> Ledger:
        if run not in self._open:
            identity, secure = self.folder / f"{run}.json", isinstance(mechanism, SecureSum)
            if not identity.exists():  # before the first charge, which needs it to be counted
                write_atomically(identity, sealed(data.to_json() | {"secure": secure}))
            header = Header("client", delta, cost, data.fingerprint)
            if mechanism is not None:
                header = Header(mechanism.unit, mechanism.delta, cost, data.fingerprint, mechanism.simulated)
            ledger, before = Ledger.open(self.folder / f"{run}.jsonl", header), self._others.pop(run, None)
            self._read.pop(run, None)
            self._open[run] = data, ledger, secure if before is None else before.secure
        _, ledger, masked = self._open[run]
        if masked != isinstance(mechanism, SecureSum):
            raise UserError("the run is under secure aggregation now or was before; that must be a new run")
        if ledger.header.data != data.fingerprint:
            raise UserError("the records are not those that the run began with; that must be a new run")
        known = ledger.header.costliest
        if not known.event.dominates(cost.event) or known.steps < cost.steps:
            raise UserError("the run costs more now than when it began; that must be a new run")
        return ledger

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside this context, no other process charges the same owner's records."""
        fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            system.lock(fd, wait=True, record=False)
            yield
        finally:
            os.close(fd)

    def _look(self) -> None:
        """Read what has changed in the ledgers of other processes, past or present. Ledgers that are open
        here are not opened again: closing the second handle would release their lock.
        """
        for file in sorted(self.folder.glob("*.jsonl")):
            if file.stem not in self._open:
                status = file.stat()
                if self._read.get(file.stem) != (status.st_mtime_ns, status.st_size):
                    self._others[file.stem] = read_account(file)
                    self._read[file.stem] = status.st_mtime_ns, status.st_size

    def accounts(self) -> Iterator[Account]:
        yield from self._others.values()
        for run, (data, ledger, secure) in self._open.items():
            yield Account(run, data, ledger.contents, secure)


def read_accounts(folder: Path) -> list[Account]:
    """Every run's charges, with each line checked."""
    return [read_account(file) for file in sorted(folder.glob("*.jsonl"))]


def read_account(file: Path) -> Account:
    try:
        plain = unsealed(file.with_suffix(".json").read_text(encoding="utf-8"))
        data, secure = Identity.from_json(plain), plain.get("secure") is True
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file.with_suffix('.json')}: nobody can say whose charges these are ({error}); restore it"
        ) from None
    return Account(file.stem, data, Ledger.read(file), secure)


def spent(accounts: Sequence[Account], allow: Allow) -> Epsilon:
    """ε of all runs together, for the unit that this owner wants protected."""
    return replay(c for account in accounts for c in account.charges(allow)).worst(allow.delta).epsilon


class Nonces:
    """Orders that were carried out, so that none is carried out twice. An order is forgotten once it has
    expired; from then on, every order that expires no later counts as expired. So a clock that goes wrong,
    and is then corrected, brings no order back.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._until: dict[str, float] = {}
        self._forgotten = 0.0
        if file.exists():
            try:
                plain = unsealed(file.read_text(encoding="utf-8"))
                self._until = {str(nonce): float(until) for nonce, until in plain["until"].items()}
                self._forgotten = float(plain.get("forgotten", 0.0))
            except (OSError, ValueError, KeyError, AttributeError, TypeError, json.JSONDecodeError) as error:
                raise UserError(
                    f"{file} is damaged ({error}): old orders could be replayed; restore it"
                ) from None

    def __contains__(self, nonce: str) -> bool:
        return nonce in self._until

    def expired(self, until: float) -> bool:
        """Whether an order that is valid until then may be one that was forgotten."""
        return until <= self._forgotten

    def add(self, nonce: str, until: float, now: float) -> None:
        """Remember an order; it is on disk when this returns."""
        old = [u for u in self._until.values() if u < now]
        forgotten = max(self._forgotten, *old) if old else self._forgotten
        kept = {n: u for n, u in self._until.items() if u >= now} | {nonce: until}
        write_atomically(self._file, sealed({"until": kept, "forgotten": forgotten}))
        self._until, self._forgotten = kept, forgotten
