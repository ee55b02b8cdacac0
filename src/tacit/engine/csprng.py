"""A CSPRNG for the model's own randomness (dropout masks and the like) under an example-level guarantee.

Masks are drawn for a whole batch at once, so adding or removing a record shifts the masks of the records
after it. The guarantee covers that if masks are independent and unknown, as the sampling is: the sum with the
record and the sum without it can then be coupled so that they differ only in that record's clipped gradient.
The guarantee does not cover it if masks can be predicted, or if only few masks are possible. torch's
generators are too weak for this: the Mersenne Twister is linear, and on some processors a mask is made from a
seed of 31 bits.

`csprng` therefore replaces torch's CPU kernels for `bernoulli_` (dropout, stochastic depth), `uniform_`,
`normal_` and `exponential_`, and everything built on them. Each call draws a nonce of 252 bits from torch's
generator; its numbers are the stream of AES-256 in counter mode under the key SHA-256(secret, nonce). Code
that saves torch's random state and restores it gets the same numbers again, as usual; nobody can get them
without the secret. Random changes to records (`SecretPlaces`) use such a stream, too.

*Assumption*: AES-256 and SHA-256 under a secret key cannot be distinguished from random functions. *Not
covered*: the rarer `randint`, `randperm` and `multinomial`, which draw from the Mersenne Twister itself (its
whole state of 19,937 bits is filled from the cipher before every step); and accelerators, whose counter-based
generators get a secret seed of 63 bits.

>>> with csprng():
...     state = torch.get_rng_state()
...     first = torch.dropout(torch.ones(1000), 0.5, train=True)
...     torch.set_rng_state(state)
...     again = torch.dropout(torch.ones(1000), 0.5, train=True)
>>> torch.equal(first, again)
True
"""

from __future__ import annotations

import os
import random
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from torch import Tensor

from tacit.gradients.generators import seed_all
from tacit.privacy import Bits

_ZEROS = memoryview(bytes(1 << 19))
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Binary digits of a uniform number: few enough that rounding never takes it out of its interval."""


@contextmanager
def csprng() -> Iterator[None]:
    """Inside this context, the process's CPU random numbers come from the cipher; see the module.

    Meanwhile, Python's generator and NumPy's global one are seeded by the operating system; afterwards they
    are restored to their earlier state.
    """
    secret = os.urandom(32)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's own kernels are replaced, which is the intention
        for name, kernel in _KERNELS.items():
            library.impl(name, partial(kernel, secret), "CPU", allow_override=True)
    try:
        with own_generators():
            seed_generators()
            yield
    finally:
        library._destroy()


@contextmanager
def own_generators() -> Iterator[None]:
    """Restore the state of Python's generator and NumPy's global one on exit."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def seed_generators() -> None:
    """Seed both from the operating system: later numbers do not depend on any earlier state."""
    random.seed(os.urandom(64))
    np.random.seed(np.frombuffer(os.urandom(64), np.uint32))  # noqa: NPY002


def refresh_generator() -> None:
    """Fill the whole state of torch's CPU generator with unpredictable bits.

    Layout (5056 bytes): the seed (8), words left (4), seeded (4), next word (8), 624 words of 8 bytes with
    32 bits each, then cached normals. "One left" makes the generator mix the new words before using them.
    """
    state = np.zeros(5056, dtype=np.uint8)
    state[8:16] = np.array([1, 1], dtype=np.int32).view(np.uint8)
    state[24 : 24 + 8 * 624] = (Bits.secret().words(624) >> np.uint64(32)).view(np.uint8)
    torch.default_generator.set_state(torch.from_numpy(state))
    seed_all(secrets.randbits(63))


class SecretPlaces:
    """64 bits for each place, a function of the place and this object's secret alone (for augmentation)."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def __call__(self, step: int, purpose: int, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        words = _stream(
            self._secret, f"{step} {purpose}".encode(), int(places.max(initial=-1)) + 1, np.uint64
        )
        return words[places]


def _words(secret: bytes, generator: torch.Generator | None, count: int, dtype: type[Any]) -> NDArray[Any]:
    """Uniform words of a stream; the generator's next numbers name the stream."""
    nonce = torch.empty(4, dtype=torch.int64).random_(generator=generator).numpy().tobytes()
    return _stream(secret, nonce, count, dtype)


def _stream(secret: bytes, name: bytes, count: int, dtype: type[Any]) -> NDArray[Any]:
    """The first words of the stream with this name."""
    stream = Cipher(AES(sha256(secret + name).digest()), CTR(bytes(16))).encryptor()
    words = np.empty(count, dtype)
    left = memoryview(words.data).cast("B")
    while left:
        part = min(len(left), len(_ZEROS))
        stream.update_into(_ZEROS[:part], left[:part])
        left = left[part:]
    return words


def _fractions(secret: bytes, generator: torch.Generator | None, like: Tensor, digits: int) -> Tensor:
    """Multiples of 2^−digits in [0, 1), in float64 and the shape of `like`."""
    words = _words(secret, generator, like.numel(), np.uint64) >> np.uint64(64 - digits)
    return torch.from_numpy(words.astype(np.float64) * 2.0**-digits).view(like.shape)


def _bernoulli(
    secret: bytes, self: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    """Ones with probability p, to 2⁻³³."""
    threshold = round(p * 2.0**32)
    if not 0 < threshold < 2**32:
        return self.fill_(threshold > 0)
    heads = _words(secret, generator, self.numel(), np.uint32) < np.uint32(threshold)
    return self.copy_(torch.from_numpy(heads).view(self.shape))


def _bernoulli_each(
    secret: bytes, self: Tensor, p: Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    return self.copy_(_fractions(secret, generator, self, 53) < p)


def _uniform(
    secret: bytes,
    self: Tensor,
    low: float = 0.0,
    high: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    return self.copy_(low + (high - low) * _fractions(secret, generator, self, _DIGITS[self.dtype]))


def _normal(
    secret: bytes,
    self: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    return self.copy_(mean + std * torch.special.ndtri(_fractions(secret, generator, self, 52) + 2.0**-53))


def _exponential(
    secret: bytes, self: Tensor, rate: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    return self.copy_((_fractions(secret, generator, self, 52) + 2.0**-53).log() / -rate)


_KERNELS: dict[str, Any] = {
    "bernoulli_.float": _bernoulli,
    "bernoulli_.Tensor": _bernoulli_each,
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": _exponential,
}
