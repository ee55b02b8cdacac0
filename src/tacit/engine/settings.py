"""The section `local` of a config: how a client trains in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from tacit.optimizers.schedules import AnySchedule, Constant, Within
from tacit.privacy import Workload
from tacit.section import section

if TYPE_CHECKING:
    from tacit.algorithms import Algorithm
    from tacit.data import Population


@section
class LocalTraining:
    """What a client does in a round; give `steps` or `epochs`, and `batch` or `seconds`."""

    lr: PositiveFloat
    """Step size."""
    batch: PositiveInt | None = None
    """Records in a batch."""
    seconds: PositiveFloat | None = None
    """Seconds of sound in a batch, instead of a number of records (speech)."""
    steps: PositiveInt | None = None
    """Steps a round, the same for every client."""
    epochs: PositiveInt | None = None
    """Or passes over the client's records."""
    weight_decay: NonNegativeFloat = 0.0
    """λ of an L2 term on each gradient; AdamW methods have a decoupled one of their own."""
    clip: PositiveFloat | None = None
    """Largest norm of a step's gradient (for stability; privacy has a clip of its own)."""
    schedule: AnySchedule = Constant()
    within: Within | None = None

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either local.steps or local.epochs")
        if (self.batch is None) == (self.seconds is None):
            raise ValueError("give local.batch, or local.seconds for batches by seconds of sound")
        return self

    def factor(self, step: int, total: int) -> float:
        """The factor of the round's learning rate at one of its `total` steps."""
        return 1.0 if self.within is None else self.within(step, total)


@dataclass(frozen=True)
class Local(LocalTraining):
    """The same as a run knows it: with `seconds`, `batch` is about how many records that makes."""

    batch: int = 1

    def nominal_steps(self, examples: float) -> int:
        """Local steps of a client with that many examples."""
        if self.steps is not None:
            return self.steps
        return int((self.epochs or 1) * max(1, -(-examples // self.batch)))


def workload(population: Population, local: Local, algorithm: Algorithm, seed: int) -> Workload:
    """The facts about a run that decide its privacy cost: a client draws `algorithm.batches` batches for each
    of its local steps.
    """
    return Workload(
        population=len(population),
        seed=seed,
        sizes=population.sizes,
        batch=local.batch,
        steps=lambda records: local.nominal_steps(records) * algorithm.batches,
        queries=algorithm.queries,
    )
