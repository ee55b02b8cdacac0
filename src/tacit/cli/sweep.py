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
    """A bar in a terminal; elsewhere a line every half minute (a `tacit.sweeps.SweepWatch`)."""

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
        self._title, self._runs = title, runs
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._bar.start()
        self._line: TaskID = self._bar.add_task(title, total=rounds, runs="")

    def progress(self, runs: int, rounds: int) -> None:
        assert self._bar is not None
        self._bar.update(self._line, completed=rounds, runs=f"{runs}/{self._runs} runs,")
        if not self._console.is_terminal and time.monotonic() - self._said > 30:
            self._said = time.monotonic()
            self._console.print(f"{self._title}: {runs}/{self._runs} runs done")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
