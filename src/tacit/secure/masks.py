"""Keys, masks and sealed shares. All primitives are OpenSSL's (`cryptography`) and PyCryptodome's.

- X25519 gives two clients a common secret; HKDF-SHA256 derives keys from it, one for each purpose, bound to
  the round's terms and to both public keys;
- AES-256 in counter mode expands a key to a mask: uniform numbers modulo 2³² or 2⁶⁴. Uploads keep as many low
  bits of it as their terms say. A mask modulo 2⁶⁴ is also one modulo 2ᵇ, so sums come out the same;
- AES-256-GCM seals shares, each with a key that is used only once;
- Shamir's secret sharing over GF(2¹²⁸) splits secrets of 128 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from tacit.secure.wire import Refused

Lanes = NDArray[np.uint32] | NDArray[np.uint64]
SECRET = 16
"""Bytes of a shared secret."""
_CHUNK = 1 << 19
_ZEROS = bytes(_CHUNK)
_ONCE = bytes(12)
"""The GCM nonce: each sealing key is used for one message only."""


def derived(secret: bytes, terms: bytes, purpose: bytes, *parts: bytes) -> bytes:
    """32 bytes for one purpose, bound to the round's terms and to `parts`, which have fixed lengths."""
    info = b"tacit secure aggregation 1: " + purpose + b"\0" + b"".join(parts)
    return HKDF(SHA256(), 32, salt=terms, info=info).derive(secret)


def mask_private(seed: bytes, terms: bytes) -> X25519PrivateKey:
    """The private mask key derived from a shared secret."""
    return X25519PrivateKey.from_private_bytes(derived(seed, terms, b"mask private key"))


def commitment(seed: bytes, terms: bytes) -> bytes:
    """A hiding and binding commitment to the seed of a client's own mask, which has 128 bits."""
    return derived(seed, terms, b"commitment")


def public_bytes(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def pair_key(mine: X25519PrivateKey, theirs: bytes, terms: bytes) -> bytes:
    """The key of the mask between two clients; both compute the same."""
    first, second = sorted((public_bytes(mine), theirs))
    return derived(_agreed(mine, theirs), terms, b"pair mask", first, second)


def own_key(seed: bytes, terms: bytes) -> bytes:
    """The key of a client's own mask."""
    return derived(seed, terms, b"own mask")


def _agreed(mine: X25519PrivateKey, theirs: bytes) -> bytes:
    try:
        return mine.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:
        raise Refused("a public key is a point of low order, with which nothing can be kept secret") from None


# --- masks ----------------------------------------------------------------------------------------------


def lanes(values: NDArray[np.int64], bits: int) -> Lanes:
    """Whole numbers modulo 2³² or 2⁶⁴, as a copy."""
    unsigned = values.astype(np.uint64)
    return unsigned.astype(np.uint32) if bits <= 32 else unsigned


def add_mask_(into: Lanes, key: bytes, minus: bool = False) -> None:
    """Add or subtract the mask of a key, modulo the lanes' size; the key must have no other use."""
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
    step = _CHUNK // into.itemsize
    for start in range(0, len(into), step):
        part = into[start : start + step]
        mask = np.frombuffer(stream.update(memoryview(_ZEROS)[: part.nbytes]), into.dtype)
        (np.subtract if minus else np.add)(part, mask, out=part)


def packed(values: Lanes, bits: int) -> bytes:
    """The low `bits` of each number, one after the other, lowest bit first."""
    if bits == 8 * values.itemsize:
        return values.astype(values.dtype.newbyteorder("<")).tobytes()
    out = []
    for start in range(0, len(values), _CHUNK // 8):  # a multiple of 8, so parts end with whole bytes
        part = values[start : start + _CHUNK // 8]
        as_bytes = part.astype(part.dtype.newbyteorder("<")).view(np.uint8).reshape(len(part), -1)
        every_bit = np.unpackbits(as_bytes, axis=1, bitorder="little", count=bits)
        out.append(np.packbits(every_bit, bitorder="little").tobytes())
    return b"".join(out)


def unpacked(data: bytes, length: int, bits: int) -> Lanes:
    """The numbers that `packed` wrote; `Refused` unless the length is exact and the unused bits are zero."""
    if len(data) != packed_size(length, bits):
        raise Refused(f"{len(data):,} bytes are not {length:,} numbers of {bits} bits")
    kind = np.dtype(np.uint32 if bits <= 32 else np.uint64)
    if bits == 8 * kind.itemsize:
        return np.frombuffer(data, kind.newbyteorder("<")).astype(kind)
    values = np.empty(length, kind)
    step = _CHUNK // 8
    for start in range(0, length, step):
        count = min(step, length - start)
        raw = np.frombuffer(data, np.uint8, -(-count * bits // 8), start * bits // 8)
        every_bit = np.unpackbits(raw, bitorder="little")
        if every_bit[count * bits :].any():
            raise Refused("there are bits after the last number")
        wide = np.zeros((count, kind.itemsize), np.uint8)
        few = np.packbits(every_bit[: count * bits].reshape(count, bits), axis=1, bitorder="little")
        wide[:, : few.shape[1]] = few
        values[start : start + count] = wide.view(kind.newbyteorder("<"))[:, 0]
    return values


def packed_size(length: int, bits: int) -> int:
    """Bytes that this many numbers take."""
    return -(-length * bits // 8)


def centred(values: Lanes, bits: int) -> NDArray[np.int64]:
    """Numbers modulo 2^bits, mapped to −2^(bits−1) … 2^(bits−1) − 1."""
    spare = np.uint64(64 - bits)
    return (values.astype(np.uint64) << spare).view(np.int64) >> np.int64(spare)


# --- shares ---------------------------------------------------------------------------------------------


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Shares for this many holders: any `threshold` of them give the secret, fewer give nothing."""
    shares = Shamir.split(threshold, holders, secret, ssss=False)
    return [bytes(share) for _, share in sorted(shares)]


def combined(shares: Mapping[int, bytes]) -> bytes:
    """The secret from enough shares, keyed by their holders' places, counted from 0."""
    return bytes(Shamir.combine([(place + 1, share) for place, share in shares.items()], ssss=False))


def seal(mine: X25519PrivateKey, theirs: bytes, terms: bytes, content: bytes) -> bytes:
    """Encrypt for one other client; only once for each pair of keys and direction."""
    return AESGCM(_sealing(mine, theirs, terms, public_bytes(mine), theirs)).encrypt(_ONCE, content, terms)


def unseal(mine: X25519PrivateKey, theirs: bytes, terms: bytes, box: bytes) -> bytes:
    """What the other client sealed; `Refused` if it did not, or if it is not for this client and round."""
    try:
        return AESGCM(_sealing(mine, theirs, terms, theirs, public_bytes(mine))).decrypt(_ONCE, box, terms)
    except InvalidTag:
        raise Refused(
            "a sealed share was not made for this client and round by whom the server says"
        ) from None


def _sealing(mine: X25519PrivateKey, theirs: bytes, terms: bytes, *direction: bytes) -> bytes:
    return derived(_agreed(mine, theirs), terms, b"seal", *direction)


def pieces(content: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Content cut into parts of these sizes; `Refused` if it has another length."""
    if len(content) != sum(sizes):
        raise Refused("a sealed share has another length")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [content[start : start + size] for start, size in zip(starts, sizes, strict=True)]
