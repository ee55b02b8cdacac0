"""The shape of a config: every key, its type, its default and what it means.

A config is checked whole before anything starts. All models are frozen and refuse unknown keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    Tag,
    field_validator,
    model_validator,
)

from tacit.config.imports import as_name
from tacit.data.augment import Augment
from tacit.data.dataset import Normalise
from tacit.data.speech.options import SpeechOptions
from tacit.deploy import FlowerSettings
from tacit.engine import ENGINES, AutoSettings, EngineSettings
from tacit.federation.settings import Checkpoints, Evaluation, ServerSettings
from tacit.models.lora import Lora
from tacit.optimizers.schedules import AnySchedule, Constant, Within
from tacit.privacy.clipping import Clip
from tacit.privacy.conventions import to_sum
from tacit.privacy.mechanisms.adaptive import AdaptiveClipping
from tacit.privacy.mechanisms.base import Entropy, Unit
from tacit.privacy.mechanisms.correlated import CorrelatedNoise
from tacit.privacy.metrics import Metrics
from tacit.section import Section


class Iid(Section):
    """Records dealt out at random, in equal parts."""

    kind: Literal["iid"]
    clients: PositiveInt


class Dirichlet(Section):
    """Equal parts; each client's label proportions are from Dirichlet(alpha): small alpha, large skew."""

    kind: Literal["dirichlet"]
    clients: PositiveInt
    alpha: PositiveFloat
    """0.1 is much skew, 100 is next to none."""


class ClassesPerClient(Section):
    """Equal parts; each client holds records of a few classes only (the pathological split)."""

    kind: Literal["classes"]
    clients: PositiveInt
    classes: PositiveInt
    """Classes that each client holds."""


class Natural(Section):
    """One client for each user of the data set."""

    kind: Literal["natural"]
    clients: PositiveInt | None = None
    """Draw so many of the users; left out, all of them."""
    iid: Literal["same-sizes", "uniform"] | None = None
    """A control: records are dealt out at random among the users. `same-sizes`: each keeps its number of
    them; `uniform`: a user is drawn for every record, which makes the sizes nearly equal (paper 003).
    """


class HeldByOwners(Section):
    """Records stay with their owners, the first so many of the federation's roster (`engine.kind: flower`).

    The data section then describes what the server has: records to test on, and how they are prepared.
    """

    kind: Literal["owners"]
    clients: PositiveInt


PartitionChoice = Annotated[
    Iid | Dirichlet | ClassesPerClient | Natural | HeldByOwners, Field(discriminator="kind")
]


class Named(BaseModel):
    """A name and the options that go with it; the bare name is short for no options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else as_name(value)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Model(BaseModel):
    """The network: `name` or `import` (other keys are options), `hub` or `config`; a bare name is a name."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str | None = None
    hub: str | None = None
    """A pretrained model of transformers: a folder, a name on the hub, or `minilm`."""
    config: dict[str, Any] | str | None = None
    """A transformers config with its model_type, or the path of a config.json: a network without weights."""
    start: str | None = None
    """Weights to begin with: a run (`tacit pretrain`), a .safetensors file, or a folder with one."""
    public: bool = False
    """What `start` was trained on needs no protection, although some of it may be in this run too."""
    lora: Lora | None = None
    train: tuple[str, ...] | None = None
    """Patterns of the parameters that are trained; `head` is the output layers. Left out: all, or LoRA's."""
    frozen: Literal["float32", "bf16", "4bit"] = "float32"
    """How parameters that are not trained are kept; 4bit needs bitsandbytes."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else as_name(value)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("name", "hub", "config") if getattr(self, key) is not None]
        if len(given) != 1:
            named = f"not {' and '.join(given)} together" if given else "none is given"
            raise ValueError(f"give one of name, hub and config ({named})")
        if self.name is None and self.options:
            known = ", ".join(type(self).model_fields)
            raise ValueError(f"unknown key {next(iter(self.options))!r}; known keys are {known}")
        if self.frozen != "float32" and self.lora is None and self.train is None:
            raise ValueError(f"frozen: {self.frozen}, but every parameter is trained; set lora, or train")
        if self.frozen == "4bit" and self.hub is None:
            raise ValueError("frozen: 4bit is for pretrained weights; set hub")
        return self

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class MethodChoice(Named):
    """A method and its options."""

    name: str = "fedavg"


class Data(Section):
    """Which records, and how they are split among clients."""

    name: str
    """A known data set, `hf:NAME`, `folder`, `table`, `csv`, `parquet`, `json` or `speech`."""
    path: str | None = None
    """A folder or file that holds the data set, instead of fetching it."""
    partition: PartitionChoice
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's records kept for its own test split (0.1 for personalised evaluation)."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's records kept to choose settings by (`evaluate.split`), never trained on."""
    public: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the records that belongs to no client and needs no protection (adadps, `pretrain.records`).

    The same share of each class, and the same records with every seed.
    """
    offline: bool = False
    """Never ask a hub."""
    image: str | None = None
    """Columns of a hub's or one's own data, where their names cannot be guessed: pictures, labels, users."""
    label: str | None = None
    user: str | None = None
    text: Annotated[tuple[str, ...], Field(max_length=2)] = ()
    """Column of texts, or two columns whose texts belong together."""
    max_length: Annotated[int, Field(ge=4)] = 128
    """Most tokens of a text; the rest is cut off."""
    pack: Annotated[int, Field(ge=8)] | None = None
    """For language: join neighbouring texts of a user to examples of up to so many bytes, which are then what
    example-level privacy protects: not a single text, without which its neighbours would be joined otherwise.
    """
    tokenizer: str | None = None
    """A folder, a name on the hub, or `bytes`; left out, that of `model.hub`."""
    size: PositiveInt | None = None
    """Give pictures to the model at this many pixels a side."""
    normalise: Normalise | None = None
    """Left out, the customary constants of a known data set, or 0.5 and 0.5."""
    augment: Augment | None = None
    speech: SpeechOptions | None = None
    """Options of a corpus of speech."""
    features: tuple[str, ...] = ()
    """Of a table: columns of numbers, together one vector a record."""
    audio: str | None = None
    """Of a table: the column of sound files; a class is learnt from the first `seconds` of each."""
    seconds: PositiveFloat | None = None
    language: str = "en"
    """Of a table's speech: whose letters transcripts are made of."""
    test: str | None = None
    """Of a table: the file of test records; left out, a tenth is set aside."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """Of a csv file: what stands between two cells."""
    encoding: str = "utf-8"
    """Of a csv file."""
    missing: tuple[str, ...] = ("",)
    """Of a table: texts that stand for a missing value; nothing else is taken for one."""
    on_bad: Literal["refuse", "skip"] = "refuse"
    """Of a table: what to do about rows that cannot be used."""
    classes: tuple[str, ...] = ()
    """Of a table: what labels may be, in order; left out, what the training records have."""
    options: dict[str, Any] = Field({})
    """Of `import`: what the function is called with."""

    @model_validator(mode="before")
    @classmethod
    def _imported(cls, value: Any) -> Any:
        return as_name(value)

    @field_validator("partition", mode="before")
    @classmethod
    def _bare_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("text", "features", "missing", mode="before")
    @classmethod
    def _bare_column(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("classes", mode="before")
    @classmethod
    def _class_names(cls, value: Any) -> Any:
        numbers = isinstance(value, list | tuple) and all(type(v) in (int, str) for v in value)
        return tuple(map(str, value)) if numbers else value


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


class LocalTraining(Section):
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


class Pretraining(BaseModel):
    """Central training of a seed model, on data that needs no protection: no clients, no rounds.

    It is a federation of one client that takes one step a round, so the server's optimizer sees gradients;
    `tacit.config.pretrain` fills the other sections from this one. Other keys are the optimizer's options.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    steps: PositiveInt
    """Steps of the optimizer in all."""
    lr: PositiveFloat
    batch: PositiveInt | None = None
    """Records in a batch."""
    seconds: PositiveFloat | None = None
    """Seconds of sound in a batch, instead of a number of records."""
    records: Literal["all", "public"] = "all"
    """`public`: those alone that `data.public` sets aside, which are then no client's in a run that does so
    too.
    """
    optimizer: str = "lars"
    clip: PositiveFloat | None = 1.0
    """Largest norm of a step's gradient."""
    schedule: AnySchedule = Constant()


class NoiseStatedOn(Section):
    """Noise in another convention than the multiplier on the sum (`tacit.privacy.conventions`); give one."""

    sum: NonNegativeFloat | None = None
    average: NonNegativeFloat | None = None
    """Paper 003's σ_DP."""
    client: NonNegativeFloat | None = None

    def on_sum(self, cohort: int) -> float:
        """The noise multiplier."""
        name, value = next((name, value) for name, value in self if value is not None)
        return to_sum(value, name, cohort)


class LargerPopulation(Section):
    """A population that is not trained on, for which ε is extrapolated."""

    population: PositiveInt
    """Clients in all."""
    cohort: PositiveInt
    """Clients a round."""
    rounds: PositiveInt | None = None
    """Of the larger federation; left out, the run's own."""


def _bare_bound(value: Any) -> Any:
    return {"bound": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


def _bare_true(value: Any) -> Any:
    return {} if value is True else value


class PrivacySettings(Section):
    """Turns any method into its private version."""

    unit: Unit
    """What is protected: all of a client's data, or each single record."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """The δ of the guarantee: well below one over the number of units."""
    clip: Annotated[Clip, BeforeValidator(_bare_bound)]
    """The clipping norm; a bare number is short for one global bound."""
    noise: NonNegativeFloat | NoiseStatedOn | None = None
    """Noise multiplier σ; left out, it is the smallest that keeps all rounds within `epsilon`.

    At client level also {average: …} or {client: …}; a checked config always has the multiplier.
    """
    epsilon: PositiveFloat | None = None
    """The budget: the run stops before it would be exceeded."""
    noise_by_layer: dict[str, NonNegativeFloat] = Field({})
    """At client level: factors on the noise of layers whose names match (`"*.mlp.*": 0.5`), by the first
    pattern that does; 1 for all others. ε is that of the whole; 0 is for simulations, which claim nothing.
    """
    noise_at: Literal["server", "clients"] = "server"
    """Who makes the noise at client level: the server on the sum, or each client on its own upload."""
    aggregation: Literal["plain", "secure"] = "plain"
    """`secure`: the server sees masked uploads and their sum, and clients make the noise (client level)."""
    threshold: Annotated[float, Field(gt=0.5, le=1)] | None = None
    """Secure aggregation: the share of a cohort that must stay to a round's end; left out, two thirds."""
    colluding: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Secure aggregation: the share of a cohort that may collude with the server; left out, a tenth."""
    entropy: Entropy = "os"
    """Where sampling and noise come from: the operating system, or the seed (a simulation, no claim)."""
    adaptive: AdaptiveClipping | None = None
    mechanism: CorrelatedNoise | None = None
    """At client level: correlated noise instead of independent noise on Poisson or fixed-size cohorts."""
    metrics: Annotated[Metrics | None, BeforeValidator(_bare_true)] = None
    """Private metrics instead of exact ones, which no guarantee covers; `true` is short for the defaults.

    At example level metrics are made of private gradients and cost nothing, and losses are left out.
    """
    extrapolate: tuple[LargerPopulation, ...] = ()
    """Also say what ε would be with more clients, at the same noise on the average; no claim of the run."""

    @field_validator("noise", mode="before")
    @classmethod
    def _stated_once(cls, noise: Any) -> Any:
        if isinstance(noise, Mapping) and (
            len(noise) != 1 or not noise.keys() <= NoiseStatedOn.model_fields.keys()
        ):
            raise ValueError("state the noise on one of sum, average, client")
        return noise

    @model_validator(mode="after")
    def _noise_or_budget(self) -> Self:
        if self.noise is None and self.epsilon is None:
            raise ValueError("give privacy.noise, or privacy.epsilon to have the noise found for it")
        if self.aggregation == "plain" and (self.threshold, self.colluding) != (None, None):
            raise ValueError(
                "threshold and colluding are of `aggregation: secure`; add it, or leave them out"
            )
        return self


def _engine_kind(value: Any) -> str | None:
    return value.get("kind", "auto") if isinstance(value, Mapping) else getattr(value, "kind", None)


KINDS: dict[str, type[Section]] = {**ENGINES, "flower": FlowerSettings}
if TYPE_CHECKING:
    EngineChoice = EngineSettings
else:
    EngineChoice = Annotated[
        reduce(or_, (Annotated[section, Tag(kind)] for kind, section in KINDS.items())),
        Discriminator(_engine_kind),
    ]
    """Where clients run: speed only. None of it can change a result, except `threads` in the last bits."""


class Config(Section):
    """A whole experiment."""

    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$", max_length=100)] = "run"
    """What the run's folder is called after."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of everything drawn but noise and cohorts under a guarantee, which are secret (`privacy.entropy`)."""
    pretrain: Pretraining | None = None
    """Central training instead of a federation (`tacit pretrain`)."""
    rounds: Annotated[int, Field(gt=0, le=10**8)]
    """How often a cohort is drawn and the server takes a step."""
    data: Data
    task: Named | None = None
    """What the model is trained for; left out, what the data set is for."""
    model: Model
    method: MethodChoice = MethodChoice()
    cohort: Cohort
    weights: Literal["uniform", "examples"] = "uniform"
    """How clients count in the mean: equally, or by their number of examples."""
    local: LocalTraining
    server: ServerSettings = ServerSettings()
    privacy: PrivacySettings | None = None
    evaluate: Evaluation = Evaluation()
    checkpoint: Checkpoints = Checkpoints()
    engine: EngineChoice = AutoSettings()
    """Where clients run: speed only, never a result."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Who else hears of every round, each an extra; `metrics.jsonl` and the page are always written."""
    _assumed_unit: bool = PrivateAttr(False)
    """Whether the privacy unit is a preset's, and not the person's choice."""

    @field_validator("privacy")
    @classmethod
    def _noise_on_the_sum(cls, privacy: PrivacySettings | None, info: Any) -> PrivacySettings | None:
        cohort = info.data.get("cohort")
        if privacy is None or cohort is None:
            return privacy
        if privacy.unit == "example" and privacy.extrapolate:
            raise ValueError("privacy.extrapolate is about populations of clients; it needs unit: client")
        if privacy.noise_by_layer and privacy.extrapolate:
            raise ValueError("privacy.extrapolate is for the same noise everywhere; leave noise_by_layer out")
        if not isinstance(privacy.noise, NoiseStatedOn):
            return privacy
        if privacy.unit == "example":
            raise ValueError("at example level privacy.noise is one number, the multiplier on a batch's sum")
        return privacy.model_copy(update={"noise": privacy.noise.on_sum(cohort.size)})

    @field_validator("evaluate")
    @classmethod
    def _choices_are_free(cls, evaluate: Evaluation, info: Any) -> Evaluation:
        """Whoever stops or picks a model by its tests chooses by records, which no guarantee pays for."""
        privacy = info.data.get("privacy")
        if privacy is None or privacy.entropy == "seed":
            return evaluate
        for name in ("patience", "keep_best"):
            if getattr(evaluate, name):
                raise ValueError(
                    f"evaluate.{name} chooses by looking at records, which the guarantee does not pay for; "
                    "leave it out, or set privacy.entropy: seed (a simulation, which claims nothing)"
                )
        return evaluate

    @field_validator("cohort")
    @classmethod
    def _cohort(cls, cohort: Cohort, info: Any) -> Cohort:
        partition = getattr(info.data.get("data"), "partition", None)
        clients = getattr(partition, "clients", None)
        if clients is not None and cohort.size > clients:
            raise ValueError(f"a cohort of {cohort.size} out of {clients} clients; lower cohort.size")
        return cohort
