"""What crosses between the round loop and whatever runs the clients: named vectors and small plain values.

An engine receives an `Order` (what to do this round), a message (named vectors) and the participants
(clients, each with the version of its state). It returns the sum of the clients' bounded uploads and a
`Report` on each client. Nothing else crosses, so an engine may be this process, a pool of processes, or
remote machines.
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
"""The version that stands for "no state yet"."""
SHARDS, SHARD = 16, 8
"""A cohort is cut into shards of `SHARD` clients, but into at least `SHARDS` shards.

That is enough shards to keep many workers busy, and few enough that adding them up costs nothing.
"""


@dataclass(frozen=True)
class Order:
    """One round's instructions, the same for every client."""

    round: int
    lr: float
    steps: int | None = 1
    """K: local steps of a client of average size; None where this number is private."""
    decay: float = 1.0
    """The local schedule's factor; `lr` already includes it."""
    weighted: bool = False
    """Weight clients by their number of examples (never under a client-level guarantee)."""
    attempt: int = 0
    """How often this round was charged before; a repeated round must not repeat its noise."""
    bounding: Bounding | None = None
    """Client-level privacy: how everything that a client sends is bounded, taken together."""


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
    """A participating client, and the version of the state that it starts from (`states.NONE`: no state)."""

    client: int
    state: str = NONE
    replay: int = 0
    """How often the client already trained in this attempt at the round, because its worker was lost."""


@dataclass(frozen=True)
class Report:
    """What the engine reports about one client's work."""

    client: int
    weight: float
    """0 when the client was left out."""
    examples: int
    steps: int
    loss: float
    norm: float
    """L2 norm of everything it sent, before any bound is applied."""
    finite: bool
    state: str | None
    """The version of the state that the client wrote for its next round, if it wrote one."""
    notes: dict[str, float]
    """Mean of each number that the algorithm noted during the client's steps."""
    seconds: float
    layers: list[float] | None = None
    """L2 norm of each layer of the update, before any bound; only if a run asks for it."""
    gradient_layers: list[float] | None = None
    """The same for its gradients, as the mean over its steps."""
    clipped_layers: list[float] | None = None
    """The same for its update after clipping, under a client-level guarantee."""


Progress = Callable[[int], None]
"""Called with the number of the round's clients that are done."""


def ignore(done: int) -> None:
    """A progress callback that does nothing."""


Replay = Callable[[Sequence[Participant]], None]
"""Called before clients train a second time in one attempt at a round; it may charge for that, or refuse."""


def free(participants: Sequence[Participant]) -> None:
    """Repeated training costs nothing: no charge, no refusal."""


class Engine(Protocol):
    """Runs clients. An engine only decides how fast; a result never depends on which engine produced it."""

    def sum(
        self, order: Order, message: Vectors, participants: Sequence[Participant], progress: Progress = ignore
    ) -> tuple[Vectors, list[Report]]:
        """Train the round's clients and add up what they send.

        Args:
            order: the round's instructions.
            message: the vectors sent to the clients; the engine must not change them.
            participants: the clients, each with the version of its state.
            progress: called with the number of clients that are done.

        Returns:
            The weighted sum of the clients' uploads, and a report on each client. Under a client-level
            guarantee the sum consists of whole numbers (int64), so it is the same in any order. The sum lies
            in the engine's own memory: the next call overwrites it, and the caller may overwrite it too.

        Raises:
            ClientError: code of the model, the data or the algorithm failed; the error names the client.
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
        """Metrics of each client's own model (shared and personal part) on the client's own test split.

        Args:
            message: as `sum` would be given it.
            participants: the clients, each with the version of its state.
            tune: first fine-tune that model on the client's own records. Nothing of the result is sent.

        Returns:
            Metrics by name, for each client that has a test split.
        """

    def close(self) -> None:
        """Release processes and memory."""


def shards(participants: Sequence[Participant], sizes: NDArray[np.int64]) -> list[list[Participant]]:
    """Cut a cohort into shards, largest clients first. The result depends on the cohort alone.

    Floating-point sums depend on their order. Each shard is summed client by client, and the shards are added
    in this order. The result is therefore the same bit for bit, however many workers share the shards.

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
