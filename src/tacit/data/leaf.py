"""LEAF's files (Caldas et al. 2018, arXiv:1812.01097), as written by its scripts: JSON, user by user.

A folder holds `train/*.json` and `test/*.json`, each with `users`, `num_samples` and `user_data`, which maps
a user to `x` and `y`. Pictures (FEMNIST) are lists of grey values from 0 to 1, row by row. Without such a
split (LEAF's `all_data`), the last tenth of each user's records, at least one, is for tests.
"""

from __future__ import annotations

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data.decode import Arrays
from tacit.errors import UserError
from tacit.reading import read_bytes

NAME = "leaf"


def key(folder: Path) -> str:
    """A name for the folder's current content: files that change get another name."""
    found = sha256()
    for file in _files(folder):
        status = file.stat()
        found.update(f"{file.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return f"{NAME}-2-{found.hexdigest()[:16]}"


def read(folder: Path) -> Arrays:
    """`train_x` (uint8 [n, 1, s, s]), `train_y`, `train_users`, and the same for `test`."""
    parts: dict[str, list[tuple[str, list[Any], list[Any]]]] = {"train": [], "test": []}
    for file in _files(folder):
        split = next((part for part in parts if part in file.relative_to(folder).parts[:-1]), None)
        for user, x, y in _users(file):
            if split is not None:
                parts[split].append((user, x, y))
                continue
            cut = len(x) - max(1, len(x) // 10)
            parts["train"].append((user, x[:cut], y[:cut]))
            parts["test"].append((user, x[cut:], y[cut:]))
    if not all(parts.values()):
        missing = next(name for name, found in parts.items() if not found)
        raise UserError(f"data.path: {folder} has no {missing}/*.json; give the folder that has both parts")
    arrays: Arrays = {}
    for split, rows in parts.items():
        arrays[f"{split}_x"] = np.concatenate([_pictures(user, x) for user, x, _ in rows if x])
        arrays[f"{split}_y"] = np.concatenate([_labels(user, y) for user, _, y in rows if y])
        # Names, not numbers, which would depend on the other users.
        arrays[f"{split}_users"] = np.repeat([user for user, _, _ in rows], [len(x) for _, x, _ in rows])
    return arrays


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.json")) if folder.is_dir() else []
    if not files:
        raise UserError(f"data.path: {folder} holds no .json file of LEAF's; give its data folder")
    return files


def _users(file: Path) -> list[tuple[str, list[Any], list[Any]]]:
    try:
        plain = json.loads(read_bytes(file))
        found = [(user, data["x"], data["y"]) for user, data in plain["user_data"].items()]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"data.path: {file} cannot be read ({error})") from None
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"data.path: {file} is not LEAF's: user_data with x and y is missing") from None
    for user, x, y in found:
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise UserError(f"data.path: {file}: user {user!r} has x and y of different lengths")
    return found


def _pictures(user: str, x: list[Any]) -> NDArray[np.uint8]:
    try:
        grey = np.asarray(x, np.float64)
    except (ValueError, TypeError):
        raise UserError(
            f"data.path: user {user!r} has records that are not lists of numbers of one length: LEAF's "
            "pictures (FEMNIST) are; texts go as data set 'table', files of pictures as 'folder'"
        ) from None
    side = math.isqrt(grey.shape[1]) if grey.ndim == 2 else 0
    if not side or side * side != grey.shape[1]:
        raise UserError(f"data.path: user {user!r} has records that are no square pictures: {grey.shape[1:]}")
    if not (grey.min() >= 0 and grey.max() <= 1):  # also where one is not a number
        raise UserError(f"data.path: user {user!r} has grey values outside of 0 to 1")
    return np.rint(grey * 255).astype(np.uint8).reshape(-1, 1, side, side)


def _labels(user: str, y: list[Any]) -> NDArray[np.int64]:
    labels = np.asarray(y)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise UserError(f"data.path: user {user!r} has labels that are no classes from 0: {y[:3]}")
    return labels.astype(np.int64)
