"""How a run goes, beside its job and its privacy: the server's step, tests, checkpoints, the engine."""

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
    """How many clients take part in a round; a bare number is short for a cohort of that size."""

    size: PositiveInt
    """Clients a round, on average or exactly."""
    sampling: Literal["fixed", "poisson"] | None = None
    """`fixed`: that many, without replacement. `poisson`: each client joins independently; `size` on average.

    Left out: poisson under client-level privacy (its guarantee is the better one), else fixed.
    """

    @model_validator(mode="before")
    @classmethod
    def _bare_size(cls, value: Any) -> Any:
        return {"size": value} if isinstance(value, int) and not isinstance(value, bool) else value

    def drawn(self, clients: int, usual: Literal["fixed", "poisson"]) -> FixedSize | Poisson:
        """How cohorts are drawn from so many clients; `usual` says how where the section does not."""
        fixed = (self.sampling or usual) == "fixed"
        return FixedSize(self.size) if fixed else Poisson(self.size / clients)


class ServerSettings(Open):
    """The server's optimizer: any of torch.optim by name, `lamb` or `lars`; other keys are its options."""

    optimizer: str = "sgd"
    lr: PositiveFloat = 1.0
    """Step size; with plain SGD, 1 is FedAvg."""
    schedule: AnySchedule = Constant()
    device: Device = "cpu"
    """Where the algorithm's state lives and its server step is computed; noise and files are the host's."""


class Evaluation(Section):
    """When and how the model is tested."""

    every: PositiveInt = 1
    """Test after every so many rounds, and after the last."""
    batch: PositiveInt = 500
    """Records at once; speed and memory only."""
    split: Literal["test", "validation"] = "test"
    """Which records judge the model: test records, or those that `data.validation` holds out."""
    patience: PositiveInt | None = None
    """Stop when the headline metric has not improved for so many tests."""
    keep_best: bool = False
    """End with the model of the best test instead of the last one; exported and tested is that one, too."""
    records: PositiveInt | None = None
    """Judge by so many of them, drawn once for the run; left out, by all."""
    clients: Annotated[int, Field(ge=0)] = 0
    """Also test this many clients, each on its own held-out split."""
    layers: bool = False
    """Record mean and deviation over clients of each layer's update norm (`tacit layers`).

    They are exact: refused under client-level privacy, except in a simulation (`privacy.entropy: seed`).
    """
    tune: Tune | None = None
    """Also test these clients after each has trained the model on its own records, for itself alone.

    It starts from the server's model of that round, so one run gives a method's curve and that of its -FT
    twin.
    """
    train: Annotated[int, Field(ge=0)] = 0
    """Also take the loss of the server's model on so many training records, always the same ones.

    It is exact: refused under a guarantee, except in a simulation (`privacy.entropy: seed`). `train_loss` is
    another number: the mean of the clients' own losses while they train (for SAM, at the perturbed point).
    """


class Checkpoints(Section):
    """How often the run is saved, and how many saves are kept."""

    every: PositiveInt = 1
    """Save after every so many rounds, and after the last."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Newest saves that stay on disk."""


@dataclass(frozen=True)
class Settings:
    """All of a run that is not its job (the model, data and algorithm) nor its privacy."""

    rounds: int
    server: ServerSettings
    optimizer: OptimizerFactory | None
    """The server's optimizer as an object, instead of `server.optimizer`."""
    weighted: bool
    """Clients count by their number of examples."""
    evaluate: Evaluation
    checkpoint: Checkpoints
    engine: EngineSettings
