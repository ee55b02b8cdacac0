"""Texts given as words, with a class for each word: every word's class stands at its first token.

A tokenizer cuts words into pieces. The first piece carries the word's class; the other pieces, what stands
around a text, and padding carry `NOTHING`, which no loss and no metric counts (Devlin et al. 2019,
arXiv:1810.04805, section 5.3).

>>> from tacit.data.tokens import Bytes
>>> records = WordRecords.made([["Ann", "ran"]], [[1, 0]], Bytes(), max_length=12)
>>> batch = records.prepare(records.take(np.array([0])))
>>> batch["input_ids"][0].tolist()
[256, 65, 110, 110, 32, 114, 97, 110, 257, 258, 258, 258]
>>> batch["y"][0].tolist()
[-100, 1, -100, -100, -100, 0, -100, -100, -100, -100, -100, -100]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tacit.data.records import Batch, Indices, packed, unpacked
from tacit.data.text import BLANK, BUCKET
from tacit.data.tokens import Tokenizer
from tacit.data.widths import by_edge, edge, fit
from tacit.errors import UserError
from tacit.lazy import torch

NOTHING = -100
"""The class of a place that is not asked about, as everywhere in the field."""


@runtime_checkable
class Splits(Protocol):
    """A tokenizer that can say which word a token is of."""

    def split(self, words: Sequence[str], most: int) -> tuple[list[int], list[int | None]]:
        """At most `most` tokens of a text's words, and for each the index of its word; None around them."""
        ...


class WordRecords:
    """Texts as tokens, with a class or `NOTHING` for each token: `y` [B, L] beside `input_ids` [B, L]."""

    def __init__(
        self,
        ids: NDArray[Any],
        lengths: NDArray[Any],
        classes: NDArray[Any],
        pad: int,
        users: NDArray[Any] | None,
    ) -> None:
        """`ids` and `classes` [N, L], of which each record's first `lengths` [N] are its own."""
        self._ids, self._lengths, self._classes, self._pad, self._users = ids, lengths, classes, pad, users

    @staticmethod
    def made(
        texts: Sequence[Sequence[str]],
        classes: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
        max_length: int,
        users: NDArray[Any] | None = None,
    ) -> WordRecords:
        """Records of texts as words and their classes; what is beyond `max_length` tokens is cut off."""
        if not isinstance(tokenizer, Splits):
            raise UserError(
                f"tokenizer: {type(tokenizer).__name__} cannot say which word a token is of; use bytes, or a "
                "fast tokenizer of transformers"
            )
        ids = np.full((len(texts), max_length), tokenizer.pad, np.int32)
        y = np.full((len(texts), max_length), NOTHING, np.int16 if _small(classes) else np.int32)
        lengths = np.zeros(len(texts), np.int64)
        for row, (words, own) in enumerate(zip(texts, classes, strict=True)):
            tokens, places = tokenizer.split(words, max_length)
            lengths[row] = len(tokens)
            ids[row, : len(tokens)] = tokens
            before: int | None = None
            for at, word in enumerate(places):
                if word is not None and word != before:
                    y[row, at] = own[word]
                before = word if word is not None else before
        return WordRecords(ids, lengths, y, tokenizer.pad, users)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def labels(self) -> None:
        """A text has many classes, and so none."""
        return None

    @property
    def users(self) -> NDArray[Any] | None:
        return self._users

    def raw(self, index: int) -> bytes:
        own = slice(0, int(self._lengths[index]))
        return self._ids[index, own].tobytes() + self._classes[index, own].tobytes()

    def take(self, indices: Indices) -> Batch:
        return {
            "ids": torch.from_numpy(self._ids[indices]),
            "length": torch.from_numpy(self._lengths[indices]),
            "classes": torch.from_numpy(self._classes[indices].astype(np.int64)),
        }

    def prepare(self, batch: Batch) -> Batch:
        lengths = batch["length"]
        longest = int(lengths.max()) if len(lengths) else 1
        return self._padded(batch, min(self._ids.shape[1], -(-max(longest, 1) // BUCKET) * BUCKET))

    def apart(self, batch: Batch) -> list[Batch]:
        """Each text as long as its own bucket."""
        edges = [(edge(length, BUCKET, self._ids.shape[1]),) for length in batch["length"].tolist()]
        return [self._padded(part, width) for (width,), part in by_edge(batch, edges)]

    def blank(self) -> Batch:
        """A text of no tokens; its width follows from `max_length` alone."""
        nothing = torch.zeros(1, 1, dtype=torch.int64)
        batch = {"ids": nothing, "length": nothing[0], "classes": nothing}
        return self._padded(batch, min(self._ids.shape[1], BLANK))

    def _padded(self, batch: Batch, width: int) -> Batch:
        mask = torch.arange(width, device=batch["ids"].device) < batch["length"].unsqueeze(1)
        ids, y = fit(batch["ids"], width).long(), fit(batch["classes"], width)
        return {
            "input_ids": torch.where(mask, ids, self._pad),
            "attention_mask": mask.long(),
            "y": torch.where(mask, y, NOTHING),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (packed(self._ids), packed(self._lengths), packed(self._classes), packed(self._users))
        return _records, (parts, self._pad)


def _small(classes: Sequence[Sequence[int]]) -> bool:
    return max((max(own, default=0) for own in classes), default=0) < 2**15


def _records(parts: tuple[Any, ...], pad: int) -> WordRecords:
    ids, lengths, classes, users = (unpacked(part) for part in parts)
    return WordRecords(ids, lengths, classes, pad, users)
