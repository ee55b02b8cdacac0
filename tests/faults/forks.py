"""A fork server: torch and tacit are imported once, and every trial is a fork of this process.

`forked` runs a function in a forked process and says how it ended. `command` runs the `tacit` command in this
process: arguments in, exit code and output out. Tests may use both. The process that forks must have one
thread (`OMP_NUM_THREADS=1`, and no thread pool started), or a fork may hang.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

import tacit.cli.app as cli

HANG = 120.0
"""Seconds after which something that takes a tenth of one is said to hang, on however loaded a machine."""
CRASHED = 70
"""The exit code of a trial that ended with an exception that nobody caught."""


@dataclass(frozen=True)
class End:
    """How a trial ended: its exit code (negative: killed by that signal), and all that it said."""

    code: int
    out: str = ""
    err: str = ""
    hung: bool = False

    @property
    def riddle(self) -> str | None:
        """What a person should not have been told: a traceback, or a refusal that is not one line."""
        if self.hung:
            return "no end"
        if self.code == CRASHED or "Traceback (most recent call last)" in self.err:
            return self.err or "an exception"
        told = [line for line in self.err.splitlines() if line.startswith("tacit: ")]
        if self.code == 2 and len(told) != 1 and "damaged " not in self.out:  # the word of `tacit verify`
            return f"refused, and not in one line: {self.err!r}"
        return None if self.code in (0, 1, 2, 130) or self.code < 0 else f"exit code {self.code}: {self.err}"


class Hung(BaseException):
    """The alarm rang: what runs here does not come to an end."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `Hung` in what takes longer than this."""

    def ring(number: int, frame: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _spoken() -> Iterator[list[Any]]:
    """Standard output and error, at the level of descriptors, in two files."""
    sys.stdout.flush(), sys.stderr.flush()
    kept, streams = [os.dup(1), os.dup(2)], (sys.stdout, sys.stderr)
    files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
    try:
        for fd, file in zip((1, 2), files, strict=True):
            os.dup2(file.fileno(), fd)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        yield files
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        sys.stdout, sys.stderr = streams
        for fd, before in zip((1, 2), kept, strict=True):
            os.dup2(before, fd)
            os.close(before)


def _said(file: Any) -> str:
    file.seek(0)
    with file:
        return str(file.read().decode(errors="replace"))


@cache
def _built() -> Any:
    """The command, built once and not for each call."""
    return typer.main.get_command(cli.app)


def command(*arguments: str | Path, seconds: float = HANG) -> End:
    """`tacit ARGUMENTS…` in this process, by its own entry point."""
    argv, app, code, hung = sys.argv, cli.app, CRASHED, False
    sys.argv, cli.app = ["tacit", *map(str, arguments)], _built()
    with _spoken() as files:
        try:
            with alarm(seconds):
                cli.main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        except Hung:
            hung = True
        except BaseException:
            traceback.print_exc()
        finally:
            sys.argv, cli.app = argv, app  # other tests of this process know it as it was
    return End(code, _said(files[0]), _said(files[1]), hung)


def start(play: Callable[[], Any], out: Any = None, err: Any = None) -> int:
    """The process id of a fork that plays a function, in a session of its own, and exits as that says."""
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = CRASHED
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for fd, file in ((1, out), (2, err)):
            if file is not None:
                os.dup2(file.fileno(), fd)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        found = play()
        code = found if isinstance(found, int) else 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def waited(pid: int, seconds: float = HANG, kill_after: float | None = None) -> tuple[int, bool]:
    """A fork's exit code, and whether it had to be ended since it hung; `kill_after`: end it on purpose."""
    begun, pause = time.monotonic(), 0.0005
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), False
        took = time.monotonic() - begun
        if kill_after is not None and took >= kill_after:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), False
        if took > seconds:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL, True
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def forked(play: Callable[[], Any], seconds: float = HANG, kill_after: float | None = None) -> End:
    """Play a function in a fork, and wait for its end."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code, hung = waited(start(play, out, err), seconds, kill_after)
        return End(code, _said(out), _said(err), hung)


class Process:
    """A fork that goes on meanwhile, with what `subprocess.Popen` has of it."""

    def __init__(self, play: Callable[[], Any]) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self.pid = start(play, *self._files)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float = HANG) -> tuple[str, str]:
        """Wait for its end, which comes by force when it takes longer: what it said."""
        if self.returncode is None:
            self.returncode, hung = waited(self.pid, timeout)
            assert not hung, "no end"
        return _said(self._files[0]), _said(self._files[1])


def cli_main(*arguments: str | Path) -> Callable[[], None]:
    """`tacit ARGUMENTS…` for a fork: its own entry point, its own exit code."""

    def play() -> None:
        sys.argv, cli.app = ["tacit", *map(str, arguments)], _built()
        cli.main()

    return play


def session(leader: int) -> list[int]:
    """Processes that are left of the session that a fork led."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] != "Z":
                    found.append(int(place.name))
    return found
