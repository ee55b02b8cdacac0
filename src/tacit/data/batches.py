"""Selects which of a client's n records form each batch, and builds the batches.

`epochs`, `steps` and `by_seconds` yield positions in 0…n-1. The caller owns the generator, so a client's
batches depend only on its own name. `gather` turns positions into model inputs.

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
from numpy.typing import NDArray

from tacit.data.records import Batch, Indices, Records
from tacit.data.widths import apart, one_by_one
from tacit.lazy import torch

MANY = 1024
"""How many records are copied out of their storage at once: a client may hold more than fits into memory."""
SMALL = 1 << 20
"""The most bytes of records, in storage form, to prepare in one go: about the size of a core's cache."""


def epochs(n: int, batch: int, epochs: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Every record once per epoch, reshuffled each time; a smaller last batch is kept."""
    if batch < 1:
        raise ValueError(f"a batch needs at least one record, not {batch}")
    for _ in range(epochs):
        order = rng.permutation(n)
        for start in range(0, n, batch):
            yield order[start : start + batch]


def steps(n: int, batch: int, steps: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Exactly `steps` batches, from as many reshuffled epochs as needed; no batches if n is 0."""
    if batch < 1:
        raise ValueError(f"a batch needs at least one record, not {batch}")
    a_pass = -(-n // batch)
    enough = -(-steps // a_pass) if a_pass else 0
    yield from islice(epochs(n, batch, enough, rng), steps)


def by_seconds(
    seconds: NDArray[Any], limit: float, epochs: int | None, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Batches of up to `limit` seconds of sound in total, from reshuffled epochs; endless if `epochs` is
    None.

    Neighbours in the shuffled order fill a batch until the next one does not fit. A record longer than the
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
            # A little slack: ten times 0.1 s is within 1 s, however the sum is rounded.
            stop = max(start + 1, int(np.searchsorted(ends, before + limit * (1 + 1e-9), "right")))
            yield order[start:stop]
            start = stop


Change = Callable[[Batch, NDArray[np.int64], int], Batch]
"""Changes a batch in storage form, given its records' positions and the batch's number (augmentation)."""


def gather(
    records: Records,
    indices: Indices,
    rows: Iterable[NDArray[np.int64]],
    change: Change | None = None,
    numbers: Iterator[int] | None = None,
) -> Iterator[Batch]:
    """The batches whose positions among the client's `indices` are `rows`, changed and prepared one by one.

    Records are copied out of their storage about one pass over the client at a time, and a batch is a view of
    that copy: for small records, gathering each batch separately would cost up to a tenth of a step. A few
    small batches are even prepared together, if `records.joint` says that the result is the same. `numbers`
    are the batch numbers passed to `change`; 0, 1, 2 … if not given.
    """
    for (batch,) in _gather(records, lambda b: [records.prepare(b)], indices, rows, change, numbers):
        yield batch


def gather_apart(
    records: Records,
    indices: Indices,
    rows: Iterable[NDArray[np.int64]],
    change: Change | None = None,
    numbers: Iterator[int] | None = None,
) -> Iterator[list[Batch]]:
    """The same batches, each in parts in which no record depends on another (see `tacit.data.widths`).

    Records without a method for this are taken and prepared one at a time.
    """
    own = apart(records)
    if own is not None:
        yield from _gather(records, own.apart, indices, rows, change, numbers)
        return
    for number, positions in zip(count() if numbers is None else numbers, rows, strict=False):
        singles = [records.take(indices[[i]]) for i in positions]
        if change is not None:
            singles = [change(one, positions[[i]], number) for i, one in enumerate(singles)]
        yield one_by_one(records, singles)


def _gather(
    records: Records,
    ready: Callable[[Batch], list[Batch]],
    indices: Indices,
    rows: Iterable[NDArray[np.int64]],
    change: Change | None,
    numbers: Iterator[int] | None,
) -> Iterator[list[Batch]]:
    numbers = count() if numbers is None else numbers
    ahead: list[NDArray[np.int64]] = []
    waiting = 0
    for positions in rows:
        ahead.append(positions)
        waiting += len(positions)
        if waiting >= min(len(indices), MANY):
            yield from _cut(records, ready, indices, ahead, change, numbers)
            ahead, waiting = [], 0
    if ahead:
        yield from _cut(records, ready, indices, ahead, change, numbers)


def _cut(
    records: Records,
    ready: Callable[[Batch], list[Batch]],
    indices: Indices,
    rows: list[NDArray[np.int64]],
    change: Change | None,
    numbers: Iterator[int],
) -> Iterator[list[Batch]]:
    together = records.take(indices[np.concatenate(rows)])
    lengths = [len(positions) for positions in rows]
    small = sum(values.nbytes for values in together.values()) <= SMALL
    jointly = small and change is None and getattr(records, "joint", False)
    if jointly:
        together = records.prepare(together)
    split = zip(*(torch.split(values, lengths) for values in together.values()), strict=True)
    for positions, parts in zip(rows, split, strict=True):
        batch = dict(zip(together, parts, strict=True))
        if change is not None:
            batch = change(batch, positions, next(numbers))
        yield [batch] if jointly else ready(batch)
