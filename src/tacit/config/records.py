"""From a checked config to records: the data set, and the tokenizer for its texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tacit import data
from tacit.config.imports import made
from tacit.config.schema import Config
from tacit.data import Dataset, TextRecords, Tokenizer
from tacit.data.augment import Augment
from tacit.data.columns import Meaning
from tacit.data.dataset import FILES, TABLE
from tacit.data.own import TASKS, from_columns
from tacit.data.settings import Data
from tacit.data.table import Format, read_table
from tacit.data.tokens import BYTES, Bytes, from_folder
from tacit.errors import UserError
from tacit.models.weights import locate
from tacit.section import IMPORT

OF_TABLES = (
    "features", "audio", "seconds", "language", "test",
    "delimiter", "encoding", "missing", "on_bad", "classes",
)  # fmt: skip
"""Keys of the data section for tables only; a csv, parquet or json file with one of them is a table."""

OF_ALL = ("name", "partition", "holdout", "validation", "public", "offline", "augment")
"""Keys of the data section that hold for records from anywhere, also for those that a function or a person
gives. `offline` is also the model's.
"""

OF_TEXTS = ("tokenizer", "max_length")
"""Keys that say how texts become tokens."""

TASKS_OF_TABLES = ("regression", "multi-label", "token-classification")
"""Tasks whose labels are not classes of records; for them, a csv, parquet or json file is a table, too."""


def build_dataset(config: Config) -> Dataset:
    """The records, downloaded if necessary."""
    section, normalise = config.data, config.data.normalise
    if section.name.startswith(IMPORT):
        if others := [key for key in described(section) if key != "options"]:
            raise UserError(
                f"data.{others[0]}: records from `import` are used as its function gives them; leave it out, "
                "or make it an argument of the function (data.options)"
            )
        found = made(section.name, "data", section.options)
        if not isinstance(found, Dataset):
            raise UserError(
                f"data.import: {section.name} gives a {type(found).__name__}, not a tacit.Dataset"
            )
        return found
    if section.options:
        raise UserError("data.options: they are for `import`, the arguments of its function; leave them out")
    stated = [key for key in described(section) if key in OF_TABLES]
    of_table = config.task is not None and config.task.name in TASKS_OF_TABLES
    if section.name == TABLE or (section.name in FILES and (stated or of_table)):
        table = _table(config)
        return table if section.pack is None else _joined(table, section.pack)
    speech = None if section.speech is None else section.speech.model_dump(exclude_unset=True)
    texts = data.has_texts(section.name, section.text)
    stated += [key for key in described(section) if key in OF_TEXTS and not texts]
    if stated:
        data.check(section.name, section.path, section.offline, speech)  # refuse an unknown data set
        what = "texts" if stated[0] in OF_TEXTS else "a table"
        raise UserError(f"data.{stated[0]}: it is of {what}, which {section.name} is not; leave it out")
    found = data.load(
        section.name,
        path=section.path,
        offline=section.offline,
        image=section.image,
        label=section.label,
        user=section.user,
        text=section.text,
        labelled=config.task is None or config.task.name != "language",
        size=section.size,
        mean=None if normalise is None else normalise.mean,
        std=None if normalise is None else normalise.std,
        tokens=data.Tokenisation(build_tokenizer(config), section.max_length) if texts else None,
        speech=speech,
    )
    return found if section.pack is None else _joined(found, section.pack)


def described(section: Data) -> list[str]:
    """The keys of a data section that say what the records are and how they are read, where they say it."""
    return [
        key
        for key, field in type(section).model_fields.items()
        if key not in OF_ALL and getattr(section, key) != field.get_default()
    ]


def _joined(dataset: Dataset, most: int) -> Dataset:
    """The data set with neighbouring texts of one user joined into one example."""
    if not isinstance(dataset.train, TextRecords) or not isinstance(dataset.test, TextRecords):
        raise UserError(f"data.pack: the records of {dataset.name} are not texts; leave it out")
    return replace(dataset, train=dataset.train.joined(most), test=dataset.test.joined(most))


def _table(config: Config) -> Dataset:
    section, normalise = config.data, config.data.normalise
    if section.path is None:
        raise UserError("data.path: a table needs the path of its file")
    if section.speech is not None:
        raise UserError(
            "data.speech: it is of corpora; for speech in a table set audio, language and task: speech"
        )
    if section.tokenizer is not None and not section.text:
        raise UserError(
            "data.tokenizer: it is of texts, and no column of texts is named (text); leave it out"
        )
    format = Format(section.delimiter, section.encoding, section.missing)
    task = "classification"
    if config.task is not None and not config.task.name.startswith(IMPORT):
        from tacit import tasks  # it imports torch, which a plan for other data does not need

        tasks.build(config.task.name, **config.task.options)  # an unknown task is reported here
        task = config.task.name if config.task.name in TASKS else task
    meaning = Meaning(
        features=section.features,
        text=section.text,
        image=section.image,
        label=section.label,
        user=section.user,
        task=task,
        tokenizer=build_tokenizer(config) if section.text else None,
        max_length=section.max_length,
        size=section.size,
        mean=None if normalise is None else normalise.mean,
        std=None if normalise is None else normalise.std,
        skip_bad=section.on_bad == "skip",
        classes=section.classes,
        audio=section.audio,
        seconds=section.seconds,
        language=section.language,
    )
    test = None if section.test is None else read_table(Path(section.test), format, "data.test")
    found = read_table(Path(section.path), format)
    return from_columns(found, test, meaning, Path(section.path).stem, section.path)


def named_tokenizer(name: str, offline: bool, max_length: int) -> Tokenizer:
    """The tokenizer with that name: bytes, a folder, or one on the hub."""
    if name == BYTES:
        return Bytes()
    folder = Path(name).expanduser()
    # The folder only needs a tokenizer; `locate` requires a whole model.
    tokenizer = from_folder(folder if folder.is_dir() else locate(name, offline))
    if max_length > tokenizer.longest:
        raise UserError(f"data.max_length: {name} reads at most {tokenizer.longest} tokens, not {max_length}")
    return tokenizer


def build_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, or the model's own."""
    name = config.data.tokenizer or config.model.hub
    if name is None:
        raise UserError(
            "data.tokenizer: texts need one, and this model brings none; give a folder, a name on the hub, "
            "minilm, or bytes"
        )
    return named_tokenizer(name, config.data.offline, config.data.max_length)


def build_augment(config: Config, dataset: Dataset) -> Augment | None:
    """The augmentation of training pictures, if any."""
    section = config.data.augment
    if section is None:
        return None
    if len(dataset.shape) != 3:
        raise UserError(f"data.augment: {dataset.name} is no set of pictures; leave it out")
    return section
