"""Records are returned exactly as stored, in the form that the model expects."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tacit.data import ArrayRecords


def pictures(channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (20, channels, 4, 5), np.uint8), rng.integers(0, 10, 20)


def test_take_is_exact_ordered_and_a_copy() -> None:
    x, y = pictures()
    records = ArrayRecords(x, y)
    batch = records.take(np.array([5, 5, 0]))
    assert batch["x"].dtype == torch.uint8 and batch["y"].dtype == torch.int64
    assert np.array_equal(batch["x"].numpy(), x[[5, 5, 0]]) and batch["y"].tolist() == y[[5, 5, 0]].tolist()
    batch["x"].zero_()
    assert x.any(axis=(1, 2, 3)).all(), "the data set must not change with a batch"


def test_an_empty_batch_keeps_its_shape() -> None:
    records = ArrayRecords(*pictures(), mean=0.5, std=0.5)
    batch = records.prepare(records.take(np.empty(0, np.int64)))
    assert batch["x"].shape == (0, 3, 4, 5) and batch["x"].dtype == torch.float32


@pytest.mark.parametrize(("mean", "std"), [(None, None), (0.3, 0.7), ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))])
def test_pixels_are_normalised_channel_by_channel(mean: object, std: object) -> None:
    x, y = pictures()
    records = ArrayRecords(x, y, mean=mean, std=std)  # type: ignore[arg-type]
    centre = np.reshape(0.0 if mean is None else mean, (-1, 1, 1))
    deviation = np.reshape(1.0 if std is None else std, (-1, 1, 1))
    stored = records.take(np.arange(20))
    before = stored["x"].clone()
    ready = records.prepare(stored)
    assert ready["x"].dtype == torch.float32
    np.testing.assert_allclose(ready["x"].numpy(), (x / 255 - centre) / deviation, rtol=0, atol=2e-6)
    assert torch.equal(stored["x"], before), "prepare must leave its input alone"


def test_floats_and_tokens_are_not_taken_for_pixels() -> None:
    floats = torch.randn(4, 3)
    plain = ArrayRecords(floats, [0, 1, 2, 3])
    assert torch.equal(plain.prepare(plain.take(np.arange(4)))["x"], floats)
    scaled = ArrayRecords(floats, [0, 1, 2, 3], mean=1.0, std=2.0)
    torch.testing.assert_close(scaled.prepare(scaled.take(np.arange(4)))["x"], (floats - 1) / 2)
    tokens = ArrayRecords(np.arange(12).reshape(4, 3), [0, 1, 2, 3])
    assert tokens.prepare(tokens.take(np.array([1])))["x"].tolist() == [[3, 4, 5]]


def test_labels_and_users() -> None:
    x, y = pictures()
    assert ArrayRecords(x, y.astype(np.uint8)).labels.tolist() == y.tolist()  # type: ignore[union-attr]
    assert ArrayRecords(x, y * 0.5).labels is None, "a regression target is no class"
    assert ArrayRecords(x, y).users is None
    assert ArrayRecords(x, y, users=list("ab" * 10)).users.tolist() == list("ab" * 10)  # type: ignore[union-attr]


def test_disagreeing_lengths_and_bad_deviations_are_refused() -> None:
    x, y = pictures()
    with pytest.raises(ValueError, match="20 records and y has 19"):
        ArrayRecords(x, y[:-1])
    with pytest.raises(ValueError, match="users has 3"):
        ArrayRecords(x, y, users=[1, 2, 3])
    with pytest.raises(ValueError, match="std must be positive"):
        ArrayRecords(x, y, std=0.0)


def test_a_memory_map_is_pickled_as_its_path(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (2000, 1, 8, 8), np.uint8)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    whole = ArrayRecords(mapped, np.arange(2000), mean=0.5, std=0.25)
    message = pickle.dumps(whole)
    assert len(message) < 40_000, "the pixels must not travel"
    copy = pickle.loads(message)
    assert isinstance(copy.x, np.memmap)
    some = np.array([3, 1999])
    assert torch.equal(copy.prepare(copy.take(some))["x"], whole.prepare(whole.take(some))["x"])
    # A part of a file is not the file: it must travel by value.
    part = pickle.loads(pickle.dumps(ArrayRecords(mapped[100:], np.arange(1900))))
    assert np.array_equal(part.x, x[100:])
