"""What a run has spent and may still spend: its ledger and its budget. An unprotected run has neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tacit.errors import UserError
from tacit.federation import checkpoint as checkpoints
from tacit.federation.room import Room
from tacit.federation.statements import (
    LEDGER,
    SEEN,
    SEEN_SPENT,
    SPENT,
    refuse_less_than_saved,
    refuse_less_than_told,
    rounds_told,
    write_statement,
)
from tacit.privacy import Charge, Ids, Ledger, Mechanism, Workload
from tacit.privacy.totals import DIGITS, Worst
from tacit.vector import Vectors


class Spending:
    """The one door to the ledger. `open` it before the first round, `close` it after the last."""

    def __init__(
        self,
        mechanism: Mechanism | None,
        workload: Workload,
        folder: Path,
        data: str = "",
        carried: Sequence[Charge] = (),
    ) -> None:
        """`data`: a fingerprint of what is protected. `carried`: what runs before it spent on the same
        data.
        """
        self._mechanism, self._workload, self._folder = mechanism, workload, folder
        self._room = Room(folder)
        self._data, self._carried = data, carried
        self.ledger: Ledger | None = None
        self.remarks: list[str] = []
        """What the statement says besides: who else counts as the server."""
        self.seen: Ledger | None = None
        """What the server sees, where the mechanism protects from it."""
        self._known: tuple[tuple[int, bool], Worst] | None = None
        """The worst client after so many charges: a round's record and its statement both ask."""
        self._afforded: Charge | None = None
        self._within = -1
        """After so many charges, all of them together are proved to stay within the budget."""

    def open(self, saved: Mapping[str, Any]) -> None:
        """The run begins, or goes on from a checkpoint that `saved` these facts about its ledgers."""
        if self._mechanism is None:
            return
        told = rounds_told(self._folder)
        for known, needed in ((saved.get(SPENT) or told, LEDGER), (saved.get(SEEN_SPENT), SEEN)):
            if known and not (self._folder / needed).exists():
                raise UserError(
                    f"{self._folder / needed} is gone, and with it what was spent; restore it, then resume"
                )
        header, seen = (
            self._mechanism.header(self._workload, self._data),
            self._mechanism.seen_header(self._data),
        )
        self.ledger = Ledger.open(self._folder / LEDGER, header, self._carried)
        try:
            refuse_less_than_saved(self.ledger.contents, saved.get(SPENT, {}))
            refuse_less_than_told(self.ledger.contents, self._folder)
            if seen is not None:
                self.seen = Ledger.open(self._folder / SEEN, seen)
                refuse_less_than_saved(self.seen.contents, saved.get(SEEN_SPENT, {}))
        except UserError:
            self.close()
            raise

    def attempt(self, round: int) -> int:
        """How often a round was charged before: one that is repeated must not repeat its noise."""
        return 0 if self.ledger is None else self.ledger.tally.attempts[round]

    def affords(self, charge: Charge | None) -> bool:
        """Whether the budget has room for one more charge."""
        if charge is None or self._mechanism is None or self._mechanism.epsilon is None:
            return True
        within = not self._open.would_exceed(charge, self._mechanism.epsilon)
        self._afforded = charge if within else None
        return within

    def make_room(self, charge: Charge | None, vectors: Callable[[], Vectors]) -> None:
        """Have the disk's space for the checkpoint that follows a charge, or refuse before it is made."""
        if charge is not None:
            self._room.hold(checkpoints.size(vectors()))

    def record(self, charge: Charge | None, cohort: Ids) -> None:
        """Put a charge on disk; what it pays for may be released after this returns."""
        if charge is None:
            return
        if self.seen is not None and self._mechanism is not None:
            shown = self._mechanism.seen_by_server(charge.round, cohort)
            assert shown is not None
            self.seen.charge(shown)
        self._open.charge(charge)
        if charge is self._afforded:
            self._within = len(self._open.charges)

    def facts(self, final: bool = False) -> dict[str, Any]:
        """Plain values for a round's record; before the final one, ε may be an upper bound: see `_worst`."""
        if self._mechanism is None:
            return {}
        return {"epsilon": self._worst(final).epsilon.value, "delta": self._mechanism.delta}

    def _worst(self, exact: bool) -> Worst:
        """The worst client. Unless `exact`, with counts rounded up, but never above the budget."""
        key = len(self._open.charges), exact
        if self._known is None or self._known[0] != key:
            self._known = key, self._found(exact)
        return self._known[1]

    def _found(self, exact: bool) -> Worst:
        assert self._mechanism is not None
        totals, delta, budget = self._open.totals, self._mechanism.delta, self._mechanism.epsilon
        if exact:
            return totals.worst(delta)
        found = totals.worst(delta, DIGITS[0])
        if budget is None or found.epsilon.value <= budget:
            return found
        if self._within != len(self._open.charges):
            return totals.worst(delta)
        # Rounded up it exceeds the budget; counted well enough it was proved not to, before the last charge.
        return replace(found, epsilon=found.epsilon.at_most(budget))

    def saved(self) -> dict[str, Any]:
        """What a checkpoint must know of each ledger: how long it was, and its last line's hash."""
        if self._mechanism is None:
            return {SPENT: {}}
        facts = {SPENT: _length(self._open)}
        return facts if self.seen is None else facts | {SEEN_SPENT: _length(self.seen)}

    def explain(self, final: bool = False) -> None:
        """Write down what is guaranteed so far, if anything is; a checkpoint follows, so its room is free."""
        self._room.give_back()
        if self._mechanism is not None:
            mechanism, workload = self._mechanism, self._workload
            warnings = [*mechanism.warnings(workload), *self.remarks]
            worst, seen = self._worst(final), self._shown(final)
            population = workload.population
            write_statement(self._folder, mechanism, worst, self._open.tally, population, warnings, seen)

    def _shown(self, exact: bool) -> float | None:
        """ε against the server, where the mechanism protects from it; an upper bound until the end."""
        if self.seen is None:
            return None
        return self.seen.totals.worst(self.seen.header.delta, None if exact else DIGITS[0]).epsilon.value

    def close(self) -> None:
        self._room.give_back()
        if self.ledger is not None:
            self.ledger.close()
            self.ledger = None
        if self.seen is not None:
            self.seen.close()
            self.seen = None

    @property
    def _open(self) -> Ledger:
        if self.ledger is None:
            raise UserError("the ledger is not open; call open() before the first round")
        return self.ledger


def _length(ledger: Ledger) -> dict[str, Any]:
    contents = ledger.contents
    return {"charges": len(contents.charges), "head": contents.head}
