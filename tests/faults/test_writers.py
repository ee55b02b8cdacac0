"""Several writers in one folder: one works, the others get an error line and change nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import faults_small as small
import pytest
from forks import cli_main, forked, start, waited

import tacit
from tacit.federation import lock
from tacit.federation.lock import locked


def as_another_process(play: Callable[[], Any]) -> Callable[[], Any]:
    """For a fork: it must not know by memory which locks its parent holds, but ask the operating system."""

    def forgetful() -> Any:
        lock._held.clear()
        return play()

    return forgetful


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Another process holds a folder's lock meanwhile; its process id. It is killed at the end."""
    told, tell = os.pipe()

    def hold() -> None:
        with locked(folder):
            os.write(tell, b"x")
            time.sleep(600)

    pid = start(hold)
    os.close(tell)
    try:
        assert os.read(told, 1) == b"x"
        yield pid
    finally:
        os.close(told)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


@pytest.mark.parametrize("kind", ["plain", "states", "client"])
def test_a_resume_that_is_refused_changes_nothing(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    small.half(kind, folder, 2, 4)
    with held(folder):
        before = small.snapshot(folder)
        with pytest.raises(tacit.UserError, match="is in use by another process"):
            small.resume(folder)
        with pytest.raises(tacit.UserError, match="is in use by another process"):
            small.run(kind, folder)
        assert small.snapshot(folder) == before
    assert small.resume(folder).finished  # the lock went with its process


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
    recipe = small.recipe("plain", tmp_path / "recipe.yaml", 30)
    files = [tmp_path.joinpath(f"said-{number}").open("w+") for number in range(3)]
    runs = [start(cli_main("run", recipe, "--out", folder), file, file) for file in files]
    codes = [waited(pid) for pid in runs]
    assert sorted(codes) == [(0, False), (2, False), (2, False)]
    for (code, _), file in zip(codes, files, strict=True):
        file.seek(0)
        told = [line for line in file.read().splitlines() if line.startswith("tacit: ")]
        file.close()
        assert len(told) == (code == 2)
        assert all("in use" in line or "already holds a run" in line for line in told)
    assert small.metric_rounds(folder) == list(range(1, 31))
    whole = tmp_path / "whole"
    assert forked(cli_main("run", recipe, "--out", whole)).code == 0
    assert small.same(small.vectors(folder), small.vectors(whole))


@pytest.mark.slow
def test_two_resumes_at_once_leave_one_sound_run(tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    small.half("states", folder, 2, 40)
    small.run("states", whole, 40)
    runs = [start(lambda: 0 if small.resume(folder).finished else 4) for _ in range(2)]
    codes = [waited(pid)[0] for pid in runs]
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
        second = forked(as_another_process(cli_main("run", file, "--out", folder)))
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
        other = forked(as_another_process(lambda: locked(tmp_path / "run").__enter__()))
        assert "in use by another process" in other.err
    assert not (tmp_path / "run").exists()  # nothing was written, so nothing is left


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small.half("plain", folder, 2, 4)
    with held(folder) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert small.resume(folder).finished


def test_what_a_run_writes_is_its_owners_alone(tmp_path: Path) -> None:
    for kind in ("states", "client"):
        folder = tmp_path / kind
        small.run(kind, folder)
        assert folder.stat().st_mode & 0o077 == 0
        for file in small.files(folder):
            assert file.stat().st_mode & 0o077 == 0, file
