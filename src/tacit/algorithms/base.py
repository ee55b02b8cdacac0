"""An algorithm: a client part, a server part, and the vectors that they send to each other.

An algorithm is a frozen dataclass of hyper-parameters with pure functions on flat vectors. It has no state
of its own: server state and client state are dictionaries of named vectors. The caller stores and
checkpoints them and, where privacy requires it, bounds uploads and adds noise. An algorithm cannot tell
whether its gradients are plain or private, nor which engine it runs on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Protocol

from tacit.lazy import Tensor
from tacit.vector import Layout, Vectors


@dataclass(frozen=True)
class Below:
    """Declares, in the type of an algorithm's option, an exclusive upper bound of the option."""

    limit: float


Decay = Annotated[float, Below(1.0)]
"""The factor of a moving average: a β or a momentum, in [0, 1). Other numbers are 0 or more."""


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

        With local epochs K is that of a client of average size, so averages over clients have one age.
        """

    @property
    def noise_variance(self) -> float:
        """φ = (σC/B)², the variance of the noise in each coordinate of a gradient; 0 without privacy."""

    @property
    def weight_decay(self) -> float:
        """λ of `local.weight_decay`; `gradient` adds λ·y unless `with_decay` is false."""

    @property
    def decay(self) -> float:
        """The local schedule's factor at this step, for algorithms with their own step sizes."""

    def load(self, theta: Tensor) -> Tensor:
        """Put the shared parameters into the model.

        Args:
            theta: the shared vector; it is copied.

        Returns:
            The model's own vector: change it in place to step.
        """

    def load_personal(self, state: Vectors) -> Tensor:
        """Put the personal part of the client's state into the model; the initial one if it has none.

        Args:
            state: the client's state, as it was passed to the algorithm's client part.

        Returns:
            The model's own vector of personal parameters: change it in place to step.
        """

    def steps(self, epochs: int | None = None) -> Iterator[float]:
        """One iteration for each local step; each step has its own batch.

        Args:
            epochs: this many passes over the client's records, instead of the config's local steps or epochs.
                Refused under example-level privacy, which is charged for the config's number of steps.

        Returns:
            An iterator over the step sizes η of the local schedule.
        """

    def gradient(self, fresh: bool = False, scale: Tensor | None = None, with_decay: bool = True) -> Tensor:
        """The gradient at the model's current values, on the step's batch.

        Under example-level privacy it is (1/B)[Σ_j clip_C(g_j) + N(0, σ²C²)] on a Poisson batch (Abadi et al.
        2016, arXiv:1607.00133). More gradients of one batch than `Algorithm.queries` declares are refused.

        Args:
            fresh: draw another batch first.
            scale: a vector that multiplies each example's gradient before it is clipped.
            with_decay: add λ·y after the noise. An algorithm that does more with a gradient than step along
                it sets this to false and adds λ·y itself.

        Returns:
            A vector that the next call overwrites; `clone()` it to keep it.
        """

    def descend(self, lr: float) -> None:
        """y −= lr · gradient(), computed faster.

        Args:
            lr: the step size.
        """

    def note(self, name: str, value: float) -> None:
        """Put a number into the round's record, averaged over steps and clients. It is exact, not private.

        Args:
            name: its name in the record.
            value: the number, for this step.
        """

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
        """Move θ by the server's optimizer, with −`delta` as its gradient (Reddi et al. 2021,
        arXiv:2003.00295).

        Args:
            delta: the average update. Plain SGD with learning rate 1 gives θ + delta, which is FedAvg.

        Returns:
            The new θ.
        """


@dataclass(frozen=True)
class Algorithm:
    """Base of all algorithms. By default an algorithm sends what FedAvg sends: θ down, Δ up, no client state.

    FedAvg: McMahan et al. 2017, arXiv:1602.05629. Under client-level privacy the mean that `server` gets is
    the noisy sum of bounded uploads ÷ the expected cohort size. Under example-level privacy the gradients
    that `client` gets are private. In both cases everything else in the two functions is post-processing.
    """

    @property
    def queries(self) -> int:
        """Gradients computed on one batch in a step; example-level privacy charges for each."""
        return 1

    @property
    def batches(self) -> int:
        """Independent batches drawn in a step; example-level privacy charges for each."""
        return 1

    @property
    def needs_public(self) -> bool:
        """Whether clients use gradients of public records."""
        return False

    @property
    def needs_steps(self) -> bool:
        """Whether a client or the server uses K, the federation's number of local steps, in a formula.

        A client may use its own number of steps. With `local.epochs` K follows from the clients' sizes, which
        a run that protects clients must not reveal.
        """
        return False

    @property
    def own_server_rule(self) -> bool:
        """Whether the server part updates θ by its own rule and ignores the server optimizer."""
        return False

    @property
    def personal_part(self) -> tuple[str, ...]:
        """Patterns of the parameters that stay with the client."""
        return ()

    @property
    def keeps_state(self) -> bool:
        """Whether what a client sends depends on earlier rounds that it took part in."""
        return bool(self.personal_part)

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        """The server's state before the first round.

        Args:
            theta: the shared parameters; the state holds them under this name.
            layout: which parameters are where in the vector.

        Returns:
            Named vectors, which are checkpointed.
        """
        return {"theta": theta}

    def message(self, state: Vectors) -> Vectors:
        """What the server sends to each client.

        Args:
            state: the server's.

        Returns:
            Named vectors, `theta` among them.
        """
        return {"theta": state["theta"]}

    def uploads(self, layout: Layout) -> dict[str, int]:
        """What a client sends; anything else is refused.

        Args:
            layout: which parameters are where in the vector.

        Returns:
            Names and lengths.
        """
        return {"delta": layout.shared}

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        """Train on one client.

        Args:
            msg: the server's message; it must not be written to.
            state: the client's state from the last time that it took part; empty the first time.
            work: the client's local training.

        Returns:
            The upload, as `uploads` declares it, and the client's new state (empty if it keeps nothing).
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `client`, which an algorithm needs")

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        """The server's step.

        Args:
            state: the server's.
            mean: the mean upload, noised in a private run; the next round overwrites it.
            round: the round, with the server's optimizer.

        Returns:
            The next state.
        """
        return {**state, "theta": round.step(mean["delta"])}
