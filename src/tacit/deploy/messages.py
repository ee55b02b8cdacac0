"""The messages: a signed head of plain values, and a body of raw numbers whose hash is in the head.

Messages contain no pickle, no code, and nothing that depends on the reader. A head is JSON in one canonical
form, with exactly the keys of its kind. A body is named vectors, one after the other, of exactly the lengths
that the head says. Any other bytes are a `BadMessage`. A body is separate from its head, so a body for many
clients is stored and sent once.

>>> from cryptography.hazmat.primitives.asymmetric import ec
>>> key = ec.generate_private_key(ec.SECP384R1())
>>> head = written(Refusal("a" * 32, 0, "b" * 32, "budget", "no"), key)
>>> read(head, key.public_key(), Refusal).reason
'budget'
>>> read(head[:-1], key.public_key(), Refusal)
Traceback (most recent call last):
tacit.deploy.messages.BadMessage: its signature is cut off
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any, ClassVar, TypeVar, get_type_hints

from tacit.deploy.keys import PrivateKey, PublicKey, sign, signed_by
from tacit.errors import UserError

MAGIC = b"tacit 2\n"
"""The protocol and its version."""
LONGEST_HEAD = 1 << 20
LONGEST_STEP = 1 << 26
"""The most bytes of the body in a step of secure aggregation."""
WIDTHS = {"f4": 4, "i4": 4, "i8": 8, "u1": 1}

Vector = tuple[str, str, int]
"""Name, dtype and length of one vector of a body."""
Body = Callable[[int], bytes | bytearray]
"""Fetches a body of the size that its head promised; never reads more."""


class BadMessage(UserError):
    """Bytes that are not one of our messages; the error says why. Nothing has been done about them."""


def _token(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32,64}", value) is not None


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _number(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


@dataclass(frozen=True)
class TrainOrder:
    """An order to train, and to send the result."""

    kind: ClassVar[str] = "train"

    run: str
    """A random name of the run."""
    to: str
    """The recipient: the SHA-256 of the client's key."""
    client: int
    """The client's number in this run."""
    clients: int
    """The number of clients."""
    nonce: str
    created: float
    """When the order was given, in seconds since 1970."""
    ttl: float
    """For how many seconds the order is valid."""
    round: int
    attempt: int
    replay: int
    lr: float
    steps: int | None
    decay: float
    bound: float | None
    """The current clipping norm, at client level."""
    config: str
    """The run's settings, as YAML: never code, and nothing about where data are."""
    shape: tuple[int, ...]
    classes: int
    labels: tuple[str, ...]
    """The labels that the server expects: a client whose records have others must not take part."""
    layout: str
    """A hash of the names and shapes of the trained parameters."""
    frozen: str | None
    """A hash of the frozen parameters."""
    state: str
    """The version of the client's own state that it starts from."""
    state_digest: str | None
    keep: tuple[str, ...]
    """Versions of the client's state that the run may still name."""
    vectors: tuple[Vector, ...]
    body: str
    """The SHA-256 of the body."""
    terms: str | None = None
    """Under secure aggregation, the round's terms (`tacit.secure.Terms`), in hexadecimal digits."""
    members: tuple[str, ...] = ()
    """Under secure aggregation, the hashes of the keys of the terms' members, in the same order."""
    delivery: str | None = None
    """Under secure aggregation, the shares that others sent to this client (`tacit.secure.Delivery`). Without
    it, the client does not train yet: it is asked for its keys, and whether it would carry out the order.
    """

    def check(self) -> bool:
        return (
            _token(self.run)
            and _token(self.to)
            and _token(self.nonce)
            and all(map(_count, (self.client, self.clients, self.round, self.attempt, self.replay)))
            and self.client < self.clients
            and all(map(_number, (self.created, self.ttl, self.lr, self.decay)))
            and (self.steps is None or _count(self.steps))
            and (self.bound is None or (_number(self.bound) and self.bound > 0))
            and all(map(_count, self.shape))
            and _count(self.classes)
            and all(isinstance(label, str) for label in self.labels)
            and _token(self.layout)
            and (self.frozen is None or _token(self.frozen))
            and (not self.state or _version(self.state))
            and (self.state_digest is None or _token(self.state_digest))
            and all(map(_version, self.keep))
            and _token(self.body)
            and (self.terms is None or _hexadecimal(self.terms))
            and all(map(_token, self.members))
            and (self.delivery is None or (self.terms is not None and _hexadecimal(self.delivery)))
        )


@dataclass(frozen=True)
class Answer:
    """The result of a client's training, and the facts about it that its owner lets out (None: withheld)."""

    kind: ClassVar[str] = "answer"

    run: str
    client: int
    nonce: str
    order: str
    """The SHA-256 of the order's head."""
    steps: int
    norm: float | None
    examples: int | None
    loss: float | None
    notes: dict[str, float] | None
    seconds: float | None
    state: str | None
    """The version of its state that the client wrote, if it wrote one."""
    state_digest: str | None
    vectors: tuple[Vector, ...]
    key: str | None
    """The key that encrypts its body (see `tacit.deploy.bodies`); None under masks: not encrypted."""
    body: str

    def check(self) -> bool:
        return (
            _token(self.run)
            and _token(self.nonce)
            and _token(self.order)
            and (self.key is None or (_token(self.key) and len(self.key) == 64))
            and _count(self.client)
            and _count(self.steps)
            and (self.norm is None or (_number(self.norm) and self.norm >= 0))
            and (self.examples is None or _count(self.examples))
            and (self.loss is None or _number(self.loss))
            and (self.seconds is None or _number(self.seconds))
            and (self.notes is None or all(_word(k) and _number(v) for k, v in self.notes.items()))
            and (self.state is None or _version(self.state))
            and (self.state_digest is None or _token(self.state_digest))
            and (self.state is None) == (self.state_digest is None)
            and _token(self.body)
        )


SHARE, AGREE, UNMASK = "share", "agree", "unmask"
STEPS = (SHARE, AGREE, UNMASK)
"""Steps of secure aggregation that have their own orders: all but the first step and the upload."""


@dataclass(frozen=True)
class StepOrder:
    """The next step of a round of secure aggregation. Its body is the server's message in that step, the same
    for every client.
    """

    kind: ClassVar[str] = "step"

    run: str
    to: str
    client: int
    nonce: str
    created: float
    ttl: float
    round: int
    attempt: int
    step: str
    """One of `STEPS`."""
    terms: str
    """The digest of the round's terms."""
    size: int
    body: str

    def check(self) -> bool:
        return (
            all(map(_token, (self.run, self.to, self.nonce, self.terms, self.body)))
            and all(map(_count, (self.client, self.round, self.attempt, self.size)))
            and all(map(_number, (self.created, self.ttl)))
            and self.step in STEPS
            and self.size <= LONGEST_STEP
        )


@dataclass(frozen=True)
class StepAnswer:
    """A client's message in a step of secure aggregation: its body, which carries a signature of its own."""

    kind: ClassVar[str] = "stepped"

    run: str
    client: int
    nonce: str
    order: str
    size: int
    body: str

    def check(self) -> bool:
        return (
            all(map(_token, (self.run, self.nonce, self.order, self.body)))
            and all(map(_count, (self.client, self.size)))
            and self.size <= LONGEST_STEP
        )


REASONS = ("expired", "replayed", "not allowed", "budget", "mismatch", "protocol", "failed")


@dataclass(frozen=True)
class Refusal:
    """Why a client did not carry out an order."""

    kind: ClassVar[str] = "refusal"

    run: str
    client: int
    nonce: str
    reason: str
    """One of `REASONS`."""
    text: str
    """A text for a person; never about records."""

    def check(self) -> bool:
        return (
            _token(self.run)
            and _token(self.nonce)
            and _count(self.client)
            and self.reason in REASONS
            and len(self.text) <= 1000
            and self.text.isprintable()
        )


Head = TrainOrder | StepOrder | Answer | StepAnswer | Refusal
_H = TypeVar("_H", TrainOrder, StepOrder, Answer, StepAnswer, Refusal)
KINDS: dict[str, type[Head]] = {cls.kind: cls for cls in (TrainOrder, StepOrder, Answer, StepAnswer, Refusal)}


def written(head: Head, key: PrivateKey) -> bytes:
    """A head as signed bytes."""
    content = MAGIC + _dump(head)
    signature = sign(key, content)
    return content + signature + len(signature).to_bytes(2, "big")


def read(message: bytes, key: PublicKey, kind: type[_H]) -> _H:
    """The head that the owner of `key` wrote; refused unless it is of this kind."""
    head = read_any(message, key)
    if not isinstance(head, kind):
        raise BadMessage(f"it is a message of kind {head.kind!r} where {kind.kind!r} is due")
    return head


def read_any(message: bytes, key: PublicKey) -> Head:
    """The head that the owner of `key` wrote; the signature is checked before anything else is read."""
    if len(message) > LONGEST_HEAD:
        raise BadMessage(f"its head is longer than {LONGEST_HEAD:,} bytes")
    if not message.startswith(MAGIC):
        raise BadMessage("it is not a message of this protocol and version")
    length = int.from_bytes(message[-2:], "big")
    content, signature = message[: -2 - length], message[-2 - length : -2]
    if len(content) <= len(MAGIC) or len(signature) != length or not 0 < length < 256:
        raise BadMessage("its signature is cut off")
    if not signed_by(key, content, signature):
        raise BadMessage("it is not signed by whom it should be from")
    return _parsed(content[len(MAGIC) :])


def head_hash(message: bytes) -> str:
    """The hash by which an answer names its order."""
    return sha256(message).hexdigest()


def _dump(head: Head) -> bytes:
    plain = {"kind": head.kind} | {field.name: getattr(head, field.name) for field in fields(head)}
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _parsed(content: bytes) -> Head:
    try:
        plain = json.loads(content)
        cls = KINDS[plain.pop("kind")]
        head = cls(**{name: _typed(value, _HINTS[cls][name]) for name, value in plain.items()})
        if not head.check() or _dump(head) != content:
            raise ValueError("a value is not as it must be")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadMessage(f"its head is not one of ours ({type(error).__name__})") from None
    return head


def _typed(value: Any, hint: Any) -> Any:
    """A JSON value as its field's type; TypeError if it has another type."""
    if hint == tuple[Vector, ...]:
        return tuple(_vector(item) for item in _list(value))
    if hint in (tuple[int, ...], tuple[str, ...]):
        return tuple(_list(value))
    kinds = tuple(getattr(hint, "__args__", ())) or (hint,)
    if hint == dict[str, float] | None:
        kinds = (dict, type(None))
    if type(value) not in kinds:
        raise TypeError(f"{type(value).__name__} where {hint} is due")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list or len(value) > 10_000:
        raise TypeError("no list, or too long a one")
    return value


def _vector(item: Any) -> Vector:
    name, dtype, length = _list(item)
    if not _word(name) or dtype not in WIDTHS or not _count(length):
        raise ValueError("no vector")
    return name, dtype, length


def _hexadecimal(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("(?:[0-9a-f]{2})+", value) is not None


def _word(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[\w.:/ -]{1,100}", name) is not None


def _version(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"\d{1,9}-\d{1,9}-\d{1,9}", name) is not None


def listed(vectors: Sequence[Vector]) -> str:
    return ", ".join(f"{name} {dtype}[{length}]" for name, dtype, length in vectors) or "none"


_HINTS: dict[type[Head], dict[str, Any]] = {
    cls: {k: v for k, v in get_type_hints(cls).items() if k != "kind"} for cls in KINDS.values()
}
