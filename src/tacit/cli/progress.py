"""What a person sees while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tacit.federation import Record
from tacit.tasks.headline import HEADLINES

SHOWN = (
    *((known.name, known.text) for known in HEADLINES),
    ("epsilon", "ε {:.2f}".format),
)
"""What is shown of a round's record: its name there, and its form here."""


def mostly_skipped(record: Record) -> str | None:
    """A word if most of a round's clients were of no use."""
    lost = len(record.get("skipped", ()))
    if lost <= record["clients"]:
        return None
    return (
        f"{lost} of {lost + record['clients']} clients were left out, their updates infinite or not a "
        "number; lower local.lr or set local.clip"
    )


class LiveProgress:
    """A tracker that draws one line for the run and one for the round under way.

    Off a terminal (a log file, CI) it prints a plain line now and then instead.
    """

    PLAIN_EVERY = 10.0  # seconds

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description:<7}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
        )
        self._preparing = console.status("preparing data, noise and workers…")
        if self._live:
            self._preparing.start()
        self._run: TaskID | None = None
        self._round: TaskID | None = None
        self._rounds = 0
        self._said = 0.0
        self._warned = -self.PLAIN_EVERY
        self._status = ""

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        self._preparing.stop()
        for note in facts["notes"]:
            self._console.print(f"[yellow]{note}[/yellow]")
        begin = f", from round {round + 1}" if round else ""
        if round >= rounds:
            begin = f"; all {rounds:,} rounds were played already"
        trained, frozen = facts["parameters"], facts.get("frozen", 0)
        size = (
            f"{trained:,} of {trained + frozen:,} parameters trained" if frozen else f"{trained:,} parameters"
        )
        self._console.print(f"{size}, {facts['clients']:,} clients{begin}")
        self._rounds = rounds
        if self._live:
            self._run = self._bar.add_task("rounds", total=rounds, completed=round, status="")
            self._round = self._bar.add_task("clients", total=1, status="")
            self._bar.start()

    def clients(self, done: int, cohort: int) -> None:
        if self._round is not None:
            self._bar.update(self._round, completed=done, total=max(cohort, 1))

    def round(self, record: Record) -> None:
        if (
            note := mostly_skipped(record)
        ) is not None and time.monotonic() - self._warned > self.PLAIN_EVERY:
            self._warned = time.monotonic()
            self._console.print(f"[yellow]round {record['round']}: {note}[/yellow]")
        shown = [text(record[name]) for name, text in SHOWN if name in record]
        self._status = "  ".join(shown) or self._status
        if self._run is not None:
            self._bar.update(self._run, completed=record["round"], status=self._status)
        elif record["round"] == self._rounds or time.monotonic() - self._said > self.PLAIN_EVERY:
            self._said = time.monotonic()
            self._console.print(f"round {record['round']}/{self._rounds}  {self._status}")

    def close(self) -> None:
        self._preparing.stop()
        if self._live:
            self._bar.stop()
