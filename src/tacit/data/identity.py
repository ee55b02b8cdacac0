"""Which data a run is about: enough to tell whether two runs touch the same people.

Charges belong to data, not to runs. A ledger is bound to the fingerprint of what it protects, so that it
cannot go on for others, and a model that began in another run brings along what was spent there if the two
share anyone.

>>> from tacit.data.records import ArrayRecords
>>> records = ArrayRecords(np.arange(16).reshape(4, 1, 2, 2), np.arange(4), users=["a", "a", "b", "c"])
>>> everyone = identify("mine", Population(records, np.array([0, 2, 4]), np.arange(4)))
>>> one = identify("yours", Population(records, np.array([0, 1]), np.array([3])))
>>> everyone.overlaps(one), everyone.fingerprint == one.fingerprint
(True, False)

What it looks at: every record's user, label and contents as they came (before tokens or pixels are made of
them), and which client holds which. Two runs share someone if they share a user, where both know their users,
or have records in common. The latter is told by the smallest hashes of either's records, so a renamed,
shortened or extended copy of a data set is recognised, and single records that two large sets share may not
be: sets of up to `SKETCH` records are compared in full; m records of a larger set of n go unnoticed with a
chance of (1 − m/n) to that power. Where the contents cannot be had cheaply (millions of records, a source of
one's own without `raw`), some records spread over the whole stand for all: k of either, in whatever order,
have k²/n in common on average, and none with a chance of e to minus that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b, sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data.population import Population
from tacit.data.records import Raw, Records
from tacit.lazy import torch

MANY = 1_000_000
"""Up to so many records are all looked at: a few microseconds each."""
SAMPLED = 1 << 13
"""Records that are looked at where each must be prepared for it: of a million, two runs have 67 in common."""
SKETCH = 1 << 14
"""Hashes of records that are written down: the smallest ones."""


@dataclass(frozen=True)
class Identity:
    """The data of one run."""

    name: str
    """Of the data set."""
    content: str
    """A hash of the records, their labels and their users."""
    clients: str
    """A hash of which records each client holds."""
    sketch: tuple[str, ...]
    """The smallest hashes of the clients' records, sorted."""
    people: tuple[str, ...] | None
    """Whose records the clients hold, where that is known."""
    holders: tuple[str, ...] | None = None
    """Whose each record of the sketch is, where every client is one person with all that is theirs."""
    public: tuple[str, ...] = ()
    """The smallest hashes of the records that the run called public, and used as they are."""

    @property
    def fingerprint(self) -> str:
        """What a ledger is bound to: the records, and who holds which."""
        return sha256(f"{self.content} {self.clients}".encode()).hexdigest()

    def overlaps(self, other: Identity) -> bool:
        """Whether some person's records may be in both: they have records in common, or people.

        Either suffices. People alone would not do: the same records under another column for users have
        nobody in common.
        """
        if not set(self.sketch).isdisjoint(other.sketch):
            return True
        if self.people is not None and other.people is not None:
            return not set(self.people).isdisjoint(other.people)
        return self.name == other.name

    def same_clients(self, other: Identity) -> bool:
        """Whether whoever is a client in both is the same client: one client here is never several there.

        So it is where both have the very same clients, and where clients are people in both: the same people,
        if of nobody's records half or more are somebody else's in the other run. (Some, such as a text of one
        word, many have.)
        """
        if self.clients == other.clients and self.content == other.content:
            return True
        return self._keeps_people_of(other) and other._keeps_people_of(self)

    def _keeps_people_of(self, other: Identity) -> bool:
        """Whether everybody here is at most one person there, by the records that either could know of."""
        if self.holders is None or other.holders is None:
            return False
        theirs = dict(zip(other.sketch, other.holders, strict=True))
        last = (
            other.sketch[-1] if len(other.sketch) == SKETCH else "g"
        )  # beyond it, no record is written down
        known, strange = Counter[str](), Counter[str]()
        for record, who in zip(self.sketch, self.holders, strict=True):
            if record <= last:
                known[who] += 1
                strange[who] += theirs.get(record, who) != who
        return all(2 * strange[who] < known[who] for who in known)

    def shows(self, other: Identity) -> bool:
        """Whether this run used records as they are that the other one protects."""
        return not set(self.public).isdisjoint(other.sketch)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> Identity:
        people, holders = plain["people"], plain.get("holders")
        if holders is not None and len(holders) != len(plain["sketch"]):
            raise ValueError("holders are not those of the sketch")
        return Identity(
            str(plain["name"]),
            str(plain["content"]),
            str(plain["clients"]),
            tuple(str(digest) for digest in plain["sketch"]),
            None if people is None else tuple(str(person) for person in people),
            None if holders is None else tuple(str(person) for person in holders),
            tuple(str(digest) for digest in plain.get("public", ())),
        )


def identify(name: str, population: Population, public: NDArray[np.int64] | None = None) -> Identity:
    """The identity of a population's data; `public`: records that the run uses without protecting them."""
    records = population.records
    looked_at = _looked_at(records, np.sort(population.indices))
    hashes = _hashes(records, looked_at)
    clients = sha256(np.ascontiguousarray(population.offsets, dtype=np.int64).tobytes())
    clients.update(np.ascontiguousarray(population.indices, dtype=np.int64).tobytes())
    clients.update(f"{population.holdout} {population.validation}".encode())
    people = None
    if records.users is not None:
        people = tuple(str(user) for user in np.unique(records.users[population.indices]))
    holders = None
    if records.users is not None and _clients_are_people(population):
        users = records.users[looked_at].astype(str)
        order = np.lexsort((users, hashes))  # of a record that several people have, the first by name
        _, first = np.unique(hashes[order], return_index=True)
        holders = tuple(str(user) for user in users[order[first[:SKETCH]]])
    shown = () if public is None else _smallest(_hashes(records, _looked_at(records, np.sort(public))))
    return Identity(
        name, _content(records, hashes), clients.hexdigest(), _smallest(hashes), people, holders, shown
    )


def _smallest(hashes: NDArray[np.uint64]) -> tuple[str, ...]:
    return tuple(f"{digest:016x}" for digest in np.unique(hashes)[:SKETCH])


def _clients_are_people(population: Population) -> bool:
    """Whether every client is one user, and every user one client."""
    if population.records.users is None:
        return False
    owner = np.repeat(np.arange(len(population)), np.diff(population.offsets))
    users = population.records.users[population.indices]
    names, person = np.unique(users, return_inverse=True)
    pairs = np.unique(owner * len(names) + person.reshape(-1))
    return len(pairs) == len(np.unique(owner)) == len(names)


def contents(records: Records) -> str:
    """A hash of every record with its label and user."""
    return _content(records, _hashes(records, _looked_at(records, np.arange(len(records)))))


def _content(records: Records, hashes: NDArray[np.uint64]) -> str:
    content = sha256(str(len(records)).encode())
    for facts in (records.labels, records.users):
        if facts is not None:
            plain = facts.astype(str) if facts.dtype == object else facts
            content.update(np.ascontiguousarray(plain).tobytes())
    content.update(hashes.tobytes())
    return content.hexdigest()


def _looked_at(records: Records, held: NDArray[Any]) -> NDArray[Any]:
    """Which of these records are looked at: all, or some spread over the whole."""
    if isinstance(records, Raw):
        return held if len(held) <= MANY else held[:: -(-len(held) // MANY)]
    spread = np.unique(np.linspace(0, len(held) - 1, min(SAMPLED, len(held))).astype(np.int64))
    return held[spread]


def _hashes(records: Records, chosen: NDArray[Any]) -> NDArray[np.uint64]:
    """A hash of each of these records."""
    if isinstance(records, Raw):
        digests = b"".join(blake2b(records.raw(int(i)), digest_size=8).digest() for i in chosen)
    else:
        digests = b"".join(_prepared(records, int(i)) for i in chosen)
    return np.frombuffer(digests, np.uint64)


def _prepared(records: Records, index: int) -> bytes:
    digest = blake2b(digest_size=8)
    for key, value in sorted(records.take(np.array([index])).items()):
        digest.update(key.encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()
