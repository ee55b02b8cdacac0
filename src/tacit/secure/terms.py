"""The terms of a round of secure aggregation: public, the same for all, and bound into every signature.

>>> terms = Terms.fresh(run=bytes(16), round=3, attempt=0, config=bytes(32), members=range(10), length=1000,
...                     bits=32, threshold=7, colluding=1)
>>> len(terms.digest), decode(Terms, encode(terms)) == terms
(32, True)

With n members, threshold t and c colluders, 2t > n + c is required. Any two groups of t members then share an
honest client, so a server that tells clients different things achieves nothing. `tacit.secure.client` has the
argument.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from tacit.secure.wire import U8, U32, U64, Bytes16, Bytes32, Refused, decode, encode

MOST_BITS = 64
TAIL = 16
"""The sum has room for noise of this many standard deviations: larger noise is less likely than 10⁻⁵⁶."""
_CONTEXT = b"tacit secure aggregation 1: terms\0"


@dataclass(frozen=True)
class Terms:
    """One attempt at one round of one run."""

    run: Bytes16
    round: U64
    attempt: U64
    nonce: Bytes32
    """Fresh for each attempt, so nothing signed for another attempt is valid here."""
    config: Bytes32
    """A digest of what the clients were asked to do."""
    members: tuple[U32, ...]
    """The cohort: numbers from the roster, ascending."""
    length: U64
    """Coordinates of an upload."""
    bits: U8
    """Uploads and their sum are whole numbers modulo 2^bits."""
    threshold: U32
    """t: with fewer clients left, at any stage, there is no sum."""
    colluding: U32
    """c: this many members, together with the server, learn no more than the sum of the others."""

    def __post_init__(self) -> None:
        n, t, c = len(self.members), self.threshold, self.colluding
        if not n or any(a >= b for a, b in zip(self.members, self.members[1:], strict=False)):
            raise Refused("secure aggregation: the members of a cohort are named once each, in order")
        if not 1 <= self.bits <= MOST_BITS or not self.length:
            raise Refused(f"secure aggregation: {self.length} coordinates of {self.bits} bits are no upload")
        if not 1 <= t <= n or 2 * t <= n + c:
            raise Refused(
                f"secure aggregation: a threshold of {t} among {n} members, {c} of them colluding, "
                f"protects nobody from a server that lies; choose {least_threshold(n, c)} or more"
            )

    @cached_property
    def digest(self) -> bytes:
        """The digest that signatures, keys and masks of this attempt are bound to."""
        return sha256(_CONTEXT + encode(self)).digest()

    @classmethod
    def fresh(
        cls,
        *,
        run: bytes,
        round: int,
        attempt: int,
        config: bytes,
        members: Iterable[int],
        length: int,
        bits: int,
        threshold: int,
        colluding: int = 0,
    ) -> Terms:
        """Terms with a fresh nonce."""
        numbers = tuple(sorted(members))
        nonce = os.urandom(32)
        return cls(run, round, attempt, nonce, config, numbers, length, bits, threshold, colluding)


def least_threshold(members: int, colluding: int = 0) -> int:
    """The least t that a cohort of this size may have.

    >>> [least_threshold(n) for n in (1, 2, 3, 4, 10)], least_threshold(100, 30)
    ([1, 2, 2, 3, 6], 66)
    """
    return (members + colluding) // 2 + 1


def bits_needed(members: int, radius: int, std: float) -> int:
    """Bits for the sum of `members` whole numbers of size ≤ radius, plus noise of `std` in total.

    Two's complement, so one bit is for the sign. A sum outside this range would come back wrong, not unsafe.

    >>> bits_needed(100, 2**20, 2.0**20)
    28
    """
    most = members * radius + math.ceil(TAIL * std)
    bits = most.bit_length() + 1
    if bits > MOST_BITS:
        raise Refused(f"secure aggregation: the sum of {members:,} uploads needs {bits} bits, of {MOST_BITS}")
    return bits


__all__ = ["Terms", "bits_needed", "decode", "encode", "least_threshold"]
