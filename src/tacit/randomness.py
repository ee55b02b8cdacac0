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

import numpy as np


def key(seed: int, *names: str | int) -> int:
    """128 bits that depend on the seed and on every name, and on their order."""
    text = "\0".join(f"{type(name).__name__}:{name}" for name in (seed, *names))
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "big")


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A NumPy generator for one purpose."""
    return np.random.default_rng(key(seed, *names))


def torch_seed(seed: int, *names: str | int) -> int:
    """A seed for `torch.manual_seed` (dropout, initialisation)."""
    return key(seed, *names) & (2**63 - 1)
