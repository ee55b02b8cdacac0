"""A client's local training: its batches, its step sizes, its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit.data import Batch, Records, batches
from tacit.gradients import ClippedGradient, plain_gradient
from tacit.privacy.mechanism import Privacy, batch_sampling
from tacit.privacy.noise import Noise
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


class Gradients(Protocol):
    """Where a client's batches and gradients come from: plain, or private at example level."""

    @property
    def noise_variance(self) -> float:
        """Variance that privacy adds to each coordinate."""

    def rows(self, examples: int) -> Iterator[NDArray[np.int64]]:
        """Positions of each batch's records among the client's own."""

    def fill(self, flat: Flat, batch: Batch, task: Task) -> Tensor:
        """Put the gradient of a batch into `flat.grad`; returns the mean loss."""


@dataclass(frozen=True)
class PlainGradients:
    """Shuffled batches, and the gradient of their mean loss."""

    local: Local
    rng: np.random.Generator
    noise_variance: float = 0.0

    def rows(self, examples: int) -> Iterator[NDArray[np.int64]]:
        local = self.local
        if local.steps is not None:
            return batches.steps(examples, local.batch, local.steps, self.rng)
        return batches.epochs(examples, local.batch, local.epochs or 1, self.rng)

    def fill(self, flat: Flat, batch: Batch, task: Task) -> Tensor:
        return plain_gradient(flat, batch, task.losses)


@dataclass(frozen=True)
class PrivateGradients:
    """Poisson batches, and g̃ = (1/B)[Σ_j clip_C(g_j) + N(0, σ²C²)] for each.

    Unit: one record of the client (add or remove). Each gradient has sensitivity C before the noise. The
    draw uses the same `batch_sampling` that the charge does.
    """

    local: Local
    privacy: Privacy
    clipped: ClippedGradient
    coins: np.random.Generator
    noise: Noise
    batches_per_step: int = 1

    @property
    def noise_variance(self) -> float:
        return (self.privacy.std() / self.local.batch) ** 2

    def rows(self, examples: int) -> Iterator[NDArray[np.int64]]:
        rate = batch_sampling(examples, self.local.batch).rate
        steps = self.local.nominal_steps(examples) * self.batches_per_step
        return batches.poisson(examples, rate, steps, self.coins)

    def fill(self, flat: Flat, batch: Batch, task: Task) -> Tensor:
        clip = self.privacy.clip
        bound = clip.bound if clip.per == "global" else clip.groups(flat.layout)
        result = self.clipped(batch, task.losses, bound)
        self.privacy.privatize_(flat.grad, self.noise, self.local.batch)
        return result.loss_sum / max(len(result.norms), 1)


class LocalWork:
    """The `Work` that an algorithm's client part is given."""

    def __init__(
        self,
        flat: Flat,
        task: Task,
        records: Records,
        indices: NDArray[np.int64],
        local: Local,
        gradients: Gradients,
        round: int,
        lr: float,
        queries: int = 1,
    ) -> None:
        self.layout: Layout = flat.layout
        self.round = round
        self.travel = 0.0
        self.count = 0
        self.examples = len(indices)
        self.steps_before = round * local.nominal_steps(self.examples)
        self._flat, self._task, self._records, self._local = flat, task, records, local
        self._gradients, self._lr, self._queries = gradients, lr, queries
        # A client's records are gathered once, in their stored form; a batch is then a cheap row selection.
        self._data = records.take(indices)
        self._rows = gradients.rows(self.examples)
        self._batch: Batch = {}
        self._asked = 0
        self._loss = torch.zeros(())
        self._losses = 0

    @property
    def loss(self) -> float:
        """Mean training loss over the gradients asked for."""
        return float(self._loss) / max(self._losses, 1)

    @property
    def noise_variance(self) -> float:
        return self._gradients.noise_variance

    def load(self, theta: Tensor) -> Tensor:
        y = self._flat.shared
        y.copy_(theta)
        return y

    def steps(self) -> Iterator[float]:
        while self._draw():
            self.count += 1
            self.travel += self._lr
            yield self._lr

    def gradient(self, fresh: bool = False) -> Tensor:
        if fresh and not self._draw():
            raise RuntimeError("the algorithm asks for more batches than its `batches` announces")
        self._asked += 1
        if self._asked > self._queries:
            raise RuntimeError(
                f"the algorithm asks for {self._asked} gradients of one batch but announces {self._queries}; "
                "each one costs privacy, so let its `queries` say how many there are"
            )
        flat = self._flat
        with torch.enable_grad():
            self._loss += self._gradients.fill(flat, self._batch, self._task)
        self._losses += 1
        grad = flat.grad[: flat.layout.shared]
        if self._local.clip is not None:
            norm = torch.linalg.vector_norm(grad)
            grad.mul_(self._local.clip / norm.clamp(min=self._local.clip))
        return grad

    def _draw(self) -> bool:
        rows = next(self._rows, None)
        if rows is None:
            return False
        chosen = torch.from_numpy(rows)
        self._batch = self._records.prepare({name: values[chosen] for name, values in self._data.items()})
        self._asked = 0
        return True
