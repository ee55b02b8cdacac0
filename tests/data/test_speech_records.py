"""Utterances as records: padding, trimming, pickling, and the tiny corpus."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from tacit.data import partition
from tacit.data.batches import gather
from tacit.data.speech.records import BUCKET, SpeechRecords
from tacit.data.speech.tiny import tiny
from tacit.data.speech.tokens import alphabet


def records() -> SpeechRecords:
    data = tiny(speakers=5)
    assert isinstance(data.train, SpeechRecords)
    return data.train


def test_take_pads_and_prepare_trims() -> None:
    source = records()
    everything = np.arange(len(source))
    stored = source.take(everything)
    assert stored["x"].dtype == torch.float16 and stored["tokens"].dtype == torch.int64
    assert len(set(source.frames.tolist())) > 1, "all alike: this test would see nothing"
    shortest = np.argsort(source.frames)[:2]
    batch = source.prepare({name: values[shortest] for name, values in stored.items()})
    alone = source.prepare(source.take(shortest))
    for name in batch:
        torch.testing.assert_close(batch[name], alone[name], atol=0, rtol=0)
    longest = int(batch["frames"].max())
    assert longest <= batch["x"].shape[1] < longest + BUCKET
    assert batch["tokens"].shape[1] == int(batch["lengths"].max())
    for row, index in enumerate(shortest):
        own = int(batch["frames"][row])
        assert batch["x"][row, :own].var() > 0.9 and not batch["x"][row, own:].any()
        assert (
            batch["tokens"][row, : int(batch["lengths"][row])].tolist() == source.transcript(index).tolist()
        )
        assert not batch["tokens"][row, int(batch["lengths"][row]) :].any()


def test_batches_of_a_pass_are_trimmed_each_for_itself() -> None:
    source = records()
    order = np.argsort(source.frames)
    rows = [np.arange(0, 3), np.arange(3, 9)]
    for positions, batch in zip(rows, gather(source, order, rows), strict=True):
        alone = source.prepare(source.take(order[positions]))
        assert all(torch.equal(batch[name], alone[name]) for name in alone)


def test_an_empty_batch_is_a_batch() -> None:
    source = records()
    batch = source.prepare(source.take(np.zeros(0, np.int64)))
    assert batch["x"].shape == (0, 0, 80) and batch["tokens"].shape == (0, 0)


def test_memory_maps_are_pickled_as_paths(tmp_path: Path) -> None:
    source = records()
    parts = []
    for name in ("x", "offsets", "tokens", "token_offsets", "users", "seconds"):
        np.save(tmp_path / f"{name}.npy", getattr(source, f"_{name}"))
        parts.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    mapped = SpeechRecords(*parts)
    pickled = pickle.dumps(mapped)
    assert len(pickled) < 2000
    again = pickle.loads(pickled)
    for a, b in zip(source.take(np.array([3, 1])).items(), again.take(np.array([3, 1])).items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1])
    in_memory = pickle.loads(pickle.dumps(source))
    assert np.array_equal(in_memory.users, source.users)


def test_the_tiny_corpus_says_what_was_spoken_and_keeps_speakers_apart() -> None:
    data = tiny(speakers=5)
    assert data.validation is not None
    groups = [set(part.users.tolist()) for part in (data.train, data.validation, data.test)]
    assert not (groups[0] & groups[1] or groups[0] & groups[2] or groups[1] & groups[2])
    text = alphabet("en").decode(data.train.transcript(0))
    assert len(text.split()) == 2
    assert data.train.seconds.min() > 0.3
    offsets, indices = partition.natural(data.train.users, np.random.default_rng(0))
    for lo, hi in pairwise(offsets):
        assert len(set(data.train.users[indices[lo:hi]])) == 1
    assert len(offsets) - 1 == 5
