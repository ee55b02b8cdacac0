"""Data sets from your own data: tables, arrays, lists, and objects of other libraries.

>>> rows = [{"age": 31, "job": "cook", "who": "ann"}, {"age": 58, "job": "vet", "who": "bob"}] * 10
>>> data = dataset(rows, features=["age"], label="job", user="who")
>>> len(data.train), len(data.test), data.classes, data.label_names, data.shape
(18, 2, 2, ('cook', 'vet'), (1,))

Nothing that would change what is learnt is guessed: you name the columns and declare missing values, and a
value that does not fit is refused with its row. Classes may be strings or integers (below 0 only if `classes`
names them); they are numbered in order, and their names are kept. No statistics for scaling are computed from
the data: statistics of private records would be a release of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data.cells import input_of, user_of
from tacit.data.columns import (
    Columns,
    Meaning,
    are_columns,
    columns_of,
    of_pair,
    pair_of,
    refuse_pair,
    refuse_stream,
)
from tacit.data.dataset import Dataset
from tacit.data.labels import Coding, class_name, coding_of, target_of
from tacit.data.partition import named, set_aside
from tacit.data.records import ArrayRecords, Records
from tacit.data.table import Format, read_table
from tacit.data.text import LEAST, TextRecords, Texts
from tacit.data.tokens import Tokenizer
from tacit.data.words import WordRecords
from tacit.errors import UserError

TASKS = ("classification", "regression", "multi-label", "token-classification", "language", "speech")
TEST_SHARE = 0.1
"""The share that is set aside for testing if no test records are given."""


def dataset(
    source: Any,
    *,
    test: Any = None,
    features: str | Sequence[str] = (),
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
    """Make a data set from your own data.

    Args:
        source: a pandas or polars DataFrame, a Hugging Face `datasets` object (or a dict of its splits), a
            torch `Dataset` of pairs, a pair of arrays or lists (x, y), a list of rows as dicts, a dict of
            columns, or the path of a csv, tsv, parquet, json or jsonl file.
        test: the same for testing; by default the source's own test split, or about a tenth of the records,
            each by what is in it.
        features: columns of numbers, together one vector a record.
        text: the column of texts, or two whose texts belong together; needs a `tokenizer`. For
            token-classification, texts are lists of words, and a word's class applies to its first token.
        image: the column of pictures: arrays, PIL images, or paths of files.
        audio: the column of sounds: paths of files, {array, sampling_rate} or {bytes} as `datasets` has them,
            or arrays at 16 kHz. The model gets log-mel features, [1, frames, 80] of a sound's first
            `seconds`; for the task `speech`, of the whole sound, and `label` is the transcript.
        label: the column of classes, numbers (regression), or lists of classes (multi-label; one for each
            word in token-classification).
        user: the column that says whose record it is; beside a pair of arrays, one entry for each record.
        task: classification, regression, multi-label, token-classification, language or speech.
        language: of speech; it decides the alphabet of the transcripts.
        size: the side of pictures in pixels.
        mean, std: constants that are subtracted and divided by; statistics would be a release.
        on_bad: `refuse` names the first row that cannot be used; `skip` leaves such rows out, and says so.
        classes: the allowed labels, in order. By default they are those of the training records, which
            reveals that somebody has each of them.
    """
    if task not in TASKS:
        raise UserError(f"task: {task!r} is not one of {', '.join(TASKS)}")
    if on_bad not in ("refuse", "skip"):
        raise UserError(f"on_bad: {on_bad!r} is not one of refuse, skip")
    splits = source if isinstance(source, Mapping) and not are_columns(source) else None
    if splits is not None:
        source = splits["train"] if "train" in splits else next(iter(splits.values()))
        if test is None and len(splits) > 1:  # of a single split some is set aside to test on
            test = splits.get("test", splits.get("validation"))
    refuse_stream(source, "source")
    refuse_stream(test, "test")
    if isinstance(classes, str | int):
        raise UserError(f"classes: give their names in order, such as ['no', 'yes'] (got {classes!r})")
    features, texts = _names("features", features), _names("text", text)
    label, image, audio = (
        None if name is None else _names(key, name, one=True)[0]
        for key, name in (("label", label), ("image", image), ("audio", audio))
    )
    user = str(user) if isinstance(user, int) else user
    source, test = (
        read_table(Path(part), Format(), key) if isinstance(part, str | Path) else part
        for key, part in (("source", source), ("test", test))
    )
    for key, numbers in (("mean", mean), ("std", std)):
        _refuse_no_numbers(key, numbers)
    meaning = Meaning(
        features,
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
        tuple(map(class_name, classes)),
    )
    if (pair := pair_of(source)) is not None:
        if isinstance(user, str):
            raise UserError(
                f"user: {user!r} names a column, and a pair (x, y) has none; give one entry for each record"
            )
        columns = of_pair(pair, user, "source")
        tested = None if test is None else of_pair(pair_of(test) or refuse_pair(test), None, "test")
        meaning = replace(meaning, label="y", user=None if user is None else "user")
        if not texts:
            meaning = replace(
                meaning, image="x" if np.ndim(columns.values["x"][0]) == 3 else None, features=("x",)
            )
        return from_columns(columns, tested, meaning, name, "given as arrays")
    if user is not None and not isinstance(user, str):
        raise UserError("user: give the name of the column that says whose record it is")
    meaning = replace(meaning, user=user)
    columns = columns_of(source, "source")
    tested = None if test is None else columns_of(test, "test")
    return from_columns(columns, tested, meaning, name, "given as an object")


def _names(key: str, given: Any, one: bool = False) -> tuple[str, ...]:
    """Names of columns; in a table made from an array they are numbers."""
    if isinstance(given, str | int):
        return (str(given),)
    if one:
        raise UserError(
            f"{key}: name one column (got {given!r})"
            + ("; several numbers to learn go into one column of lists" if key == "label" else "")
        )
    return tuple(map(str, given))


def _refuse_no_numbers(key: str, numbers: Any) -> None:
    """Raise unless these are numbers for a mean or a standard deviation."""
    if numbers is None:
        return
    found = np.asarray(numbers)
    if found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        raise UserError(f"{key}: give finite numbers, one for each feature or channel (got {numbers!r})")
    if key == "std" and not (found > 0).all():
        raise UserError(f"std: records are divided by it, so it must be greater than 0 (got {numbers!r})")


def _refuse_unused(meaning: Meaning, kind: str, name: str) -> None:
    """Raise if something was asked for that does nothing for records of this kind, or for this task."""
    task, usual = meaning.task, Meaning()
    for key, given, used, of in (
        ("size", meaning.size is not None, kind == "image", "pictures"),
        ("seconds", meaning.seconds is not None, kind == "audio" and task != "speech", "classes of sounds"),
        ("max_length", meaning.max_length != usual.max_length, kind == "text", "texts"),
        ("language", meaning.language != usual.language, task == "speech", "task: speech"),
        ("mean (data.normalise)", meaning.mean is not None, kind != "text" and task != "speech", "numbers"),
        ("std (data.normalise)", meaning.std is not None, kind != "text" and task != "speech", "numbers"),
        ("classes", bool(meaning.classes), task not in ("regression", "language", "speech"), "labels"),
    ):
        if given and not used:
            raise UserError(
                f"{key}: it is for {of}, and {name} is {kind} for task: {task}, where it would do nothing; "
                "leave it out"
            )
    if kind == "text" and meaning.max_length < LEAST:
        raise UserError(
            f"max_length: it counts tokens, those around a text too, so {meaning.max_length} is too few; "
            f"give {LEAST} or more"
        )


def from_columns(
    columns: Columns, test: Columns | None, meaning: Meaning, name: str, origin: str, licence: str = "yours"
) -> Dataset:
    """A data set from columns with known meanings."""
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
    _refuse_unused(meaning, kinds[0], name)
    used = [*meaning.features, *meaning.text]
    if twice := [column for column in used if used.count(column) > 1]:
        raise UserError(
            f"{name}: column {twice[0]!r} is named twice among what is learnt from; leave one out"
        )
    if meaning.label in used:
        raise UserError(
            f"{name}: column {meaning.label!r} is what is to be learnt, so it must not be learnt from; take "
            "it out of the others, or name another label"
        )
    if meaning.user is not None and meaning.user in (meaning.label, *used):
        raise UserError(
            f"{name}: column {meaning.user!r} says whose a record is (user); a model must neither learn it "
            "nor learn from it; name another column"
        )
    if test is None:
        aside = set_aside(
            columns.contents((meaning.image, meaning.audio)), TEST_SHARE, meaning.user in columns.values
        )
        test, columns = columns.take(np.flatnonzero(aside)), columns.take(np.flatnonzero(~aside))
        if not len(columns):
            few = "one record is too few to train on and to test"
            raise UserError(f"{name}: {few}; give more, or a file of others to test on (data.test)")
    else:
        test = replace(test, called="the test data")
    coding = coding_of(columns, meaning)
    bad: list[str] = []
    train_records, shape = _records(columns, meaning, coding, bad)
    test_records, test_shape = _records(test, meaning, coding, bad)
    if shape != test_shape:
        raise UserError(f"{name}: records have shape {shape} in training and {test_shape} in testing")
    left_out = ""
    if bad:
        first = bad[0].partition(";")[0]  # behind it stands what to do about such rows
        left_out = f"{len(bad):,} bad row{'s' * (len(bad) > 1)} left out, the first: {first}"
        origin = f"{origin}; {left_out}"
    classes = 0 if meaning.task == "language" else coding.outputs
    return Dataset(
        name, train_records, test_records, classes, shape, licence, origin, meaning.task, meaning.tokenizer,
        label_names=coding.names, tokens=coding.tokens, left_out=left_out,
        features=() if meaning.features == ("x",) else meaning.features,
    )  # fmt: skip


def _records(
    columns: Columns, meaning: Meaning, coding: Coding, bad: list[str]
) -> tuple[Records, tuple[int, ...]]:
    kept: list[int] = []
    xs: list[Any] = []
    ys: list[Any] = []
    users: list[Any] = []
    for row in range(len(columns)):
        try:
            x = input_of(columns, meaning, row)
            y = None if meaning.label is None else target_of(columns, meaning, coding, row)
            who = (
                None
                if meaning.user is None or meaning.user not in columns.values
                else user_of(columns, meaning, row)
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
        first = bad[0].partition(";")[0]  # behind it stands that such rows can be left out, as they were
        raise UserError(f"no usable record is left, so mend the file; the first bad one: {first}")
    people = None if meaning.user is None or any(who is None for who in users) else named(users)
    if meaning.user is not None and meaning.user not in columns.values and meaning.user != "user":
        columns.column(meaning.user, "user")
    if meaning.text:
        if meaning.tokenizer is None:
            raise UserError("tokenizer: texts need one; give a tokenizer, a folder with one, or bytes")
        if meaning.task == "token-classification":
            made = WordRecords.made(xs, ys, meaning.tokenizer, meaning.max_length, people)
            return made, (meaning.max_length,)
        pairs = Texts.of(x[1] for x in xs) if len(meaning.text) == 2 else None
        kind = np.float32 if meaning.task in ("regression", "multi-label") else np.int64
        labels = None if meaning.label is None else np.asarray(ys, kind)
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
    for name, given in (("mean", meaning.mean), ("std", meaning.std)):
        if given is not None and np.size(given) not in (1, shape[0]):
            what = "channels" if meaning.image else "features"
            raise UserError(
                f"{name} (data.normalise): {np.size(given)} numbers for {shape[0]} {what}; give one, or one "
                "for each"
            )
    kinds = {"classification": np.int64, "token-classification": np.int64}
    y = np.asarray(ys, kinds.get(meaning.task, np.float32))
    mean, std = meaning.mean, meaning.std
    if meaning.image is not None and xs[0].dtype == np.uint8 and mean is None:
        mean, std = 0.5, 0.5
    odd = next((x.dtype for x in xs if x.dtype != xs[0].dtype), None)
    if odd is not None:  # as one array they would get one type, which would change everybody's numbers
        raise UserError(f"{name}: some hold {xs[0].dtype} and some {odd}; make them of one type")
    # Pictures of one size are resized batch by batch; others were brought to one size when they were read.
    records = ArrayRecords(
        np.stack(xs), y, people, mean, std, None if meaning.image is None else meaning.size
    )
    wanted = (shape[0], meaning.size, meaning.size) if meaning.image and meaning.size else shape
    return records, tuple(wanted)
