"""The section `data` of a config: the records, their preparation, and their division among clients."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from tacit.data.augment import Augment
from tacit.data.speech.options import SpeechOptions
from tacit.section import Section, as_name


class Iid(Section):
    """Records distributed at random, in equal parts."""

    kind: Literal["iid"]
    clients: PositiveInt


class Dirichlet(Section):
    """Equal parts; each client's label proportions are from Dirichlet(alpha): small alpha, large skew."""

    kind: Literal["dirichlet"]
    clients: PositiveInt
    alpha: PositiveFloat
    """0.1 is strong skew, 100 is almost none."""


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
    """Draw this many of the users; by default all of them. A guarantee for clients needs `share`."""
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Or draw each user with this probability, by its own name. The draw of one user does not depend on the
    others, which a guarantee for clients needs.
    """
    iid: Literal["same-sizes", "uniform"] | None = None
    """A control: records are distributed at random among the users. `same-sizes`: each user keeps its number
    of records; `uniform`: a user is drawn for every record, so sizes are nearly equal (paper 003).
    """

    @model_validator(mode="after")
    def _one_draw(self) -> Self:
        if self.clients is not None and self.share is not None:
            raise ValueError("give clients or share, not both")
        return self


class HeldByOwners(Section):
    """Records stay with their owners: the first clients of the federation's roster (`engine.kind: flower`).

    The data section then describes what the server has: records to test on, and how they are prepared.
    """

    kind: Literal["owners"]
    clients: PositiveInt


PartitionChoice = Annotated[
    Iid | Dirichlet | ClassesPerClient | Natural | HeldByOwners, Field(discriminator="kind")
]


class Normalise(Section):
    """Mean and deviation for pixels between 0 and 1: one number each, or one for each channel."""

    mean: Annotated[tuple[float, ...], Field(min_length=1)]
    std: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]


class Data(Section):
    """The records, and how they are divided among clients."""

    name: str
    """A known data set, `hf:NAME`, `folder`, `table`, `csv`, `parquet`, `json` or `speech`."""
    path: str | None = None
    """A folder or file that holds the data set, instead of fetching it."""
    partition: PartitionChoice
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's records kept for its own test split (0.1 for personalised evaluation)."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's records kept for choosing settings (`evaluate.split`), never trained on."""
    public: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the records that belong to no client and need no protection (adadps, `pretrain.records`).

    It is the same share of each class, and the same records with every seed. With `partition: natural` it
    consists of whole users, each drawn by its name with this probability.
    """
    offline: bool = False
    """Never use a hub."""
    image: str | None = None
    """Columns of pictures, labels and users in data of a hub or your own, where they cannot be guessed."""
    label: str | None = None
    user: str | None = None
    text: Annotated[tuple[str, ...], Field(max_length=2)] = ()
    """The column of texts, or two columns whose texts belong together."""
    max_length: Annotated[int, Field(ge=4)] = 128
    """The maximum number of tokens of a text; the rest is cut off."""
    pack: Annotated[int, Field(ge=8)] | None = None
    """For language: join neighbouring texts of a user into examples of up to this many bytes. Example-level
    privacy then protects these examples, not single texts: without one text its neighbours are joined
    differently.
    """
    tokenizer: str | None = None
    """A folder, a name on the hub, or `bytes`; by default that of `model.hub`."""
    size: PositiveInt | None = None
    """The side of pictures in pixels, as the model gets them."""
    normalise: Normalise | None = None
    """By default the customary constants of a known data set, or 0.5 and 0.5."""
    augment: Augment | None = None
    speech: SpeechOptions | None = None
    """Options of a speech corpus."""
    features: tuple[str, ...] = ()
    """For a table: columns of numbers, together one vector for each record."""
    audio: str | None = None
    """For a table: the column of sound files; a class is learnt from the first `seconds` of each."""
    seconds: PositiveFloat | None = None
    language: str = "en"
    """For speech in a table: the language, which decides the alphabet of the transcripts."""
    test: str | None = None
    """For a table: the file of test records; by default a tenth (of each user's) is set aside."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """For a csv file: the separator of cells."""
    encoding: str = "utf-8"
    """For a csv file."""
    missing: tuple[str, ...] = ("",)
    """For a table: texts that mean a missing value; nothing else is treated as missing."""
    on_bad: Literal["refuse", "skip"] = "refuse"
    """For a table: what to do about rows that cannot be used."""
    classes: tuple[str, ...] = ()
    """For a table: the allowed labels, in order; by default those of the training records."""
    options: dict[str, Any] = Field({})
    """For `import`: the arguments of the function."""

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
