"""A population: which records belong to which client, at a cost that grows with the cohort.

Two arrays store this (compressed rows): client i owns `indices[offsets[i] : offsets[i+1]]`. Ten million
clients take some 120 MB, and no record is read before its client is drawn.

>>> from tacit.data.records import ArrayRecords
>>> records = ArrayRecords(np.zeros((6, 1, 2, 2), np.uint8), np.arange(6))
>>> clients = Population(records, np.array([0, 4, 6]), np.array([5, 1, 3, 0, 2, 4]), holdout=0.25)
>>> len(clients), clients.sizes.tolist(), clients.train(0).tolist(), clients.test(0).tolist()
(2, [3, 2], [5, 1, 3], [0])
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data.records import Indices, Records


class Population:
    """Clients and their records; each client's records have a training, a validation and a test part.

    The partition has already shuffled each client's records, so the last floor(n · holdout) are a random
    test split, and the floor(n · validation) before them a random validation split. If a client is too small
    for one such record, that split is empty.
    """

    def __init__(
        self,
        records: Records,
        offsets: Indices,
        indices: Indices,
        holdout: float = 0.0,
        validation: float = 0.0,
    ) -> None:
        if not (0.0 <= holdout < 1.0 and 0.0 <= validation < 1.0 and holdout + validation < 1.0):
            raise ValueError(
                f"holdout {holdout} and validation {validation} are shares that leave some to train on"
            )
        if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(indices):
            raise ValueError("offsets must run from 0 to the number of indices")
        self.records = records
        self.holdout, self.validation = holdout, validation
        self.offsets = _narrow(offsets, len(indices))
        self.indices = _narrow(indices, len(records))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> NDArray[Any]:
        """Number of training records of every client."""
        owned = np.diff(self.offsets)
        if not self.holdout and not self.validation:
            return owned
        held_out = _share(owned, self.holdout) + _share(owned, self.validation)
        sizes: NDArray[Any] = owned - held_out.astype(owned.dtype)
        return sizes

    @cached_property
    def splits_users(self) -> bool:
        """Whether a user's records are at several clients; a client is then only a part of a user."""
        users = self.records.users
        if users is None or not len(self.indices):
            return False
        client = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        names, user = np.unique(np.asarray(users)[self.indices], return_inverse=True)
        return len(np.unique(user.reshape(-1).astype(np.int64) * len(self) + client)) > len(names)

    def train(self, client: int) -> NDArray[Any]:
        """The client's training records, as positions in `records`."""
        start, middle, _, _ = self._bounds(client)
        return self.indices[start:middle]

    def validate(self, client: int) -> NDArray[Any]:
        """The client's own validation records, for choosing settings; disjoint from the other two parts."""
        _, middle, late, _ = self._bounds(client)
        return self.indices[middle:late]

    def test(self, client: int) -> NDArray[Any]:
        """The client's own test records; disjoint from the other two parts."""
        _, _, late, end = self._bounds(client)
        return self.indices[late:end]

    def _bounds(self, client: int) -> tuple[int, int, int, int]:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        start, end = int(self.offsets[client]), int(self.offsets[client + 1])
        late = end - int(_share(end - start, self.holdout))
        return start, late - int(_share(end - start, self.validation)), late, end


def _share(owned: Any, share: float) -> Any:
    # The nudge keeps 0.29 · 100 at 29 although the product is 28.999999999999996.
    return np.floor(owned * share + 1e-9)


def _narrow(values: Indices, bound: int) -> Indices:
    """Convert to int32 if every value up to `bound` fits: this halves the memory of a large population."""
    dtype = np.int32 if bound <= np.iinfo(np.int32).max else np.int64
    return np.ascontiguousarray(values, dtype=dtype)
