"""Several writers at one folder: one works, the others get a line and change nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faults_small as small
import pytest
from forks import cli_main, forked

import tacit
from tacit.federation.lock import locked


@pytest.mark.parametrize("kind", ["plain", "states", "client"])
def test_a_resume_that_is_refused_changes_nothing(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    small.half(kind, folder, 2, 4)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from tacit.federation.lock import locked\n"
            f"with locked(Path({str(folder)!r})):\n print('held', flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        before = small.snapshot(folder)
        with pytest.raises(tacit.UserError, match="is in use by another process"):
            small.resume(folder)
        with pytest.raises(tacit.UserError, match="is in use by another process"):
            small.run(kind, folder)
        assert small.snapshot(folder) == before
    finally:
        holder.kill()  # the lock goes with its process
        holder.wait()
    assert small.resume(folder).finished


@pytest.mark.parametrize("kind", ["states", "client"])
def test_a_resume_that_is_refused_for_its_ledger_or_state_changes_nothing(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    small.half(kind, folder, 2, 4)
    if kind == "client":
        ledger = folder / "ledger.jsonl"
        ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:2]))
    else:
        for place in (folder / "checkpoint").iterdir():
            (place / "state.json").write_text("{}")
    before = small.snapshot(folder)
    with pytest.raises(tacit.UserError):
        small.resume(folder)
    assert small.snapshot(folder) == before


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch) -> None:
    from tacit import api

    monkeypatch.chdir(tmp_path)
    made = [api.new_folder("a") for _ in range(20)]
    assert len(set(made)) == 20
    assert all(folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700 for folder in made)


@pytest.mark.slow
def test_of_three_runs_in_one_folder_one_is_done_and_two_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    runs = [small.program("plain", folder, 30, wait=False) for _ in range(3)]
    outcomes = [(p.communicate(timeout=120), p.returncode) for p in runs]
    assert sorted(code for _, code in outcomes) == [0, 2, 2]
    for (_, err), code in outcomes:
        if code == 2:
            assert len(err.strip().splitlines()) == 1
            assert "in use" in err or "already holds a run" in err
    assert small.metric_rounds(folder) == list(range(1, 31))
    whole = tmp_path / "whole"
    small.run("plain", whole, 30)
    assert small.same(small.vectors(folder), small.vectors(whole))


@pytest.mark.slow
def test_two_resumes_at_once_leave_one_sound_run(tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    small.half("states", folder, 2, 40)
    small.run("states", whole, 40)
    runs = [small.program("states", folder, 40, wait=False) for _ in range(2)]
    codes = [p.wait(timeout=120) for p in runs]
    assert 0 in codes
    if sorted(codes) == [0, 0]:  # one began after the other had ended
        assert small.metric_rounds(folder) == list(range(1, 41))
    assert small.same(small.vectors(folder), small.vectors(whole))


def test_a_second_sweep_at_one_folder_gets_one_line_and_changes_nothing(tmp_path: Path) -> None:
    file = small.recipe("plain", tmp_path / "sweep.yaml", 1, name="mini", sweep={"seed": [0, 1]})
    folder = tmp_path / "mini"
    with locked(folder, create=True):  # as a sweep that is under way
        (folder / "tuned.json").write_text("{}")
        before = small.snapshot(folder)
        second = forked(cli_main("run", file, "--out", folder))
        assert (second.code, second.riddle) == (2, None)
        assert "is in use by another process" in second.err
        assert small.snapshot(folder) == before
    assert forked(cli_main("run", file, "--out", folder)).code == 0
    assert len(list(folder.glob("*/finished"))) == 2


def test_a_lock_inside_a_process_counts_too(tmp_path: Path) -> None:
    with locked(tmp_path / "run", create=True):
        for _ in range(2):
            with pytest.raises(tacit.UserError, match="in use"), locked(tmp_path / "run"):
                pass
        # A refusal must not have given the lock up: another process still sees it.
        code = "import sys; from pathlib import Path; from tacit.federation.lock import locked\n"
        code += f"with locked(Path({str(tmp_path / 'run')!r})): pass"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "in use by another process" in other.stderr
    assert not (tmp_path / "run").exists()  # nothing was written, so nothing is left


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small.half("plain", folder, 2, 4)
    code = "import os, sys; from pathlib import Path; from tacit.federation.lock import locked\n"
    code += f"with locked(Path({str(folder)!r})): print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    time.sleep(0.05)
    assert small.resume(folder).finished


def test_what_a_run_writes_is_its_owners_alone(tmp_path: Path) -> None:
    for kind in ("states", "client"):
        folder = tmp_path / kind
        small.run(kind, folder)
        assert folder.stat().st_mode & 0o077 == 0
        for file in small.files(folder):
            assert file.stat().st_mode & 0o077 == 0, file
