"""The messages between clients and the server, in the order of a round.

    client → server              server → client
    Advertise                    Keys          everyone's advertisements
    Shares                       Delivery      who takes part, and the shares that are for this client
    Masked                       Survivors     whose upload is in the sum
    Agreed                       Agreement     what the others signed
    Unmask

A client signs its messages, together with the round's terms. Nobody has to trust the server's messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TypeVar

from tacit.secure.identity import PrivateKey, Roster, sign
from tacit.secure.terms import Terms
from tacit.secure.wire import U8, U32, Bytes16, Bytes32, Refused, decode, encode

_CONTEXT = b"tacit secure aggregation 1: message\0"


@dataclass(frozen=True)
class Advertise:
    """A client's keys for this round."""

    mask_key: Bytes32
    """X25519: its key agreement with each neighbour gives the masks between them."""
    share_key: Bytes32
    """X25519: its key agreement with each neighbour gives the keys that encrypt shares between them."""
    commitment: Bytes32
    """A commitment to the seed of the client's own mask, so that wrong shares of it are noticed."""


@dataclass(frozen=True)
class Shares:
    """Shares of a client's two secrets, encrypted for each neighbour."""

    boxes: tuple[tuple[U32, bytes], ...]


@dataclass(frozen=True)
class Masked:
    """A client's upload under its masks, packed."""

    vector: bytes


@dataclass(frozen=True)
class Agreed:
    """A client's statement that it was told these advertisements, participants and survivors only."""

    digest: Bytes32


@dataclass(frozen=True)
class Unmask:
    """Shares of the own-mask seeds of clients whose upload arrived, and of the mask keys of the others."""

    seeds: tuple[tuple[U32, Bytes16], ...]
    keys: tuple[tuple[U32, Bytes16], ...]


@dataclass(frozen=True)
class Keys:
    """The signed advertisements of all clients who advertised."""

    advertisements: tuple[bytes, ...]


@dataclass(frozen=True)
class Delivery:
    """The clients that sent shares, and the shares for this client."""

    participants: tuple[U32, ...]
    boxes: tuple[tuple[U32, bytes], ...]


@dataclass(frozen=True)
class Survivors:
    """The clients whose masked upload arrived."""

    numbers: tuple[U32, ...]


@dataclass(frozen=True)
class Agreement:
    """Signed `Agreed` messages."""

    signed: tuple[bytes, ...]


Said = Advertise | Shares | Masked | Agreed | Unmask
S = TypeVar("S", Advertise, Shares, Masked, Agreed, Unmask)
_KINDS: dict[type, int] = {Advertise: 1, Shares: 2, Masked: 3, Agreed: 4, Unmask: 5}


@dataclass(frozen=True)
class Signed:
    """A client's message with its signature over the kind, the terms, the sender and the body."""

    kind: U8
    terms: Bytes32
    sender: U32
    body: bytes
    signature: bytes

    @property
    def content(self) -> bytes:
        return _CONTEXT + encode(replace(self, signature=b""))


def signed(key: PrivateKey, terms: Terms, sender: int, message: Said) -> bytes:
    """A client's signed message, ready to be sent."""
    bare = Signed(_KINDS[type(message)], terms.digest, sender, encode(message), b"")
    return encode(replace(bare, signature=sign(key, bare.content)))


def opened(cls: type[S], terms: Terms, roster: Roster, data: bytes) -> tuple[int, S]:
    """The sender and the message; `Refused` unless a member said it in this attempt at this round."""
    envelope = decode(Signed, data)
    if envelope.terms != terms.digest:
        raise Refused(f"client {envelope.sender}: the message belongs to another round")
    if envelope.kind != _KINDS[cls]:
        raise Refused(f"client {envelope.sender}: the message is of another stage than {cls.__name__}")
    if envelope.sender not in terms.members:
        raise Refused(f"client {envelope.sender} is not a member of the cohort")
    roster.verify(envelope.sender, envelope.signature, envelope.content)
    return envelope.sender, decode(cls, envelope.body)


def opened_keys(keys: Keys, terms: Terms, roster: Roster) -> dict[int, Advertise]:
    """The advertisements, in the order of their senders; `Refused` if one is invalid or there are too few."""
    found: dict[int, Advertise] = {}
    last = -1
    for data in keys.advertisements:
        sender, advertised = opened(Advertise, terms, roster, data)
        if sender <= last:
            raise Refused(f"client {sender} is advertised twice, or out of order")
        found[sender], last = advertised, sender
    public = [key for one in found.values() for key in (one.mask_key, one.share_key)]
    if len(set(public)) != len(public):
        raise Refused("two clients advertise the same key")
    enough(found, terms)
    return found


def view(keys: Keys, participants: Iterable[int], survivors: Iterable[int]) -> Agreed:
    """What a client signs before it unmasks."""
    told = (b"".join(sha256(data).digest() for data in keys.advertisements), encode_numbers(participants))
    return Agreed(sha256(b"".join(sha256(t).digest() for t in (*told, encode_numbers(survivors)))).digest())


def encode_numbers(numbers: Iterable[int]) -> bytes:
    """Ascending numbers as bytes."""
    return encode(Survivors(tuple(numbers)))


def checked_numbers(numbers: tuple[int, ...], among: Iterable[int], terms: Terms) -> frozenset[int]:
    """The set that the server announced; `Refused` unless ascending, within `among` and large enough."""
    found = frozenset(numbers)
    if list(numbers) != sorted(found) or not found <= set(among):
        raise Refused("the server names clients twice, out of order, or who cannot be there")
    enough(found, terms)
    return found


def enough(numbers: Iterable[int], terms: Terms) -> None:
    """`Refused` below the threshold."""
    left = len(list(numbers))
    if left < terms.threshold:
        raise Refused(
            f"secure aggregation, round {terms.round + 1}: {left} of {len(terms.members)} clients are left "
            f"where {terms.threshold} must be; nothing was released"
        )
