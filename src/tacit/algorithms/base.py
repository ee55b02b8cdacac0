"""What an algorithm is: a client part, a server part, and the vectors that are sent between them.

An algorithm is a frozen dataclass of hyper-parameters with pure functions on flat vectors. It keeps
nothing: the server's state and a client's state are dictionaries of named vectors that the caller
carries, checkpoints and (where privacy asks for it) bounds and noises. It cannot tell whether its
gradients are plain or private, nor on which engine it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Protocol

from tacit.lazy import Tensor
from tacit.vector import Layout, Vectors


@dataclass(frozen=True)
class Below:
    """Declares, in the type of an algorithm's option, what the option must be less than."""

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

        With local epochs K is that of a client of average size; what is averaged over clients has one age.
        """

    @property
    def noise_variance(self) -> float:
        """φ = (σC/B)², the variance that privacy adds to each coordinate of a gradient; 0 without privacy."""

    @property
    def weight_decay(self) -> float:
        """λ of `local.weight_decay`, which `gradient` adds as λ·y unless it is told not to."""

    @property
    def decay(self) -> float:
        """The local schedule's factor at this step, for step sizes of the algorithm's own."""

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
            state: the client's state, as the algorithm's client part was given it.

        Returns:
            The model's own vector of personal parameters: change it in place to step.
        """

    def steps(self, epochs: int | None = None) -> Iterator[float]:
        """One iteration for each local step; each has a batch of its own.

        Args:
            epochs: so many passes over the client's records, instead of the config's local steps or epochs.
                Refused under example-level privacy, which is charged for the config's own.

        Returns:
            An iterator over the step sizes η of the local schedule.
        """

    def gradient(self, fresh: bool = False, scale: Tensor | None = None, with_decay: bool = True) -> Tensor:
        """The gradient at the model's current values, on the step's batch.

        Under example-level privacy it is (1/B)[Σ_j clip_C(g_j) + N(0, σ²C²)] on a Poisson batch (Abadi et al.
        2016, arXiv:1607.00133); what is asked of a batch more often than `Algorithm.queries` declares is
        refused.

        Args:
            fresh: draw another batch first.
            scale: a vector that multiplies each example's gradient before it is clipped.
            with_decay: add λ·y after the noise; an algorithm that does more with a gradient than step along
                it leaves it out, and adds it itself.

        Returns:
            A vector that the next call overwrites: `clone()` what must last.
        """

    def descend(self, lr: float) -> None:
        """y −= lr · gradient(), the quick way.

        Args:
            lr: the step size.
        """

    def note(self, name: str, value: float) -> None:
        """Note a number for the round's record, averaged over steps and clients. It is exact, not private.

        Args:
            name: what it is called in the record.
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
            delta: the average update. Plain SGD at rate 1 is θ + delta, which is FedAvg.

        Returns:
            The new θ.
        """


@dataclass(frozen=True)
class Algorithm:
    """Base of all algorithms; the defaults are FedAvg's traffic: θ down, Δ up, the client keeps nothing.

    FedAvg: McMahan et al. 2017, arXiv:1602.05629. Under client-level privacy the mean that `server` gets is
    the noisy sum of bounded uploads ÷ the expected cohort; under example-level privacy the gradients that
    `client` gets are private. Either way what the two functions do besides is post-processing.
    """

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
        """Whether a client or the server uses K, the federation's number of local steps, beyond taking them.

        A client may use its own. With `local.epochs` it follows from the clients' sizes, which whoever
        protects clients must not tell.
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

    @property
    def keeps_state(self) -> bool:
        """Whether what a client sends depends on rounds that it took part in before."""
        return bool(self.personal_part)

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        """The server's state before the first round.

        Args:
            theta: the shared parameters; the state holds them under this name.
            layout: what is where in them.

        Returns:
            Named vectors, which are checkpointed.
        """
        return {"theta": theta}

    def message(self, state: Vectors) -> Vectors:
        """What goes down to each client.

        Args:
            state: the server's.

        Returns:
            Named vectors, `theta` among them.
        """
        return {"theta": state["theta"]}

    def uploads(self, layout: Layout) -> dict[str, int]:
        """What a client sends; anything else is refused.

        Args:
            layout: what is where in the parameters.

        Returns:
            Names and lengths.
        """
        return {"delta": layout.shared}

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        """Train on one client.

        Args:
            msg: what came down; it must not be written to.
            state: what the client kept when it last took part; empty the first time.
            work: its local training.

        Returns:
            The upload, as `uploads` declares it, and the client's new state (empty: it keeps nothing).
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `client`, which an algorithm needs")

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        """The server's step.

        Args:
            state: the server's.
            mean: the mean upload, private where the run is; it is overwritten by the next round.
            round: the round, with the server's optimizer.

        Returns:
            The next state.
        """
        return {**state, "theta": round.step(mean["delta"])}
