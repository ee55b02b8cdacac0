"""Batches: every record once per epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tacit.data import ArrayRecords, batches, epochs, steps


@given(n=st.integers(0, 50), batch=st.integers(1, 60), count=st.integers(0, 4), seed=st.integers(0, 9))
def test_an_epoch_has_every_record_once(n: int, batch: int, count: int, seed: int) -> None:
    passes = list(epochs(n, batch, count, np.random.default_rng(seed)))
    assert sorted(np.concatenate([[], *passes]).tolist()) == sorted(list(range(n)) * count)
    assert all(0 < len(b) <= batch for b in passes)
    assert len(passes) == count * -(-n // batch)


@given(n=st.integers(1, 50), batch=st.integers(1, 60), count=st.integers(0, 30), seed=st.integers(0, 9))
def test_steps_are_a_prefix_of_epochs(n: int, batch: int, count: int, seed: int) -> None:
    some = list(steps(n, batch, count, np.random.default_rng(seed)))
    many = list(epochs(n, batch, count, np.random.default_rng(seed)))
    assert len(some) == count
    assert all(np.array_equal(a, b) for a, b in zip(some, many, strict=False))


def test_a_client_without_records_has_no_steps() -> None:
    assert list(steps(0, 4, 10, np.random.default_rng(0))) == []


def test_epochs_are_reshuffled() -> None:
    first, second = epochs(100, 100, 2, np.random.default_rng(0))
    assert not np.array_equal(first, second)


def test_an_empty_batch_size_is_refused() -> None:
    for function in (epochs, steps):
        with pytest.raises(ValueError, match="at least one record"):
            next(function(5, 0, 1, np.random.default_rng(0)))


@given(
    sizes=st.lists(st.integers(0, 7), max_size=12),
    n=st.integers(1, 9),
    joint=st.booleans(),
    small=st.booleans(),
)
def test_gathered_batches_are_the_records_asked_for(
    sizes: list[int], n: int, joint: bool, small: bool
) -> None:
    """However many are copied and prepared at once, each batch is what taking it alone would give."""
    rng = np.random.default_rng(0)
    records = ArrayRecords(rng.integers(0, 256, (20, 1, 2, 2), np.uint8), np.arange(20), mean=0.4, std=0.3)
    records.joint = joint
    indices = rng.permutation(20)[:n]
    rows = [rng.integers(0, n, size) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "SMALL", batches.SMALL if small else 0)
        got = list(batches.gather(records, indices, rows))
    assert len(got) == len(rows)
    for batch, positions in zip(got, rows, strict=True):
        alone = records.prepare(records.take(indices[positions]))
        assert all(torch.equal(batch[name], alone[name]) for name in alone)
