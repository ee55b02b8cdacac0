"""A user at a terminal sees at once that work is in progress; programs and logs see none of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from command import GOOD, tacit

CODE = """
from tacit.cli.common import working
with working("adding up"):
    pass
print("42")
"""
PRIVATE = "privacy: {unit: client, clip: 1.0, noise: 2.0, delta: 1.0e-3, entropy: seed}\n"
PLAN = ["plan", "--rate", "0.1", "--rounds", "9", "--delta", "1e-5"]
COMMANDS = {
    "compare": ["compare", "r"],
    "data": ["data", "r.yaml"],
    "fit": ["fit", "r.yaml"],
    "ledger": ["ledger", "r"],
    "methods": ["blocks", "r.yaml"],
    "plan_config": ["plan", "r.yaml"],
    "plan_one": [*PLAN, "--noise", "1"],
    "plan_table": [*PLAN, "--noise", "1,2"],
    "report": ["report", "r"],
    "statement": ["statement", "r"],
    "test": ["test", "r"],
    "verify": ["verify", "r"],
}


def seen(**streams: int) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "TERM": "xterm", "FORCE_COLOR": "1"}
    return subprocess.run([sys.executable, "-c", CODE], check=True, env=environment, **streams)


def read(terminal: int) -> str:
    """All that was written to a terminal; the side that wrote is closed."""
    told = b""
    try:
        while part := os.read(terminal, 4096):
            told += part
    except OSError:  # Linux's word for the end
        pass
    return told.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
def test_a_spinner_is_there_on_a_terminal_and_gone_before_the_answer() -> None:
    ours, theirs = os.openpty()
    seen(stdout=theirs, stderr=theirs)
    os.close(theirs)
    before, after = read(ours).split("42")
    assert "adding up…" in before and not after.strip()
    assert before.endswith("\x1b[2K"), "the line is empty again"


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
@pytest.mark.parametrize("watched", ["stdout", "stderr"])
def test_nothing_is_written_where_one_of_both_is_a_pipe(watched: str) -> None:
    ours, theirs = os.openpty()
    piped = {"stdout": "stderr", "stderr": "stdout"}[watched]
    done = seen(**{watched: theirs, piped: subprocess.PIPE})
    os.close(theirs)
    told = read(ours).encode(), done.stdout or done.stderr or b""
    assert sorted(part.strip() for part in told) == [b"", b"42"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a finished run of it."""
    from tacit import api, config

    folder = tmp_path_factory.mktemp("working")
    (folder / "r.yaml").write_text(GOOD + PRIVATE)
    api.run(config.load(folder / "r.yaml"), folder / "r")
    return folder


@pytest.mark.parametrize("module", COMMANDS)
def test_commands_say_that_they_work_and_answer_afterwards(
    module: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside: list[str] = []

    @contextmanager
    def working(_: str) -> Iterator[None]:
        yield
        inside.append(capsys.readouterr().out)

    monkeypatch.chdir(place)
    monkeypatch.setattr(import_module(f"tacit.cli.{module}"), "working", working)
    code, out, err = tacit(*COMMANDS[module], monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0, err
    assert out and inside and inside[0] == ""
