"""How a sweep's progress looks in a terminal, and in a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar:
    """A bar in a terminal; elsewhere a line for each run that ends, and one every half minute between them
    (a `tacit.sweeps.SweepWatch`).
    """

    SILENCE = 30.0  # seconds

    def __init__(self, console: Console) -> None:
        self._console, self._said = console, time.monotonic()
        self._bar: Progress | None = None

    def start(self, title: str, runs: int, rounds: int) -> None:
        columns = (
            TextColumn(f"{title:<7}"),
            BarColumn(16),
            TextColumn("{task.fields[runs]}"),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._title, self._runs, self._rounds = title, runs, rounds
        self._done = 0
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._bar.start()
        self._line: TaskID = self._bar.add_task(title, total=rounds, runs="")

    def progress(self, runs: int, rounds: int) -> None:
        assert self._bar is not None
        self._bar.update(self._line, completed=rounds, runs=f"{runs}/{self._runs} runs,")
        if self._console.is_terminal:
            return
        ended = range(self._done + 1, runs + 1)
        if not ended and time.monotonic() - self._said <= self.SILENCE:
            return
        self._said, self._done = time.monotonic(), runs
        for done in ended or (runs,):
            told = f"{done}/{self._runs} runs, {rounds}/{self._rounds} rounds done"
            self._console.print(f"{self._title}: {told}")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
