"""Gaussian noise, from the operating system's entropy or from a seed.

A claimed guarantee needs noise that nobody can predict and that is never drawn twice: `OsNoise`. Experiments
that must be repeatable use `SeededNoise`, and the run's statement then says "simulation".

>>> vector = torch.zeros(3)
>>> SeededNoise(2024, 7).add_(vector, std=1.0)
>>> again = torch.zeros(3)
>>> SeededNoise(2024, 7).add_(again, std=1.0)
>>> bool((vector == again).all()), OsNoise().secret
(True, True)

torch's own `manual_seed` takes 32 bits on the CPU (the rest of the number is dropped), so its noise can be
guessed by trying all seeds. Here all 624 words of the generator's state are set, afresh for every 32,768
coordinates. The generator (Mersenne Twister) stretches that entropy and is not a cryptographic one: whoever
already knows the exact noise of some coordinates could compute that of others in the same stretch.
Normals are made from 24-bit uniforms, so a single coordinate never exceeds 5.8 standard deviations.
Statements name both among what is not covered.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORDS = 624
_STRETCH = 1 << 15  # coordinates per fresh state: in the cache, and too few for torch to split over threads

Words = NDArray[np.uint32]


class Noise(Protocol):
    """Adds N(0, std²) to each coordinate of a vector; no two calls of one source share their randomness."""

    @property
    def secret(self) -> bool: ...

    def add_(self, vector: Tensor, std: float) -> None: ...


class OsNoise:
    """Noise nobody can repeat: fresh entropy of the operating system for every stretch."""

    secret = True

    def add_(self, vector: Tensor, std: float) -> None:
        """Add N(0, std²) to each coordinate, in place."""
        _add_normal_(vector, std, _os_words)


class SeededNoise:
    """Repeatable noise named by whole numbers ≥ 0, such as (run seed, round). For simulations only."""

    secret = False

    def __init__(self, *name: int) -> None:
        self._sequence = np.random.SeedSequence(name)

    def add_(self, vector: Tensor, std: float) -> None:
        """Add N(0, std²) to each coordinate, in place; a later call continues the stream."""
        _add_normal_(vector, std, self._fresh)

    def _fresh(self) -> Words:
        return self._sequence.spawn(1)[0].generate_state(_WORDS).astype(np.uint32)


def secret_state() -> Tensor:
    """A whole state for torch's CPU generator that nobody can guess, for a model's own dice (dropout)."""
    return _state(_os_words())


def _os_words() -> Words:
    return np.frombuffer(os.urandom(4 * _WORDS), dtype=np.uint32)


def _add_normal_(vector: Tensor, std: float, fresh: Callable[[], Words]) -> None:
    if vector.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"noise in {vector.dtype} would be rounded away; convert the sum to float32 first")
    if std == 0:
        return
    generator = torch.Generator()
    scratch = torch.empty(min(_STRETCH, vector.numel()), dtype=vector.dtype)
    for stretch in torch.split(vector, _STRETCH):
        generator.set_state(_state(fresh()))
        part = scratch[: stretch.numel()]
        part.normal_(0.0, std, generator=generator)
        stretch.add_(part.to(vector.device))


def _state(words: Words) -> Tensor:
    """The whole state of torch's Mersenne Twister.

    Layout (5056 bytes): the seed (8), words left (4), seeded (4), next word (8), 624 words of 8 bytes with
    32 bits each, then cached normals. "One left" makes the generator stir the new words before using them.
    """
    state = np.zeros(5056, dtype=np.uint8)
    state[8:16] = np.array([1, 1], dtype=np.int32).view(np.uint8)
    state[24 : 24 + 8 * _WORDS] = words.astype(np.uint64).view(np.uint8)
    return torch.from_numpy(state)
