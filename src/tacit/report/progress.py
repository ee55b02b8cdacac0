"""What the user sees while a run is running."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tacit.federation import Record, Tracker
from tacit.federation.notes import Notes, PythonWarnings
from tacit.privacy.rounding import rounded_up
from tacit.tasks.headline import headlines


def workers(record: Record) -> str:
    """What a cluster's engine reports about its workers; empty for other engines.

    >>> workers({"workers": 4, "workers_busy": 0.912, "workers_lost": 1, "shards_replayed": 2})
    '4 workers, 91 % busy, 1 lost, 2 shards repeated'
    >>> workers({"workers": 4, "workers_busy": 1.0, "workers_lost": 0, "shards_replayed": 0}), workers({})
    ('4 workers, 100 % busy', '')
    """
    if "workers" not in record:
        return ""
    told = [f"{record['workers']} workers", f"{100 * record['workers_busy']:.0f} % busy"]
    told += [f"{record['workers_lost']} lost"] if record["workers_lost"] else []
    told += [f"{record['shards_replayed']} shards repeated"] if record["shards_replayed"] else []
    return ", ".join(told)


def watching(trackers: Sequence[object], show: bool | None) -> list[Tracker]:
    """The tracker to add for the user: a progress bar in terminals and notebooks, otherwise warnings."""
    if any(isinstance(tracker, LiveProgress) for tracker in trackers):
        return []
    console = Console(stderr=True, highlight=False)
    shown = console.is_terminal or console.is_jupyter if show is None else show
    return [LiveProgress(console) if shown else PythonWarnings()]


class LiveProgress:
    """A tracker that draws one line for the run and one for the current round.

    Outside a terminal (a log file, CI) it occasionally prints a plain line instead.
    """

    PLAIN_EVERY = 10.0  # seconds

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal or console.is_jupyter
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
        self._status = ""
        self._warn = Notes()

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        self._preparing.stop()
        for note in facts["notes"]:
            self._console.print(f"[yellow]{note}[/yellow]")
        begin = f", from round {round + 1}" if round else ""
        if round >= rounds:
            begin = f"; all {rounds:,} rounds are done already"
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
        for note in self._warn.of(record):
            self._console.print(f"[yellow]{note}[/yellow]")
        shown = [metric.text(record[metric.name]) for metric in headlines(record)]
        if "epsilon" in record:
            shown.append(f"ε {rounded_up(record['epsilon'])}")
        self._status = "  ".join(shown) or self._status
        if self._run is not None and self._round is not None:
            self._bar.update(self._run, completed=record["round"], status=self._status)
            self._bar.update(self._round, status=workers(record))
        elif record["round"] == self._rounds or time.monotonic() - self._said > self.PLAIN_EVERY:
            self._said = time.monotonic()
            parts = (f"round {record['round']}/{self._rounds}", self._status, workers(record))
            self._console.print("  ".join(filter(None, parts)))

    def close(self) -> None:
        self._preparing.stop()
        if self._live:
            self._bar.stop()
