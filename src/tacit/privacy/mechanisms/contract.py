"""The interface between a run and a mechanism: workloads, arrivals, states, and the steps of a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tacit.privacy.bits import Ids
from tacit.privacy.bounding import Bounding
from tacit.privacy.charges import Charge
from tacit.vector import Layout, Vectors

State = dict[str, Any]
"""What a mechanism keeps between rounds: plain numbers and vectors, saved with every checkpoint."""


def _one(records: int) -> int:
    return 1


@dataclass(frozen=True)
class Workload:
    """The parts of a run that decide its cost. All of them count as public."""

    population: int
    """Clients."""
    seed: int = 0
    """Seeds what may be repeated: the cohorts of an example-level run, and everything in a simulation."""
    sizes: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Training records of each client (example level)."""
    batch: int = 1
    """Expected records in a batch (example level)."""
    steps: Callable[[int], int] = _one
    """Batches that a client with this many records draws in a round (example level)."""
    queries: int = 1
    """Gradients computed on each batch (example level)."""


@dataclass(frozen=True)
class Arrivals:
    """What is known about a round's uploads when they have arrived."""

    drawn: int
    """Clients in the cohort."""
    arrived: int
    """Clients whose upload is in the sum; the other uploads were not finite."""
    within: int = 0
    """Clients whose upload norm was within the current clipping norm."""
    weight: float = 0.0
    """The sum of their weights."""
    missing: int = 0
    """Clients that sent nothing, not even a share of the noise (secure aggregation)."""


@dataclass(frozen=True)
class Observer:
    """An adversary who observes the run, and the ε that holds against them (None: no guarantee)."""

    who: str
    epsilon: float | None
    why: str


@dataclass(frozen=True)
class Description:
    """A mechanism's sentences in the statement."""

    sampling: str
    clipping: str
    noise: str
    observers: tuple[Observer, ...]
    not_covered: tuple[str, ...]
    metrics: str = ""
    """What was released beside the model, and at what cost."""


class Aggregation(Protocol):
    """How a round's clients are drawn and what the server learns about their uploads, with or without a
    guarantee.
    """

    @property
    def clients_release(self) -> bool:
        """Whether what a client sends is already a release, so that the charge must come before it."""

    def sample(self, round: int, attempt: int, workload: Workload) -> Ids:
        """Draw a round's clients.

        Args:
            round: its number, from 0.
            attempt: how often this round was charged before.
            workload: what of the run decides its cost, including the population and the seed.

        Returns:
            The clients' numbers, sorted.
        """

    def charge(self, round: int, cohort: Ids, workload: Workload, attempt: int = 0) -> Charge | None:
        """What the round costs, before anything of it is released.

        Args:
            round: its number, from 0.
            cohort: the clients that were drawn.
            workload: what of the run decides its cost.
            attempt: how often this round was charged before.

        Returns:
            A charge for the ledger; None if nothing is claimed.
        """

    def init(self) -> State:
        """The state before the first round."""

    def bounding(self, state: State, sizes: Mapping[str, int], layout: Layout, drawn: int) -> Bounding | None:
        """What each client does to its upload before it is added to the others.

        Args:
            state: the mechanism's state at the start of this round.
            sizes: names and lengths of what a client sends.
            layout: which parameters are where in the vector.
            drawn: the cohort's size.

        Returns:
            The rule that bounds a client's contribution in L2 norm; None for no bound.
        """

    def release(
        self, total: Vectors, arrivals: Arrivals, state: State, round: int, attempt: int, workload: Workload
    ) -> tuple[Vectors | None, State]:
        """The only way from uploads to the server. Its charge is on disk before this is called.

        Args:
            total: the sum of the clients' uploads; it may be overwritten.
            arrivals: what is known about the uploads.
            state: the mechanism's state when the clients clipped.
            round: its number, from 0.
            attempt: how often this round was charged before; the noise must differ between attempts.
            workload: what of the run decides its cost.

        Returns:
            The mean upload (None if there is nothing to release), and the next state.
        """

    def expected(self, population: int) -> float:
        """The expected cohort size: the constant that sums are divided by.

        Args:
            population: clients in all.
        """
