"""Which of a client's n records make up each batch.

Each function yields positions in 0…n-1; the caller owns the generator, so a client's batches depend on its
own name and nothing else.

>>> rng = np.random.default_rng(0)
>>> [len(batch) for batch in epochs(10, 4, 2, rng)]
[4, 4, 2, 4, 4, 2]
>>> [len(batch) for batch in steps(10, 4, 4, rng)]
[4, 4, 2, 4]
>>> sum(1 for _ in poisson(10, 0.3, 5, rng))
5
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray


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


def poisson(n: int, rate: float, steps: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Exactly `steps` batches; every record joins each one with probability `rate`, independently.

    This is the sampling that amplification by subsampling assumes: a batch's size is itself random, and an
    empty batch is a step like any other. Do not skip it.
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"a sampling rate is a probability, not {rate}")
    for _ in range(steps):
        yield np.flatnonzero(rng.random(n) < rate)
