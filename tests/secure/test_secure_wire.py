"""Malformed messages: fuzzed, cut, extended, of wrong types."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_parties import Parties, identity, terms_for, uploads

from tacit.secure import Agreement, Client, Delivery, Keys, Refused, Server, Survivors, Terms, decode, encode
from tacit.secure.messages import Advertise, Agreed, Masked, Shares, Signed, Unmask
from tacit.secure.wire import U8, U32, Bytes16

FUZZED = 10_000
CLASSES = (Terms, Signed, Advertise, Shares, Masked, Agreed, Unmask, Keys, Delivery, Survivors, Agreement)


def _mutated(rng: np.random.Generator, data: bytes, others: list[bytes]) -> bytes:
    what = rng.integers(6)
    at = int(rng.integers(len(data) + 1))
    if what == 0:
        return data[:at]
    if what == 1:
        return data[:at] + rng.bytes(int(rng.integers(1, 9))) + data[at:]
    if what == 2:
        return data[:at] + rng.bytes(int(rng.integers(1, 9))) + data[at + 4 :]
    if what == 3:
        return data[:at] + others[int(rng.integers(len(others)))][at:]
    if what == 4:  # a length that promises the world
        return data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :]
    return rng.bytes(int(rng.integers(200)))


def test_fuzzed_messages_raise_nothing_but_a_refusal() -> None:
    """At each stage, mutations of real messages go to the server; the round then ends as if nothing was."""
    rng, started = np.random.default_rng(5), time.process_time()
    terms = terms_for(4, threshold=3, bits=20)
    parties, vectors, taken = Parties(terms), uploads(terms), 0
    real: list[bytes] = []
    original = parties.server.receive

    def attacked(data: bytes) -> int:
        nonlocal taken
        real.append(data)
        for _ in range(FUZZED // 20):  # five stages of four messages
            wrong = _mutated(rng, data, real)
            if wrong in real:
                continue
            with pytest.raises(Refused):
                original(wrong)
            taken += 1
        return original(data)

    parties.server.receive = attacked  # type: ignore[method-assign]
    assert np.array_equal(parties.sum(vectors), sum(vectors.values()))
    assert taken > 0.95 * FUZZED
    assert time.process_time() - started < 60


def test_fuzzed_bytes_are_no_messages_for_clients_either() -> None:
    rng = np.random.default_rng(6)
    terms = terms_for(4, threshold=3)
    parties = Parties(terms)
    parties.sum(uploads(terms))
    real = [encode(terms), *(data for said in parties.heard.values() for data in said.values())]
    real += [encode(d) for d in parties.deliveries.values()]
    for _ in range(FUZZED):
        data = _mutated(rng, real[int(rng.integers(len(real)))], real)
        for cls in (CLASSES[int(rng.integers(len(CLASSES)))],):
            try:
                message = decode(cls, data)
            except Refused:
                continue
            assert encode(message) == data  # what is read is exactly what was written


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CLASSES), st.binary(max_size=300))
def test_any_bytes_are_the_encoding_of_what_they_decode_to(cls: type, data: bytes) -> None:
    try:
        message = decode(cls, data)
    except Refused:
        return
    assert encode(message) == data


def test_every_prefix_and_extension_of_a_message_is_refused() -> None:
    terms = terms_for(5)
    for message in (
        terms,
        Shares(((1, b"abc"), (2, b""))),
        Unmask(((1, bytes(16)),), ((2, bytes(16)), (3, bytes(16)))),
        Delivery((1, 2), ((1, b"x"),)),
        Keys((b"", b"ab")),
    ):
        data = encode(message)
        assert decode(type(message), data) == message
        for end in range(len(data)):
            with pytest.raises(Refused):
                decode(type(message), data[:end])
        with pytest.raises(Refused, match="too many"):
            decode(type(message), data + b"\0")


@dataclass(frozen=True)
class Sample:
    small: U8
    numbers: tuple[U32, ...]
    fixed: Bytes16
    pair: tuple[U32, bytes]


GOOD = {"small": 3, "numbers": (1, 2), "fixed": bytes(16), "pair": (1, b"x")}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("small", 256),
        ("small", -1),
        ("small", True),
        ("small", 3.0),
        ("small", "3"),
        ("numbers", [1, 2]),
        ("numbers", (1, None)),
        ("numbers", (2**32,)),
        ("fixed", bytes(15)),
        ("fixed", bytearray(16)),
        ("fixed", "x" * 16),
        ("pair", (1,)),
        ("pair", (1, b"x", 2)),
        ("pair", (b"x", 1)),
        ("pair", None),
    ],
)
def test_wrong_types_and_sizes_are_not_written(name: str, wrong: object) -> None:
    assert decode(Sample, encode(Sample(**GOOD))) == Sample(**GOOD)
    with pytest.raises(Refused, match=f"Sample.{name}"):
        encode(Sample(**GOOD | {name: wrong}))


@pytest.mark.parametrize("data", [None, "text", 7, bytearray(4), memoryview(b"abcd")])
def test_only_bytes_are_read(data: object) -> None:
    with pytest.raises(Refused):
        decode(Survivors, data)
    server = Server(terms_for(2), Parties(terms_for(2)).roster)
    with pytest.raises(Refused):
        server.receive(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"members": ()},
        {"members": (1, 1, 2)},
        {"length": 0},
        {"bits": 0},
        {"bits": 65},
        {"threshold": 0},
        {"threshold": 5},
        {"threshold": 11},
        {"threshold": 6, "colluding": 2},
        {"threshold": 10, "colluding": 10},
    ],
)
def test_terms_that_protect_nobody_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(Refused):
        terms_for(10, **changes)


def test_members_out_of_order_are_refused_on_the_wire() -> None:
    data = bytearray(encode(terms_for(2)))
    at = data.index(b"\0\0\0\0\0\0\0\1", 16 + 8 + 8 + 32 + 32)  # the numbers 0 and 1
    data[at : at + 8] = b"\0\0\0\1\0\0\0\0"
    with pytest.raises(Refused, match="in order"):
        decode(Terms, bytes(data))


def test_who_is_not_a_member_has_no_part() -> None:
    terms = terms_for(3)
    with pytest.raises(Refused, match="not a member"):
        Client(7, identity(7), Parties(terms).roster, terms)
