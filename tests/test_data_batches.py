"""Batches: every record once an epoch; Poisson inclusion at the stated rate, independently."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tacit.data import ArrayRecords, batches, epochs, poisson, steps


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


def test_poisson_inclusion_rate_and_independence() -> None:
    """400 records, 5000 steps, rate 0.03; every bound is 5.5 deviations or more.

    With 400 + 3 comparisons against a two-sided tail of 4e-8 the whole test raises a false alarm for less
    than one seed in 60,000.
    """
    n, count, q = 400, 5000, 0.03
    joined = np.zeros((count, n))
    for row, batch in zip(joined, poisson(n, q, count, np.random.default_rng(7)), strict=True):
        assert (np.diff(batch) > 0).all(), "no record twice"
        row[batch] = 1
    deviation = np.sqrt(q * (1 - q))
    assert np.abs(joined.mean(axis=0) - q).max() < 5.5 * deviation / np.sqrt(count), "each record's own rate"
    z = (joined - q) / deviation
    # Sizes: independent records make the size's variance n·q(1-q); fixed-size batches would have none.
    # The variance of a sample variance is about (2 + excess/n)/count; the excess is negligible at n = 400.
    size = z.sum(axis=1) / np.sqrt(n)
    assert abs((size**2).mean() - 1) < 5.5 * np.sqrt(2.1 / count)
    # Neighbouring records of one step, and one record in neighbouring steps.
    assert abs((z[:, :-1] * z[:, 1:]).mean()) < 5.5 / np.sqrt(z[:, 1:].size)
    assert abs((z[:-1] * z[1:]).mean()) < 5.5 / np.sqrt(z[1:].size)


def test_poisson_keeps_empty_batches_and_the_edges() -> None:
    rng = np.random.default_rng(0)
    assert [len(b) for b in poisson(5, 0.0, 3, rng)] == [0, 0, 0]
    assert [b.tolist() for b in poisson(3, 1.0, 2, rng)] == [[0, 1, 2]] * 2
    assert len(list(poisson(0, 0.5, 4, rng))) == 4


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_is_a_probability(rate: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        next(poisson(5, rate, 1, np.random.default_rng(0)))


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
