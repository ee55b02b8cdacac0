"""Edit distances of many pairs of sequences at once.

The Levenshtein distance (insertions, deletions and substitutions cost one each), by the usual table. All
pairs share its rows as one tensor, and the dependence within a row (insertions) is a running minimum. The
cost is a few tensor operations for each element of the longest sequence, whatever the number of pairs.

>>> distances([[1, 2, 3], [], [5, 5]], [[1, 3], [7], [5, 5]]).tolist()
[1, 1, 0]
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def distances(references: Sequence[Sequence[int]], hypotheses: Sequence[Sequence[int]]) -> Tensor:
    """The number of edits between each reference and its hypothesis, int64 [pairs].

    Elements are numbers ≥ 0.
    """
    if not references:
        return torch.zeros(0, dtype=torch.int64)
    left, right = _padded(references, -1), _padded(hypotheses, -2)
    rows = torch.tensor([len(r) for r in references])
    columns = torch.tensor([[len(h)] for h in hypotheses])
    place = torch.arange(right.shape[1] + 1)
    row = place.repeat(len(left), 1)
    found = row.gather(1, columns).squeeze(1)
    for i in range(left.shape[1]):
        differs = (right != left[:, i : i + 1]).long()
        new = torch.cat([row[:, :1] + 1, torch.minimum(row[:, :-1] + differs, row[:, 1:] + 1)], dim=1)
        row = (new - place).cummin(1).values + place
        found = torch.where(rows == i + 1, row.gather(1, columns).squeeze(1), found)
    return found


def numbered(*groups: Sequence[Sequence[Hashable]]) -> list[list[list[int]]]:
    """Map sequences of anything to sequences of numbers; equal elements get the same number in every group.

    >>> numbered([["to", "be"]], [["be"]])
    [[[0, 1]], [[1]]]
    """
    known: dict[Hashable, int] = {}
    return [[[known.setdefault(e, len(known)) for e in sequence] for sequence in g] for g in groups]


def _padded(sequences: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(len(s) for s in sequences)
    return torch.tensor([[*s, *[value] * (longest - len(s))] for s in sequences], dtype=torch.int64)
