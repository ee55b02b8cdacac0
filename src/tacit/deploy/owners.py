"""A population whose records are elsewhere: as its server knows it, and as one of its clients does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data import Population, Records
from tacit.data.records import Batch, Indices
from tacit.deploy.roster import Roster
from tacit.errors import UserError


class Elsewhere:
    """Records that are with their owners: one stands for each of them, and nobody here can look at it."""

    def __init__(self, roster: Roster) -> None:
        self._owners = np.array([member.who for member in roster.members])

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def labels(self) -> None:
        return None

    @property
    def users(self) -> NDArray[Any]:
        """Runs have people in common if they have owners in common."""
        return self._owners

    def raw(self, index: int) -> bytes:
        return str(self._owners[index]).encode()

    def take(self, indices: Indices) -> Batch:
        raise UserError("these records are with their owners, not on the server")

    def prepare(self, batch: Batch) -> Batch:
        return batch


@dataclass(frozen=True)
class Looks:
    """What everybody's records must look like: their shape, and the classes by number and name."""

    shape: tuple[int, ...]
    classes: int
    labels: tuple[str, ...] = ()


class Owners(Population):
    """A population as a federation's server knows it: who there is, and how much each one says it has."""

    def __init__(self, roster: Roster, looks: Looks) -> None:
        count = len(roster.members)
        super().__init__(Elsewhere(roster), np.arange(count + 1), np.arange(count))
        self.roster, self.looks = roster, looks
        self.__dict__["sizes"] = np.array([member.records for member in roster.members], np.int64)


def alone(
    records: Records,
    own: Sequence[int] | NDArray[Any],
    number: int = 0,
    clients: int = 1,
    holdout: float = 0.0,
    validation: float = 0.0,
) -> Population:
    """The population as one of its clients knows it: its own records, under its number, and nobody else's."""
    offsets = np.zeros(clients + 1, np.int64)
    offsets[number + 1 :] = len(own)
    return Population(records, offsets, np.asarray(own, np.int64), holdout, validation)
