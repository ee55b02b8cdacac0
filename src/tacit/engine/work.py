"""A client's local training: its batches, its step sizes, its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit.data import Batch, Records, batches
from tacit.gradients.plain import plain_gradient
from tacit.tasks import Task
from tacit.vector import Flat, Layout


@dataclass(frozen=True)
class Local:
    """How long and on what batches a client trains in a round."""

    batch: int
    steps: int | None = None
    epochs: int | None = None
    clip: float | None = None
    """Largest norm of a step's mean gradient; a matter of stability, not of privacy."""

    def nominal_steps(self, examples: float) -> int:
        """Local steps of a client with that many examples."""
        if self.steps is not None:
            return self.steps
        return int((self.epochs or 1) * max(1, -(-examples // self.batch)))

    def batches(self, examples: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Positions of each step's records among the client's own."""
        if self.steps is not None:
            return batches.steps(examples, self.batch, self.steps, rng)
        return batches.epochs(examples, self.batch, self.epochs or 1, rng)


class LocalWork:
    """The `Work` that an algorithm's client part is given: plain gradients on shuffled batches."""

    def __init__(
        self,
        flat: Flat,
        task: Task,
        records: Records,
        indices: NDArray[np.int64],
        local: Local,
        round: int,
        lr: float,
        rng: np.random.Generator,
    ) -> None:
        self.layout: Layout = flat.layout
        self.round = round
        self.travel = 0.0
        self.count = 0
        self.examples = len(indices)
        self._flat, self._task, self._records, self._local = flat, task, records, local
        self._lr = lr
        self._rng = rng
        # A client's records are gathered once, in their stored form; a batch is then a cheap row selection.
        self._data = records.take(indices)
        self._batch: Batch = {}
        self._loss = torch.zeros(())
        self._queries = 0

    @property
    def loss(self) -> float:
        """Mean training loss over the gradients asked for."""
        return float(self._loss) / max(self._queries, 1)

    def load(self, theta: Tensor) -> Tensor:
        y = self._flat.shared
        y.copy_(theta)
        return y

    def steps(self) -> Iterator[float]:
        for rows in self._local.batches(self.examples, self._rng):
            self._select(rows)
            self.count += 1
            self.travel += self._lr
            yield self._lr

    def gradient(self) -> Tensor:
        flat = self._flat
        with torch.enable_grad():
            self._loss += plain_gradient(flat, self._batch, self._task.losses)
        self._queries += 1
        grad = flat.grad[: flat.layout.shared]
        if self._local.clip is not None:
            norm = torch.linalg.vector_norm(grad)
            grad.mul_(self._local.clip / norm.clamp(min=self._local.clip))
        return grad

    def _select(self, rows: NDArray[np.int64]) -> None:
        chosen = torch.from_numpy(rows)
        self._batch = self._records.prepare({name: values[chosen] for name, values in self._data.items()})
