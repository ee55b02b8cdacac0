"""`tacit.load` and `tacit.dataset`: what a run is given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tacit import config as configs
from tacit.config import Config
from tacit.config.records import named_tokenizer
from tacit.data import Dataset, own
from tacit.data.tokens import from_object


def load(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """Load and check a config.

    Args:
        source: a YAML file, or a mapping of the same keys.
        overrides: dotted keys and their values, such as {"local.lr": 0.1}.

    Returns:
        The config, with every default filled in.

    Raises:
        UserError: a key or a value is wrong; the error names the file, the line and the key.
    """
    return configs.load(source, overrides)


def dataset(source: Any, *, tokenizer: Any = None, **columns: Any) -> Dataset:
    """Make a data set from your own records: see `tacit.data.own.dataset` for all options.

        data = tacit.dataset(frame, text="review", label="stars", user="customer", tokenizer="bytes")
        tacit.run(config, dataset=data)

    Args:
        source: a pandas or polars DataFrame, a Hugging Face `datasets` object, a torch `Dataset`, a pair of
            arrays (x, y), a list of rows, a dict of columns, or the path of a csv, parquet or json file.
        tokenizer: `bytes`, a folder, a name on the hub, or an object, such as a tokenizer of transformers.
        columns: which columns are what (`text`, `label`, `user`, …), and further options.

    Returns:
        The argument for `tacit.run(dataset=…)`.

    Raises:
        UserError: a column is missing, or holds values that cannot be trained on.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = named_tokenizer(str(tokenizer), False, columns.get("max_length", 128))
    elif tokenizer is not None:
        tokenizer = from_object(tokenizer)
    return own.dataset(source, tokenizer=tokenizer, **columns)
