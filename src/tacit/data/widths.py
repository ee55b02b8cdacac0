"""A record's own width: how far it is padded when no record may touch another.

Padding to the longest record of a batch lets that record reach all the others: a model without masks sees
more padding, and one with masks takes other kernels. Where each record's gradient is bounded by itself
(example-level privacy), a record is padded to the edge of its own bucket instead, and each part that a model
is given holds records of one bucket. Edges are fixed numbers, the same for every data set and every batch.

>>> [edge(length, step=16) for length in (0, 16, 17, 40, 64, 65, 100, 200)]
[16, 16, 32, 48, 64, 96, 128, 256]
>>> edge(200, step=16, most=200)
200
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from tacit.data.records import Batch, Records, Subset
from tacit.lazy import Tensor, torch


@runtime_checkable
class Apart(Protocol):
    """Records that know how to come without touching each other."""

    def apart(self, batch: Batch) -> list[Batch]:
        """A batch in storage form as parts that are ready for a model, in which what becomes of a record
        depends on that record alone, shapes included; its records in any grouping, each of them once.
        """
        ...


def edge(length: int, step: int, most: int | None = None) -> int:
    """The smallest of step · {1, 2, 3, 4, 6, 8, 12, 16, …} that is at least `length`, or `most`.

    Two edges an octave: few shapes, and padding of at most half a record's length, or a step.
    """
    bound = step
    while bound < length:
        # From 2ᵏ to 3·2ᵏ⁻¹ and on to 2ᵏ⁺¹; from the step itself straight to twice the step.
        units = bound // step
        bound = step * (2 if units == 1 else units * 3 // 2 if units & (units - 1) == 0 else units * 4 // 3)
    return bound if most is None else min(bound, most)


@runtime_checkable
class Blank(Protocol):
    """Records that say what one of them looks like to a model, whoever is there."""

    def blank(self) -> Batch:
        """A batch of one, ready for a model, in names, types and widths that follow from no single record;
        what is in it means nothing. There must be a record.
        """
        ...


def by_edge(batch: Batch, edges: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], Batch]]:
    """The batch as one part for each distinct entry of `edges` (one for each record), in ascending order."""
    for each in sorted(set(edges)):
        rows = torch.tensor([i for i, own in enumerate(edges) if own == each])
        yield each, {name: values[rows] for name, values in batch.items()}


def fit(values: Tensor, width: int) -> Tensor:
    """Dimension 1 cut, or filled up with zeros, to `width`."""
    missing = width - values.shape[1]
    if missing <= 0:
        return values[:, :width]
    return torch.nn.functional.pad(values, (0, 0) * (values.dim() - 2) + (0, missing))


def apart(records: Records) -> Apart | None:
    """What gives these records apart, if they say how.

    A class that takes or prepares in a way of its own must say so anew: what it inherits was said of another.
    """
    records = _whole(records)
    return records if isinstance(records, Apart) and _says(records, "apart") else None


def blank(records: Records) -> Batch | None:
    """What one of these records looks like to a model, if they say so; as with `apart`, a class that takes or
    prepares in a way of its own must say so anew.
    """
    records = _whole(records)
    return records.blank() if isinstance(records, Blank) and _says(records, "blank") else None


def _whole(records: Records) -> Records:
    while isinstance(records, Subset):
        records = records.records
    return records


def _says(records: Records, method: str) -> bool:
    """Whether a method was said of the way in which these are taken and prepared."""
    says, *does = (_definer(type(records), name) for name in (method, "take", "prepare"))
    return all(issubclass(says, each) for each in does)


def _definer(kind: type, name: str) -> type:
    return next((base for base in kind.__mro__ if name in vars(base)), kind)


def one_by_one(records: Records, batches: Sequence[Batch]) -> list[Batch]:
    """Records that were taken one at a time, prepared one at a time: those of one shape make one part.

    For records that say nothing of how they treat their neighbours: here they have none.
    """
    parts: dict[object, list[Batch]] = {}
    for single in batches:
        ready = records.prepare(single)
        shapes = tuple((name, tuple(values.shape[1:]), values.dtype) for name, values in ready.items())
        parts.setdefault(shapes, []).append(ready)
    return [{name: torch.cat([one[name] for one in part]) for name in part[0]} for part in parts.values()]
