"""Data sets of the Hugging Face hub, folders of pictures and files of rows, as arrays.

All are read by `datasets`, which knows their many layouts.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from rich.console import Console
from rich.progress import track

from tacit.data.columns import content
from tacit.data.decode import Arrays
from tacit.data.partition import named, set_aside
from tacit.data.pictures import coloured, mode_of
from tacit.data.text import write_texts
from tacit.errors import UserError
from tacit.fetching.hub import TIMEOUT, Unavailable, first_line, left_out, probe

PICTURES = "imagefolder"
"""`datasets`' own name for a folder of pictures with one sub-folder for each class."""
ROWS = "rows"
"""A folder with file formats that the file names show."""
PARTS = ("text", "pair")
"""The cache's names for the first and the second text of a record."""
WITH_CLASSES = "texts with classes go into a csv or json file, with a column for either"
OF_FILES = "name another column, or, of a csv, parquet or json file, set"


class _Unequal(Exception):
    """A picture's size differs from the first one's."""


@dataclass(frozen=True)
class ColumnNames:
    """The columns of a record's parts. None: guess it (picture or class only, never a text or user)."""

    image: str | None = None
    label: str | None = None
    user: str | None = None
    text: tuple[str, ...] = ()
    """One column, or two whose texts belong together; empty for pictures."""
    labelled: bool = True
    """Whether a class is needed; texts for language modelling need none."""


@dataclass(frozen=True)
class Source:
    """Where rows come from: `hub` and a name there, or a kind of file and its path."""

    kind: str
    where: str | Path


def key(source: Source, columns: ColumnNames, size: int | None) -> str:
    """A cache key that changes with the name, the options and, for files, with any of them."""
    where, files = source.where, []
    if isinstance(where, Path):
        found = where.rglob("*") if where.is_dir() else [where]
        files = sorted((str(p), s.st_size, s.st_mtime_ns) for p in found for s in [p.stat()])
    # Since version 4, pictures are not cut to 8 bits, keep their colours, and a missing label is not a class;
    # since 5, each record is set aside by what is in it, and one of another size does not resize all others.
    described = [5, source.kind, str(where), astuple(columns), size, files]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    stem = "".join(c if c.isalnum() else "-" for c in Path(where).name)
    return f"{stem[:40]}-{digest[:16]}"


def download_known(name: str) -> Arrays:
    """The train and test splits of an image data set whose columns can be guessed."""
    splits = _from_hub(name, offline=False)
    arrays: Arrays = {}
    for split in ("train", "test"):
        table = splits[split]
        columns = _guess(table, ColumnNames())
        arrays[f"{split}_x"] = np.empty((len(table), *_shape(table, columns)), np.uint8)
        _fill(arrays[f"{split}_x"], table, columns, None)
        arrays[f"{split}_y"] = np.asarray(table[columns.label], np.int64)
    return arrays


def convert(
    source: Source, columns: ColumnNames, size: int | None, offline: bool, into: Path, about: dict[str, Any]
) -> None:
    """Write `train_x.npy` (or texts), `train_y.npy`, …, `test_users.npy` into a folder; note the rest."""
    with tempfile.TemporaryDirectory() as scratch:
        where = source.where
        files = isinstance(where, Path)
        splits = (
            _from_files(source, columns.user, columns.text, scratch)
            if files
            else _from_hub(str(where), offline)
        )
        train = splits["train"] if "train" in splits else splits[next(iter(splits))]
        columns = _guess(train, columns)
        guessed = files and source.kind == PICTURES and any(Path(where).rglob("metadata.csv"))
        for table in splits.values():
            _refuse_other_ids(table, columns.user, guessed)
        train, test = _train_and_test(splits, train, columns)
        _write(train, test, columns, size, into, about)
    unstated = "yours" if files else "not stated; see the data set's page"
    about["licence"] = train.info.license or unstated
    about["origin"] = str(where)


def _write(
    train: Any, test: Any, columns: ColumnNames, size: int | None, into: Path, about: dict[str, Any]
) -> None:
    codes, names = _classes(train, columns) if columns.label else (None, [])
    about["classes"] = len(names)
    # Numbers from 0 are no names: one owner's records may lack the last classes.
    about["labels"] = [] if names == [str(number) for number in range(len(names))] else names
    if not columns.text:
        _write_pictures({"train": train, "test": test}, columns, size, into)
    for split, table in (("train", train), ("test", test)):
        for part, column in zip(PARTS, columns.text, strict=False):
            write_texts(into, f"{split}_{part}", _texts(table, column))
        if columns.label is not None:
            np.save(into / f"{split}_y.npy", _labels(table, columns, codes))
        if columns.user is not None:
            np.save(into / f"{split}_users.npy", named(table[columns.user]))


def _texts(table: Any, column: str) -> Iterable[str]:
    for row in _watched(table.select_columns([column]), "reading texts"):
        if not isinstance(row[column], str):
            what = "has a row without a text" if row[column] is None else f"holds {row[column]!r}, no text"
            raise UserError(f"column {column!r} {what}; mend it, or leave such rows out (data.on_bad: skip)")
        yield row[column]


def _watched(rows: Any, what: str) -> Iterable[Any]:
    console = Console(stderr=True)
    return track(rows, what, console=console, transient=True, disable=not console.is_terminal)


def _write_pictures(tables: dict[str, Any], columns: ColumnNames, size: int | None, into: Path) -> None:
    """If most pictures have one size, and are no larger than `size`, all are kept in that one: enlarging a
    batch takes no time, and stored enlarged pictures would take fifty times the space. Others are resized
    here, once. Most, and not all: a single picture of another size must not change how all others are made.
    """
    channels, *own = _shape(tables["train"], columns)
    if size is None:
        try:
            _fill_all(tables, columns, (channels, own[0], own[1]), None, into)
        except _Unequal as error:
            raise UserError(f"{error}, as the first is; set data.size to make all equal") from None
        return
    usual = _usual(tables["train"], columns)
    height, width = usual if usual is not None and max(usual) <= size else (size, size)
    _fill_all(tables, columns, (channels, height, width), size, into)


def _usual(table: Any, columns: ColumnNames) -> tuple[int, int] | None:
    """The height and width of more than half of the pictures, by the heads of their files."""
    name, sizes = columns.image, Counter[tuple[int, int]]()
    heads = table.select_columns([name]).cast_column(name, type(table.features[name])(decode=False))
    for row in _watched(heads, "measuring pictures"):
        held = row[name]["bytes"]
        file = row[name]["path"] if held is None else io.BytesIO(held)
        # A broken one is named when it is read.
        with suppress(OSError, SyntaxError, ValueError), Image.open(file) as picture:
            turned = picture.getexif().get(ExifTags.Base.Orientation, 1) > 4  # as `datasets` turns it
            sizes[picture.size if turned else picture.size[::-1]] += 1
    size, agree = max(sizes.items(), key=lambda one: one[1], default=((0, 0), 0))
    return size if 2 * agree > len(table) else None


def _fill_all(
    tables: dict[str, Any], columns: ColumnNames, shape: tuple[int, int, int], size: int | None, into: Path
) -> None:
    for split, table in tables.items():
        x = np.lib.format.open_memmap(into / f"{split}_x.npy", "w+", np.uint8, (len(table), *shape))
        _fill(x, table, columns, size)
        x.flush()


def _from_hub(name: str, offline: bool) -> Any:
    if left_out(offline):
        raise Unavailable("the hub was left out (offline)")
    import datasets  # a second of imports that most runs do not need
    from huggingface_hub import HfApi

    repository, _, part = name.partition(":")
    probe(lambda: HfApi().dataset_info(repository, timeout=TIMEOUT))
    try:
        return datasets.load_dataset(repository, *([part] if part else []))
    except Exception as error:  # `datasets` raises a dozen kinds of errors, mostly network errors
        raise Unavailable(first_line(error)) from None


def _refuse_other_ids(table: Any, user: str | None, guessed: bool) -> None:
    """User ids must be texts or whole numbers. With other types, one user's id would change the names of all.
    The same holds for numbers whose type a reader `guessed` from the whole column: 001 becomes 1 if no id has
    letters.
    """
    if user is None or user not in table.features:
        return
    kind = str(getattr(table.features[user], "dtype", table.features[user]))
    if not re.fullmatch(r"(large_)?string|u?int\d+", kind):
        raise UserError(
            f"column {user!r} holds {kind}; ids of users are texts or whole numbers: write them as texts"
        )
    if guessed and "int" in kind:
        raise UserError(
            f"column {user!r} of metadata.csv: whose each picture is must not depend on how all are called; "
            "write metadata.jsonl, with ids as texts"
        )
    if any(one is None or one == "" for one in table[user]):
        raise UserError(f"column {user!r} has rows without a user; give each its own, or leave such rows out")


def _text_of(cell: str) -> str | None:
    return cell or None


def _from_files(source: Source, user: str | None, texts: tuple[str, ...], scratch: str) -> Any:
    """`user` and `texts`: columns that are read as text. A reader that infers a type for the whole column
    would rename 001 if no cell has letters.
    """
    import datasets

    where, kind = Path(source.where), source.kind
    if kind == ROWS and any(where.rglob("*.csv")):
        kind = "csv"
    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        if kind == ROWS:
            return datasets.load_dataset(str(where), cache_dir=scratch)
        place = {"data_dir": str(where)} if where.is_dir() else {"data_files": str(where)}
        if kind != "csv":
            return datasets.load_dataset(kind, **place, cache_dir=scratch)
        # Only an empty cell is missing: a label may be called None, and a person NA.
        as_written: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
        as_written["converters"] = dict.fromkeys(texts, _text_of) | ({} if user is None else {user: str})
        return datasets.load_dataset(kind, **place, **as_written, cache_dir=scratch)
    except Exception as error:  # `datasets` has no common error for "nothing usable here"
        what = {PICTURES: "a folder of pictures", ROWS: "a folder of rows"}.get(kind, kind)
        none = isinstance(error, StopIteration) or "corresponds to no data" in str(error)
        # The cause is hidden beneath its "an error occurred".
        why = "there is no record in it" if none else first_line(error.__cause__ or error)
        noted = none and kind == PICTURES and where.is_dir() and any(where.rglob("*.txt"))
        instead = f"; {WITH_CLASSES}" if noted else ""
        raise UserError(f"{where} cannot be read as {what} ({why}){instead}") from None
    finally:
        if not hidden:
            datasets.enable_progress_bars()


def _train_and_test(splits: Any, train: Any, columns: ColumnNames) -> tuple[Any, Any]:
    """The test set: the test split, or the next one if its labels are kept secret (GLUE's are all −1)."""
    for name in ("test", "validation", "validation_matched"):
        if name in splits and splits[name] is not train:
            held_out = splits[name]
            if columns.label is None or not len(held_out) or held_out[0][columns.label] != -1:
                return train, held_out
    rows = train
    for name, feature in train.features.items():
        if hasattr(feature, "decode"):  # a picture's file is enough to know it by
            rows = rows.cast_column(name, type(feature)(decode=False))
    aside = set_aside(map(content, rows), 0.1, columns.user is not None)
    return train.select(np.flatnonzero(~aside)), train.select(np.flatnonzero(aside))


def _guess(table: Any, columns: ColumnNames) -> ColumnNames:
    """Fill in the columns of picture and class: by type if exactly one column has it, else by usual name."""
    kinds = {name: type(feature).__name__ for name, feature in table.features.items()}
    for given in (columns.image, columns.label, columns.user, *columns.text):
        if given is not None and given not in kinds:
            raise UserError(f"the data have no column {given!r}; they have {', '.join(kinds)}")

    for role, column in (("label", columns.label), ("user", columns.user)):
        if column is not None and column in columns.text:
            raise UserError(f"column {column!r} holds the texts, so it cannot be the {role}; name another")

    def one(what: str, kind: str, usual: Iterable[str]) -> str:
        typed = [name for name, found in kinds.items() if found == kind]
        named = [name for name in usual if name in kinds]
        if len(typed) == 1 or named:
            return typed[0] if len(typed) == 1 else named[0]
        if what == "label" and not set(kinds) - set(columns.text):
            raise UserError(f"nothing beside {' and '.join(columns.text)} could be the label; {WITH_CLASSES}")
        if what == "label" and set(kinds.values()) == {"Image"}:
            raise UserError(
                "there are no classes; a folder of pictures has a sub-folder for each, two or more"
            )
        raise UserError(
            f"which column holds the {what}? Name one of {', '.join(kinds)} as `{what}`"
            + (", as `text`, or (of a table) numbers as `features`" if what == "image" else "")
        )

    image, label = columns.image, columns.label
    if not columns.text:
        image = image or one("image", "Image", ("image", "img"))
    if columns.labelled:
        label = label or one("label", "ClassLabel", ("label", "labels"))
    return replace(columns, image=image, label=label)


def _shape(table: Any, columns: ColumnNames) -> tuple[int, int, int]:
    first = _opened(lambda: table[0][columns.image], 0)
    return 1 if mode_of(first) == "L" else 3, first.height, first.width


def _opened(get: Callable[[], Any], number: int) -> Any:
    """A picture with its pixels loaded; a broken one is named."""
    try:
        picture = get()
        picture.load()
    except (OSError, SyntaxError, ValueError) as error:  # PIL raises these for broken files
        told = str(error).strip().splitlines() or [
            type(error).__name__
        ]  # whole: it ends with the file's name
        raise UserError(f"picture {number}: {told[0]}; mend the file, or take it away") from None
    try:
        mode_of(picture)
    except ValueError as error:
        raise UserError(f"{_called(picture, number)}: {error}") from None
    return picture


def _called(picture: Any, number: int) -> str:
    """A picture's name: its file, if it has one."""
    return getattr(picture, "filename", "") or f"picture {number}"


def _fill(x: NDArray[np.uint8], table: Any, columns: ColumnNames, size: int | None) -> None:
    channels, height, width = x.shape[1:]
    mode = "L" if channels == 1 else "RGB"
    rows = iter(_watched(table.select_columns([columns.image]), "decoding pictures"))
    for i in range(len(table)):
        found = _opened(lambda: next(rows)[columns.image], i)
        if mode == "L" and coloured(found):
            raise UserError(
                f"{_called(found, i)} is in colour, and the first picture is grey; save all of them grey, or "
                "all in colour (RGB)"
            )
        picture = found.convert(mode)
        if size:
            picture = picture.resize((width, height))
        elif picture.size != (width, height):
            raise _Unequal(
                f"{_called(found, i)} is {picture.width} × {picture.height}, not {width} × {height}"
            )
        x[i] = np.asarray(picture).reshape(height, width, channels).transpose(2, 0, 1)


def _classes(table: Any, columns: ColumnNames) -> tuple[NDArray[Any] | None, list[str]]:
    """The label values in order, if they must be numbered, and the names of the classes."""
    feature = table.features[columns.label]
    if hasattr(feature, "num_classes"):
        return None, [feature.int2str(number) for number in range(feature.num_classes)]
    values = np.unique(_label_values(table, columns))
    return values, [str(value) for value in values]


def _label_values(table: Any, columns: ColumnNames) -> NDArray[Any]:
    """The label column's values; refuses missing labels, and decimals, which are no classes."""
    given = table[columns.label]
    where = f"column {columns.label!r}"
    if any(label is None or label != label or label == "" for label in given):
        raise UserError(
            f"{where} has a row without a label; fill it in, or leave such rows out (data.on_bad: skip)"
        )
    if any(isinstance(label, list | dict) for label in given):
        raise UserError(f"{where} holds lists, which are no classes; {OF_FILES} task: multi-label")
    values = np.asarray(given)
    if values.dtype.kind != "f":
        return values
    if (odd := values[values != np.round(values)]).size:
        raise UserError(f"{where} holds {odd[0]:g}, which is no class; {OF_FILES} task: regression")
    return values.astype(np.int64)


def _labels(table: Any, columns: ColumnNames, codes: NDArray[Any] | None) -> NDArray[np.int64]:
    if codes is None:
        return np.asarray(table[columns.label], np.int64)
    values = _label_values(table, columns)
    strangers = np.setdiff1d(values, codes)
    if len(strangers):
        raise UserError(
            f"the test part has classes that the training part lacks: {', '.join(map(str, strangers[:5]))}"
        )
    return np.searchsorted(codes, values).astype(np.int64)
