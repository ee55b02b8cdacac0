"""The settings of a run besides its job and its privacy: server step, tests, checkpoints, engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tacit.engine import EngineSettings, Tune
from tacit.engine.device import Device
from tacit.optimizers.schedules import AnySchedule, Constant
from tacit.privacy.sampling import FixedSize, Poisson
from tacit.section import Open, Section

if TYPE_CHECKING:
    from tacit.optimizers.server import OptimizerFactory


class Cohort(Section):
    """How many clients take part in a round; a bare number means a cohort of that size."""

    size: PositiveInt
    """Clients a round, on average or exactly."""
    sampling: Literal["fixed", "poisson"] | None = None
    """`fixed`: that many, without replacement. `poisson`: each client joins independently, `size` on average.

    Default: poisson under client-level privacy (its guarantee is better), otherwise fixed.
    """

    @model_validator(mode="before")
    @classmethod
    def _bare_size(cls, value: Any) -> Any:
        return {"size": value} if isinstance(value, int) and not isinstance(value, bool) else value

    def drawn(self, clients: int, usual: Literal["fixed", "poisson"]) -> FixedSize | Poisson:
        """How cohorts are drawn from this many clients; `usual` is the default of the section."""
        fixed = (self.sampling or usual) == "fixed"
        return FixedSize(self.size) if fixed else Poisson(self.size / clients)


class ServerSettings(Open):
    """The server's optimizer: any of torch.optim by name, `lamb` or `lars`; other keys are its options."""

    optimizer: str = "sgd"
    lr: PositiveFloat = 1.0
    """Step size; with plain SGD, 1 is FedAvg."""
    schedule: AnySchedule = Constant()
    device: Device = "cpu"
    """The device of the algorithm's state and of its server step; noise and files stay on the host."""


class Evaluation(Section):
    """When and how the model is tested."""

    every: PositiveInt = 1
    """Test after every this many rounds, and after the last."""
    batch: PositiveInt = 500
    """Records in a batch; affects only speed and memory."""
    split: Literal["test", "validation"] = "test"
    """Which records evaluate the model: test records, or those that `data.validation` holds out."""
    patience: PositiveInt | None = None
    """Stop when the headline metric has not improved for this many tests."""
    keep_best: bool = False
    """End with the model of the best test instead of the last one; export and test use it, too."""
    records: PositiveInt | None = None
    """Evaluate on this many of them, drawn once for the run; by default on all."""
    clients: Annotated[int, Field(ge=0)] = 0
    """Also test this many clients, each on its own held-out split."""
    layers: bool = False
    """Record each layer's update norm, as mean and deviation over clients (`tacit layers`).

    These numbers are exact, so they are refused under client-level privacy, except in a simulation
    (`privacy.entropy: seed`).
    """
    tune: Tune | None = None
    """Also test these clients after each has fine-tuned the model on its own records.

    Fine-tuning starts from the server's model of that round, so one run gives the curve of a method and of
    its -FT variant.
    """
    train: Annotated[int, Field(ge=0)] = 0
    """Also compute the loss of the server's model on this many training records, always the same ones.

    It is exact, so it is refused under a guarantee, except in a simulation (`privacy.entropy: seed`).
    `train_loss` is another number: the mean of the clients' own losses during training (for SAM, at the
    perturbed point).
    """


class Checkpoints(Section):
    """How often the run is saved, and how many saves are kept."""

    every: PositiveInt = 1
    """Save after every this many rounds, and after the last."""
    keep: Annotated[int, Field(ge=2)] = 2
    """The number of newest checkpoints that stay on disk."""


@dataclass(frozen=True)
class Settings:
    """Everything of a run except its job (the model, data and algorithm) and its privacy."""

    rounds: int
    server: ServerSettings
    optimizer: OptimizerFactory | None
    """The server's optimizer as an object, instead of `server.optimizer`."""
    weighted: bool
    """Clients are weighted by their number of examples."""
    evaluate: Evaluation
    checkpoint: Checkpoints
    engine: EngineSettings
