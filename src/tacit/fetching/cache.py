"""Decoded data sets on disk, as `.npy` files that every process maps into memory.

An entry is a folder that appears under its final name only when it is complete, so neither a crash nor a
second process leaves half an entry. The cache is `$TACIT_CACHE`, or `~/.cache/tacit`; it is safe to delete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.errors import UserError

_ABOUT = "about.json"


def root() -> Path:
    """The folder for decoded data sets; never inside a project."""
    return Path(os.environ.get("TACIT_CACHE") or Path.home() / ".cache" / "tacit") / "data"


def has(key: str) -> bool:
    return (root() / key / _ABOUT).is_file()


def read(key: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The entry's arrays, memory-mapped read-only, and the notes about them."""
    folder = root() / key
    try:
        arrays = {p.stem: np.load(p, mmap_mode="r") for p in sorted(folder.glob("*.npy"))}
        about: dict[str, Any] = json.loads((folder / _ABOUT).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"the cached data in {folder} are damaged ({error}); delete that folder") from None
    return arrays, about


@contextmanager
def adding(key: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A scratch folder for `.npy` files and a dict for notes; both become entry `key` when the block
    succeeds.
    """
    try:
        root().mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root()))
    except OSError as error:
        raise UserError(
            f"the data cache {root()} cannot be written ({error.strerror}); "
            "set TACIT_CACHE to a folder that can"
        ) from None
    about: dict[str, Any] = {}
    try:
        yield scratch, about
        (scratch / _ABOUT).write_text(json.dumps(about, indent=1))
        try:
            scratch.rename(root() / key)
        except OSError:
            # Another process was faster; its entry is equivalent.
            if not has(key):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
