"""The identity of a run's data: enough to tell whether two runs use the same people's records.

Charges belong to data, not to runs. A ledger is bound to the fingerprint of the data that it protects, so it
cannot continue on other data. A model that started in another run inherits that run's charges if the two
share anyone.

>>> from tacit.data.records import ArrayRecords
>>> records = ArrayRecords(np.arange(16).reshape(4, 1, 2, 2), np.arange(4), users=["a", "a", "b", "c"])
>>> everyone = identify("mine", Population(records, np.array([0, 2, 4]), np.arange(4)))
>>> one = identify("yours", Population(records, np.array([0, 1]), np.array([3])))
>>> everyone.overlaps(one), everyone.fingerprint == one.fingerprint
(True, False)

The identity covers every record's user, label and original content (before tokenizing or decoding), and which
client holds which record. Two runs share someone if they share a user (where both know their users) or have
records in common. Common records are found by the smallest hashes of either's records. A renamed, shortened
or extended copy of a data set is therefore recognised, while single records that two large sets share may be
missed: sets of up to `SKETCH` records are compared in full; m records of a larger set of n go unnoticed with
probability (1 − m/n) to that power. If the contents are expensive to read (millions of records, or a custom
source without `raw`), a sample of records, spread over the whole, stands for all. Two samples of k, in any
order, have k²/n records in common on average, and none with probability e to minus that.
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
"""Up to this many records are all read: a few microseconds each."""
SAMPLED = 1 << 13
"""How many records are read if each must be prepared first: of a million, two runs have 67 in common."""
SKETCH = 1 << 14
"""How many hashes of records are stored: the smallest ones."""


@dataclass(frozen=True)
class Identity:
    """The data of one run."""

    name: str
    """The data set's name."""
    content: str
    """A hash of the records, their labels and their users."""
    clients: str
    """A hash of which records each client holds."""
    sketch: tuple[str, ...]
    """The smallest hashes of the clients' records, sorted."""
    people: tuple[str, ...] | None
    """The users whose records the clients hold, if known."""
    holders: tuple[str, ...] | None = None
    """The owner of each record in the sketch, if every client is one person with all of that person's
    records.
    """
    public: tuple[str, ...] = ()
    """The smallest hashes of the records that the run declared public, and used without protection."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint that a ledger is bound to: the records, and who holds which."""
        return sha256(f"{self.content} {self.clients}".encode()).hexdigest()

    def overlaps(self, other: Identity) -> bool:
        """Whether some person's records may be in both: they have records or people in common.

        Either is enough. Comparing people alone would not do: the same records with another user column have
        nobody in common. If either run does not know its people, data sets of the same name count as
        overlapping.
        """
        if not set(self.sketch).isdisjoint(other.sketch):
            return True
        if self.people is not None and other.people is not None:
            return not set(self.people).isdisjoint(other.people)
        return self.name == other.name

    def same_clients(self, other: Identity) -> bool:
        """Whether a client of both is the same client in both: one client here is never several there.

        This holds if both have exactly the same clients. It also holds if clients are people in both and
        nobody has half or more of their records held by somebody else in the other run. (Many people share
        some records, such as one-word texts.)
        """
        if self.clients == other.clients and self.content == other.content:
            return True
        return self._keeps_people_of(other) and other._keeps_people_of(self)

    def _keeps_people_of(self, other: Identity) -> bool:
        """Whether everybody here is at most one person there, by the records that both could know of."""
        if self.holders is None or other.holders is None:
            return False
        theirs = dict(zip(other.sketch, other.holders, strict=True))
        last = other.sketch[-1] if len(other.sketch) == SKETCH else "g"  # larger hashes are not stored
        known, strange = Counter[str](), Counter[str]()
        for record, who in zip(self.sketch, self.holders, strict=True):
            if record <= last:
                known[who] += 1
                strange[who] += theirs.get(record, who) != who
        return all(2 * strange[who] < known[who] for who in known)

    def shows(self, other: Identity) -> bool:
        """Whether this run used records without protection that the other run protects."""
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
    """The identity of a population's data; `public`: records that the run uses without protection."""
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
        order = np.lexsort((users, hashes))  # for a record that several people have, the first name
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
    """The records that are read: all, or a sample spread over the whole."""
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
