"""A run's job: everything that a worker needs to train as any of the run's clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tacit.algorithms import Algorithm
from tacit.data import Population, Records
from tacit.data.augment import Augment
from tacit.engine.settings import Local, workload
from tacit.engine.states import ClientStates
from tacit.gradients.modules import refuse_modules
from tacit.privacy import Mechanism, Workload
from tacit.tasks import Task
from tacit.vector import Layout, Vectors, read_buffers

TEST_CHUNK = 2000
"""Records of the test set in one evaluation task; fixed, so sums do not depend on the engine."""


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to train as any client of a run; sent once, when the worker starts."""

    model: nn.Module
    task: Task
    population: Population
    test: Records
    algorithm: Algorithm
    local: Local
    seed: int
    states: ClientStates
    evaluation_batch: int = 500
    validating: bool = False
    """Evaluate clients on their own validation splits instead of their test splits."""
    privacy: Mechanism | None = None
    layers: bool = False
    """Report the norm of each layer of a client's update: exact numbers about single clients."""
    public: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Records that belong to no client and need no protection."""
    probe: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Training records on which the server's model is also evaluated, for its train loss."""
    augment: Augment | None = None
    """Random changes to the records a client trains on; never to records used for evaluation."""

    def __post_init__(self) -> None:
        if self.privacy is not None:
            refuse_modules(self.model, examples=self.privacy.unit == "example")

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.model, self.algorithm.personal_part)

    @cached_property
    def upload_sizes(self) -> dict[str, int]:
        """Names and lengths of what each client sends.

        Under a guarantee buffers keep their initial values: statistics of records would need noise, and would
        drown in it.
        """
        buffers = read_buffers(self.model) if self.privacy is None else {}
        return {**self.uploads, **{name: vector.numel() for name, vector in buffers.items()}}

    @cached_property
    def uploads(self) -> dict[str, int]:
        """Names and lengths of what the algorithm's client part sends."""
        return dict(self.algorithm.uploads(self.layout))

    @cached_property
    def workload(self) -> Workload:
        """The facts about the run that decide its privacy cost."""
        return workload(self.population, self.local, self.algorithm, self.seed)

    def empty_sums(self, device: str = "cpu") -> Vectors:
        """Zeros to add uploads to: whole numbers under a client-level guarantee."""
        return {
            name: torch.zeros(size, dtype=self.sum_dtype, device=device)
            for name, size in self.upload_sizes.items()
        }

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.int64 if self.privacy is not None and self.privacy.sums_integers else torch.float32

    @property
    def test_chunks(self) -> int:
        """Number of evaluation tasks into which the common test set is cut."""
        return -(-len(self.test) // TEST_CHUNK)

    @property
    def chunks(self) -> int:
        """All evaluation tasks: those of the test set, then those of the probe."""
        return self.test_chunks + -(-len(self.probe) // TEST_CHUNK)

    def summarise(self, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Metrics from the sums of all chunks, in order; for the probe, only the loss."""
        metrics = self.task.summarise(add_sums(parts[: self.test_chunks]))
        if len(self.probe):
            metrics["server_train_loss"] = self.task.summarise(add_sums(parts[self.test_chunks :]))["loss"]
        return metrics


def add_sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up metric sums in the order given."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
