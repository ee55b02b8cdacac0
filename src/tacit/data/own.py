"""Data that people already have, as a data set: tables, arrays, lists, and the objects of other libraries.

>>> rows = [{"age": 31, "job": "cook", "who": "ann"}, {"age": 58, "job": "vet", "who": "bob"}] * 10
>>> data = dataset(rows, features=["age"], label="job", user="who")
>>> len(data.train), len(data.test), data.classes, data.label_names, data.shape
(18, 2, 2, ('cook', 'vet'), (1,))

Nothing is guessed that would change what is learnt: columns are named, missing values are those declared, and
whatever does not fit is refused with its row. Classes may be strings or any whole numbers; they are numbered
in order, and their names are kept. Nothing is computed from the data to scale them: statistics of private
records would be a release of their own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data.dataset import Dataset
from tacit.data.records import ArrayRecords, Records
from tacit.data.text import TextRecords, Texts
from tacit.data.tokens import Tokenizer
from tacit.data.words import WordRecords
from tacit.errors import UserError

TASKS = ("classification", "regression", "multi-label", "token-classification", "language", "speech")
TEST_SHARE = 0.1
"""Set aside for testing where no test records are given."""


@dataclass(frozen=True)
class Columns:
    """Columns by name, with a way to say where a row came from."""

    values: Mapping[str, Sequence[Any]]
    where: Callable[[int], str] = field(default=lambda row: f"row {row}")

    def __len__(self) -> int:
        return len(next(iter(self.values.values()), ()))

    def column(self, name: str, what: str) -> Sequence[Any]:
        if name not in self.values:
            raise UserError(f"{what}: there is no column {name!r}; the data have {', '.join(self.values)}")
        return self.values[name]

    def take(self, rows: NDArray[np.int64]) -> Columns:
        chosen = {name: [column[i] for i in rows] for name, column in self.values.items()}
        return Columns(chosen, lambda row: self.where(int(rows[row])))


@dataclass(frozen=True)
class Meaning:
    """What the columns are; see `dataset`."""

    features: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    image: str | None = None
    label: str | None = None
    user: str | None = None
    task: str = "classification"
    tokenizer: Tokenizer | None = None
    max_length: int = 128
    size: int | None = None
    mean: Sequence[float] | float | None = None
    std: Sequence[float] | float | None = None
    skip_bad: bool = False
    audio: str | None = None
    seconds: float | None = None
    language: str = "en"
    classes: tuple[str, ...] = ()


def dataset(
    source: Any,
    *,
    test: Any = None,
    features: Sequence[str] = (),
    text: str | Sequence[str] = (),
    image: str | None = None,
    audio: str | None = None,
    label: str | None = None,
    user: str | Sequence[Any] | None = None,
    task: str = "classification",
    tokenizer: Tokenizer | None = None,
    max_length: int = 128,
    size: int | None = None,
    mean: Sequence[float] | float | None = None,
    std: Sequence[float] | float | None = None,
    seconds: float | None = None,
    language: str = "en",
    on_bad: str = "refuse",
    classes: Sequence[Any] = (),
    name: str = "own data",
) -> Dataset:
    """A data set from what is at hand.

    Args:
        source: a pandas or polars DataFrame, a Hugging Face `datasets` object (or a dict of its splits), a
            torch `Dataset` of pairs, a pair of arrays or lists (x, y), a list of rows as dicts, or a dict of
            columns.
        test: the same for testing; otherwise the source's own test split, or a tenth of the records.
        features: columns of numbers, together one vector a record.
        text: the column of texts, or two whose texts belong together; needs a `tokenizer`. For
            token-classification, texts are lists of words, and a word's class stands at its first token.
        image: the column of pictures: arrays, PIL images, or paths of files.
        audio: the column of sounds: paths of files, {array, sampling_rate} or {bytes} as `datasets` has them,
            or arrays at 16 kHz. Heard are log-mel features, [1, frames, 80] of a sound's first `seconds`; for
            the task `speech` all of it, and `label` is what is said.
        label: the column of classes, numbers (regression), or lists of classes (multi-label; one for each
            word in token-classification).
        user: the column that says whose record it is; beside a pair of arrays, one entry for each record.
        task: classification, regression, multi-label, token-classification, language or speech.
        language: of speech: whose letters transcripts are made of.
        size: pictures come out this many pixels a side.
        mean, std: what is subtracted and divided by; constants, since statistics would be a release.
        on_bad: `refuse` names the first row that cannot be used; `skip` leaves such rows out, and says so.
        classes: what labels may be, in order; left out, what the training records have.
    """
    if task not in TASKS:
        raise UserError(f"task: {task!r} is not one of {', '.join(TASKS)}")
    if on_bad not in ("refuse", "skip"):
        raise UserError(f"on_bad: {on_bad!r} is not one of refuse, skip")
    splits = source if isinstance(source, Mapping) and not _is_columns(source) else None
    if splits is not None:
        source = splits["train"] if "train" in splits else next(iter(splits.values()))
        test = test if test is not None else splits.get("test", splits.get("validation"))
    texts = (text,) if isinstance(text, str) else tuple(text)
    meaning = Meaning(
        tuple(features),
        texts,
        image,
        label,
        None,
        task,
        tokenizer,
        max_length,
        size,
        mean,
        std,
        on_bad == "skip",
        audio,
        seconds,
        language,
        tuple(map(str, classes)),
    )
    if (pair := _pair(source)) is not None:
        columns = _of_pair(pair, None if isinstance(user, str) else user, "source")
        tested = None if test is None else _of_pair(_pair(test) or _refuse_pair(test), None, "test")
        meaning = _with(meaning, label="y", user=None if user is None else "user")
        if not texts:
            meaning = _with(
                meaning, image="x" if np.ndim(columns.values["x"][0]) == 3 else None, features=("x",)
            )
        return from_columns(columns, tested, meaning, name, "given as arrays")
    if user is not None and not isinstance(user, str):
        raise UserError("user: give the name of the column that says whose record it is")
    meaning = _with(meaning, user=user)
    columns = columns_of(source, "source")
    tested = None if test is None else columns_of(test, "test")
    return from_columns(columns, tested, meaning, name, "given as an object")


def from_columns(
    columns: Columns, test: Columns | None, meaning: Meaning, name: str, origin: str, licence: str = "yours"
) -> Dataset:
    """A data set of columns whose meaning is known."""
    if not len(columns):
        raise UserError(f"{name}: there are no records")
    kinds = [kind for kind in ("features", "text", "image", "audio") if getattr(meaning, kind)]
    if meaning.image is not None and meaning.features == ("x",):
        kinds = ["image"]
    if len(kinds) != 1:
        told = f"not {' and '.join(kinds)} together" if kinds else "none is named"
        raise UserError(f"{name}: say which columns are learnt from: features, text, image or audio ({told})")
    if (meaning.task == "speech") > (meaning.audio is not None):
        raise UserError(f"{name}: task speech: name the column of sounds (audio)")
    if meaning.audio is not None and meaning.task != "speech" and not (meaning.seconds or 0) > 0:
        raise UserError(f"{name}: seconds: say how much of each sound is heard, such as 2.0; the rest is cut")
    if meaning.label is None and meaning.task != "language":
        raise UserError(f"{name}: label: name the column of what is to be learnt")
    if test is None:
        order = np.random.default_rng(0).permutation(len(columns))
        cut = max(1, round(TEST_SHARE * len(columns)))
        test, columns = columns.take(np.sort(order[:cut])), columns.take(np.sort(order[cut:]))
        if not len(columns):
            raise UserError(f"{name}: one record is too few to train on and to test")
    coding = _coding(columns, meaning)
    bad: list[str] = []
    train_records, shape = _records(columns, meaning, coding, bad)
    test_records, test_shape = _records(test, meaning, coding, bad)
    if shape != test_shape:
        raise UserError(f"{name}: records have shape {shape} in training and {test_shape} in testing")
    if bad:
        origin = f"{origin}; {len(bad):,} bad rows left out, the first: {bad[0]}"
    classes = 0 if meaning.task == "language" else coding.outputs
    return Dataset(
        name, train_records, test_records, classes, shape, licence, origin, meaning.task, meaning.tokenizer,
        label_names=coding.names, tokens=coding.tokens,
    )  # fmt: skip


# --- from other libraries' objects to columns ---------------------------------------------------------------


def columns_of(source: Any, what: str) -> Columns:
    """Columns of a DataFrame, a `datasets` object, a dict of columns or a list of rows."""
    if isinstance(source, Columns):
        return source
    if isinstance(source, Mapping):
        return _checked({str(key): value for key, value in source.items()}, what)
    library = type(source).__module__.split(".")[0]
    if library == "pandas":
        return _checked({str(name): source[name].to_numpy() for name in source.columns}, what)
    if library == "polars":
        return _checked({str(name): source[name].to_list() for name in source.columns}, what)
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return _checked({name: _named_classes(source, name) for name in source.column_names}, what)
    if isinstance(source, Sequence) and source and all(isinstance(row, Mapping) for row in source):
        names = list(dict.fromkeys(key for row in source for key in row))
        return _checked({str(n): [row.get(n) for row in source] for n in names}, what)
    raise UserError(
        f"{what}: a {type(source).__name__} is not known as data; give a DataFrame, a datasets object, a "
        "torch Dataset, a pair (x, y), a list of rows as dicts, or a dict of columns"
    )


def _named_classes(source: Any, name: str) -> Sequence[Any]:
    """A column of a `datasets` object; classes by their names, which it knows."""
    values, feature = source[name], source.features[name]
    names = getattr(feature, "names", None)
    return [names[v] if v is not None and v >= 0 else None for v in values] if names else list(values)


def _checked(values: dict[str, Sequence[Any]], what: str) -> Columns:
    lengths = {name: len(column) for name, column in values.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"{what}: columns differ in length ({told})")
    return Columns(values)


def _is_columns(source: Mapping[Any, Any]) -> bool:
    """Whether a mapping holds columns, and not the splits of a data set."""
    return not all(hasattr(part, "column_names") or hasattr(part, "columns") for part in source.values())


def _pair(source: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """(x, y) of a pair of arrays, or of a torch data set of pairs; None of anything else."""
    if isinstance(source, tuple) and len(source) == 2:
        return _array_like(source[0]), _array_like(source[1])
    from torch.utils.data import Dataset as TorchDataset

    if isinstance(source, TorchDataset):
        items = [source[i] for i in range(len(source))]  # type: ignore[arg-type]
        if not items or not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
            raise UserError("source: a torch Dataset must give pairs (x, y)")
        return [_array_like(x) for x, _ in items], [_array_like(y) for _, y in items]
    return None


def _array_like(value: Any) -> Any:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _refuse_pair(test: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    raise UserError(f"test: the training data are a pair (x, y), and this is a {type(test).__name__}")


def _of_pair(pair: tuple[Sequence[Any], Sequence[Any]], users: Sequence[Any] | None, what: str) -> Columns:
    values: dict[str, Sequence[Any]] = {"x": pair[0], "y": pair[1]}
    if users is not None:
        values["user"] = users
    return _checked(values, what)


def _with(meaning: Meaning, **changes: Any) -> Meaning:
    from dataclasses import replace

    return replace(meaning, **changes)


# --- from columns to records --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Coding:
    """How labels become numbers."""

    outputs: int
    names: tuple[str, ...] = ()
    codes: Mapping[Any, int] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    """Of speech: the characters of transcripts."""


def _coding(columns: Columns, meaning: Meaning) -> _Coding:
    if meaning.label is None:
        return _Coding(0)
    values = columns.column(meaning.label, "label")
    if meaning.task == "speech":
        from tacit.data.speech.tokens import alphabet

        letters = alphabet(meaning.language).tokens
        return _Coding(len(letters), tokens=tuple(letters))
    if meaning.task == "regression":
        first = next((v for v in values if v is not None), 0.0)
        return _Coding(int(np.size(first)))
    if meaning.task == "token-classification":
        flat = [_plain(v) for row in values if not _missing(row) for v in np.ravel(row)]
        if any(isinstance(v, str) for v in flat):
            return _coded(sorted({str(v) for v in flat}), meaning.classes)
        most = max((int(v) for v in flat if int(v) >= 0), default=0) + 1
        if meaning.classes and most > len(meaning.classes):
            raise UserError(f"label: {most - 1} is the number of none of {len(meaning.classes)} classes")
        return _Coding(len(meaning.classes) or most)
    known: set[Any] = set()
    if meaning.task == "multi-label" and np.ndim(values[0]) == 1 and not isinstance(values[0][0:1], str):
        if all(len(row) == len(values[0]) and set(np.unique(row).tolist()) <= {0, 1} for row in values):
            return _Coding(len(values[0]))
        known = {_plain(v) for row in values for v in row}
    else:
        for row, value in enumerate(values):
            plain = _plain(value)
            if isinstance(plain, float) and not plain.is_integer() and not math.isnan(plain):
                raise UserError(
                    f"label: column {meaning.label!r} holds {plain:g} ({columns.where(row)}), which is no "
                    "class; set task: regression for numbers"
                )
            if not _missing(plain):
                known.add(int(plain) if isinstance(plain, float) else plain)
    if len({type(v) for v in known}) > 1:
        raise UserError(
            f"label: column {meaning.label!r} holds both numbers and words; make them all one kind"
        )
    return _coded(sorted(known), meaning.classes)


def _coded(found: Sequence[Any], classes: tuple[str, ...]) -> _Coding:
    """Numbers for the labels that were found: in their own order, or in that of the classes there may be."""
    if not classes:
        names = tuple(str(v) for v in found)
        return _Coding(len(names), names, {v: number for number, v in enumerate(found)})
    beyond = [v for v in found if str(v) not in classes]
    if beyond or len(set(classes)) < len(classes):
        what = f"label: {beyond[0]!r} is not among the classes" if beyond else "classes: one is named twice"
        raise UserError(f"{what}: {', '.join(classes)}")
    numbers: dict[Any, int] = {name: number for number, name in enumerate(classes)}
    numbers |= {int(name): n for n, name in enumerate(classes) if name.isdecimal() and str(int(name)) == name}
    return _Coding(len(classes), classes, numbers)


def _plain(value: Any) -> Any:
    return (
        value.item()
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim)
        else value
    )


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _records(
    columns: Columns, meaning: Meaning, coding: _Coding, bad: list[str]
) -> tuple[Records, tuple[int, ...]]:
    kept: list[int] = []
    xs: list[Any] = []
    ys: list[Any] = []
    users: list[Any] = []
    for row in range(len(columns)):
        try:
            x = _input(columns, meaning, row)
            y = None if meaning.label is None else _target(columns, meaning, coding, row)
            who = (
                None
                if meaning.user is None or meaning.user not in columns.values
                else _user(columns, meaning, row)
            )
        except UserError as error:
            if not meaning.skip_bad:
                raise
            bad.append(str(error))
            continue
        kept.append(row)
        xs.append(x)
        ys.append(y)
        users.append(who)
    if not xs:
        raise UserError(f"no usable record is left; the first bad one: {bad[0]}")
    people = None if meaning.user is None or any(who is None for who in users) else np.asarray(users)
    if meaning.user is not None and meaning.user not in columns.values and meaning.user != "user":
        columns.column(meaning.user, "user")
    if meaning.text:
        if meaning.tokenizer is None:
            raise UserError("tokenizer: texts need one; give a tokenizer, a folder with one, or bytes")
        if meaning.task == "token-classification":
            made = WordRecords.made(xs, ys, meaning.tokenizer, meaning.max_length, people)
            return made, (meaning.max_length,)
        pairs = Texts.of(x[1] for x in xs) if len(meaning.text) == 2 else None
        labels = None if meaning.label is None else np.asarray(ys, np.int64)
        texts = Texts.of(x[0] for x in xs)
        return TextRecords(texts, meaning.tokenizer, meaning.max_length, labels, people, pairs), (
            meaning.max_length,
        )
    if meaning.task == "speech":
        from tacit.data.speech.features import BANDS
        from tacit.data.speech.records import gather, hear

        speakers = ["nobody"] * len(xs) if people is None else [str(who) for who in people]
        return gather(hear(*heard) for heard in zip(xs, ys, speakers, strict=True)), (BANDS,)
    return _arrays(columns, meaning, kept, xs, ys, people)


def _arrays(
    columns: Columns,
    meaning: Meaning,
    kept: list[int],
    xs: list[Any],
    ys: list[Any],
    people: NDArray[Any] | None,
) -> tuple[Records, tuple[int, ...]]:
    shape = xs[0].shape
    for row, x in zip(kept, xs, strict=True):
        if x.shape != shape:
            raise UserError(
                f"{columns.where(row)} has shape {x.shape}, and the first record {shape}; "
                "make them equal" + (", or give a size" if meaning.image else "")
            )
    kinds = {"classification": np.int64, "token-classification": np.int64}
    y = np.asarray(ys, kinds.get(meaning.task, np.float32))
    mean, std = meaning.mean, meaning.std
    if meaning.image is not None and xs[0].dtype == np.uint8 and mean is None:
        mean, std = 0.5, 0.5
    # Pictures of one size are enlarged batch by batch; others were made equal when they were read.
    records = ArrayRecords(
        np.stack(xs), y, people, mean, std, None if meaning.image is None else meaning.size
    )
    wanted = (shape[0], meaning.size, meaning.size) if meaning.image and meaning.size else shape
    return records, tuple(wanted)


def _input(columns: Columns, meaning: Meaning, row: int) -> Any:
    if meaning.text:
        texts = [columns.column(name, "text")[row] for name in meaning.text]
        if meaning.task == "token-classification":
            return _words(texts, columns.where(row))
        for name, text in zip(meaning.text, texts, strict=True):
            if not isinstance(text, str):
                raise UserError(
                    f"text: {columns.where(row)}: column {name!r} holds {text!r}, which is no text"
                )
        return texts
    if meaning.image is not None:
        return _picture(columns.column(meaning.image, "image")[row], meaning.size, columns.where(row))
    if meaning.audio is not None:
        wave = _wave(columns.column(meaning.audio, "audio")[row], columns.where(row))
        return wave if meaning.task == "speech" else _heard(wave, float(meaning.seconds or 0))
    values = [columns.column(name, "features")[row] for name in meaning.features]
    if len(values) == 1 and np.ndim(values[0]):
        found = np.asarray(values[0])
        if found.dtype == object or found.dtype.kind not in "fiub":
            raise UserError(f"features: {columns.where(row)} holds {found.dtype}, not numbers")
        if found.dtype.kind in "iub" and meaning.task == "token-classification":
            return found.astype(np.int64)
        found = found.astype(np.float32)
        if not np.isfinite(found).all():
            place = tuple(int(i) for i in np.argwhere(~np.isfinite(found))[0])
            raise UserError(
                f"features: {columns.where(row)}: place {place} is {found[place]}, not a finite number"
            )
        return found
    numbers = []
    for name, value in zip(meaning.features, values, strict=True):
        try:
            numbers.append(float(value))
        except (TypeError, ValueError):
            what = "missing" if value is None else f"{value!r}, not a number"
            raise UserError(
                f"features: {columns.where(row)}: column {name!r} is {what}; mend it, or skip"
            ) from None
        if not math.isfinite(numbers[-1]):
            raise UserError(
                f"features: {columns.where(row)}: column {name!r} is {numbers[-1]}, not a finite number; "
                "mend it, or skip such rows (on_bad: skip)"
            )
    return np.asarray(numbers, np.float32)


def _words(texts: list[Any], where: str) -> list[str]:
    """One text as its words."""
    if len(texts) != 1:
        raise UserError("text: a class for each word is for one column of texts, not for pairs")
    words = texts[0].tolist() if isinstance(texts[0], np.ndarray) else texts[0]
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) and word for word in words):
        raise UserError(
            f"text: {where}: a class for each word needs a list of words, like ['Ann', 'ran'] (got {words!r})"
        )
    if not words:
        raise UserError(f"text: {where}: there is no word in it")
    return list(words)


def _target(columns: Columns, meaning: Meaning, coding: _Coding, row: int) -> Any:
    assert meaning.label is not None
    value = _plain(columns.column(meaning.label, "label")[row])
    if _missing(value):
        raise UserError(f"label: {columns.where(row)}: column {meaning.label!r} is missing")
    if meaning.task == "speech":
        from tacit.data.speech.tokens import UnknownCharacters, alphabet

        try:
            return alphabet(meaning.language).encode(alphabet(meaning.language).normalise(str(value)))
        except UnknownCharacters as error:
            raise UserError(f"label: {columns.where(row)}: {error}") from None
    if meaning.task == "regression":
        try:
            number = np.asarray(value, np.float32)
        except (TypeError, ValueError):
            raise UserError(f"label: {columns.where(row)}: {value!r} is not a number") from None
        if not np.isfinite(number).all():
            raise UserError(f"label: {columns.where(row)}: {value!r} is not a finite number")
        return number
    if meaning.task == "token-classification":
        tags = [_code(coding, str(v), columns, row) for v in value] if coding.codes else value
        found = np.asarray(tags, np.int64)
        if meaning.text and len(found) != (words := len(columns.column(meaning.text[0], "text")[row])):
            raise UserError(f"label: {columns.where(row)}: {len(found)} classes for {words} words")
        return found
    if meaning.task == "multi-label":
        if not coding.codes:
            return np.asarray(value, np.float32)
        hot = np.zeros(coding.outputs, np.float32)
        for one in value:
            hot[_code(coding, _plain(one), columns, row)] = 1.0
        return hot
    return _code(coding, int(value) if isinstance(value, float) else value, columns, row)


def _code(coding: _Coding, value: Any, columns: Columns, row: int) -> int:
    if value not in coding.codes:
        raise UserError(
            f"label: {columns.where(row)}: class {value!r} is in no training record; known: "
            f"{', '.join(coding.names[:8])}{' …' if len(coding.names) > 8 else ''}"
        )
    return coding.codes[value]


def _user(columns: Columns, meaning: Meaning, row: int) -> Any:
    assert meaning.user is not None
    value = _plain(columns.values[meaning.user][row])
    if _missing(value) or value == "":
        raise UserError(
            f"user: {columns.where(row)}: column {meaning.user!r} is missing; whose record is it?"
        )
    return value


def _wave(value: Any, where: str) -> NDArray[np.float32]:
    """A sound as one channel at 16 kHz."""
    from tacit.data.speech.audio import BadAudio, read, resample
    from tacit.data.speech.features import RATE, WINDOW

    rate = RATE
    if isinstance(value, Mapping) and value.get("array") is not None:
        value, rate = value["array"], int(value["sampling_rate"])
    elif isinstance(value, Mapping):  # as `datasets` keeps undecoded sounds
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str | Path | bytes):
        try:
            return read(Path(value) if isinstance(value, str) else value)
        except BadAudio as error:
            shown = "it" if isinstance(value, bytes) else f"{str(value)!r}"
            raise UserError(f"audio: {where}: {shown} is no sound that can be used: {error}") from None
    wave = np.asarray(value, np.float32) if np.ndim(value) == 1 else None
    if wave is None or not np.isfinite(wave).all() or len(wave) * RATE < WINDOW * rate:
        raise UserError(
            f"audio: {where}: a sound is a file, {{array, sampling_rate}}, or one row of finite samples, of "
            "25 ms or more"
        )
    return resample(wave, rate)


def _heard(wave: NDArray[np.float32], seconds: float) -> NDArray[np.float32]:
    """Log-mel features of its first seconds, [1, frames, 80]; what is beyond its end is zero."""
    import torch

    from tacit.data.speech.features import RATE, log_mel

    samples = round(seconds * RATE)
    cut = torch.zeros(1, samples)
    own = min(len(wave), samples)
    cut[0, :own] = torch.from_numpy(wave[:own])
    found, _ = log_mel(cut, torch.tensor([own]))
    heard: NDArray[np.float32] = found.numpy()
    return heard


def _picture(value: Any, size: int | None, where: str) -> NDArray[Any]:
    """[C, H, W]: pixels as uint8, or an array of floats as it is."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(value, np.ndarray) or (
        hasattr(value, "__array_interface__") and not hasattr(value, "convert")
    ):
        found = np.asarray(value)
        found = found[None] if found.ndim == 2 else found
        if found.ndim != 3:
            raise UserError(f"image: {where} has shape {found.shape}; a picture is [channels, height, width]")
        if found.shape[-1] in (1, 3) and found.shape[0] not in (1, 3):
            found = found.transpose(2, 0, 1)
        if found.dtype == np.uint8:
            return found
        found = found.astype(np.float32)
        if not np.isfinite(found).all():
            raise UserError(f"image: {where} holds values that are not finite numbers")
        return found
    try:
        if isinstance(value, Mapping):  # as `datasets` keeps undecoded pictures
            value = io.BytesIO(value["bytes"]) if value.get("bytes") else value["path"]
        picture = value if hasattr(value, "convert") else Image.open(value)
        picture = picture.convert("L" if picture.mode in ("1", "L", "I;16", "I") else "RGB")
        if size is not None:
            picture = picture.resize((size, size))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UnidentifiedImageError) as error:
        raise UserError(f"image: {where}: {value!r} cannot be read as a picture ({error})") from None
    pixels = np.asarray(picture, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
