"""The engine that shares clients out among processes of one machine.

Each process holds one resident model and one thread. Messages go down and sums come up through shared
memory; the pipes carry only plain values. Every worker has a few slots for finished shards. A shard waits
in its slot until all shards before it have been added, so the sum is the in-process engine's bit for bit,
and memory follows the number of workers, not the cohort.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from tacit.engine import shared
from tacit.engine.contract import Order, Progress, Report, Tune, Visit, ignore, shards
from tacit.engine.worker import ClientError, Job, add_sums
from tacit.errors import UserError
from tacit.vector import Vectors

QUEUE = 2
"""Tasks a worker holds at once, so that it never waits for its next one."""


@dataclass
class _Process:
    pipe: Connection[Any, Any]
    process: subprocess.Popen[bytes]
    slots: list[Vectors]
    free: list[int]
    held: int = 0
    """Tasks sent and not yet answered."""


class Pool:
    """A pool of worker processes. Start it once a run; close it at the end."""

    def __init__(self, job: Job, message: Vectors, workers: int, threads: int = 1) -> None:
        """`message` is an example of what will be sent: its names and lengths are fixed for the run."""
        self._job = job
        sizes = job.upload_sizes
        # A slot more costs a vector of memory and spares a wait; large models would rather wait.
        slots = 4 if sum(sizes.values()) < 4_000_000 else 2
        self._total = job.empty_sums()
        message_sizes = {name: vector.numel() for name, vector in message.items()}
        frozen = [p for p in job.model.parameters() if not p.requires_grad]
        sums = workers * slots * sum(total.nbytes for total in self._total.values())
        needed = 4 * sum(message_sizes.values()) + sums + sum(p.nbytes for p in frozen)
        self._folder = shared.shared_folder(needed)
        self._processes: list[_Process] = []
        try:
            # A copy: parameters that are views of one vector would each be pickled with all of it. Frozen
            # ones are shared instead.
            model = deepcopy(job.model, {id(p): p for p in frozen})
            body = shared.dump(replace(job, model=model), self._folder / "job")
            self._message = shared.map_vectors(self._folder / "message", message_sizes)
            for number in range(workers):
                self._processes.append(self._start(number, threads, slots, body, sizes, message_sizes))
            for worker in self._processes:
                self._receive(worker)  # ready: it has mapped everything
            # Mapped memory outlives its name: without one, nothing is left behind even after a SIGKILL.
            shutil.rmtree(self._folder)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        number: int,
        threads: int,
        slots: int,
        body: bytes,
        sizes: dict[str, int],
        message_sizes: dict[str, int],
    ) -> _Process:
        files = [self._folder / f"slot-{number}-{slot}" for slot in range(slots)]
        mapped = [shared.map_vectors(file, sizes, self._job.sum_dtype) for file in files]
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "tacit.engine.pool_worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        ours.send((str(self._folder), body, message_sizes, sizes, slots, number, threads))
        return _Process(ours, process, mapped, list(range(slots)))

    def sum(
        self, order: Order, message: Vectors, visits: Sequence[Visit], progress: Progress = ignore
    ) -> tuple[Vectors, list[Report]]:
        self._send_message(message)
        for total in self._total.values():
            total.zero_()
        parts = shards(visits, self._job.population.sizes)
        done: dict[int, tuple[_Process, int, list[Report]]] = {}
        reports: list[Report] = []
        sent = added = 0
        while added < len(parts):
            for worker in sorted(self._processes, key=lambda w: w.held):
                if sent < len(parts) and worker.held < QUEUE and worker.free:
                    worker.pipe.send(("sum", sent, worker.free.pop(), order, parts[sent]))
                    worker.held += 1
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
        chunks = range(self._job.test_chunks)
        parts: list[dict[str, float]] = self._map([("evaluate", chunk) for chunk in chunks])
        return self._job.task.summarise(add_sums(parts))

    def evaluate_clients(
        self, message: Vectors, visits: Sequence[Visit], tune: Tune | None = None
    ) -> list[dict[str, float]]:
        self._send_message(message)
        parts: list[dict[str, float]] = self._map([("client", visit, tune) for visit in visits])
        return [self._job.task.summarise(part) for part in parts if part]

    def _map(self, tasks: list[tuple[Any, ...]]) -> list[Any]:
        """Each task's answer, in the tasks' order, whoever did it."""
        answers: dict[int, Any] = {}
        sent = 0
        while len(answers) < len(tasks):
            for worker in sorted(self._processes, key=lambda w: w.held):
                if sent < len(tasks) and worker.held < QUEUE:
                    worker.pipe.send((tasks[sent][0], sent, *tasks[sent][1:]))
                    worker.held += 1
                    sent += 1
            answers.update(answer for _, answer in self._answers())
        return [answers[i] for i in range(len(tasks))]

    def _send_message(self, message: Vectors) -> None:
        for name, vector in self._message.items():
            vector.copy_(message[name])

    def _answers(self) -> list[tuple[_Process, Any]]:
        by_pipe = {id(worker.pipe): worker for worker in self._processes}
        ready = wait([worker.pipe for worker in self._processes if worker.held])
        workers = [by_pipe[id(pipe)] for pipe in ready]
        answers = [(worker, self._receive(worker)) for worker in workers]
        for worker in workers:
            worker.held -= 1
        return answers

    def _receive(self, worker: _Process) -> Any:
        try:
            kind, answer = worker.pipe.recv()
        except EOFError:
            code = worker.process.wait()
            raise UserError(
                f"a worker process ended unexpectedly (exit code {code}; −9 often means out of memory); "
                "try fewer engine.workers or a smaller batch, then `tacit resume`"
            ) from None
        if kind == "user error":
            raise UserError(answer)
        if kind == "error":
            raise ClientError(answer)
        return answer

    def close(self) -> None:
        for worker in self._processes:
            worker.pipe.close()  # its read fails, and it leaves
        for worker in self._processes:
            try:
                worker.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._processes = []
        shutil.rmtree(self._folder, ignore_errors=True)
