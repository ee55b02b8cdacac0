"""A record's width is its own: other records in its batch do not change what the model gets of it."""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tacit.data import ArrayRecords, Batch, Subset
from tacit.data.batches import gather, gather_apart
from tacit.data.speech.tiny import tiny
from tacit.data.text import TextRecords, Texts
from tacit.data.tokens import Bytes
from tacit.data.widths import apart, blank, edge
from tacit.data.words import WordRecords
from tacit.engine.local import PrivateGradients
from tacit.gradients import ClippedGradient
from tacit.privacy import Clip, ExampleLevel, Poisson, Workload
from tacit.tasks import Classification
from tacit.vector import Flat

BOUND = 0.5


def writings(lengths: list[int], most: int = 200, seed: int = 0) -> TextRecords:
    rng = np.random.default_rng(seed)
    texts = ["".join(chr(97 + int(c)) for c in rng.integers(0, 26, n)) for n in lengths]
    return TextRecords(Texts.of(texts), Bytes(), most, labels=rng.integers(0, 3, len(lengths)))


@given(st.integers(0, 5000), st.integers(1, 64))
def test_an_edge_is_near_and_there_are_few(length: int, step: int) -> None:
    assert length <= edge(length, step) <= max(1.5 * length, length + step)
    assert edge(edge(length, step), step) == edge(length, step)
    assert len({edge(n, step) for n in range(1, 64 * step)}) <= 13


def looks(batch: Batch) -> dict[str, tuple[Any, ...]]:
    return {name: (values.dtype, tuple(values.shape)) for name, values in batch.items()}


BLANKS: dict[str, Any] = {
    "texts": lambda short: writings([3 if short else 90, 40]),
    "pairs": lambda short: TextRecords(
        Texts.of(["a" if short else "a" * 90, "b"]), Bytes(), 200, pairs=Texts.of(["c", "d"])
    ),
    "words": lambda short: WordRecords.made([["a"] * (1 if short else 90)], [[0] * 90], Bytes(), 64),
    "speech": lambda short: tiny(speakers=2, seed=0 if short else 1).train,
    "pictures": lambda short: ArrayRecords(np.zeros((2, 1, 4, 4), np.uint8), np.arange(2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", BLANKS)
def test_what_records_look_like_is_no_single_records_doing(kind: str) -> None:
    """The same names and types as a model gets, in a shape that is not the first record's."""
    found, other = BLANKS[kind](True), BLANKS[kind](False)
    told, again = blank(found), blank(Subset(other, np.array([0])))
    assert told is not None and again is not None and looks(told) == looks(again)
    real = looks(found.prepare(found.take(np.zeros(1, np.int64))))
    assert {name: (kind, len(shape)) for name, (kind, shape) in real.items()} == {
        name: (kind, len(shape)) for name, (kind, shape) in looks(told).items()
    }
    assert all(len(values) == 1 for values in told.values())


def rows_of(parts: list[Batch]) -> list[tuple[tuple[str, tuple[int, ...], bytes], ...]]:
    return [
        tuple((name, tuple(values.shape[1:]), values[i].numpy().tobytes()) for name, values in part.items())
        for part in parts
        for i in range(len(next(iter(part.values()))))
    ]


RECORDS = {
    "texts": cache(lambda: writings([3, 200, 1, 17, 40, 18, 90, 16, 5, 33], most=64)),
    "speech": cache(lambda: tiny(speakers=4).train),
    "pictures": cache(
        lambda: ArrayRecords(np.arange(160, dtype=np.uint8).reshape(10, 1, 4, 4), np.arange(10))
    ),
}


@pytest.mark.parametrize("kind", RECORDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_record_comes_the_same_in_every_batch(kind: str, data: st.DataObject) -> None:
    """Shapes and bits: alone, and among any others; each record of a batch once."""
    records = RECORDS[kind]()
    n = min(10, len(records))
    chosen = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    indices = np.arange(n)
    alone = [rows_of(next(gather_apart(records, indices, [np.array([i])])))[0] for i in range(n)]
    (parts,) = gather_apart(records, indices, [np.array(chosen)])
    assert sorted(rows_of(parts)) == sorted(alone[i] for i in chosen)


class Ragged:
    """Somebody's own records: padded to the longest of a batch already as they are taken."""

    labels = users = None

    def __len__(self) -> int:
        return 6

    def take(self, indices: Any) -> Batch:
        x = np.zeros((len(indices), max(int(i) + 1 for i in indices)), np.float32)
        for row, i in enumerate(indices):
            x[row, : i + 1] = i
        return {"x": torch.from_numpy(x)}

    def prepare(self, batch: Batch) -> Batch:
        return {"x": batch["x"] - batch["x"].mean()}


class Centred(ArrayRecords):
    """What it inherits says that records do not touch; what it does says otherwise."""

    def prepare(self, batch: Batch) -> Batch:
        x = batch["x"].float()
        return {**batch, "x": x - x.mean()}


@pytest.mark.parametrize("records", [Ragged(), Centred(np.eye(6, dtype=np.float32), np.arange(6))])
@pytest.mark.parametrize("subset", [False, True])
def test_records_that_say_nothing_are_taken_one_by_one(records: Any, subset: bool) -> None:
    assert apart(records) is None
    if subset:
        records = Subset(records, np.arange(6))
    alone = [rows_of(next(gather_apart(records, np.arange(6), [np.array([i])])))[0] for i in range(6)]
    (parts,) = gather_apart(records, np.arange(6), [np.array([5, 0, 3])])
    assert sorted(rows_of(parts)) == sorted(alone[i] for i in (5, 0, 3))
    changed: list[tuple[list[int], int]] = []

    def change(batch: Batch, positions: Any, number: int) -> Batch:
        changed.append((positions.tolist(), number))
        return batch

    list(gather_apart(records, np.arange(6), [np.array([5, 0]), np.array([2])], change, count(7)))
    assert changed == [([5], 7), ([0], 7), ([2], 8)]


def test_batches_are_numbered_on_through_several_passes() -> None:
    numbers, told = count(), []
    records = RECORDS["pictures"]()
    for _ in range(2):
        for _ in gather(
            records,
            np.arange(10),
            [np.arange(4), np.arange(4, 10)],
            lambda batch, _, number: told.append(number) or batch,
            numbers,
        ):
            pass
    assert told == [0, 1, 2, 3]


class Unmasked(nn.Module):
    """As FNet: tokens are mixed by a Fourier transform over all places, padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(259, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        mixed = torch.fft.fft(hidden, dim=1).real
        logits: Tensor = self.head((hidden + mixed).mean(1))
        return logits


def private_sum(flat: Flat, records: TextRecords, rows: list[int]) -> Tensor:
    """Σ clip(g_j), as a client's step makes it, without noise."""
    mechanism = ExampleLevel(0.0, 1e-5, Clip(BOUND), Poisson(1.0))
    work = Workload(1, sizes=np.array([len(records)]))
    queries = mechanism.queries(len(records), work)
    gradients = PrivateGradients(queries, ClippedGradient(flat))
    (parts,) = gather_apart(records, np.arange(len(records)), [np.array(rows, np.int64)])
    gradients.fill(flat, parts, Classification(), None)
    return flat.grad.double() * queries.expected_batch


def test_one_long_text_among_short_ones_moves_the_sum_by_itself_alone() -> None:
    torch.manual_seed(0)
    flat = Flat(Unmasked())
    records = writings([8] * 32 + [14] * 32 + [190])
    everyone = list(range(65))
    total = private_sum(flat, records, everyone)
    for j in (64, 0, 40):
        rest = [i for i in everyone if i != j]
        moved = total - private_sum(flat, records, rest)
        alone = private_sum(flat, records, [j])
        assert moved.norm() <= BOUND * (1 + 1e-5)
        assert (moved - alone).norm() <= 1e-4 * BOUND
    # That the test can fail: padded to their longest neighbour, the 64 others move too.
    clipped = ClippedGradient(flat)
    sums = []
    for rows in (everyone, everyone[:-1]):
        clipped(records.prepare(records.take(np.array(rows))), Classification().losses, BOUND)
        sums.append(flat.grad.double())
    assert (sums[0] - sums[1]).norm() > 3 * BOUND


def test_an_empty_batch_has_gradient_zero() -> None:
    flat = Flat(Unmasked())
    flat.grad.fill_(7.0)
    assert not private_sum(flat, writings([8, 9]), []).any()
