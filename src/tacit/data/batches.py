"""Which of a client's n records make up each batch, and the batches themselves.

`epochs`, `steps` and `by_seconds` yield positions in 0…n-1; the caller owns the generator, so a client's
batches depend on its own name and nothing else. `gather` turns positions into what a model eats.

>>> rng = np.random.default_rng(0)
>>> [len(batch) for batch in epochs(10, 4, 2, rng)]
[4, 4, 2, 4, 4, 2]
>>> [len(batch) for batch in steps(10, 4, 4, rng)]
[4, 4, 2, 4]
>>> [len(batch) for batch in by_seconds(np.full(10, 2.0), 7.0, 1, rng)]
[3, 3, 3, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tacit.data.records import Batch, Indices, Records

MANY = 1024
"""Records that are copied out of their storage at once: a client may hold more than memory does."""
SMALL = 1 << 20
"""Bytes of records, in storage form, that may be prepared in one go: about what a core's own cache holds."""


def epochs(n: int, batch: int, epochs: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Every record once an epoch, reshuffled each time; the last, smaller batch is kept."""
    if batch < 1:
        raise ValueError(f"a batch needs at least one record, not {batch}")
    for _ in range(epochs):
        order = rng.permutation(n)
        for start in range(0, n, batch):
            yield order[start : start + batch]


def steps(n: int, batch: int, steps: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Exactly `steps` batches from as many reshuffled epochs as it takes; none at all if n is 0."""
    if batch < 1:
        raise ValueError(f"a batch needs at least one record, not {batch}")
    a_pass = -(-n // batch)
    enough = -(-steps // a_pass) if a_pass else 0
    yield from islice(epochs(n, batch, enough, rng), steps)


def by_seconds(
    seconds: NDArray[Any], limit: float, epochs: int | None, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Batches of up to `limit` seconds of sound in all, from reshuffled epochs; without end if None.

    Neighbours in the shuffled order fill a batch until the next one would not fit. A record longer than the
    limit is a batch by itself.
    """
    if limit <= 0:
        raise ValueError(f"a batch needs some seconds of sound, not {limit}")
    for _ in count() if epochs is None and len(seconds) else range(epochs or 0):
        order = rng.permutation(len(seconds))
        ends = np.cumsum(seconds[order], dtype=np.float64)
        start = 0
        while start < len(order):
            before = ends[start - 1] if start else 0.0
            # A hair of slack: ten times 0.1 s is within 1 s, whatever the sum rounds to.
            stop = max(start + 1, int(np.searchsorted(ends, before + limit * (1 + 1e-9), "right")))
            yield order[start:stop]
            start = stop


Change = Callable[[Batch, NDArray[np.int64]], Batch]
"""Changes a batch in storage form, given its records' positions (augmentation)."""


def gather(
    records: Records, indices: Indices, rows: Iterable[NDArray[np.int64]], change: Change | None = None
) -> Iterator[Batch]:
    """The batches whose positions among the client's `indices` are `rows`, changed and prepared one by one.

    Records are copied out of their storage about one pass over the client at a time, and a batch is a view of
    that copy: for small records, to gather each batch by itself would cost as much as a tenth of a step. Few
    and small ones are even prepared together, where `records.joint` says that this is as good.
    """
    ahead: list[NDArray[np.int64]] = []
    waiting = 0
    for positions in rows:
        ahead.append(positions)
        waiting += len(positions)
        if waiting >= min(len(indices), MANY):
            yield from _cut(records, indices, ahead, change)
            ahead, waiting = [], 0
    if ahead:
        yield from _cut(records, indices, ahead, change)


def _cut(
    records: Records, indices: Indices, rows: list[NDArray[np.int64]], change: Change | None
) -> Iterator[Batch]:
    together = records.take(indices[np.concatenate(rows)])
    lengths = [len(positions) for positions in rows]
    small = sum(values.nbytes for values in together.values()) <= SMALL
    ready = small and change is None and getattr(records, "joint", False)
    if ready:
        together = records.prepare(together)
    split = zip(*(torch.split(values, lengths) for values in together.values()), strict=True)
    for positions, parts in zip(rows, split, strict=True):
        batch = dict(zip(together, parts, strict=True))
        if change is not None:
            batch = change(batch, positions)
        yield batch if ready else records.prepare(batch)
