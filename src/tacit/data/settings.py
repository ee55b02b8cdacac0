"""The section `data` of a config: which records, how they are prepared, and how clients share them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from tacit.data.augment import Augment
from tacit.data.speech.options import SpeechOptions
from tacit.section import Section, as_name


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
    """Draw so many of the users; left out, all of them. A guarantee for clients needs `share`."""
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Or draw each user with this chance, by its own name: who takes part does not depend on who else is
    there, which a guarantee for clients needs.
    """
    iid: Literal["same-sizes", "uniform"] | None = None
    """A control: records are dealt out at random among the users. `same-sizes`: each keeps its number of
    them; `uniform`: a user is drawn for every record, which makes the sizes nearly equal (paper 003).
    """

    @model_validator(mode="after")
    def _one_draw(self) -> Self:
        if self.clients is not None and self.share is not None:
            raise ValueError("give clients or share, not both")
        return self


class HeldByOwners(Section):
    """Records stay with their owners, the first so many of the federation's roster (`engine.kind: flower`).

    The data section then describes what the server has: records to test on, and how they are prepared.
    """

    kind: Literal["owners"]
    clients: PositiveInt


PartitionChoice = Annotated[
    Iid | Dirichlet | ClassesPerClient | Natural | HeldByOwners, Field(discriminator="kind")
]


class Normalise(Section):
    """What is subtracted from pixels between 0 and 1, and divided by: one number, or one for each channel."""

    mean: Annotated[tuple[float, ...], Field(min_length=1)]
    std: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]


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

    The same share of each class, and the same records with every seed; with `partition: natural` whole users,
    each drawn by its name with this chance.
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
    """Of a table: the file of test records; left out, a tenth (of each user's) is set aside."""
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
