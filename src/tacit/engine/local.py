"""Where a client's batches and gradients come from: plain, or private at example level."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit.data import Batch, Records, batches
from tacit.engine.isolation import Pristine
from tacit.engine.settings import Local
from tacit.gradients import ClippedGradient, batch_size, plain_gradient
from tacit.privacy.mechanisms.example import ClientQueries
from tacit.tasks import Task
from tacit.vector import Flat


def nothing() -> None:
    """The default before each step: nothing."""


class Gradients(Protocol):
    """Where a client's batches and gradients come from: plain, or private at example level."""

    @property
    def noise_variance(self) -> float:
        """Variance of the noise that privacy adds to each coordinate."""

    @property
    def exact(self) -> bool:
        """Whether an algorithm may use exact facts about the records, besides their gradients, in what it
        sends.
        """

    def batches(
        self,
        records: Records,
        indices: NDArray[np.int64],
        change: batches.Change | None,
        numbers: Iterator[int],
        epochs: int | None = None,
    ) -> Iterator[list[Batch]]:
        """One list for each step: the parts of its batch, ready for the model.

        `change` is applied to each batch; it gets the batch's number, the next of `numbers`. The batches
        cover `epochs` passes over the records, or the local length.
        """

    def fill(self, flat: Flat, parts: list[Batch], task: Task, scale: Tensor | None) -> Tensor:
        """Put the gradient of a batch into `flat.grad`; return the losses, or their mean in place of each.

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
    exact: bool = True

    def batches(
        self,
        records: Records,
        indices: NDArray[np.int64],
        change: batches.Change | None,
        numbers: Iterator[int],
        epochs: int | None = None,
    ) -> Iterator[list[Batch]]:
        rows = self.rows(len(indices), epochs)
        return ([batch] for batch in batches.gather(records, indices, rows, change, numbers))

    def rows(self, examples: int, epochs: int | None = None) -> Iterator[NDArray[np.int64]]:
        """Positions of each batch's records among the client's own, for `epochs` passes or the local length.
        Every step gets all its batches; a last step without enough batches is left out.
        """
        local, times = self.local, self.batches_per_step
        if epochs is not None:
            local = replace(local, steps=None, epochs=epochs)
        if local.seconds is not None and self.durations is not None:
            whole = (local.epochs or 1) * times if local.steps is None else None
            packed = batches.by_seconds(self.durations, local.seconds, whole, self.rng)
            return _whole_steps(packed, times) if local.steps is None else islice(packed, local.steps * times)
        if local.steps is not None:
            return batches.steps(examples, local.batch, local.steps * times, self.rng)
        return batches.epochs(examples, local.batch, (local.epochs or 1) * times, self.rng)

    def fill(self, flat: Flat, parts: list[Batch], task: Task, scale: Tensor | None) -> Tensor:
        (batch,) = parts
        loss = plain_gradient(flat, batch, task.losses)
        if scale is not None:
            flat.grad.mul_(scale)
        return loss.expand(batch_size(batch))


def _whole_steps(rows: Iterator[NDArray[np.int64]], batches: int) -> Iterator[NDArray[np.int64]]:
    """Yield rows while enough are left for a step of this many batches. Epochs by seconds vary in number of
    batches.
    """
    while len(step := list(islice(rows, batches))) == batches:
        yield from step


@dataclass(frozen=True)
class PrivateGradients:
    """Poisson batches, and g̃ = (1/B)[Σ_j clip_C(g_j) + N(0, σ²C²)] for each.

    Unit: one record of the client (add or remove). The mechanism draws the batches, adds the noise and was
    charged, all by the same workload. A record is padded to the width of its own bucket, in a part with
    records of that bucket alone, so what it adds to the sum does not depend on which others were drawn. A
    gradient must leave the model as it was: anything else that would carry records past the clipping is
    refused.
    """

    queries: ClientQueries
    clipped: ClippedGradient
    turn: tuple[int, int] | None = None
    """The round and the client. What another client's records did to `clipped` must not affect this one."""
    model: Pristine | None = None
    """The objects that a gradient must leave unchanged."""
    masks: Callable[[], None] = nothing
    """Called before each step: fresh randomness for dropout and its like."""
    exact: bool = False

    @cached_property
    def noise_variance(self) -> float:
        return self.queries.variance(self.clipped.flat.grad.numel())

    def batches(
        self,
        records: Records,
        indices: NDArray[np.int64],
        change: batches.Change | None,
        numbers: Iterator[int],
        epochs: int | None = None,
    ) -> Iterator[list[Batch]]:
        if epochs is not None:
            raise RuntimeError("example-level privacy is charged for the config's own local steps alone")
        return batches.gather_apart(records, indices, self.queries.batches(), change, numbers)

    def fill(self, flat: Flat, parts: list[Batch], task: Task, scale: Tensor | None) -> Tensor:
        clip = self.queries.clip
        bound = clip.bound if clip.per == "global" else clip.groups(flat.layout)
        self.masks()
        noise = self.queries.ahead(flat.grad)
        losses = self._sum(flat, parts, task, bound, scale)
        if self.model is not None:
            self.model.refuse_changes()
        self.queries.privatize_(flat.grad, noise)
        return losses

    def _sum(self, flat: Flat, parts: list[Batch], task: Task, bound: Any, scale: Tensor | None) -> Tensor:
        """Leave Σ_j clip(g_j) over all parts in `flat.grad`; return each part's mean loss for its records."""
        found, total = [flat.grad.new_zeros(0)], None
        if not parts:
            flat.grad.zero_()
        for part in parts:
            result = self.clipped(part, task.losses, bound, scale, self.turn)
            found.append((result.loss_sum / len(result.norms)).expand(len(result.norms)))
            if len(parts) > 1:
                total = flat.grad.clone() if total is None else total.add_(flat.grad)
        if total is not None:
            flat.grad.copy_(total)
        return torch.cat(found)
