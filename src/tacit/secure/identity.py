"""Identities: long-term keys of clients, and the roster that every client holds.

Keys are on NIST's curves P-256 and P-384, in OpenSSH's format, like the keys of Flower's clients; signatures
are ECDSA. The roster comes from the owners, not from the server, so it contains no key that the server
invented.

>>> mine = ec.generate_private_key(ec.SECP256R1())
>>> roster = Roster({4: mine.public_key()})
>>> roster.verify(4, sign(mine, b"hello"), b"hello")
>>> roster.verify(4, sign(mine, b"hello"), b"Hello")
Traceback (most recent call last):
    ...
tacit.secure.wire.Refused: client 4: the signature is not its own
"""

from __future__ import annotations

from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, HashAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from tacit.errors import UserError
from tacit.secure.wire import Refused

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
_HASHES: dict[str, type[HashAlgorithm]] = {"secp256r1": SHA256, "secp384r1": SHA384}


class Roster:
    """The public keys of a federation's clients, by number."""

    def __init__(self, keys: Mapping[int, PublicKey]) -> None:
        for number, key in keys.items():
            _hash(key.curve, f"client {number}")
        points = [key.public_numbers() for key in keys.values()]
        if len(set(points)) != len(points):
            raise UserError("two clients of the roster have the same key; each needs one of its own")
        self._keys = dict(keys)

    @classmethod
    def read(cls, lines: Mapping[int, bytes]) -> Roster:
        """A roster from OpenSSH public keys such as `ecdsa-sha2-nistp384 AAAA… name`."""
        keys = {}
        for number, line in lines.items():
            try:
                key = load_ssh_public_key(line)
            except (ValueError, UnsupportedAlgorithm) as error:
                raise UserError(f"client {number}: not an OpenSSH public key ({error})") from None
            if not isinstance(key, PublicKey):
                raise UserError(f"client {number}: make its key with `ssh-keygen -t ecdsa -b 384`")
            keys[number] = key
        return cls(keys)

    def verify(self, number: int, signature: bytes, content: bytes) -> None:
        """`Refused` unless client `number` signed this."""
        key = self._keys.get(number)
        if key is None:
            raise Refused(f"client {number} is not in the roster")
        try:
            key.verify(signature, content, ec.ECDSA(_hash(key.curve, f"client {number}")))
        except InvalidSignature:
            raise Refused(f"client {number}: the signature is not its own") from None


def sign(key: PrivateKey, content: bytes) -> bytes:
    """An ECDSA signature with the hash that belongs to the key's curve."""
    return key.sign(content, ec.ECDSA(_hash(key.curve, "this client")))


def _hash(curve: ec.EllipticCurve, whose: str) -> HashAlgorithm:
    kind = _HASHES.get(curve.name)
    if kind is None:
        raise UserError(f"{whose}: keys are on the curves P-256 or P-384, not {curve.name}")
    return kind()
