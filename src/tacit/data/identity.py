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
be. Where the contents cannot be had cheaply (millions of records, a source of one's own without `raw`), some
records spread over the whole stand for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b, sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tacit.data.population import Population
from tacit.data.records import Raw, Records

MANY = 1_000_000
"""Up to so many records are all looked at: a few microseconds each."""
SAMPLED = 64
"""Records that are looked at where each must be prepared for it."""
SKETCH = 256
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> Identity:
        people = plain["people"]
        return Identity(
            str(plain["name"]),
            str(plain["content"]),
            str(plain["clients"]),
            tuple(str(digest) for digest in plain["sketch"]),
            None if people is None else tuple(str(person) for person in people),
        )


def identify(name: str, population: Population) -> Identity:
    """The identity of a population's data."""
    records = population.records
    hashes = _hashes(records, np.sort(population.indices))
    clients = sha256(np.ascontiguousarray(population.offsets, dtype=np.int64).tobytes())
    clients.update(np.ascontiguousarray(population.indices, dtype=np.int64).tobytes())
    clients.update(f"{population.holdout} {population.validation}".encode())
    people = None
    if records.users is not None:
        people = tuple(str(user) for user in np.unique(records.users[population.indices]))
    sketch = tuple(f"{digest:016x}" for digest in np.unique(hashes)[:SKETCH])
    return Identity(name, _content(records, hashes), clients.hexdigest(), sketch, people)


def contents(records: Records) -> str:
    """A hash of every record with its label and user."""
    return _content(records, _hashes(records, np.arange(len(records))))


def _content(records: Records, hashes: NDArray[np.uint64]) -> str:
    content = sha256(str(len(records)).encode())
    for facts in (records.labels, records.users):
        if facts is not None:
            plain = facts.astype(str) if facts.dtype == object else facts
            content.update(np.ascontiguousarray(plain).tobytes())
    content.update(hashes.tobytes())
    return content.hexdigest()


def _hashes(records: Records, held: NDArray[Any]) -> NDArray[np.uint64]:
    """A hash of each record that clients hold, or of some of them."""
    if isinstance(records, Raw):
        chosen = held if len(held) <= MANY else held[:: -(-len(held) // MANY)]
        digests = b"".join(blake2b(records.raw(int(i)), digest_size=8).digest() for i in chosen)
    else:
        spread = np.unique(np.linspace(0, len(held) - 1, min(SAMPLED, len(held))).astype(np.int64))
        digests = b"".join(_prepared(records, int(i)) for i in held[spread])
    return np.frombuffer(digests, np.uint64)


def _prepared(records: Records, index: int) -> bytes:
    digest = blake2b(digest_size=8)
    for key, value in sorted(records.take(np.array([index])).items()):
        digest.update(key.encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()
