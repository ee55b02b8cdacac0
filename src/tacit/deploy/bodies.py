"""The body of a message: named vectors as raw numbers, one after the other, with exactly the lengths given in
the head. The head also holds the body's hash.

The body of an answer is encrypted with its own key, which stands in its head. This hides nothing from the
server, nor from whoever runs the SuperLink; it stops other clients from testing guesses. A SuperLink
identifies an object by the hash of its content, and tells any member whether it holds a given object. Without
encryption, a member that can compute another member's update with and without some record could ask which of
the two is there.

>>> body, names = pack({"delta": torch.ones(2)})
>>> names, body[:4].hex()
((('delta', 'f4', 2),), '0000803f')
>>> encrypt_(body, "00" * 32); encrypt_(body, "00" * 32)      # twice is not at all
>>> body[:4].hex()
'0000803f'
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from tacit.deploy.messages import WIDTHS, Answer, BadMessage, Body, TrainOrder, Vector, listed
from tacit.errors import UserError
from tacit.vector import Vectors

LONGEST_BODY = 1 << 36
DTYPES = {"f4": torch.float32, "i4": torch.int32, "i8": torch.int64, "u1": torch.uint8}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STRETCH = 1 << 20


def pack(vectors: Mapping[str, torch.Tensor]) -> tuple[bytearray, tuple[Vector, ...]]:
    """A body, and its description for the head. Vectors are sorted by name: a state read from a checkpoint
    does not remember the order in which it was made.
    """
    vectors = dict(sorted(vectors.items()))
    if sys.byteorder != "little":
        raise UserError("machines that number bytes from the other end are not supported")
    named = tuple((name, _NAMES[v.dtype], v.numel()) for name, v in vectors.items())
    body, at = bytearray(sum(WIDTHS[dtype] * length for _, dtype, length in named)), 0
    for vector in vectors.values():
        part: Any = vector.detach().contiguous().view(torch.uint8).numpy()
        memoryview(body)[at : at + part.size] = memoryview(part)
        at += part.size
    return body, named


def body_hash(body: bytes | bytearray) -> str:
    return sha256(body).hexdigest()


def unpack(body: Body, head: TrainOrder | Answer, expected: Sequence[Vector]) -> Vectors:
    """The vectors of a body, if the body is the one that its head names and the vectors are the expected
    ones.

    The body is fetched only after the head has been checked. The vectors may be written to.
    """
    if head.vectors != tuple(expected):
        raise BadMessage(f"its vectors are {listed(head.vectors)} where {listed(expected)} are due")
    size = sum(WIDTHS[dtype] * length for _, dtype, length in head.vectors)
    content = exact(body, size, head.body)
    key = head.key if isinstance(head, Answer) else None
    if key is not None:
        content = content if isinstance(content, bytearray) else bytearray(content)
        encrypt_(content, key)
    found, at = {}, 0
    for name, dtype, length in head.vectors:
        if isinstance(content, bytearray) and length and at % WIDTHS[dtype] == 0:  # no copy
            found[name] = torch.frombuffer(content, dtype=DTYPES[dtype], count=length, offset=at)
        else:
            found[name] = torch.empty(length, dtype=DTYPES[dtype])
            part = memoryview(content)[at : at + WIDTHS[dtype] * length]
            found[name].view(torch.uint8).numpy()[:] = part
        at += WIDTHS[dtype] * length
    return found


def exact(body: Body, size: int, digest: str) -> bytes | bytearray:
    """Fetch a body; refused unless it is the one that its head names."""
    if size > LONGEST_BODY:
        raise BadMessage(f"its body would have {size:,} bytes")
    content = body(size)
    if len(content) != size:
        raise BadMessage(f"its body has {len(content):,} bytes instead of {size:,}")
    if body_hash(content) != digest:
        raise BadMessage("its body is not the one that its head names")
    return content


def encrypt_(body: bytearray, key: str) -> None:
    """Encrypt or decrypt a body in place (AES-256 in counter mode); use each key for one body only."""
    stream = Cipher(AES(bytes.fromhex(key)), CTR(bytes(16))).encryptor()
    for at in range(0, len(body), _STRETCH):
        body[at : at + _STRETCH] = stream.update(bytes(memoryview(body)[at : at + _STRETCH]))
