"""A client's local training, as the client part of an algorithm sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from math import fsum, nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tacit.data import Batch, Records, batches
from tacit.engine.contract import Order
from tacit.engine.device import HOST, Compute
from tacit.engine.front import Front
from tacit.engine.local import Gradients
from tacit.engine.settings import Local
from tacit.errors import UserError
from tacit.gradients import plain_gradient
from tacit.gradients.plain import Descent
from tacit.tasks import Task
from tacit.vector import Flat, Layout, Vectors


class LocalWork:
    """The `Work` (see `tacit.algorithms`) of one client in one round.

    Under example-level privacy an algorithm gets nothing exact: gradients are private, losses are refused,
    and the rest (steps, step sizes, the number of records) is public. Names that begin with an underscore are
    not part of this contract. Python cannot hide anything from malicious code, so untrusted code must not run
    where the records are.
    """

    def __init__(
        self,
        flat: Flat,
        task: Task,
        records: Records,
        indices: NDArray[np.int64],
        local: Local,
        gradients: Gradients,
        order: Order,
        initial_personal: Tensor,
        queries: int,
        public: Iterator[NDArray[np.int64]] | None = None,
        descent: Descent | None = None,
        layers: bool = False,
        augment: batches.Change | None = None,
        losses: list[Tensor] | None = None,
        compute: Compute = HOST,
        front: Front | None = None,
    ) -> None:
        """`queries`: the most gradients that may be computed on one batch. `public`: batches of public
        records.

        `descent`: the fast path for an SGD step, for plain gradients. `layers`: measure gradients. `augment`:
        changes a batch, given its records' places and the number of batches before it. `losses` is filled as
        gradients are computed, for other code to read. `front`: the frozen first layers, if `task` can start
        after them.
        """
        self.layout: Layout = flat.layout
        self.round, self.decay = order.round, order.decay
        self._round_decay = order.decay
        self.lr_sum = 0.0
        self.count = 0
        self.examples = len(indices)
        self._nominal = order.steps
        self._flat, self._task, self._records, self._local = flat, task, records, local
        self._gradients, self._lr, self._queries, self._public = gradients, order.lr, queries, public
        self._initial_personal = initial_personal
        self._descent = descent if local.clip is None and not local.weight_decay and not layers else None
        self._layers = flat.values.new_zeros(len(flat.layout.layer_slices())) if layers else None
        self._compute, self._front = compute, front
        self._measured = 0
        self._augment, self._numbers = augment, count()
        self._noted: dict[str, list[float]] = {}
        self._indices = indices
        self._batches: Iterator[list[Batch]] = iter(())
        self._passes = 0
        self._parts: list[Batch] = []
        self._asked = 0
        self._losses: list[Tensor] = [] if losses is None else losses

    @property
    def loss(self) -> float:
        """Mean training loss over the records whose gradients were computed.

        Refused under example-level privacy: the loss is exact, so anything made from it would bypass the
        noise. The number of a client's records (`examples`) counts as public there.
        """
        if not self._gradients.exact:
            raise UserError(
                "work.loss is an exact number about private records, so under example-level privacy a client "
                "cannot use it for what it sends; use work.gradient(), and work.note() for the record"
            )
        return mean_loss(self._losses)

    @property
    def gradient_layers(self) -> list[float] | None:
        """Mean norm of each layer of the computed gradients, before any local clip; None unless it is
        measured.
        """
        return None if self._layers is None else (self._layers / max(self._measured, 1)).tolist()

    @property
    def notes(self) -> dict[str, float]:
        """The mean of each number that the algorithm noted."""
        return {name: sum(values) / len(values) for name, values in self._noted.items()}

    @property
    def noise_variance(self) -> float:
        return self._gradients.noise_variance

    @property
    def steps_before(self) -> int:
        return self.round * public_steps(self._nominal)

    def load(self, theta: Tensor) -> Tensor:
        y = self._flat.shared
        y.copy_(theta)
        return y

    def load_personal(self, state: Vectors) -> Tensor:
        h = self._flat.personal
        h.copy_(state.get("personal", self._initial_personal))
        return h

    def steps(self, epochs: int | None = None) -> Iterator[float]:
        self._passes += 1
        if self._passes > 1 and self._gradients.noise_variance:
            raise RuntimeError("a second pass over the records is not charged; example-level privacy has one")
        self._batches = self._gradients.batches(
            self._records, self._indices, self._augment, self._numbers, epochs
        )
        length = replace(self._local, steps=None, epochs=epochs) if epochs else self._local
        total, step = length.nominal_steps(self.examples), 0
        while self._draw():
            factor = self._local.factor(step, total)
            step += 1
            self.count += 1
            self.decay = self._round_decay * factor
            self.lr_sum += self._lr * factor
            yield self._lr * factor

    @property
    def weight_decay(self) -> float:
        return self._local.weight_decay

    def gradient(self, fresh: bool = False, scale: Tensor | None = None, with_decay: bool = True) -> Tensor:
        if fresh and not self._draw():
            raise RuntimeError("the algorithm asks for more batches than its `batches` announces")
        self._fill(scale)
        grad = self._flat.grad[: self.layout.shared]
        if self._layers is not None:
            self._layers += self.layout.layer_norms(grad)
            self._measured += 1
        if with_decay and self._local.weight_decay:
            grad.add_(self._flat.shared, alpha=self._local.weight_decay)
        if self._local.clip is not None:
            norm = torch.linalg.vector_norm(grad)
            grad.mul_(self._local.clip / norm.clamp(min=self._local.clip))
        return grad

    def descend(self, lr: float) -> None:
        if self._descent is None:
            self._flat.shared.sub_(self.gradient(), alpha=lr)
            return
        with torch.enable_grad(), self._compute.products():
            losses = self._descent(self._parts[0], self._task.losses, lr)
        self._losses.append(losses)

    def note(self, name: str, value: float) -> None:
        self._noted.setdefault(name, []).append(value)

    def personal_gradient(self) -> Tensor:
        with _frozen(self._flat.module, {s.name for s in self.layout.shared_segments}):
            self._fill(None)
        return self._flat.grad[self.layout.shared :]

    def public_gradient(self) -> Tensor:
        if self._public is None:
            raise RuntimeError("this method needs public records; set data.public to a share such as 0.05")
        batch = self._compute.batch(self._records.prepare(self._records.take(next(self._public))))
        with torch.enable_grad(), self._compute.products():
            plain_gradient(self._flat, batch, self._task.losses)
        return self._flat.grad[: self.layout.shared].clone()

    def _fill(self, scale: Tensor | None) -> None:
        self._asked += 1
        if self._asked > self._queries:
            raise RuntimeError(
                f"the algorithm asks for {self._asked} gradients of one batch but announces {self._queries}; "
                "each one costs privacy, so let its `queries` say how many there are"
            )
        with torch.enable_grad(), self._compute.products():
            self._losses.append(self._gradients.fill(self._flat, self._parts, self._task, scale))

    def _draw(self) -> bool:
        parts = next(self._batches, None)
        if parts is None:
            return False
        self._parts, self._asked = [self._compute.batch(part) for part in parts], 0
        if self._front is not None:
            self._parts = [self._front.extended(part) for part in self._parts]
        return True


def mean_loss(losses: list[Tensor]) -> float:
    """The mean over records of all gradients' losses; NaN if it is undefined, as for ∞ and −∞."""
    seen = torch.cat(losses).tolist() if losses else []
    try:
        return fsum(seen) / len(seen) if seen else 0.0
    except (ValueError, OverflowError):  # a run that stopped for it would reveal these records
        return nan


def public_steps(steps: int | None) -> int:
    """K, where it may be used: the average client's epochs would reveal its data without any noise."""
    if steps is None:
        raise UserError(
            "local.epochs: this method scales by the steps of a client of average size, which client-level "
            "privacy protects; set local.steps instead"
        )
    return steps


@contextmanager
def _frozen(module: nn.Module, names: set[str]) -> Iterator[None]:
    """Inside this context, these parameters need no gradient, so none is computed for them."""
    chosen = [parameter for name, parameter in module.named_parameters() if name in names]
    for parameter in chosen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in chosen:
            parameter.requires_grad_(True)
