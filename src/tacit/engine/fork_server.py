"""A process that imports torch and the model's libraries once, and from which every worker is forked.

Importing torch takes two seconds of a core; transformers with peft take five more. With this server the run
pays that once, not once for each worker, and the workers share the libraries' memory. The server runs under
`python -P` with a clean path, as a fresh worker does. It ends when its pipe is closed or its parent dies, and
its workers end with it.

A fork is sound if the child needs no thread but the one that forked. So the server computes nothing, draws no
random number, reads no user's code, and counts its threads before each fork. With more than one thread it
refuses to fork, and the pool starts a fresh process instead. Workers on accelerators are always fresh
processes: a driver that was opened before a fork does not work after it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from tacit.engine.shared import import_path

LIBRARIES = ("tacit", "transformers", "peft")
"""Libraries, besides torch, whose modules may be imported before the fork: they start no thread and keep no
secret.
"""
THREADS = Path("/proc/self/task")
SUPPORTED = sys.platform == "linux" and THREADS.is_dir()
IMPORTS, ANSWER = 600.0, 60.0
"""Seconds to wait until the first worker may be forked, and for the answer to a question."""
_DIE_WITH_PARENT = 1
"""The number of this option in Linux's `prctl`."""


class ForkServer:
    """The fork server, as the process that started it sees it."""

    def __init__(self, model: nn.Module, environment: Mapping[str, str], fds: Iterable[int]) -> None:
        """`fds`: open files that workers inherit under the same numbers, if they are told to keep them."""
        self._fds = set(fds)
        self._pipe, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *self._fds],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        self._say(os.getpid(), import_path(), modules(model))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def start(self, pipe: Connection[Any, Any], fds: Iterable[int]) -> Forked | None:
        """Fork a worker at the other end of `pipe` that keeps these open files; None if a fork is unsound."""
        if not self._say("start", sorted(self._fds - set(fds))):
            return None
        with suppress(OSError):
            send_handle(self._pipe, pipe.fileno(), self.pid)
        number = self._heard(IMPORTS)
        return None if number is None else Forked(self, number)

    def ask(self, *question: Any) -> int | None:
        """Ask the server for a worker's exit code. If the server was killed, so were its workers."""
        if not self._say(*question):
            return -signal.SIGKILL
        return self._heard(ANSWER, -signal.SIGKILL)

    def _heard(self, patience: float, otherwise: int | None = None) -> int | None:
        """The next answer. A server that does not answer in time is ended, and a new one will replace it."""
        try:
            if self._pipe.poll(patience):
                answer: int | None = self._pipe.recv()
                return answer
            self._process.kill()
        except (OSError, EOFError):
            pass
        return otherwise

    def _say(self, *thing: Any) -> bool:
        try:
            self._pipe.send(thing)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Forked:
    """A worker that the server forked: the part of `subprocess.Popen` that a pool needs."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid, self.args = server, pid, (f"fork {pid}",)
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self._code is None:
            self._code = self._server.ask("poll", self.pid)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self._code is None:
            self._code = self._server.ask("kill", self.pid)


def modules(model: nn.Module) -> list[str]:
    """Modules of known libraries that define the classes of a model's parts."""
    found = {type(part).__module__ for part in model.modules()}
    return sorted(name for name in found if name.partition(".")[0] in LIBRARIES)


def serve(pipe: Connection[Any, Any]) -> None:
    """Fork, poll and kill workers until the pipe closes."""
    import_module("tacit.engine.pool_worker")  # and everything that a worker needs

    maker, path, names = pipe.recv()
    sys.path[:] = path  # as in a worker before it reads the job
    for name in names:
        with suppress(ImportError):  # reading the job will report it
            import_module(name)
    gc.collect()
    gc.freeze()  # these objects stay: a collection in a child must not copy their pages
    while True:
        while not pipe.poll(1.0):
            if os.getppid() != maker:
                return
        what, *about = pipe.recv()
        if what == "start":
            fd = recv_handle(pipe)
            pid = _forked(pipe, fd, about[0]) if len(list(THREADS.iterdir())) == 1 else None
            os.close(fd)
            pipe.send(pid)
        elif what == "poll":
            pipe.send(_code(about[0], os.WNOHANG))
        elif what == "kill":
            with suppress(ProcessLookupError):
                os.kill(about[0], signal.SIGKILL)
            pipe.send(_code(about[0], 0))
        else:
            raise ValueError(f"unknown request {what!r}")


def _forked(pipe: Connection[Any, Any], fd: int, others: Sequence[int]) -> int:
    """Fork a worker, which closes what belongs to others; returns its process id."""
    from tacit.engine.pool_worker import work

    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == server:
            pipe.close()
            for other in others:
                os.close(other)
            np.random.seed()  # noqa: NPY002 (the only generator that was seeded before the fork)
            work(Connection(fd))
    finally:
        with suppress(Exception):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def _code(pid: int, options: int) -> int | None:
    try:
        done, status = os.waitpid(pid, options)
    except ChildProcessError:
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if done else None


def main() -> None:
    with suppress(EOFError, OSError):
        serve(Connection(int(sys.argv[1])))
