"""The server can learn nothing but the sum. Masks and shares against an independent computation."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from secure_parties import Parties, identity, terms_for, uploads

from tacit.secure import Client, Server, client
from tacit.secure.masks import SECRET, combined, packed, packed_size, split, unpacked
from tacit.secure.messages import Masked, Unmask, opened
from tacit.secure.wire import Refused

FALSE_ALARM = 1e-9
"""Of each statistical test below; there are a few dozen of them."""


# --- an independent computation -------------------------------------------------------------------------


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869, one block of SHA-256."""
    extracted = hmac.new(salt, secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\1", hashlib.sha256).digest()


def counter_mode(key: bytes, count: int) -> bytes:
    """AES-256 of 0, 1, 2, …, block by block."""
    block = Cipher(AES(key), ECB()).encryptor()
    return b"".join(block.update(i.to_bytes(16)) for i in range(-(-count // 16)))[:count]


def times(a: int, b: int) -> int:
    """In GF(2¹²⁸) with x¹²⁸ + x⁷ + x² + x + 1."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a, b = a << 1, b >> 1
        if a >> 128:
            a ^= 1 << 128 | 0b10000111
    return product


def inverse(a: int) -> int:
    result, power = 1, 2**128 - 2
    while power:
        if power & 1:
            result = times(result, a)
        a, power = times(a, a), power >> 1
    return result


def interpolated(shares: dict[int, int]) -> int:
    """The polynomial through the shares at 0, by Lagrange."""
    total = 0
    for x, y in shares.items():
        for other in shares:
            if other != x:
                y = times(y, times(other, inverse(other ^ x)))
        total ^= y
    return total


class Tape:
    """Entropy that is remembered."""

    def __init__(self, seed: int) -> None:
        self._rng, self.drawn = np.random.default_rng(seed), []

    def __call__(self, count: int) -> bytes:
        self.drawn.append(self._rng.bytes(count))
        return self.drawn[-1]


@pytest.mark.parametrize(("bits", "width"), [(20, 4), (32, 4), (40, 8)])
def test_masked_uploads_are_what_another_hand_computes(bits: int, width: int) -> None:
    terms = terms_for(4, threshold=3, length=23, bits=bits)
    parties, tapes, vectors = Parties(terms), {n: Tape(n) for n in range(4)}, uploads(terms)
    parties.clients = {n: Client(n, identity(n), parties.roster, terms, tapes[n]) for n in range(4)}
    parties.masked(vectors)
    name = b"tacit secure aggregation 1: "
    seeds = {n: tape.drawn[0] for n, tape in tapes.items()}
    private = {
        n: X25519PrivateKey.from_private_bytes(
            hkdf(tape.drawn[1], terms.digest, name + b"mask private key\0")
        )
        for n, tape in tapes.items()
    }
    public = {n: key.public_key().public_bytes_raw() for n, key in private.items()}

    def mask(secret: bytes, info: bytes) -> list[int]:
        stream = counter_mode(hkdf(secret, terms.digest, name + info), 23 * width)
        return [int.from_bytes(stream[i : i + width], "little") for i in range(0, len(stream), width)]

    for n in range(4):
        y = [int(x) for x in vectors[n]]
        y = [a + b for a, b in zip(y, mask(seeds[n], b"own mask\0"), strict=True)]
        for m in set(range(4)) - {n}:
            secret = private[n].exchange(X25519PublicKey.from_public_bytes(public[m]))
            pair = mask(secret, b"pair mask\0" + min(public[n], public[m]) + max(public[n], public[m]))
            y = [a + (b if n < m else -b) for a, b in zip(y, pair, strict=True)]
        number = sum(value % 2**bits << bits * i for i, value in enumerate(y))
        _, sent = opened(Masked, terms, parties.roster, parties.heard["masked"][n])
        assert sent.vector == number.to_bytes(-(-23 * bits // 8), "little")


def test_shares_are_points_of_a_polynomial_through_the_secret() -> None:
    secret = bytes(range(16))
    shares = split(secret, 4, 7)
    for places in itertools.combinations(range(7), 4):
        assert combined({p: shares[p] for p in places}) == secret
    for places in ((0, 1, 2, 3), (1, 3, 4, 6)):
        points = {p + 1: int.from_bytes(shares[p]) for p in places}
        assert interpolated(points).to_bytes(16) == secret
    assert combined({p: shares[p] for p in range(3)}) != secret
    assert split(secret, 1, 1) == [secret] == split(secret, 1, 2)[:1]


def test_what_clients_reveal_are_shares_of_seeds_or_keys_and_never_both() -> None:
    terms = terms_for(5, threshold=3)
    parties, tapes = Parties(terms, {"masked": {1}}), {n: Tape(10 + n) for n in range(5)}
    parties.clients = {n: Client(n, identity(n), parties.roster, terms, tapes[n]) for n in range(5)}
    parties.sum(uploads(terms))
    shares: dict[str, dict[int, dict[int, int]]] = {"seeds": {}, "keys": {}}
    for n, data in parties.heard["unmask"].items():
        _, message = opened(Unmask, terms, parties.roster, data)
        for kind, revealed in (("seeds", message.seeds), ("keys", message.keys)):
            for of, share in revealed:
                shares[kind].setdefault(of, {})[n + 1] = int.from_bytes(share)
    assert shares["seeds"].keys() == {0, 2, 3, 4} and shares["keys"].keys() == {1}
    assert all(interpolated(s).to_bytes(16) == tapes[n].drawn[0] for n, s in shares["seeds"].items())
    assert interpolated(shares["keys"][1]).to_bytes(16) == tapes[1].drawn[1]
    assert all(len(draw) == SECRET for tape in tapes.values() for draw in tape.drawn[:2])


# --- the server cannot tell inputs with equal sums apart ------------------------------------------------


def _transcripts(
    monkeypatch: pytest.MonkeyPatch, inputs: list[int], absent: set[int], colluding: set[int]
) -> Counter[tuple[int, ...]]:
    """How often the server sees what, over all masks of one bit for three clients: every own mask and every
    pair once. It sees the masked uploads, own masks of those who arrived, pairs of those who did not, and
    whatever colluders know: their pairs and their uploads.
    """
    pairs, numbers = [(0, 1), (0, 2), (1, 2)], range(3)
    seen: Counter[tuple[int, ...]] = Counter()
    parties = Parties(terms_for(3, threshold=2, length=1, bits=1))
    there = [n for n in numbers if n not in absent]
    parties.step("advertise", {n: c.advertise for n, c in parties.clients.items()})
    keys = parties.server.keys()
    parties.step("shares", {n: lambda c=c: c.share_keys(keys) for n, c in parties.clients.items()})
    deliveries = parties.server.deliveries()
    for values in itertools.product((0, 1), repeat=6):
        own, pair = dict(zip(numbers, values, strict=False)), dict(zip(pairs, values[3:], strict=True))
        sent = []
        for n in there:
            # The order in which `masked_input` asks for masks: its own, then each neighbour's.
            masks: Iterator[int] = iter([own[n], *(pair[min(n, m), max(n, m)] for m in numbers if m != n)])

            def add(into: np.ndarray, key: bytes, minus: bool = False, masks: Iterator[int] = masks) -> None:
                into += np.uint32(-next(masks) % 2**32 if minus else next(masks))

            monkeypatch.setattr(client, "add_mask_", add)
            parties.clients[n]._step = 2
            data = parties.clients[n].masked_input(deliveries[n], np.array([inputs[n]]))
            sent.append(opened(Masked, parties.terms, parties.roster, data)[1].vector[0])
        known = [own[n] for n in there] + [pair[p] for p in pairs if set(p) & (absent | colluding)]
        known += [inputs[n] for n in colluding]
        seen[(*sent, *known)] += 1
    return seen


@pytest.mark.parametrize(("absent", "colluding"), [(set(), set()), ({1}, set()), (set(), {1})])
def test_exactly_the_same_transcripts_for_inputs_with_equal_sums(
    monkeypatch: pytest.MonkeyPatch, absent: set[int], colluding: set[int]
) -> None:
    """Not a statistical test: over all masks, each transcript is equally often seen for either input. Numbers
    modulo 2, so −1 is 1. Other sums give other transcripts, or the test could not fail.
    """
    one, same, other = [-1, 0, 0], [0, 0, -1], [-1, 0, -1]
    seen = {str(x): _transcripts(monkeypatch, x, absent, colluding) for x in (one, same, other)}
    assert seen[str(one)] == seen[str(same)]
    assert not seen[str(one)].keys() & seen[str(other)].keys()


def test_a_whole_transcript_looks_the_same_for_inputs_with_equal_sums() -> None:
    """All masked uploads, less the own masks that the server learns: each, and each difference of two, is
    uniform for either input, though the inputs are as different as can be. χ² with a stated false alarm.
    """
    terms = terms_for(4, threshold=3, length=40_000, bits=8)
    zeros = np.zeros(terms.length, np.int64)
    one = {0: zeros + 100, 1: zeros - 100, 2: zeros, 3: zeros}
    other = {0: zeros, 1: zeros, 2: zeros, 3: zeros}
    for vectors in (one, other):
        parties = Parties(terms)
        assert not parties.sum(vectors).any()
        raw = {
            n: np.frombuffer(opened(Masked, terms, parties.roster, data)[1].vector, np.uint8)
            for n, data in parties.heard["masked"].items()
        }
        bare = {n: _without_own_mask(parties.server, n, y) for n, y in raw.items()}
        total = sum(y.astype(np.int64) for y in bare.values()) % 256
        assert not total.any()  # with its own masks gone, only the pairs are left: they cancel
        for group in (raw, bare):
            for n in group:
                _uniform(group[n])
            for a, b in itertools.combinations(group, 2):
                _uniform(group[a] - group[b])
                if len(group) > 2:
                    _uniform(group[a] + group[b])


def _without_own_mask(server: Server, number: int, masked: np.ndarray) -> np.ndarray:
    from tacit.secure.masks import add_mask_, own_key

    wide = masked.astype(np.uint32)
    add_mask_(wide, own_key(server._seed_of(number), server.terms.digest), minus=True)
    return wide.astype(np.uint8)


def _uniform(values: np.ndarray) -> None:
    counts = np.bincount(values, minlength=256)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_the_uniformity_test_would_notice() -> None:
    """Masks that were used twice, or not at all, fail it."""
    rng = np.random.default_rng(0)
    with pytest.raises(AssertionError):
        _uniform(np.full(40_000, 7, np.uint8))
    with pytest.raises(AssertionError):
        _uniform(rng.integers(0, 250, 40_000).astype(np.uint8))


def test_nothing_repeats_between_two_attempts_at_a_round() -> None:
    heard = []
    for _ in range(2):
        parties = Parties(terms_for(3, threshold=2, length=100))
        parties.sum({n: np.zeros(100, np.int64) for n in range(3)})
        heard.append({stage: set(said.values()) for stage, said in parties.heard.items()})
    assert all(not heard[0][stage] & heard[1][stage] for stage in heard[0])


# --- packing --------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 64), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=70))
def test_packing_is_undone_and_is_the_plain_concatenation_of_bits(bits: int, numbers: list[int]) -> None:
    kind = np.uint32 if bits <= 32 else np.uint64
    values = np.array([n % (1 << 8 * np.dtype(kind).itemsize) for n in numbers], kind)
    data = packed(values, bits)
    whole = sum((int(v) % (1 << bits)) << bits * i for i, v in enumerate(values))
    assert data == whole.to_bytes(packed_size(len(values), bits), "little")
    back = unpacked(data, len(values), bits)
    assert back.dtype == kind and [int(v) for v in back] == [int(v) % (1 << bits) for v in values]


def test_long_vectors_are_packed_in_parts() -> None:
    rng = np.random.default_rng(1)
    for bits in (1, 7, 22, 33):
        kind = np.uint32 if bits <= 32 else np.uint64
        values = rng.integers(0, 1 << bits, 150_001).astype(kind)
        assert np.array_equal(unpacked(packed(values, bits), len(values), bits), values)


def test_packed_vectors_of_another_length_or_with_bits_left_over_are_refused() -> None:
    data = packed(np.arange(5, dtype=np.uint32), 7)
    for wrong in (data[:-1], data + b"\0", data[:-1] + bytes([data[-1] | 0x80])):
        with pytest.raises(Refused):
            unpacked(wrong, 5, 7)
