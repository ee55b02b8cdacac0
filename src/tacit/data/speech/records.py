"""Utterances as records: features on disk, mapped into memory, and padded only in a batch.

All frames of all utterances are stored one after the other in one array, and so are all tokens; offsets mark
where each utterance begins. A corpus larger than memory costs nothing until it is read, and worker processes
share its pages.

>>> from tacit.data.speech.tiny import tiny
>>> records = tiny(speakers=3).train
>>> batch = records.prepare(records.take(np.array([1, 0])))
>>> batch["x"].dtype, batch["x"].shape[2], sorted(batch)
(torch.float32, 80, ['frames', 'lengths', 'tokens', 'x'])
>>> batch["frames"].tolist() == records.frames[[1, 0]].tolist()
True
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit.data.records import Batch, Indices, packed, unpacked
from tacit.data.speech.features import BANDS, RATE, log_mel
from tacit.data.widths import by_edge, edge, fit
from tacit.lazy import torch

BUCKET = 24
"""Batches are padded to a multiple of this many frames: kernels prefer few distinct shapes."""
BLANK = 4
"""Buckets of a blank utterance that is nobody's, with which a network is tried."""
TOKEN_BUCKET = 16
"""The smallest width of a transcript that is padded alone."""


class SpeechRecords:
    """Transcribed utterances (see `tacit.data.Records`), with a speaker and a duration each.

    A batch is `x` [B, T, 80] features, `frames` [B] (how many of the T are the record's own), and likewise
    `tokens` [B, U] and `lengths` [B]. Frames and tokens past a record's own are zero. `x` is stored as
    float16.
    """

    def __init__(
        self,
        x: NDArray[Any],
        offsets: Indices,
        tokens: NDArray[Any],
        token_offsets: Indices,
        users: NDArray[Any],
        seconds: NDArray[Any],
    ) -> None:
        """`x` [frames, 80] and `tokens` [tokens] of all utterances in a row; utterance i has the rows from
        `offsets[i]` up to `offsets[i + 1]`."""
        for name, array, want in (
            ("offsets", offsets, len(users) + 1),
            ("token_offsets", token_offsets, len(users) + 1),
            ("seconds", seconds, len(users)),
            ("x", x, int(offsets[-1])),
            ("tokens", tokens, int(token_offsets[-1])),
        ):
            if len(array) != want:
                raise ValueError(f"{len(users)} utterances need {name} of length {want}, not {len(array)}")
        self._x, self._offsets = x, offsets
        self._tokens, self._token_offsets = tokens, token_offsets
        self._users, self._seconds = users, seconds

    def __len__(self) -> int:
        return len(self._users)

    @property
    def labels(self) -> None:
        """An utterance has no class."""
        return None

    @property
    def users(self) -> NDArray[Any]:
        """The speaker of each utterance."""
        return self._users

    @property
    def seconds(self) -> NDArray[Any]:
        """The length of each utterance, for batches by seconds of audio."""
        return self._seconds

    @property
    def frames(self) -> NDArray[Any]:
        """The number of feature frames of each utterance."""
        return np.diff(self._offsets)

    def transcript(self, index: int) -> NDArray[Any]:
        """The tokens of one utterance."""
        return self._tokens[self._token_offsets[index] : self._token_offsets[index + 1]]

    def raw(self, index: int) -> bytes:
        """An utterance's features and transcript."""
        sound = self._x[self._offsets[index] : self._offsets[index + 1]]
        return sound.tobytes() + self.transcript(index).tobytes()

    def take(self, indices: Indices) -> Batch:
        frames = self._offsets[indices + 1] - self._offsets[indices]
        lengths = self._token_offsets[indices + 1] - self._token_offsets[indices]
        x = np.zeros((len(indices), _rounded(int(frames.max(initial=0))), BANDS), self._x.dtype)
        tokens = np.zeros((len(indices), int(lengths.max(initial=0))), np.int64)
        for row, (index, n) in enumerate(zip(indices, frames, strict=True)):
            start = self._offsets[index]
            x[row, :n] = self._x[start : start + n]
            tokens[row, : lengths[row]] = self.transcript(index)
        return {
            "x": torch.from_numpy(x),
            "frames": torch.from_numpy(np.array(frames, np.int64)),
            "tokens": torch.from_numpy(tokens),
            "lengths": torch.from_numpy(np.array(lengths, np.int64)),
        }

    def prepare(self, batch: Batch) -> Batch:
        """Convert to float32, and to the width that the batch's longest utterance needs (rounded up to a
        bucket).
        """
        if not len(batch["frames"]):
            return {**batch, "x": batch["x"].float()}
        widest = min(_rounded(int(batch["frames"].max())), batch["x"].shape[1])
        return {
            **batch,
            "x": batch["x"][:, :widest].float(),
            "tokens": batch["tokens"][:, : int(batch["lengths"].max())],
        }

    def apart(self, batch: Batch) -> list[Batch]:
        """Each utterance and its transcript, padded to their own buckets."""
        lengths = zip(batch["frames"].tolist(), batch["lengths"].tolist(), strict=True)
        edges = [(edge(frames, BUCKET), edge(tokens, TOKEN_BUCKET)) for frames, tokens in lengths]
        return [
            {**part, "x": fit(part["x"], frames).float(), "tokens": fit(part["tokens"], tokens)}
            for (frames, tokens), part in by_edge(batch, edges)
        ]

    def blank(self) -> Batch:
        """Silence, and a transcript, with the same widths for every corpus."""
        length = torch.ones(1, dtype=torch.int64)
        return {
            "x": torch.zeros(1, BLANK * BUCKET, BANDS),
            "frames": length,
            "tokens": torch.zeros(1, TOKEN_BUCKET, dtype=torch.int64),
            "lengths": length.clone(),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self._x, self._offsets, self._tokens, self._token_offsets, self._users, self._seconds)
        return _unpickle, tuple(packed(part) for part in parts)


class Heard(NamedTuple):
    """A prepared utterance: its features, its tokens, its speaker and its seconds."""

    x: NDArray[np.float16]
    tokens: NDArray[np.int64]
    speaker: str
    seconds: float


def hear(wave: NDArray[np.float32], tokens: NDArray[np.int64], speaker: str) -> Heard:
    """Features of one wave at 16 kHz."""
    x, _ = log_mel(torch.from_numpy(wave)[None])
    return Heard(x[0].half().numpy(), tokens, speaker, len(wave) / RATE)


def gather(utterances: Iterable[Heard]) -> SpeechRecords:
    """Records in memory, for a small corpus."""
    heard = list(utterances)
    return SpeechRecords(
        np.concatenate([h.x for h in heard]),
        np.cumsum([0, *(len(h.x) for h in heard)]),
        np.concatenate([h.tokens for h in heard]),
        np.cumsum([0, *(len(h.tokens) for h in heard)]),
        np.array([h.speaker for h in heard]),
        np.array([h.seconds for h in heard], np.float32),
    )


def _unpickle(*parts: Any) -> SpeechRecords:
    return SpeechRecords(*(unpacked(part) for part in parts))


def _rounded(frames: int) -> int:
    return -(-frames // BUCKET) * BUCKET
