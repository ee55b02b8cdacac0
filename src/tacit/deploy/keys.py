"""Keys and certificates: they identify a party, and prove that a message is from that party.

Every party in a federation, including the server, has one key pair on the NIST curve P-384, in OpenSSH's
format. The SHA-256 of the public key identifies the party. Messages are signed with the key (ECDSA, SHA-384).
For TLS, the federation has its own certificate authority. All primitives come from `cryptography`.
"""

from __future__ import annotations

import hmac
import os
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tacit.errors import UserError
from tacit.reading import read_bytes, read_text

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
_SIGNATURE = ec.ECDSA(hashes.SHA384())
YEARS = 10


def fingerprint(key: PublicKey) -> str:
    """The identity of a key's owner: the SHA-256 of the key's DER form."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def sign(key: PrivateKey, content: bytes) -> bytes:
    return key.sign(content, _SIGNATURE)


def signed_by(key: PublicKey, content: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, content, _SIGNATURE)
    except InvalidSignature:
        return False
    return True


def keyed_hash(key: PrivateKey, content: bytes) -> str:
    """A hash that nobody can compute without the key (HMAC-SHA256)."""
    secret = key.private_numbers().private_value.to_bytes(48)
    return hmac.new(b"tacit 1: keyed hash\0" + secret, content, sha256).hexdigest()


def new_key(file: Path) -> PrivateKey:
    """Create a key pair: `file`, which only its owner may read, and `file`.pub beside it."""
    key = ec.generate_private_key(ec.SECP384R1())
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    write_new(file, key.private_bytes(encoding, form, serialization.NoEncryption()), 0o600)
    write_new(file.with_name(f"{file.name}.pub"), f"{public_text(key.public_key())}\n".encode())
    return key


def read_key(file: Path) -> PrivateKey:
    try:
        key = serialization.load_ssh_private_key(read_bytes(file), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{file}: this private key cannot be read ({error})") from None
    if not isinstance(key, PrivateKey) or key.curve.name != "secp384r1":
        raise UserError(f"{file}: keys are on the curve P-384; `ssh-keygen -t ecdsa -b 384` makes one")
    return key


def read_public_file(file: Path) -> PublicKey:
    try:
        return read_public(read_text(file))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: this public key cannot be read ({error})") from None


def public_text(key: PublicKey) -> str:
    """A public key as one line, in OpenSSH's format."""
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return key.public_bytes(encoding, form).decode()


def read_public(text: str) -> PublicKey:
    """The key on a line; ValueError if it is not of our kind."""
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not isinstance(key, PublicKey) or key.curve.name != "secp384r1":
        raise ValueError("keys are on the curve P-384")
    return key


def new_authority(key_file: Path, certificate_file: Path) -> None:
    """A certificate authority for one federation, which signs only for that federation."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tacit federation")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = _usage(sign=True)
    builder = _certificate(name, name, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True).add_extension(identifier, critical=False)
    _write_pair(key, builder.sign(key, hashes.SHA384()), key_file, certificate_file)


def new_certificate(folder: Path, hosts: list[str], authority: tuple[Path, Path], name: str) -> None:
    """A server's certificate for these hosts (names or addresses): `name`.key and `name`.crt."""
    signer = serialization.load_pem_private_key(authority[0].read_bytes(), None)
    issuer = x509.load_pem_x509_certificate(authority[1].read_bytes())
    assert isinstance(signer, PrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    builder = _certificate(subject, issuer.subject, key.public_key())
    known = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(sign=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([_host(host) for host in hosts]), False),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known), False),
    ):
        builder = builder.add_extension(extension, critical)
    certificate = builder.sign(signer, hashes.SHA384())
    _write_pair(key, certificate, folder / f"{name}.key", folder / f"{name}.crt")


def write_new(file: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file that must not exist yet."""
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise UserError(f"{file} is there already and is not overwritten; choose another folder") from None
    with os.fdopen(fd, "wb") as stream:
        stream.write(content)


def _certificate(subject: x509.Name, issuer: x509.Name, key: PublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
    builder = builder.serial_number(x509.random_serial_number())
    # Valid from an hour ago: the owners' clocks differ.
    builder = builder.not_valid_before(now - timedelta(hours=1))
    return builder.not_valid_after(now + timedelta(days=365 * YEARS))


def _usage(sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign,
        crl_sign=sign,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_pair(key: PrivateKey, certificate: x509.Certificate, key_file: Path, file: Path) -> None:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    write_new(key_file, key.private_bytes(encoding, form, serialization.NoEncryption()), 0o600)
    write_new(file, certificate.public_bytes(encoding))
