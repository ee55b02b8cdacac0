"""A population whose records are elsewhere, as its server and as one of its clients know it."""

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
    """Records that stay with their owners: one placeholder stands for each, and nobody here can read it."""

    def __init__(self, roster: Roster) -> None:
        self._owners = np.array([member.who for member in roster.members])

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def labels(self) -> None:
        return None

    @property
    def users(self) -> NDArray[Any]:
        """Two runs have people in common if they have owners in common."""
        return self._owners

    def raw(self, index: int) -> bytes:
        return str(self._owners[index]).encode()

    def take(self, indices: Indices) -> Batch:
        raise UserError("these records are with their owners, not on the server")

    def prepare(self, batch: Batch) -> Batch:
        return batch


@dataclass(frozen=True)
class Looks:
    """What all owners' records must look like: their shape, and the classes by number and name."""

    shape: tuple[int, ...]
    classes: int
    labels: tuple[str, ...] = ()


class Owners(Population):
    """A population as a federation's server knows it: the members, and how many records each claims."""

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
    """The population as one of its clients knows it: its own records, under its number, and no others."""
    offsets = np.zeros(clients + 1, np.int64)
    offsets[number + 1 :] = len(own)
    return Population(records, offsets, np.asarray(own, np.int64), holdout, validation)
