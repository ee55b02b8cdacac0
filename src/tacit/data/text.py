"""Texts as records: tokenised when they are first asked for, and never again.

Texts lie end to end in one array of bytes. Their tokens lie in a file beside it, one row for each text, that
all processes map into memory and fill in as clients are drawn: a text that nobody asks for is never
tokenised, and takes no space on the disk (the file has holes). Two processes that meet at one text write
the same row, and a row that was half written, by whatever accident, is seen to be so and made again.

>>> from tacit.data.tokens import Bytes
>>> records = TextRecords(Texts.of(["good", "bad", "so so"]), Bytes(), max_length=8, labels=[1, 0, 0])
>>> batch = records.prepare(records.take(np.array([1, 2])))
>>> batch["input_ids"].tolist()
[[256, 98, 97, 100, 257, 258, 258, 258], [256, 115, 111, 32, 115, 111, 257, 258]]
>>> batch["attention_mask"].sum(1).tolist(), batch["y"].tolist()
([5, 7], [0, 0])
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.data.records import Batch, Indices, packed, unpacked
from tacit.data.tokens import Tokenizer
from tacit.data.widths import by_edge, edge, fit
from tacit.errors import UserError
from tacit.lazy import torch

BUCKET = 16
"""Batches are as long as their longest text, rounded up to a multiple of this: few shapes, little padding."""
BLANK = 128
"""Tokens of a text that is nobody's, at most: a network is tried with it."""
LEAST = 4
"""The smallest number of tokens that a text may be cut to, those around it included."""
HEADER = 2
"""Before a row's ids: its length and where its second text starts."""
TURN = 2000
"""Texts that are tokenised at once."""


@dataclass(frozen=True)
class Texts:
    """Many texts end to end in UTF-8: text i is `data[offsets[i] : offsets[i+1]]`."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    @staticmethod
    def of(texts: Iterable[str]) -> Texts:
        """Texts from the memory of this process."""
        encoded = [text.encode("utf-8", "replace") for text in texts]
        offsets = np.concatenate([[0], np.cumsum([len(text) for text in encoded], dtype=np.int64)])
        return Texts(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def at(self, indices: Indices) -> list[str]:
        """The texts at `indices`, in that order."""
        starts, ends = self.offsets[indices], self.offsets[np.asarray(indices) + 1]
        return [bytes(self.data[a:b]).decode() for a, b in zip(starts, ends, strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        return _texts, (packed(self.data), packed(self.offsets))


class TextRecords:
    """Texts, or pairs of texts, as a model's tokens.

    `take` gives `ids` (one more than the tokenizer's; 0 after a text's end), `length` and, for pairs that the
    model tells apart, `second`; `prepare` makes `input_ids`, `attention_mask` and `token_type_ids` of
    them. Labels are `y` in both: whole numbers are classes, others (float32) are for other tasks. Padding is
    on the right, where masks hide it from a model that heeds them.
    `apart` does not rely on that: there a text is padded by its own length.

    `keep` is the folder for tokens; without one, or where it cannot be written, each process has its own.
    """

    def __init__(
        self,
        texts: Texts,
        tokenizer: Tokenizer,
        max_length: int,
        labels: ArrayLike | None = None,
        users: ArrayLike | None = None,
        pairs: Texts | None = None,
        keep: Path | None = None,
    ) -> None:
        self._texts, self._pairs, self._tokenizer = texts, pairs, tokenizer
        self.max_length = max_length
        self._labels = None if labels is None else _as_labels(labels)
        self._users = None if users is None else np.asanyarray(users)
        self._keep = keep
        for name, other in (("labels", self._labels), ("users", self._users), ("pairs", pairs)):
            if other is not None and len(other) != len(texts):
                raise ValueError(f"there are {len(texts)} texts and {len(other)} {name}; they must agree")
        if max_length < LEAST:
            raise ValueError(f"max_length counts tokens, those around a text too; {max_length} is too few")
        self._segments = tokenizer.segments and pairs is not None
        self._rows: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        return self._labels if self._labels is not None and self._labels.dtype.kind == "i" else None

    @property
    def users(self) -> NDArray[Any] | None:
        return self._users

    def joined(self, most: int) -> TextRecords:
        """Records of longer texts: neighbours of one user on lines of one text, up to `most` bytes in all.

        A text longer than that stays by itself. Without users, all texts are one user's.
        """
        if self._labels is not None or self._pairs is not None:
            raise UserError("data.pack: texts with classes or pairs cannot be joined; it is for language")
        order = np.arange(len(self)) if self._users is None else np.argsort(self._users, kind="stable")
        users = None if self._users is None else self._users[order]
        parts: list[list[int]] = []
        room = 0
        for place, index in enumerate(order.tolist()):
            size = int(self._texts.offsets[index + 1] - self._texts.offsets[index])
            same = users is None or (place > 0 and users[place] == users[place - 1])
            if not parts or not same or size + 1 > room:
                parts.append([])
                room = most + 1
            parts[-1].append(index)
            room -= size + 1
        texts = Texts.of("\n".join(self._texts.at(np.array(part))) for part in parts)
        owners = None if self._users is None else self._users[[part[0] for part in parts]]
        keep = None if self._keep is None else self._keep / f"joined-{most}"
        return TextRecords(texts, self._tokenizer, self.max_length, None, owners, None, keep)

    def raw(self, index: int) -> bytes:
        """The text itself, and its class: no token is made for this."""
        texts = [texts.at(np.array([index]))[0] for texts in (self._texts, self._pairs) if texts is not None]
        label = "" if self._labels is None else str(self._labels[index].tolist())
        return "\0".join([label, *texts]).encode()

    def take(self, indices: Indices) -> Batch:
        rows = self._tokens(np.asarray(indices))
        lengths = rows[:, 0].astype(np.int64) - 1
        longest = int(lengths.max(initial=1))
        batch = {
            "ids": torch.from_numpy(rows[:, HEADER : HEADER + longest].astype(np.int32)),
            "length": torch.from_numpy(lengths),
        }
        if self._segments:
            batch["second"] = torch.from_numpy(rows[:, 1].astype(np.int64) - 1)
        if self._labels is not None:
            batch["y"] = torch.from_numpy(self._labels.take(indices, axis=0))
        return batch

    def prepare(self, batch: Batch) -> Batch:
        lengths = batch["length"]
        longest = int(lengths.max()) if len(lengths) else 1
        return self._padded(batch, min(self.max_length, -(-max(longest, 1) // BUCKET) * BUCKET))

    def apart(self, batch: Batch) -> list[Batch]:
        """Each text as long as its own bucket; edges follow from `max_length` alone."""
        edges = [(edge(length, BUCKET, self.max_length),) for length in batch["length"].tolist()]
        return [self._padded(part, width) for (width,), part in by_edge(batch, edges)]

    def blank(self) -> Batch:
        """A text of no tokens; its width follows from `max_length` alone."""
        nothing = torch.zeros(1, dtype=torch.int64)
        batch = {"ids": nothing.int().view(1, 1), "length": nothing}
        batch |= {"second": nothing} if self._segments else {}
        batch |= {} if self._labels is None else {"y": nothing}
        return self._padded(batch, min(self.max_length, BLANK))

    def _padded(self, batch: Batch, width: int) -> Batch:
        ids, lengths = fit(batch["ids"], width).long(), batch["length"]
        place = torch.arange(width, device=ids.device)
        mask = place < lengths.unsqueeze(1)
        ready = {
            "input_ids": torch.where(mask, ids - 1, self._tokenizer.pad),
            "attention_mask": mask.long(),
        }
        if self._segments:
            second = batch["second"].unsqueeze(1)
            ready["token_type_ids"] = ((place >= second) & mask & (second > 0)).long()
        if "y" in batch:
            ready["y"] = batch["y"]
        return ready

    def _tokens(self, indices: Indices) -> NDArray[Any]:
        """Rows of the texts at `indices`; those that nobody has asked for before are made now, and kept."""
        store = self._store()
        rows: NDArray[Any] = store[indices]
        missing = np.unique(indices[~_complete(rows)])
        if not len(missing):
            return rows
        for start in range(0, len(missing), TURN):
            turn = missing[start : start + TURN]
            store[turn] = self._made(turn)
        again: NDArray[Any] = store[indices]
        return again

    def _made(self, indices: Indices) -> NDArray[Any]:
        pairs = None if self._pairs is None else self._pairs.at(indices)
        rows = np.zeros((len(indices), HEADER + self.max_length), self._dtype)
        for row, (ids, second) in zip(
            rows, self._tokenizer(self._texts.at(indices), pairs, self.max_length), strict=True
        ):
            row[0], row[1] = len(ids) + 1, second + 1
            row[HEADER : HEADER + len(ids)] = np.asarray(ids) + 1
        return rows

    @property
    def _dtype(self) -> type[np.uint16 | np.uint32]:
        return np.uint16 if max(self._tokenizer.vocabulary, self.max_length) < 2**16 - 1 else np.uint32

    def _store(self) -> NDArray[Any]:
        if self._rows is None:
            shape = (len(self), HEADER + self.max_length)
            try:
                self._rows = (
                    None if self._keep is None else _mapped(self._file(self._keep), self._dtype, shape)
                )
            except OSError:
                self._rows = None
            if self._rows is None:  # no place to share
                self._rows = np.zeros(shape, self._dtype)
        return self._rows

    def _file(self, folder: Path) -> Path:
        what = f"{self._tokenizer.fingerprint} {self.max_length} {len(self)} {self._pairs is not None}"
        return folder / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.tokens"

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (packed(self._labels), packed(self._users))
        return _records, (self._texts, self._tokenizer, self.max_length, parts, self._pairs, self._keep)


def _as_labels(labels: ArrayLike) -> NDArray[Any]:
    """Classes as int64; numbers to learn, one or several for a text, as float32."""
    found = np.asarray(labels)
    return found.astype(np.float32 if found.dtype.kind == "f" else np.int64)


def _complete(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows that hold all that they announce. No number in a finished row is 0, so a hole shows."""
    ids = np.count_nonzero(rows[:, HEADER:], axis=1)
    whole: NDArray[np.bool_] = ids == rows[:, 0].astype(np.int64) - 1
    return whole & (rows[:, 1] > 0)


def _mapped(file: Path, dtype: type[Any], shape: tuple[int, int]) -> NDArray[Any]:
    """The file as a writable array, made of holes if it is not there yet."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    if not size:
        return np.zeros(shape, dtype)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        # Whoever comes second finds it long enough, or makes it the same length at the same moment.
        if stream.tell() < size:
            os.truncate(stream.fileno(), size)
    return np.memmap(file, dtype, "r+", shape=shape)


def write_texts(folder: Path, name: str, texts: Iterable[str]) -> None:
    """Texts as two `.npy` files, for `read_texts`."""
    packed_texts = Texts.of(texts)
    np.save(folder / f"{name}.npy", packed_texts.data)
    np.save(folder / f"{name}_offsets.npy", packed_texts.offsets)


def read_texts(arrays: Mapping[str, NDArray[Any]], name: str) -> Texts | None:
    """The texts that `write_texts` called `name`, among the arrays of a folder."""
    return Texts(arrays[name], arrays[f"{name}_offsets"]) if name in arrays else None


def _texts(data: Any, offsets: Any) -> Texts:
    return Texts(unpacked(data), unpacked(offsets))


def _records(
    texts: Texts,
    tokenizer: Tokenizer,
    most: int,
    parts: tuple[Any, Any],
    pairs: Texts | None,
    keep: Path | None,
) -> TextRecords:
    labels, users = (unpacked(part) for part in parts)
    return TextRecords(texts, tokenizer, most, labels, users, pairs, keep)
