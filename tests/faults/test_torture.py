"""A short torture test with a fixed seed; `make torture` runs for an hour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import faults_small as small
import pytest
from forks import CRASHED, cli_main, forked
from points import ERRORS, KILLS, NEVER, Faults

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_little_torture_breaks_nothing() -> None:
    """A process of its own, since it forks: kills, failing file operations, damage, nonsense."""
    command = [sys.executable, str(HERE / "torture.py"), "--few", "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["broken"] == {}
    for name in ("kills", "fault points", "corruptions", "fuzzed inputs", "hostile clients"):
        assert counts[name] > 2, counts


def test_faults_are_made_where_they_should_be(tmp_path: Path) -> None:
    """The harness itself: each mode at some operation of a run has the effect it is named after."""
    recipe = small.recipe("plain", tmp_path / "recipe.yaml", 2)

    def end(mode: str, at: int) -> tuple[int, str | None]:
        folder = tmp_path / f"{mode}-{at}"
        faults = Faults(folder, at, mode)

        def play() -> None:
            faults.install()
            cli_main("run", recipe, "--out", folder)()

        ended = forked(play)
        assert ended.riddle is None, (mode, at, ended)
        return ended.code, faults.struck

    code, struck = end("kill", NEVER)
    assert (code, struck) == (0, None)
    for mode in KILLS:
        assert all(end(mode, at)[0] == -9 for at in (4, 30)), mode
    for mode in ERRORS:
        for at in (4, 30):
            code, struck = end(mode, at)
            assert struck is not None
            # A failure to remove something may be of no consequence; a failure to write is told.
            assert code == 2 or struck in ("unlink", "rmdir", "open", "fsync"), (mode, at, struck)


def test_what_was_put_in_place_of_system_calls_is_taken_away_again(tmp_path: Path) -> None:
    before = (os.open, os.write, os.rename, small.checkpoint.save_file)
    Faults(tmp_path, 1, "EIO").install()()
    assert (os.open, os.write, os.rename, small.checkpoint.save_file) == before


def test_a_fork_that_crashes_hangs_or_is_killed_is_told_apart() -> None:
    def crash() -> None:
        raise ZeroDivisionError

    crashed = forked(crash)
    assert crashed.code == CRASHED
    assert "ZeroDivisionError" in (crashed.riddle or "")
    hung = forked(lambda: __import__("time").sleep(60), seconds=0.2)
    assert hung.hung and hung.riddle == "no end"
    killed = forked(lambda: __import__("time").sleep(60), kill_after=0.05)
    assert (killed.code, killed.riddle) == (-9, None)
    told = forked(lambda: (print("tacit: no", file=sys.stderr), 2)[1])
    assert (told.code, told.riddle) == (2, None)
    assert forked(lambda: 2).riddle is not None  # refused, and nobody said why
