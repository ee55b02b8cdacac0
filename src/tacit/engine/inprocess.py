"""The engine that runs clients in the calling process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tacit.engine.contract import Order, Participant, Progress, Report, Tune, ignore, shards
from tacit.engine.device import HOST, Compute
from tacit.engine.guard import Shown
from tacit.engine.worker import Job, Worker
from tacit.vector import Vectors


class InProcess:
    """One worker, no processes. `threads` is torch's thread count for the whole process until `close`."""

    def __init__(self, job: Job, threads: int = 1, compute: Compute = HOST) -> None:
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        self.worker = Worker(job, compute)
        self._total, self._shard = job.empty_sums(compute.sums), job.empty_sums(compute.sums)
        self._memory: Vectors = {}

    def sum(
        self, order: Order, message: Vectors, participants: Sequence[Participant], progress: Progress = ignore
    ) -> tuple[Vectors, list[Report]]:
        for total in self._total.values():
            total.zero_()
        reports: list[Report] = []
        shown = Shown.copy_of(self.worker.compute.vectors(message), self._memory)
        self._memory = shown.memory
        for shard in shards(participants, self.worker.job.population.sizes):
            reports += self.worker.sum(order, shown, shard, self._shard)
            for name, total in self._total.items():
                total.add_(self._shard[name])
            progress(len(reports))
        return self.worker.compute.host(self._total), reports

    def evaluate(self, message: Vectors) -> dict[str, float]:
        self.worker.load(message)
        job = self.worker.job
        return job.summarise([self.worker.evaluate_chunk(chunk) for chunk in range(job.chunks)])

    def evaluate_clients(
        self, message: Vectors, participants: Sequence[Participant], tune: Tune | None = None
    ) -> list[dict[str, float]]:
        message = self.worker.compute.vectors(message)
        parts = [self.worker.evaluate_client(message, participant, tune) for participant in participants]
        return [self.worker.job.task.summarise(part) for part in parts if part]

    def close(self) -> None:
        self.worker.forget()
        torch.set_num_threads(self._threads_before)
