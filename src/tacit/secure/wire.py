"""Messages as bytes, and back: each message has one encoding, and everything else is refused.

A message is a frozen dataclass whose annotations describe its fields: whole numbers of a fixed number of
bytes, bytes of fixed or any length, and tuples of these. There are no tags, no names and no options on the
wire. So two different byte strings never mean the same message, and a parser has no choices to make.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Hello:
...     number: U32
...     friends: tuple[U32, ...]
>>> encode(Hello(7, (1, 2))).hex()
'00000007000000020000000100000002'
>>> decode(Hello, encode(Hello(7, (1, 2))))
Hello(number=7, friends=(1, 2))
>>> decode(Hello, encode(Hello(7, ()))[:-1])
Traceback (most recent call last):
    ...
tacit.secure.wire.Refused: Hello: cut off
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from tacit.errors import UserError

U8 = Annotated[int, 1]
U32 = Annotated[int, 4]
U64 = Annotated[int, 8]
Bytes16 = Annotated[bytes, 16]
Bytes32 = Annotated[bytes, 32]

_LENGTH = 4
M = TypeVar("M")


class Refused(UserError):
    """A message that the protocol does not expect here and now; no part of it was used."""


def encode(message: Any) -> bytes:
    """The bytes of a message. `Refused` if a field is not what its annotation says."""
    out: list[bytes] = []
    for name, kind in _kinds(type(message)).items():
        _write(kind, getattr(message, name), out, f"{type(message).__name__}.{name}")
    return b"".join(out)


def decode(cls: type[M], data: bytes) -> M:
    """Decode the whole of these bytes as a message of class `cls`. Any other bytes are `Refused`.

    Time and memory are bounded by the length of `data`, whatever numbers it contains.
    """
    reader = _Reader(data, cls.__name__)
    values = {name: _read(kind, reader) for name, kind in _kinds(cls).items()}
    reader.finish()
    return cls(**values)


_FIELDS: dict[type, dict[str, Any]] = {}


def _kinds(cls: type) -> dict[str, Any]:
    if cls not in _FIELDS:
        hints = get_type_hints(cls, include_extras=True)
        _FIELDS[cls] = {field.name: hints[field.name] for field in fields(cls)}
    return _FIELDS[cls]


def _write(kind: Any, value: Any, out: list[bytes], where: str) -> None:
    origin = get_origin(kind)
    if origin is Annotated:
        base, size = get_args(kind)
        if type(value) is not base:
            raise Refused(f"{where}: {type(value).__name__} where {base.__name__} belongs")
        if base is int:
            if not 0 <= value < 1 << 8 * size:
                raise Refused(f"{where}: {value} does not fit into {size} bytes")
            out.append(value.to_bytes(size))
        else:
            if len(value) != size:
                raise Refused(f"{where}: {len(value)} bytes where {size} belong")
            out.append(value)
    elif kind is bytes:
        if type(value) is not bytes:
            raise Refused(f"{where}: {type(value).__name__} where bytes belong")
        _write(U32, len(value), out, where)
        out.append(value)
    else:
        assert origin is tuple, f"{where}: no encoding of {kind}"
        parts = get_args(kind)
        if type(value) is not tuple:
            raise Refused(f"{where}: {type(value).__name__} where a tuple belongs")
        if parts[-1] is Ellipsis:
            _write(U32, len(value), out, where)
            parts = (parts[0],) * len(value)
        if len(parts) != len(value):
            raise Refused(f"{where}: {len(value)} values where {len(parts)} belong")
        for part, item in zip(parts, value, strict=True):
            _write(part, item, out, where)


def _read(kind: Any, reader: _Reader) -> Any:
    origin = get_origin(kind)
    if origin is Annotated:
        base, size = get_args(kind)
        data = reader.take(size)
        return int.from_bytes(data) if base is int else data
    if kind is bytes:
        return reader.take(int.from_bytes(reader.take(_LENGTH)))
    parts = get_args(kind)
    if parts[-1] is Ellipsis:
        count = int.from_bytes(reader.take(_LENGTH))
        if count > reader.left:  # each item takes at least one byte
            raise Refused(f"{reader.what}: cut off")
        parts = (parts[0],) * count
    return tuple(_read(part, reader) for part in parts)


class _Reader:
    def __init__(self, data: bytes, what: str) -> None:
        if type(data) is not bytes:
            raise Refused(f"{what}: {type(data).__name__} where bytes belong")
        self._data, self._at, self.what = data, 0, what

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise Refused(f"{self.what}: cut off")
        self._at += count
        return self._data[self._at - count : self._at]

    def finish(self) -> None:
        if self.left:
            raise Refused(f"{self.what}: {self.left} bytes too many")
