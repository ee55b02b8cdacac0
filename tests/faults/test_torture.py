"""A minute of torture with a fixed seed; `make torture` goes on for hours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_minute_of_torture_breaks_nothing() -> None:
    """A process of its own, since it forks: kills, failing file operations, flipped bits, nonsense."""
    command = [sys.executable, str(HERE / "torture.py"), "--seconds", "60", "--seed", "0", "--attacks", "120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["broken"] == {}
    assert counts["fault points"] > 2
    assert counts["kills"] > 2
    assert counts["corruptions"] > 2


def test_faults_are_made_where_they_should_be(tmp_path: Path) -> None:
    """The harness itself: each mode at the first operations of a run has the effect it is named after."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + (
        "import torture, tempfile; from pathlib import Path\n"
        "scratch = Path(tempfile.mkdtemp())\n"
        "def end(mode, at):\n"
        "    folder = scratch / f'{mode}-{at}'\n"
        "    return torture.go('client', folder, scratch / 'log', torture.Faults(folder, at, mode))\n"
        "ends = {mode: [end(mode, at) for at in (4, 30)] for mode in torture.MODES}\n"
        "assert all(e == -9 for m in ('kill', 'kill after', 'torn') for e in ends[m]), ends\n"
        "assert all(e == 2 for m in ('ENOSPC', 'EIO', 'full') for e in ends[m]), ends\n"
        "assert end('kill', 100_000) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
