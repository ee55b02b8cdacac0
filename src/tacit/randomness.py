"""Randomness by name: every draw comes from a generator keyed by what it is for.

A key is (run seed, purpose, round, client, …). Two draws share a stream only if they share a key, so a
result does not depend on the engine, on the number of workers, on the order of clients or on a crash.

>>> float(generator(0, "batches", 3, 17).random()) == float(generator(0, "batches", 3, 17).random())
True
>>> float(generator(0, "batches", 3, 17).random()) == float(generator(0, "batches", 3, 18).random())
False
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray


def key(seed: int, *names: str | int) -> int:
    """128 bits that depend on the seed and on every name, and on their order."""
    text = "\0".join(f"{type(name).__name__}:{name}" for name in (seed, *names))
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "big")


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A NumPy generator for one purpose."""
    return np.random.default_rng(key(seed, *names))


def scattered(seed: int, *places: int | NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """64 random bits for each place, a function of the seed and that place alone.

    A generator's draws depend on how many came before; these do not, so that what one record gets does not
    depend on which others are there. (SplitMix64's mixing, once for each coordinate of a place.)

    >>> one, all_ = scattered(7, 3, np.array([41])), scattered(7, 3, np.arange(100))
    >>> bool(one[0] == all_[41])
    True
    """
    return mixed(np.atleast_1d(np.uint64(seed & (2**64 - 1))), *places)


def mixed(bits: NDArray[np.uint64], *places: int | NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """The same with a seed for each place."""
    for place in places:
        bits = bits + (np.atleast_1d(place).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
    return bits


def torch_seed(seed: int, *names: str | int) -> int:
    """A seed for `torch.manual_seed` (dropout, initialisation)."""
    return key(seed, *names) & (2**63 - 1)
