"""What a person must hear while a run goes on, and the tracker that says it where nobody watches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tacit.federation.tracking import Record, Tracker, trouble
from tacit.privacy.statement import WEAK


class Notes:
    """What a person must hear while a run goes on, each thing once (failures at 1, 10, 100, … rounds)."""

    def __init__(self) -> None:
        self._bad = 0
        self._passed = False

    def of(self, record: Record) -> list[str]:
        found = []
        if (said := trouble(record)) is not None:
            self._bad += 1
            if self._bad == 10 ** (len(str(self._bad)) - 1):
                found.append(said if self._bad == 1 else f"{said} (as in {self._bad - 1:,} rounds before)")
        if record.get("epsilon", 0.0) > WEAK and not self._passed:
            self._passed = True
            found.append(
                f"round {record['round']}: ε has passed {WEAK:g}, which bounds next to nothing; raise "
                "privacy.noise, or run fewer rounds"
            )
        return found


class PythonWarnings(Tracker):
    """The notes of a run as Python's warnings, where nobody watches a progress bar."""

    def __init__(self) -> None:
        self._notes = Notes()

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        self._tell(facts["notes"])

    def round(self, record: Record) -> None:
        self._tell(self._notes.of(record))

    def _tell(self, notes: Sequence[str]) -> None:
        for note in notes:
            warnings.warn(note, RuntimeWarning, stacklevel=2)
