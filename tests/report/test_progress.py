"""What a user sees during a run."""

from __future__ import annotations

import io

from rich.console import Console

from tacit.report.progress import LiveProgress


def test_progress_rounds_epsilon_up_as_the_statement_does() -> None:
    seen = io.StringIO()
    progress = LiveProgress(Console(file=seen, width=80))
    progress.start(0, 1, {"notes": [], "parameters": 3, "clients": 2})
    progress.round({"round": 1, "epsilon": 1.2341})
    progress.close()
    assert seen.getvalue().splitlines()[-1] == "round 1/1  ε 1.24"
