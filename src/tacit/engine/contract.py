"""What crosses between the round loop and whatever runs the clients: named vectors and small plain values.

An engine gets an `Order` (what to do this round), a message (named vectors) and the participants (clients,
and which version of its state each holds). It gives back the sum of the clients' bounded uploads and a
`Report` on each. Nothing else crosses, so an engine may be this process, a pool of processes, or machines
far away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt

from tacit.section import section

if TYPE_CHECKING:
    from tacit.privacy.bounding import Bounding
    from tacit.vector import Vectors

NONE = ""
"""The version of a client that has no state yet."""
SHARDS, SHARD = 16, 8
"""A cohort is cut into shards of `SHARD` clients, but into no fewer than `SHARDS` of them.

Enough to keep many workers busy, few enough that adding the shards up costs nothing.
"""


@dataclass(frozen=True)
class Order:
    """One round's instructions, the same for every client."""

    round: int
    lr: float
    steps: int | None = 1
    """Local steps of a client of average size, K; None where that is private."""
    decay: float = 1.0
    """The local schedule's factor, already in `lr`."""
    weighted: bool = False
    """Weigh a client by its number of examples (never under a client-level guarantee)."""
    attempt: int = 0
    """How often this round was charged before: a repeated round must not repeat its noise."""
    bounding: Bounding | None = None
    """Client-level privacy: what is done to everything a client sends, taken together."""


@section
class Tune:
    """Local fine-tuning for a client itself (the -FT methods): epochs of SGD over all parameters.

    Nothing of it is sent. The defaults are ours: paper 002 says only that the server's model is fine-tuned
    locally.
    """

    epochs: PositiveInt = 2
    lr: PositiveFloat = 0.005
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Participant(NamedTuple):
    """A client that takes part, and the version of its state that it starts from (`states.NONE`: none)."""

    client: int
    state: str = NONE
    replay: int = 0
    """How often the client already trained in this attempt at the round: its worker was lost."""


@dataclass(frozen=True)
class Report:
    """What is known of one client's work."""

    client: int
    weight: float
    """0 when the client was left out."""
    examples: int
    steps: int
    loss: float
    norm: float
    """L2 norm of everything it sent, before any bound."""
    finite: bool
    state: str | None
    """The version of its state that it wrote for the next time it is drawn, if it did."""
    notes: dict[str, float]
    """Means of what the algorithm noted in its steps."""
    seconds: float
    layers: list[float] | None = None
    """L2 norm of each layer of its update, before any bound; only where a run asks for it."""
    gradient_layers: list[float] | None = None
    """The same of its gradients, in the mean over its steps."""
    clipped_layers: list[float] | None = None
    """The same of its update after the bound, under a guarantee for clients."""


Progress = Callable[[int], None]
"""Told how many of the round's clients are done."""


def ignore(done: int) -> None:
    """Progress that nobody watches."""


Replay = Callable[[Sequence[Participant]], None]
"""Told before clients train a second time in one attempt at a round; may charge for it, or refuse."""


def free(participants: Sequence[Participant]) -> None:
    """Nothing has to be done before clients train again."""


class Engine(Protocol):
    """Runs clients. Speed is its only business: a result never depends on which engine made it."""

    def sum(
        self, order: Order, message: Vectors, participants: Sequence[Participant], progress: Progress = ignore
    ) -> tuple[Vectors, list[Report]]:
        """Train the round's clients and add up what they send.

        Args:
            order: the round's instructions.
            message: what goes down; the engine must not change it.
            participants: the clients, each with the version of its state.
            progress: told how many are done.

        Returns:
            The weighted sum of their uploads, and a report on each. Under a client-level guarantee the sum is
            of whole numbers, in int64: the same in any order. It is in memory of the engine's own, which the
            next call overwrites; the caller may do so too.

        Raises:
            ClientError: code of the model, the data or the algorithm failed; it says on which client.
        """

    def evaluate(self, message: Vectors) -> dict[str, float]:
        """Metrics of the server's model on the common test set.

        Args:
            message: as `sum` would be given it.

        Returns:
            Metrics by name, with `server_train_loss` if the job asks for it.
        """

    def evaluate_clients(
        self, message: Vectors, participants: Sequence[Participant], tune: Tune | None = None
    ) -> list[dict[str, float]]:
        """Metrics of each client's own model (shared part and its personal part) on its own test split.

        Args:
            message: as `sum` would be given it.
            participants: the clients, each with the version of its state.
            tune: first train that model on the client's own records. Nothing of that is sent.

        Returns:
            Metrics by name, of each client that has a test split.
        """

    def close(self) -> None:
        """Release processes and memory."""


def shards(participants: Sequence[Participant], sizes: NDArray[np.int64]) -> list[list[Participant]]:
    """Cut a cohort into shards, largest clients first; a function of the cohort alone.

    Floating-point sums depend on their order. Each shard is summed client by client and the shards are
    added in this order, so the result is the same bit for bit however many workers share them out.

    >>> cohort = [Participant(c) for c in range(3)]
    >>> [[v.client for v in shard] for shard in shards(cohort, np.array([5, 9, 5]))]
    [[1], [0], [2]]
    """
    if not participants:
        return []
    largest_first = sorted(
        participants, key=lambda participant: (-int(sizes[participant.client]), participant.client)
    )
    count = min(len(participants), max(SHARDS, len(participants) // SHARD))
    cuts = np.array_split(np.arange(len(participants)), count)
    return [[largest_first[i] for i in cut] for cut in cuts]
