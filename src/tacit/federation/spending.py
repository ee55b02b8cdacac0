"""What a run has spent and may still spend: its ledger and its budget. An unprotected run has neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tacit.errors import UserError
from tacit.federation.statements import LEDGER, refuse_less_than_saved, write_statement
from tacit.privacy import Charge, Ledger, Mechanism, Workload
from tacit.privacy.statement import Tally
from tacit.privacy.totals import Worst


class Spending:
    """The one door to the ledger. `open` it before the first round, `close` it after the last."""

    def __init__(
        self,
        mechanism: Mechanism | None,
        workload: Workload,
        data: str = "",
        carried: Sequence[Charge] = (),
    ) -> None:
        """`data`: a fingerprint of what is protected. `carried`: what runs before it spent on the same
        data.
        """
        self._mechanism, self._workload = mechanism, workload
        self._data, self._carried = data, carried
        self.ledger: Ledger | None = None
        self.remarks: Sequence[str] = ()
        """What the statement says besides: who else counts as the server."""
        self._tally = Tally()

    def open(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """The run begins, or goes on from a checkpoint that `saved` these facts about the ledger."""
        if self._mechanism is None:
            return
        file = folder / LEDGER
        if saved and not file.exists():
            raise UserError(f"{file} is gone, and with it what was spent; restore it, then resume")
        self.ledger = Ledger.open(file, self._mechanism.header(self._workload, self._data), self._carried)
        try:
            refuse_less_than_saved(self.ledger.contents, saved)
        except UserError:
            self.close()
            raise
        for charge in self.ledger.charges:
            self._tally.add(charge)

    def attempt(self, round: int) -> int:
        """How often a round was charged before: one played again must not repeat its noise."""
        return self._tally.attempts[round]

    def affords(self, charge: Charge | None) -> bool:
        """Whether the budget has room for one more charge."""
        if charge is None or self._mechanism is None or self._mechanism.epsilon is None:
            return True
        return not self._open.would_exceed(charge, self._mechanism.epsilon)

    def record(self, charge: Charge | None) -> None:
        """Put a charge on disk; what it pays for may be released after this returns."""
        if charge is not None:
            self._open.charge(charge)
            self._tally.add(charge)

    def facts(self, final: bool = False) -> dict[str, Any]:
        """Plain values for a round's record; before the final one, ε may be an upper bound: see `_worst`."""
        if self._mechanism is None:
            return {}
        return {"epsilon": self._worst(final).epsilon.value, "delta": self._mechanism.delta}

    def _worst(self, exact: bool) -> Worst:
        """The worst client. Unless `exact`, with counts rounded up where that stays within the budget."""
        assert self._mechanism is not None
        totals, delta, budget = self._open.totals, self._mechanism.delta, self._mechanism.epsilon
        if not exact:
            found = totals.worst(delta, rounded=True)
            if budget is None or found.epsilon.value <= budget:
                return found
        return totals.worst(delta)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint must know of the ledger: how long it was, and its last line's hash."""
        if self._mechanism is None:
            return {}
        contents = self._open.contents
        return {"charges": len(contents.charges), "head": contents.head}

    def explain(self, folder: Path, final: bool = False) -> None:
        """Write down what is guaranteed so far, if anything is."""
        if self._mechanism is not None:
            mechanism, workload = self._mechanism, self._workload
            warnings = [*mechanism.warnings(workload), *self.remarks]
            write_statement(folder, mechanism, self._worst(final), self._tally, workload.population, warnings)

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
            self.ledger = None

    @property
    def _open(self) -> Ledger:
        if self.ledger is None:
            raise UserError("the ledger is not open; call open() before the first round")
        return self.ledger
