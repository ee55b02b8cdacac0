"""Reads the files of Fashion-MNIST, MNIST and CIFAR-10 as arrays.

Each reader takes a folder, finds its files anywhere below it, and returns `train_x` (uint8 [n, C, H, W]),
`train_y` and the same for `test`. Nothing here runs code from a file: CIFAR-10's pickles are read with an
unpickler that builds only arrays.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import track

from tacit.errors import UserError

Arrays = dict[str, NDArray[Any]]


def idx(folder: Path) -> Arrays:
    """MNIST's own format: a big-endian header, then bytes; gzipped or not."""
    arrays = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        arrays[f"{split}_x"] = _idx_file(find(folder, f"{prefix}-images*idx3-ubyte*"))[:, None]
        arrays[f"{split}_y"] = _idx_file(find(folder, f"{prefix}-labels*idx1-ubyte*")).astype(np.int64)
    return arrays


def cifar10(folder: Path) -> Arrays:
    """CIFAR-10 as sheets of PNG (one picture a row), as the binary version, or as the Python version."""
    for pattern, read in _CIFAR.items():
        if any(folder.rglob(pattern.format("data_batch_1"))):
            batches = track(range(1, 6), "decoding CIFAR-10", console=Console(stderr=True), transient=True)
            train = [read(find(folder, pattern.format(f"data_batch_{i}"))) for i in batches]
            test = read(find(folder, pattern.format("test_batch")))
            train_x, test_x = np.concatenate([x for x, _ in train]), test[0]
            if pattern.endswith(
                ".png"
            ):  # the sheets' labels lie beside them; "lables" is the package's spelling
                train_y = np.array(json.loads(find(folder, "train_la*.json").read_text()), np.int64)
                test_y = np.array(json.loads(find(folder, "test_la*.json").read_text()), np.int64)
            else:
                train_y, test_y = np.concatenate([y for _, y in train]), test[1]
            return {"train_x": train_x, "train_y": train_y, "test_x": test_x, "test_y": test_y}
    raise UserError(
        f"{folder} holds no CIFAR-10: expected data_batch_1 … 5 and test_batch, as .png, .bin or Python's"
    )


def _sheet(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    limit, Image.MAX_IMAGE_PIXELS = (
        Image.MAX_IMAGE_PIXELS,
        None,
    )  # ten thousand pictures look like a bomb to PIL
    try:
        with Image.open(path) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2), np.empty(0, np.int64)


def _binary(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    rows = np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


def _pickled(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    return np.asarray(content[b"data"]).reshape(-1, 3, 32, 32), np.array(content[b"labels"], np.int64)


_CIFAR: dict[str, Callable[[Path], tuple[NDArray[Any], NDArray[Any]]]] = {
    "{}.png": _sheet,
    "{}.bin": _binary,
    "{}": _pickled,
}


class _ArraysOnly(pickle.Unpickler):
    """Builds only numpy arrays. A pickle that asks for anything else is refused, so it cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}:
            return super().find_class(module, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return super().find_class("numpy._core.multiarray", name)
        raise UserError(f"the pickle asks for {module}.{name}; that is no CIFAR-10 batch")


def _idx_file(path: Path) -> NDArray[np.uint8]:
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise UserError(f"{path} is not an IDX file of bytes")
    shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def find(folder: Path, pattern: str) -> Path:
    found = sorted(p for p in folder.rglob(pattern) if p.is_file())
    if not found:
        raise UserError(f"{folder} holds no {pattern}; give the folder or archive that has it")
    return found[0]
