"""Unpredictable uniform bits: AES-256 in counter mode, in the processor's hardware.

All secret sampling, masks and noise of a guarantee come from a `Bits` stream with its own key, taken from the
operating system for each release. A simulation names its streams instead; whoever knows the name can repeat
the stream, so a simulation claims no guarantee.

>>> Bits.named(7, 3).words(2).tolist() == Bits.named(7, 3).words(2).tolist()
True
>>> Bits.secret().words(1)[0] == Bits.secret().words(1)[0]      # equal once in 2⁶⁴
np.False_

The cipher is OpenSSL's (`cryptography`). The assumption is the usual one: AES-256 under a secret random key
cannot be distinguished from random bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

_CHUNK = 1 << 16
"""Words generated at a time: 512 kB, which stay in a core's cache."""
_ZEROS = bytes(8 * _CHUNK)


class Bits:
    """An endless stream of uniform 64-bit words; `named` says whether others could reproduce it."""

    def __init__(self, key: bytes, named: bool, part: int = 0) -> None:
        """`key`: 32 bytes, never used for another stream; `part`: which 2⁶⁴ blocks of the counter it uses."""
        self.is_named = named
        self._key, self._parts = key, 0
        self._stream = Cipher(AES(key), CTR(part.to_bytes(8) + bytes(8))).encryptor()

    @classmethod
    def secret(cls) -> Bits:
        """A fresh stream, from 256 bits of the operating system's entropy."""
        return cls(os.urandom(32), named=False)

    @classmethod
    def named(cls, *name: int) -> Bits:
        """The stream with a name such as (run seed, round, purpose). For simulations only."""
        return cls(sha256(repr(("tacit", *(int(part) for part in name))).encode()).digest(), named=True)

    def parts(self, count: int) -> Iterator[Bits]:
        """`count` further streams that share nothing with this one or with each other."""
        first = self._parts + 1
        self._parts += count
        return (Bits(self._key, self.is_named, part) for part in range(first, first + count))

    def words(self, count: int) -> Words:
        """The next `count` words of the stream."""
        if count > _CHUNK:
            return np.concatenate([self.words(part) for part in _parts(count)])
        return np.frombuffer(self._stream.update(memoryview(_ZEROS)[: 8 * count]), np.uint64)

    def integer(self) -> int:
        """64 bits as a number."""
        return int(self.words(1)[0])

    def bernoulli(self, count: int, rate: float) -> Ids:
        """Which of `count` independent Bernoulli(`rate`) draws are 1; sorted.

        The probability is `rate` to within 2⁻⁶⁴ (and exactly 1 for a rate of 1). The draws are made one by
        one, so the sampling that an accountant relies on does not depend on a sampler's floating-point
        arithmetic.
        """
        if rate >= 1:
            return np.arange(count, dtype=np.int64)
        threshold = np.uint64(min(int(rate * 2.0**64), 2**64 - 1))
        ones = []
        start = 0
        for part in _parts(count):
            ones.append(start + np.flatnonzero(self.words(part) < threshold))
            start += part
        return np.concatenate(ones) if ones else np.empty(0, np.int64)

    def subset(self, count: int, size: int) -> Ids:
        """A uniform subset of `size` of the numbers below `count`, sorted: those with the smallest random
        words.
        """
        if size >= count:
            return np.arange(count, dtype=np.int64)
        chosen = np.argpartition(self.words(count), size)[:size] if size else np.empty(0, np.int64)
        return np.sort(chosen).astype(np.int64)


def _parts(count: int) -> list[int]:
    whole, rest = divmod(count, _CHUNK)
    return [_CHUNK] * whole + ([rest] if rest else [])
