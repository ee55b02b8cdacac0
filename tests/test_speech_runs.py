"""Speech through the whole machine: a federation of speakers, batches by seconds, error rates by speaker."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tacit
from tacit.config import Config, load
from tacit.data import Dataset
from tacit.data.batches import by_seconds
from tacit.data.speech.tiny import tiny
from tacit.engine.local import Local, PlainGradients
from tacit.errors import UserError

MODEL = {
    "name": "ctc-transformer",
    "size": "tiny",
    "depth": 1,
    "width": 24,
    "hidden": 32,
    "dropout": 0.1,
    "layer_drop": 0.1,
}


def speech(**overrides: Any) -> Config:
    values = {
        "rounds": 2,
        "data": {"name": "fashion-mnist-slice", "partition": {"kind": "natural"}},  # the object is given
        "model": MODEL,
        "cohort": 4,
        "local": {"steps": 2, "seconds": 2.0, "lr": 0.1, "clip": 1.0},
        "evaluate": {"every": 2, "batch": 16},
        "engine": {"workers": 0},
    }
    return load(values, {key.replace("__", "."): value for key, value in overrides.items()})


@pytest.fixture(scope="module")
def corpus() -> Dataset:
    return tiny(speakers=6, utterances=4)


lengths = st.lists(st.floats(0.1, 9.0), max_size=30)


@given(seconds=lengths, limit=st.floats(0.5, 20.0), epochs=st.integers(0, 3), seed=st.integers(0, 9))
def test_batches_by_seconds(seconds: list[float], limit: float, epochs: int, seed: int) -> None:
    durations = np.array(seconds)
    batches = list(by_seconds(durations, limit, epochs, np.random.default_rng(seed)))
    assert sorted(np.concatenate([[], *batches]).tolist()) == sorted(list(range(len(seconds))) * epochs)
    for batch in batches:
        assert len(batch) == 1 or durations[batch].sum() <= limit * (1 + 1e-6)
    ends = np.cumsum([len(batch) for batch in batches])
    for end, (batch, after) in zip(ends, pairwise(batches), strict=False):
        if end % len(seconds):  # within an epoch no batch could have held the next one's first
            assert durations[batch].sum() + durations[after[0]] > limit * (1 - 1e-6)


def test_steps_by_seconds_go_on_through_epochs() -> None:
    durations, rng = np.full(5, 1.0), np.random.default_rng(0)
    local = Local(2, steps=7, seconds=2.0)
    rows = list(PlainGradients(local, rng, durations=durations).rows(5))
    assert [len(r) for r in rows] == [2, 2, 1, 2, 2, 1, 2]
    twice = PlainGradients(Local(2, epochs=2, seconds=2.0), rng, batches_per_step=2, durations=durations)
    assert len(list(twice.rows(5))) == 2 * 2 * 3
    assert not list(PlainGradients(local, rng, durations=np.zeros(0)).rows(0))


@pytest.mark.slow
def test_a_federation_of_speakers_learns_and_does_not_depend_on_the_engine(
    corpus: Dataset, tmp_path: Path
) -> None:
    alone = tacit.run(speech(), tmp_path / "a", dataset=corpus)
    assert {"wer", "cer", "loss"} <= alone.metrics[-1].keys()
    assert alone.best() == alone.last("wer") <= 1.5
    pool = tacit.run(speech(engine__workers=2), tmp_path / "b", dataset=corpus)
    for name in ("wer", "cer", "loss", "train_loss"):
        assert pool.last(name) == alone.last(name)


def test_validation_speakers_judge_when_asked(corpus: Dataset, tmp_path: Path) -> None:
    test = tacit.run(speech(), tmp_path / "a", dataset=corpus)
    validation = tacit.run(speech(evaluate__split="validation"), tmp_path / "b", dataset=corpus)
    assert test.last("train_loss") == validation.last("train_loss")
    assert test.last("loss") != validation.last("loss")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"local__batch": 4}, "give local.batch, or local.seconds"),
        ({"local__seconds": None}, "give local.batch, or local.seconds"),
        ({"method": "dp-fedavg"}, "local.seconds: at example level"),
    ],
)
def test_impossible_batches_are_told(
    changes: dict[str, Any], told: str, corpus: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        tacit.run(speech(**changes), tmp_path / "run", dataset=corpus)


def test_pictures_have_no_seconds(dataset: Dataset, config: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"local\.seconds: the records of blobs have no length"):
        tacit.run(config(local__batch=None, local__seconds=2.0), tmp_path / "run", dataset=dataset)
