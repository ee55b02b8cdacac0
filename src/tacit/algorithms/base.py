"""What an algorithm is: a client part, a server part, and the vectors that are sent between them.

An algorithm is a frozen dataclass of hyper-parameters with pure functions on flat vectors. It keeps
nothing: the server's state and a client's state are dictionaries of named vectors that the caller
carries, checkpoints and (where privacy asks for it) bounds and noises. It cannot tell whether its
gradients are plain or private, nor on which engine it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tacit.vector import Layout, Vectors


class Work(Protocol):
    """One client's local training, as the client part of an algorithm sees it."""

    @property
    def layout(self) -> Layout: ...

    @property
    def round(self) -> int:
        """The round's number, from 0."""

    @property
    def lr_sum(self) -> float:
        """The sum of the step sizes taken so far (K·η at a constant rate)."""

    @property
    def steps_before(self) -> int:
        """Local steps in all rounds before this one: rounds × K, the same for every client.

        With local epochs K is that of a client of average size; what is averaged over clients has one age.
        """

    @property
    def noise_variance(self) -> float:
        """φ = (σC/B)², the variance that privacy adds to each coordinate of a gradient; 0 without privacy."""

    @property
    def decay(self) -> float:
        """The local schedule's factor at this step, for step sizes of the algorithm's own."""

    def load(self, theta: Tensor) -> Tensor:
        """Copy `theta` into the model and return the model's own vector: change it in place to step."""

    def load_personal(self, state: Vectors) -> Tensor:
        """Put the personal part of the client's state (or the initial one) into the model; its own vector."""

    def steps(self, epochs: int | None = None) -> Iterator[float]:
        """One iteration for each local step, with the step size; each has a batch of its own.

        With `epochs`, so many passes over the client's records instead of the config's steps or epochs.
        """

    def gradient(self, fresh: bool = False, scale: Tensor | None = None) -> Tensor:
        """The gradient (plain or private) at the model's current values, on the step's batch.

        `fresh` draws another batch first. `scale` multiplies each record's gradient, before it is clipped.
        A buffer that the next call overwrites: `clone()` what must last.
        """

    def descend(self, lr: float) -> None:
        """y −= lr · gradient(), the quick way."""

    def note(self, name: str, value: float) -> None:
        """A number for the round's record, averaged over steps and clients. It is exact, not private."""

    def personal_gradient(self) -> Tensor:
        """The gradient of the personal part, on the step's batch."""

    def public_gradient(self) -> Tensor:
        """A plain gradient on a batch of the public records that the config sets aside."""


class Round(Protocol):
    """One round, as the server part of an algorithm sees it."""

    @property
    def index(self) -> int:
        """The round's number, from 0."""

    @property
    def fraction(self) -> float:
        """Expected share of the population in a cohort (S/N)."""

    @property
    def lr_sum(self) -> float:
        """K·η of this round: nominal local steps times the local step size."""

    def step(self, delta: Tensor) -> Tensor:
        """Move θ by the server's optimizer, with −`delta` as its gradient; returns the new θ.

        Plain SGD at rate 1 is θ + delta, which is FedAvg.
        """


@dataclass(frozen=True)
class Algorithm:
    """Base of all algorithms; the defaults are FedAvg's traffic: θ down, Δ up, the client keeps nothing."""

    @property
    def queries(self) -> int:
        """Gradients asked of one batch in a step; each is paid for under example-level privacy."""
        return 1

    @property
    def batches(self) -> int:
        """Independent batches drawn in a step; each is paid for under example-level privacy."""
        return 1

    @property
    def needs_public(self) -> bool:
        """Whether clients ask for gradients of public records."""
        return False

    @property
    def needs_steps(self) -> bool:
        """Whether a client or the server uses K, the number of local steps, beyond taking them.

        With `local.epochs` it follows from the clients' sizes, which whoever protects clients must not tell.
        """
        return False

    @property
    def own_server_rule(self) -> bool:
        """Whether the server part moves θ by a rule of its own, so that a server optimizer has no say."""
        return False

    @property
    def personal_part(self) -> tuple[str, ...]:
        """Patterns of the parameters that a client keeps to itself."""
        return ()

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        """The server's state before the first round; it holds at least `theta`."""
        return {"theta": theta}

    def message(self, state: Vectors) -> Vectors:
        """What goes down to each client."""
        return {"theta": state["theta"]}

    def uploads(self, layout: Layout) -> dict[str, int]:
        """Names and lengths of what a client sends; anything else is refused."""
        return {"delta": layout.shared}

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        """Train on one client: from the message and its state to its upload and its new state."""
        raise NotImplementedError

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        """From the state and the mean upload to the next state."""
        return {**state, "theta": round.step(mean["delta"])}
