"""The members of a federation: numbers, keys, and how many records each owner claims.

`roster.json` in the server's folder. Clients are numbered in the order in which they joined and never lose
their number. A run covers the first N of them. So its population, which its guarantee counts as public, is
frozen while others join for the next run. A member who is removed keeps the number and counts as absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tacit.deploy.keys import PublicKey, fingerprint, public_text, read_public
from tacit.errors import UserError
from tacit.federation.files import sealed, unsealed, write_atomically
from tacit.reading import from_json, read_text

ROSTER = "roster.json"
NAME = r"[\w.-]{1,60}"
"""The pattern of a client's name."""


@dataclass(frozen=True)
class Member:
    """A client of the federation."""

    name: str
    key: str
    """The client's public key, a line in OpenSSH's format."""
    records: int = 0
    """Training records that its owner reported; 0: not reported."""
    revoked: bool = False

    @property
    def public_key(self) -> PublicKey:
        return read_public(self.key)

    @property
    def who(self) -> str:
        """The SHA-256 of its key."""
        return fingerprint(self.public_key)


@dataclass(frozen=True)
class Roster:
    """All members, by number."""

    members: tuple[Member, ...] = ()

    @staticmethod
    def read(folder: Path) -> Roster:
        file = folder / ROSTER
        try:
            plain = unsealed(read_text(file), indent=1)
            return Roster(tuple(_member(member) for member in plain["members"]))
        except FileNotFoundError:
            raise UserError(f"{folder} holds no federation; `tacit server init {folder}` makes one") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error}); restore it") from None

    def write(self, folder: Path) -> None:
        write_atomically(folder / ROSTER, sealed({"members": [asdict(m) for m in self.members]}, indent=1))

    def with_member(self, member: Member) -> Roster:
        """The roster with one more member. A key may appear only once, or one owner could be two clients."""
        for other in self.members:
            if other.who == member.who:
                raise UserError(f"{member.name}: this key is {other.name}'s already; one key is one client")
            if other.name == member.name:
                raise UserError(f"there is a client {member.name} already; choose another name")
        return Roster((*self.members, member))

    def without(self, name: str) -> Roster:
        """The roster with a member removed: the number stays, and what the member sends is no longer read."""
        if not any(member.name == name for member in self.members):
            raise UserError(f"there is no client {name}; there are {', '.join(m.name for m in self.members)}")
        return Roster(tuple(replace(m, revoked=m.revoked or m.name == name) for m in self.members))

    def first(self, clients: int) -> Roster:
        """The members that a run covers."""
        if clients > len(self.members):
            raise UserError(
                f"data.partition.clients: {clients}, and the federation has {len(self.members)} so far; "
                "`tacit server add` takes more in"
            )
        return Roster(self.members[:clients])


def held(folder: Path) -> Roster:
    """The roster that a client holds: other clients whom its owner knows; empty until some are added."""
    return Roster.read(folder) if (folder / ROSTER).exists() else Roster()


def taken_in(roster: Roster, cards: Sequence[Path]) -> Roster:
    """The roster plus the clients of these cards, of which only names and keys are kept."""
    for file in cards:
        roster = roster.with_member(replace(card_of(file), records=0))
    return roster


def card_of(file: Path) -> Member:
    try:
        return read_card(read_text(file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error})") from None


def read_card(text: str, where: str) -> Member:
    """What `tacit client check` wrote for the server's operator: name, key, perhaps a number of records."""
    try:
        plain = from_json(text)
        return _member({**plain, "revoked": False})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where} is no client's card ({error}); `tacit client check` writes one") from None


def card(name: str, key: PublicKey, records: int) -> str:
    return json.dumps({"name": name, "key": public_text(key), "records": records}, indent=1) + "\n"


def is_name(name: Any) -> bool:
    """Whether this is a valid name for a client."""
    return isinstance(name, str) and re.fullmatch(NAME, name) is not None


def _member(plain: dict[str, Any]) -> Member:
    if plain.keys() != {"name", "key", "records", "revoked"}:
        raise ValueError("a card has a name, a key and a number of records")
    if not is_name(plain["name"]):
        raise ValueError("a name is letters, digits, dots and dashes")
    if type(plain["records"]) is not int or plain["records"] < 0 or type(plain["revoked"]) is not bool:
        raise ValueError("its number of records is none")
    read_public(plain["key"])
    return Member(**plain)
