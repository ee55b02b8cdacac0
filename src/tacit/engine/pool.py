"""The engine that distributes clients over processes of one machine.

Each process holds one resident model and one thread. It is a fork of a process that has already imported the
libraries (`tacit.engine.fork_server`) or, on accelerators, a fresh process. Messages go down and sums come up
through shared memory; the pipes carry only plain values. Every worker has a few slots for finished shards. A
shard waits in its slot until all shards before it have been added. The sum is therefore the in-process
engine's bit for bit, and memory grows with the number of workers, not with the cohort.

Workers may die
---------------
A worker gives a sign of life every second. A worker that ends, falls silent, or takes many times longer than
any earlier task of the same kind is replaced, and its work is repeated with the same named randomness, so the
result is the same. A shard's sum is read only after its worker has answered, so nothing of interrupted work
reaches the server. Still, `before_replay` is called first: where what a client sends is already a release,
under secret randomness, the round loop charges those clients a second time, as it does for a repeated round.
A worker that fails several times without finishing anything ends the run.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
from torch import Tensor

from tacit.engine import shared
from tacit.engine.contract import Order, Participant, Progress, Replay, Report, Tune, free, ignore, shards
from tacit.engine.device import HOST, Compute
from tacit.engine.fork_server import SUPPORTED, Forked, ForkServer
from tacit.engine.shared import Place
from tacit.engine.worker import Job
from tacit.errors import ClientError, UserError
from tacit.system import starts_workers
from tacit.vector import Vectors

QUEUE = 2
"""Tasks a worker holds at once, so that it never waits for its next one."""
KEPT_FROM_WORKERS = {
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
}
"""Signals that ask to stop, which workers ignore: the round loop decides when to stop, also when the signal
goes to the whole process group or service.
"""
Task = tuple[Any, ...]


@dataclass(frozen=True)
class Patience:
    """How long a worker may be silent or slow, in seconds, and how often it may fail."""

    silence: float = 60.0
    start: float = 600.0
    """Until it is ready for its first task."""
    least: float = 120.0
    times: float = 20.0
    """A task may take this many times the longest earlier one of its kind, and at least `least`."""
    failures: int = 3
    """Failures in a row, without a finished task between them."""


@dataclass
class _Process:
    number: int
    slots: list[Vectors]
    places: list[Place]
    free: list[int]
    pipe: Connection[Any, Any] | None = None
    process: subprocess.Popen[bytes] | Forked | None = None
    tasks: deque[Task] = field(default_factory=deque)
    """Tasks sent and not yet answered; the first one is running."""
    since: float = 0.0
    """When the first of them started."""
    born: float = 0.0
    ready: bool = False
    failures: int = 0


def slots(sizes: Mapping[str, int]) -> int:
    """How many sums a worker may have ready for the server.

    One more slot costs a vector of memory and saves a wait; for large models, waiting is better.
    """
    return 4 if sum(sizes.values()) < 4_000_000 else 2


class Pool:
    """A pool of worker processes. Start it once a run; close it at the end."""

    def __init__(
        self,
        job: Job,
        message: Vectors,
        workers: int,
        threads: int = 1,
        before_replay: Replay = free,
        patience: Patience | None = None,
        computes: Sequence[Compute] = (HOST,),
    ) -> None:
        """`message` is an example of the messages to come: its names and lengths are fixed for the run.

        Workers are assigned `computes` in turn; with as many workers as `computes`, each has one of its own.
        """
        if not starts_workers():
            raise UserError(
                "engine: worker processes need Linux or macOS, where they inherit shared memory; set "
                "engine.workers to 0, which runs clients in this process"
            )
        self._computes = computes
        self._messages = 0
        self._job, self._threads = job, threads
        self._before_replay, self._patience = before_replay, patience or Patience()
        self._sizes = job.upload_sizes
        self._slots = slots(self._sizes)
        self._total = job.empty_sums()
        self._message_sizes = {name: vector.numel() for name, vector in message.items()}
        self._longest: dict[str, float] = {}
        self._looked = time.monotonic()
        self._places: list[Place] = []
        self._processes: list[_Process] = []
        self._server: ForkServer | None = None
        try:
            self._share(job)
            self._message_place = self._place("message", shared.vectors_size(self._message_sizes))
            self._message = shared.map_vectors(self._message_place, self._message_sizes)
            self._beats_place = self._place("signs of life", 8 * workers)
            self._beats: Tensor = torch.frombuffer(self._beats_place.map(), dtype=torch.float64)
            for number in range(workers):
                self._processes.append(self._prepared(number))
            for worker in self._processes:
                self._start(worker)
        except BaseException:
            self.close()
            raise

    def _share(self, job: Job) -> None:
        """Put the job into shared memory, where workers find it."""
        # A copy: buffers that are views of one vector would each be pickled with all of it. Parameters are
        # not copied: workers read them in place.
        model = deepcopy(job.model, {id(p): p for p in job.model.parameters()})
        body, self._arrays_place = shared.dump(replace(job, model=model))
        self._places.append(self._arrays_place)
        self._body_place = self._place("body", len(body))
        with self._body_place.map() as memory:
            memory[: len(body)] = body

    def _place(self, label: str, size: int) -> Place:
        self._places.append(Place.make(label, size))
        return self._places[-1]

    def _prepared(self, number: int) -> _Process:
        size = shared.vectors_size(self._sizes, self._job.sum_dtype)
        places = [self._place(f"slot-{number}-{slot}", size) for slot in range(self._slots)]
        slots = [shared.map_vectors(place, self._sizes, self._job.sum_dtype) for place in places]
        return _Process(number, slots, places, list(range(self._slots)))

    def _start(self, worker: _Process) -> None:
        ours, theirs = Pipe()
        places = [
            self._body_place,
            self._arrays_place,
            self._message_place,
            self._beats_place,
            *worker.places,
        ]
        compute = self._computes[worker.number % len(self._computes)]
        # Signals that are blocked here stay blocked in the worker, so there is no moment at which one can
        # kill it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, KEPT_FROM_WORKERS)
        try:
            worker.process, parent = self._forked(theirs, places, compute) or self._fresh(theirs, places)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        worker.pipe, worker.born, worker.ready = ours, time.monotonic(), False
        worker.since = worker.born
        self._beats[worker.number] = 0.0
        self._send(
            worker,
            (
                parent,
                places,
                self._message_sizes,
                self._sizes,
                worker.number,
                self._threads,
                compute,
            ),
        )

    def _forked(
        self, pipe: Connection[Any, Any], places: Sequence[Place], compute: Compute
    ) -> tuple[Forked, int] | None:
        """A worker forked with its libraries already imported, and its parent's id; None if forking is
        unsound.
        """
        if not SUPPORTED or not compute.here:
            return None
        if self._server is not None and self._server.ended:
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = ForkServer(self._job.model, self._environment(), (p.fd for p in self._places))
        forked = self._server.start(pipe, (place.fd for place in places))
        return None if forked is None else (forked, self._server.pid)

    def _fresh(
        self, pipe: Connection[Any, Any], places: Sequence[Place]
    ) -> tuple[subprocess.Popen[bytes], int]:
        """A worker in a fresh process, and its parent's process id."""
        process = subprocess.Popen(
            # -P: a file of the current folder must not pass for a module of Python's.
            [sys.executable, "-P", "-m", "tacit.engine.pool_worker", str(pipe.fileno())],
            pass_fds=[pipe.fileno(), *(place.fd for place in places)],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
        )
        return process, os.getpid()

    def _environment(self) -> dict[str, str]:
        threads = str(self._threads)
        return {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def sum(
        self, order: Order, message: Vectors, participants: Sequence[Participant], progress: Progress = ignore
    ) -> tuple[Vectors, list[Report]]:
        self._send_message(message)
        for total in self._total.values():
            total.zero_()
        parts = shards(participants, self._job.population.sizes)
        done: dict[int, tuple[_Process, int, list[Report]]] = {}
        reports: list[Report] = []
        sent = added = 0
        while added < len(parts):
            for worker in sorted(self._processes, key=lambda w: len(w.tasks)):
                if sent < len(parts) and len(worker.tasks) < QUEUE and worker.free:
                    self._give(worker, ("sum", sent, worker.free.pop(), order, parts[sent], self._messages))
                    sent += 1
            for worker, (shard, slot, part) in self._answers():
                done[shard] = worker, slot, part
            while added in done:
                worker, slot, part = done.pop(added)
                for name, total in self._total.items():
                    total.add_(worker.slots[slot][name])
                worker.free.append(slot)
                reports += part
                added += 1
            progress(len(reports))
        return self._total, reports

    def evaluate(self, message: Vectors) -> dict[str, float]:
        self._send_message(message)
        parts: list[dict[str, float]] = self._map(
            [("evaluate", chunk, self._messages) for chunk in range(self._job.chunks)]
        )
        return self._job.summarise(parts)

    def evaluate_clients(
        self, message: Vectors, participants: Sequence[Participant], tune: Tune | None = None
    ) -> list[dict[str, float]]:
        self._send_message(message)
        parts: list[dict[str, float]] = self._map(
            [("client", participant, tune, self._messages) for participant in participants]
        )
        return [self._job.task.summarise(part) for part in parts if part]

    def _map(self, tasks: list[Task]) -> list[Any]:
        """Each task's answer, in the order of the tasks, whichever worker did it."""
        answers: dict[int, Any] = {}
        sent = 0
        while len(answers) < len(tasks):
            for worker in sorted(self._processes, key=lambda w: len(w.tasks)):
                if sent < len(tasks) and len(worker.tasks) < QUEUE:
                    self._give(worker, (tasks[sent][0], sent, *tasks[sent][1:]))
                    sent += 1
            answers.update(answer for _, answer in self._answers())
        return [answers[i] for i in range(len(tasks))]

    def _send_message(self, message: Vectors) -> None:
        self._messages += 1
        for name, vector in self._message.items():
            vector.copy_(message[name])

    def _give(self, worker: _Process, task: Task) -> None:
        if not worker.tasks:
            worker.since = time.monotonic()
        worker.tasks.append(task)
        self._send(worker, task)

    @staticmethod
    def _send(worker: _Process, thing: Any) -> None:
        assert worker.pipe is not None
        with suppress(OSError):  # it has ended; the next read from it will show that
            worker.pipe.send(thing)

    def _answers(self) -> list[tuple[_Process, Any]]:
        """Wait for answers, or for a worker that had to be replaced."""
        busy = [(worker.pipe, worker) for worker in self._processes if worker.tasks]
        ready = {id(pipe) for pipe in wait([pipe for pipe, _ in busy if pipe is not None], timeout=1.0)}
        answers = []
        for pipe, worker in busy:
            if id(pipe) in ready:
                answers += [(worker, answer) for answer in self._received(worker)]
        self._replace_the_silent()
        return answers

    def _received(self, worker: _Process) -> list[Any]:
        """All messages from a worker; a worker that has ended is replaced."""
        answers: list[Any] = []
        assert worker.pipe is not None
        try:
            while worker.pipe.poll():
                kind, answer = worker.pipe.recv()
                if kind == "error":
                    raise ClientError(answer)
                if kind == "refused":
                    raise UserError(answer)
                if kind == "ready":
                    worker.ready, worker.since = True, time.monotonic()
                if kind == "answer":
                    task, now = worker.tasks.popleft(), time.monotonic()
                    self._longest[task[0]] = max(self._longest.get(task[0], 0.0), now - worker.since)
                    worker.since, worker.failures = now, 0
                    answers.append(answer)
        except (EOFError, OSError):
            self._replace(worker, "ended")
        return answers

    def _replace_the_silent(self) -> None:
        now, patience = time.monotonic(), self._patience
        if now - self._looked > 10.0:  # this process itself was stopped for a while, or the machine was
            for worker in self._processes:
                worker.since = worker.born = now
        self._looked = now
        for worker in self._processes:
            if not worker.tasks:
                continue
            heard = float(self._beats[worker.number])
            if not worker.ready:
                if now - worker.born > patience.start:
                    self._replace(worker, "did not start")
            elif now - max(heard, worker.since) > patience.silence:
                self._replace(worker, "fell silent")
            elif now - worker.since > self._deadline(worker.tasks[0][0]):
                self._replace(worker, "took far longer than any before")

    def _deadline(self, kind: str) -> float:
        """Seconds that a task of this kind may take; there is no limit before the first one has finished."""
        known = self._longest.get(kind)
        return math.inf if known is None else max(self._patience.least, self._patience.times * known)

    def _replace(self, worker: _Process, why: str) -> None:
        """Start a new worker and give it the tasks that the old one had not answered."""
        code = self._end(worker, kill=True)
        worker.failures += 1
        if worker.failures >= self._patience.failures:
            hint = "; −9 often means out of memory" if code == -9 and why == "ended" else ""
            raise UserError(
                f"a worker process failed {worker.failures} times in a row: it {why} "
                f"(exit code {code}{hint}); try fewer engine.workers or a smaller batch, then `tacit resume`"
            )
        if worker.tasks and worker.tasks[0][0] == "sum":
            self._before_replay(worker.tasks[0][4])
            worker.tasks[0] = (
                *worker.tasks[0][:4],
                [v._replace(replay=v.replay + 1) for v in worker.tasks[0][4]],
                *worker.tasks[0][5:],
            )
        self._start(worker)
        for task in worker.tasks:
            self._send(worker, task)

    @staticmethod
    def _end(worker: _Process, kill: bool = False) -> int | None:
        if worker.pipe is not None:
            worker.pipe.close()  # its read fails, and it leaves
            worker.pipe = None
        process, worker.process = worker.process, None
        if process is None:
            return None
        try:
            if kill and process.poll() is None:
                raise subprocess.TimeoutExpired(process.args, 0)
            return process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def close(self) -> None:
        for worker in self._processes:
            if worker.pipe is not None:
                worker.pipe.close()
                worker.pipe = None
        for worker in self._processes:
            self._end(worker)
        self._processes = []
        if self._server is not None:
            self._server.close()
            self._server = None
        for place in self._places:
            place.close()
        self._places = []
