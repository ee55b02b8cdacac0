"""A ledger as the lines of its file: each has the hash of the one before it, and is whole or refused."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from tacit.errors import UserError
from tacit.privacy.charges import Carried, Charge, Contents, Header, Part
from tacit.privacy.events import plain_event, read_event
from tacit.reading import from_json

VERSION = 2


def parse(path: Path, content: bytes) -> Contents:
    first, *lines = content.split(b"\n")
    _refuse_first_version(path, first)
    damaged = f"{path}: line {{}} is damaged, so nobody can say what was spent; restore the file"
    try:
        plain, digest = _checked(first, "")
        header = _read_header(plain)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: line 1 is not a ledger's; restore the file, or start a new run") from error
    contents = Contents(path, header, [], [digest])
    for number, line in enumerate(lines, start=2):
        final = number == len(lines) + 1
        if final and not line:
            break
        if final:  # no line's end: the disk, or a kill, cut it off
            rounds = [charge.round for charge in contents.charges if charge.carried is None]
            contents.charges.append(Charge(max(rounds, default=-1) + 1, (header.costliest,), truncated=True))
            contents.hashes.append("")
            break
        try:
            plain, digest = _checked(line, contents.hashes[-1])
            contents.charges.append(_read_charge(plain))
            contents.hashes.append(digest)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(damaged.format(number)) from error
    if not lines:
        raise UserError(f"{path}: line 1 is cut off, so nobody can say what was spent; restore the file")
    return contents


def _refuse_first_version(path: Path, line: bytes) -> None:
    try:
        version = from_json(line).get("ledger")
    except (ValueError, AttributeError):
        return
    if version not in (None, VERSION):
        raise UserError(
            f"{path} was written by another version of this program (ledger {version}, not {VERSION}). "
            "Ledgers of version 1 belong to noise that could be told from the data; start a new run"
        )


def line_of(plain: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    """A line of the file, and its hash."""
    body = {"after": before, "nonce": secrets.token_hex(8), **plain}
    digest = sha256(_dump(body)).hexdigest()
    return _dump(body | {"hash": digest}) + b"\n", digest


def _checked(line: bytes, before: str) -> tuple[dict[str, Any], str]:
    """A line's values and its hash; ValueError if a single byte is not as it was written."""
    plain = from_json(line)
    if type(plain) is not dict or _dump(plain) != line:
        raise ValueError("not as this program writes it")
    digest = plain.pop("hash")
    if sha256(_dump(plain)).hexdigest() != digest or plain.pop("after") != before:
        raise ValueError("its hash, or that of the line before it, is another")
    _typed(plain.pop("nonce"), str)
    return plain, digest


def _dump(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()


def plain_header(header: Header) -> dict[str, Any]:
    return {
        "ledger": VERSION,
        "id": header.id,
        "unit": header.unit,
        "delta": header.delta,
        "data": header.data,
        "simulation": header.simulation,
        "costliest": _plain_part(header.costliest),
    }


def _read_header(plain: dict[str, Any]) -> Header:
    kinds = {"id": str, "unit": str, "delta": float, "data": str, "simulation": bool}
    values = {name: _typed(plain.pop(name), kind) for name, kind in kinds.items()}
    costliest = _read_part(plain.pop("costliest"))
    if plain.keys() != {"ledger"}:
        raise ValueError(f"unknown keys {plain.keys() - {'ledger'}}")
    return Header(costliest=costliest, **values)


def plain_charge(charge: Charge) -> dict[str, Any]:
    plain: dict[str, Any] = {"round": charge.round}
    if charge.truncated:
        plain["truncated"] = True
    if charge.carried is not None:
        plain["carried"] = {
            "ledger": charge.carried.ledger,
            "head": charge.carried.head,
            "rounds": charge.carried.rounds,
        }
    return plain | {"parts": [_plain_part(part) for part in charge.parts]}


def _read_charge(plain: dict[str, Any]) -> Charge:
    number = _typed(plain.pop("round"), int)
    truncated = _typed(plain.pop("truncated", False), bool)
    carried = plain.pop("carried", None)
    parts = tuple(_read_part(part) for part in _typed(plain.pop("parts"), list))
    if plain or number < -1:
        raise ValueError(f"unknown keys {plain.keys()}")
    if carried is not None:
        kinds = {"ledger": str, "head": str, "rounds": int}
        if _typed(carried, dict).keys() != kinds.keys():
            raise ValueError(f"carried has {kinds.keys()}")
        carried = Carried(**{name: _typed(carried[name], kind) for name, kind in kinds.items()})
    return Charge(number, parts, truncated, carried)


def _plain_part(part: Part) -> dict[str, Any]:
    plain: dict[str, Any] = {"event": plain_event(part.event), "steps": part.steps}
    if part.clients is not None:
        plain["clients"] = list(part.clients)
    return plain


def _read_part(plain: Mapping[str, Any]) -> Part:
    if _typed(plain, dict).keys() - {"clients"} != {"event", "steps"}:
        raise ValueError(f"a part has an event, steps and perhaps clients, not {plain.keys()}")
    steps, clients = _typed(plain["steps"], int), plain.get("clients")
    if steps < 0:
        raise ValueError("steps are counted from 0")
    if "clients" in plain:
        clients = tuple(_typed(client, int) for client in _typed(clients, list))
    return Part(read_event(_typed(plain["event"], dict)), steps, clients)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not a {kind.__name__}")
    return value
