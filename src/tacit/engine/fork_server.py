"""A process that imports torch and the model's libraries once, and of which every worker is a fork.

torch takes two seconds of a core to import, transformers with peft five more: once for a run, not once for
each worker, and their memory is the workers' in common. The server has `python -P` and a clean path,
as a fresh worker has, and ends when its pipe is closed or its maker dies; its workers end with it.

A fork is sound where nothing but the one thread that forks would have to live on in the child. So the server
computes nothing, draws no random number, reads no user's code, and counts its threads before each fork; with
more than one it forks nobody, and the pool starts a fresh process instead. Workers of accelerators are
always fresh ones: a driver that was looked at before a fork does not work after it.
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
"""Whose modules may be imported before the fork, beside torch: they start no thread and keep no secret."""
THREADS = Path("/proc/self/task")
SUPPORTED = sys.platform == "linux" and THREADS.is_dir()
IMPORTS, ANSWER = 600.0, 60.0
"""Seconds until the first worker may be forked, and until a question has its answer."""
_DIE_WITH_PARENT = 1
"""Linux's number for it, in `prctl`."""


class ForkServer:
    """The server as its maker sees it."""

    def __init__(self, model: nn.Module, environment: Mapping[str, str], fds: Iterable[int]) -> None:
        """`fds`: open files that workers will have under the same numbers, if they are told to keep them."""
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
        """A worker at the other end of `pipe` that keeps these open files; None if it cannot be forked."""
        if not self._say("start", sorted(self._fds - set(fds))):
            return None
        with suppress(OSError):
            send_handle(self._pipe, pipe.fileno(), self.pid)
        number = self._heard(IMPORTS)
        return None if number is None else Forked(self, number)

    def ask(self, *question: Any) -> int | None:
        """What the server says of a worker's exit code; if it was killed, so were its workers."""
        if not self._say(*question):
            return -signal.SIGKILL
        return self._heard(ANSWER, -signal.SIGKILL)

    def _heard(self, patience: float, otherwise: int | None = None) -> int | None:
        """The next answer; a server that has none in time is ended, and another one will take its place."""
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
    """A worker that the server forked: as much of `subprocess.Popen` as a pool needs."""

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
    """Modules of known libraries that the classes of a model's parts come from."""
    found = {type(part).__module__ for part in model.modules()}
    return sorted(name for name in found if name.partition(".")[0] in LIBRARIES)


def serve(pipe: Connection[Any, Any]) -> None:
    """Fork, poll and kill workers until the pipe closes."""
    import_module("tacit.engine.pool_worker")  # and all that every worker needs

    maker, path, names = pipe.recv()
    sys.path[:] = path  # as a worker has it before it reads the job
    for name in names:
        with suppress(ImportError):  # whoever reads the job will say so
            import_module(name)
    gc.collect()
    gc.freeze()  # what is here is here to stay: a collection in a child does not copy its pages
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
    """The process id of a new worker, which closes what belongs to others."""
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
