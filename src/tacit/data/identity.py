"""Which data a run is about: enough to tell whether two runs touch the same people.

Charges belong to data, not to runs. A ledger is bound to the fingerprint of what it protects, so that it
cannot go on for others, and a model that began in another run brings along what was spent there if the two
share anyone.

>>> import numpy as np
>>> from tacit.data import ArrayRecords
>>> records = ArrayRecords(np.zeros((4, 1, 2, 2), np.uint8), np.arange(4), users=["a", "a", "b", "c"])
>>> everyone = Population(records, np.array([0, 2, 4]), np.arange(4))
>>> someone = Population(records, np.array([0, 1]), np.array([3]))
>>> one, other = identify("mine", everyone), identify("yours", someone)
>>> one.overlaps(other), one.fingerprint == other.fingerprint
(True, False)

What it looks at: every record's label and user, which records each client holds, and the contents of a few
records spread over the whole. Not the contents of all: a corpus may be larger than memory. So two sources
that hold the same people's records under other names, without users, are taken for different ones; the
config can say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from tacit.data.population import Population
from tacit.data.records import Records

SAMPLED = 64
"""Records whose contents are looked at."""


@dataclass(frozen=True)
class Identity:
    """The data of one run."""

    name: str
    """Of the data set."""
    content: str
    """A hash of the records."""
    clients: str
    """A hash of which records each client holds."""
    people: tuple[str, ...] | None
    """Whose records the clients hold, where that is known."""

    @property
    def fingerprint(self) -> str:
        """What a ledger is bound to: the records, and who holds which."""
        return sha256(f"{self.content} {self.clients}".encode()).hexdigest()

    def overlaps(self, other: Identity) -> bool:
        """Whether some person's records may be in both."""
        if self.people is not None and other.people is not None:
            return not set(self.people).isdisjoint(other.people)
        return self.content == other.content or self.name == other.name

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> Identity:
        people = plain["people"]
        return Identity(
            str(plain["name"]),
            str(plain["content"]),
            str(plain["clients"]),
            None if people is None else tuple(str(person) for person in people),
        )


def identify(name: str, population: Population) -> Identity:
    """The identity of a population's data."""
    records = population.records
    content = contents(records)
    clients = sha256(np.ascontiguousarray(population.offsets, dtype=np.int64).tobytes())
    clients.update(np.ascontiguousarray(population.indices, dtype=np.int64).tobytes())
    clients.update(f"{population.holdout} {population.validation}".encode())
    people = None
    if records.users is not None:
        people = tuple(str(user) for user in np.unique(records.users[population.indices]))
    return Identity(name, content, clients.hexdigest(), people)


def contents(records: Records) -> str:
    """A hash of every record's label and user, and of some records themselves."""
    content = sha256(str(len(records)).encode())
    for facts in (records.labels, records.users):
        if facts is not None:
            plain = facts.astype(str) if facts.dtype == object else facts
            content.update(np.ascontiguousarray(plain).tobytes())
    spread = np.unique(np.linspace(0, len(records) - 1, min(SAMPLED, len(records))).astype(np.int64))
    for record in spread:
        for key, value in sorted(records.take(np.array([record])).items()):
            content.update(key.encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
