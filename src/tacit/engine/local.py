"""Where a client's batches and gradients come from: plain, or private at example level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tacit.algorithms import Algorithm
from tacit.data import Batch, Population, batches
from tacit.gradients import ClippedGradient, plain_gradient
from tacit.optimizers import Within
from tacit.privacy import Bits, ExampleLevel, Workload
from tacit.tasks import Task
from tacit.vector import Flat


@dataclass(frozen=True)
class Local:
    """How long and on what batches a client trains in a round."""

    batch: int
    """Records in a batch; with `seconds`, about how many that makes."""
    steps: int | None = None
    epochs: int | None = None
    weight_decay: float = 0.0
    """λ of an L2 term: adds λ y to every gradient (AdamW methods decouple their own)."""
    clip: float | None = None
    """Largest norm of a step's mean gradient; a matter of stability, not of privacy."""
    seconds: float | None = None
    """Batches of up to so many seconds of sound, instead of a number of records."""
    within: Within | None = None
    """The rate's shape over a round's steps."""

    def factor(self, step: int, total: int) -> float:
        """Of the round's rate, at one of its `total` steps."""
        return 1.0 if self.within is None else self.within(step, total)

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

    def rows(self, examples: int, epochs: int | None = None) -> Iterator[NDArray[np.int64]]:
        """Positions of each batch's records among the client's own; `epochs` over them, or the local
        length.
        """

    def fill(self, flat: Flat, batch: Batch, task: Task, scale: Tensor | None) -> Tensor:
        """Put the gradient of a batch into `flat.grad`; returns the mean loss.

        `scale` multiplies each record's gradient (a vector as long as the parameters).
        """


@dataclass(frozen=True)
class PlainGradients:
    """Shuffled batches, and the gradient of their mean loss."""

    local: Local
    rng: np.random.Generator
    batches_per_step: int = 1
    durations: NDArray[Any] | None = None
    """Seconds of each of the client's records, for batches by seconds."""
    noise_variance: float = 0.0

    def rows(self, examples: int, epochs: int | None = None) -> Iterator[NDArray[np.int64]]:
        local, times = self.local, self.batches_per_step
        if epochs is not None:
            local = replace(local, steps=None, epochs=epochs)
        if local.seconds is not None and self.durations is not None:
            whole = (local.epochs or 1) * times if local.steps is None else None
            packed = batches.by_seconds(self.durations, local.seconds, whole, self.rng)
            return packed if local.steps is None else islice(packed, local.steps * times)
        if local.steps is not None:
            return batches.steps(examples, local.batch, local.steps * times, self.rng)
        return batches.epochs(examples, local.batch, (local.epochs or 1) * times, self.rng)

    def fill(self, flat: Flat, batch: Batch, task: Task, scale: Tensor | None) -> Tensor:
        loss = plain_gradient(flat, batch, task.losses)
        if scale is not None:
            flat.grad.mul_(scale)
        return loss


@dataclass(frozen=True)
class PrivateGradients:
    """Poisson batches, and g̃ = (1/B)[Σ_j clip_C(g_j) + N(0, σ²C²)] for each.

    Unit: one record of the client (add or remove). The mechanism draws, noises and was charged by the same
    workload.
    """

    mechanism: ExampleLevel
    workload: Workload
    clipped: ClippedGradient
    coins: Bits
    noise: Bits
    examples: int

    @cached_property
    def expected_batch(self) -> float:
        """The constant divisor B."""
        return self.mechanism.expected_batch(self.examples, self.workload)

    @cached_property
    def noise_variance(self) -> float:
        dimension = self.clipped.flat.grad.numel()
        return (self.mechanism.std(dimension, self.expected_batch) / self.expected_batch) ** 2

    def rows(self, examples: int, epochs: int | None = None) -> Iterator[NDArray[np.int64]]:
        if epochs is not None:
            raise RuntimeError("example-level privacy is charged for the config's own local steps alone")
        return self.mechanism.batches(examples, self.workload, self.coins)

    def fill(self, flat: Flat, batch: Batch, task: Task, scale: Tensor | None) -> Tensor:
        clip = self.mechanism.clip
        bound = clip.bound if clip.per == "global" else clip.groups(flat.layout)
        clipped = self.clipped if scale is None else ClippedGradient(flat, precondition=scale)
        result = clipped(batch, task.losses, bound)
        self.mechanism.privatize_(flat.grad, self.noise, self.expected_batch)
        return result.loss_sum / max(len(result.norms), 1)


def workload(population: Population, local: Local, algorithm: Algorithm, seed: int) -> Workload:
    """What of a run decides its cost: a client makes `algorithm.batches` batches for each of its local
    steps.
    """
    return Workload(
        population=len(population),
        seed=seed,
        sizes=population.sizes,
        batch=local.batch,
        steps=lambda records: local.nominal_steps(records) * algorithm.batches,
        queries=algorithm.queries,
    )
