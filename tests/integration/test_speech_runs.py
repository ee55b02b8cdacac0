"""Speech in the whole system: a federation of speakers, batches by seconds, error rates by speaker."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tacit
from tacit import models
from tacit.config import Config, load
from tacit.config.build import build_job
from tacit.data import Dataset
from tacit.data.batches import by_seconds
from tacit.data.speech.tiny import tiny
from tacit.engine import Local
from tacit.engine.local import PlainGradients
from tacit.errors import UserError
from tacit.federation.start import save_weights, start_from
from tacit.federation.testing import metrics_by_user
from tacit.optimizers.lars import Lars
from tacit.randomness import torch_seed
from tacit.tasks import Speech

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
    local = Local(0.1, 2, 2.0, steps=7)
    rows = list(PlainGradients(local, rng, durations=durations).rows(5))
    assert [len(r) for r in rows] == [2, 2, 1, 2, 2, 1, 2]
    twice = PlainGradients(Local(0.1, 2, 2.0, epochs=2), rng, batches_per_step=2, durations=durations)
    assert len(list(twice.rows(5))) == 2 * 2 * 3
    assert not list(PlainGradients(local, rng, durations=np.zeros(0)).rows(0))


def test_epochs_by_seconds_end_with_a_whole_step() -> None:
    """Three records of 1, 1 and 2 s in batches of 2 s: an epoch has two or three, by its order."""
    durations, odd = np.array([1.0, 1.0, 2.0]), 0
    for seed in range(20):
        packed = list(by_seconds(durations, 2.0, 2, np.random.default_rng(seed)))
        odd += len(packed) % 2
        local, rng = Local(0.1, 2, 2.0, epochs=1), np.random.default_rng(seed)
        rows = list(PlainGradients(local, rng, batches_per_step=2, durations=durations).rows(3))
        assert len(rows) == len(packed) // 2 * 2
        assert all(np.array_equal(row, one) for row, one in zip(rows, packed, strict=False))
    assert odd, "some of them do not come out even"


def test_a_method_of_two_batches_a_step_takes_epochs_by_seconds(corpus: Dataset, tmp_path: Path) -> None:
    config = speech(
        method={"name": "fedsam", "fresh": True},
        rounds=3,
        cohort=6,
        local={"epochs": 1, "seconds": 1.01, "lr": 0.1},
    )
    assert tacit.run(config, tmp_path / "run", dataset=corpus).finished


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
        ({"method": "dp-fedavg", "privacy__unit": "example"}, "local.seconds: at example level"),
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


def seed_config(**overrides: Any) -> Config:
    values = {
        "name": "seed",
        "data": {"name": "fashion-mnist-slice"},
        "model": MODEL,
        "pretrain": {"steps": 12, "seconds": 3.0, "lr": 0.5, "trust_coefficient": 0.02},
        "evaluate": {"batch": 16},
        "engine": {"workers": 0},
    }
    return load(values, {key.replace("__", "."): value for key, value in overrides.items()})


def test_pretraining_is_the_optimizers_own_steps(corpus: Dataset, tmp_path: Path) -> None:
    """Without augmentation, 3 steps on the whole corpus equal LARS applied to clipped gradients by hand."""
    calm = {"dropout": 0.0, "layer_drop": 0.0, "augment": False, "shift": 0.0}
    model = {**MODEL, **calm}
    section = {"steps": 3, "batch": 1000, "lr": 0.5, "clip": 0.5, "schedule": {"kind": "step", "every": 2}}
    result = tacit.run(seed_config(model=model, pretrain=section), tmp_path / "run", dataset=corpus)
    torch.manual_seed(torch_seed(0, "model"))
    twin = models.build("ctc-transformer", (80,), 30, **{k: v for k, v in model.items() if k != "name"})
    optimizer = Lars(twin.parameters(), lr=0.5)
    batch = corpus.train.prepare(corpus.train.take(np.arange(len(corpus.train))))
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.5 * 0.5 ** (step // 2 + 1)
        optimizer.zero_grad()
        Speech().losses(twin, batch).mean().backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
    for (name, a), b in zip(result.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5, msg=name)


def test_a_federation_starts_from_a_seed_model_a_file_or_a_run(corpus: Dataset, tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    tacit.run(seed_config(), seed, dataset=corpus)
    (tmp_path / "alone").mkdir()
    file = (seed / "model.safetensors").rename(tmp_path / "alone" / "model.safetensors")
    whole = {}
    for place in (seed, file, file.parent):  # the checkpoint, the file, the folder with the file
        config = speech(model={**MODEL, "start": str(place)})
        whole[place] = metrics_by_user(build_job(config, tmp_path, dataset=corpus))[0]["loss"]
    assert len({round(loss, 6) for loss in whole.values()}) == 1
    scratch = metrics_by_user(build_job(speech(), tmp_path, dataset=corpus))[0]["loss"]
    assert whole[seed] < scratch, "and it has learnt something"


def test_resumed_pretraining_ends_with_the_same_model(corpus: Dataset, tmp_path: Path) -> None:
    whole = tacit.run(seed_config(checkpoint__every=4), tmp_path / "a", dataset=corpus)
    tacit.run(seed_config(checkpoint__every=4), tmp_path / "b", dataset=corpus)
    shutil.rmtree(tmp_path / "b" / "checkpoint" / "000012")
    (tmp_path / "b" / "model.safetensors").unlink()
    again = tacit.resume(tmp_path / "b", dataset=corpus)
    assert again.last("loss") == whole.last("loss")
    assert (tmp_path / "b" / "model.safetensors").exists()


def test_error_rates_by_speaker_add_up(corpus: Dataset, tmp_path: Path) -> None:
    result = tacit.run(speech(), tmp_path / "run", dataset=corpus)
    found = tacit.test(tmp_path / "run", dataset=corpus)
    whole, each = found.whole, found.users
    assert found.round == 2 and set(each) == {"test-0", "test-1"}
    assert sum(own["count"] for own in each.values()) == whole["count"] == len(corpus.test)
    assert whole["wer"] == pytest.approx(result.last("wer"))
    losses = sum(own["loss"] * own["count"] for own in each.values()) / whole["count"]
    assert losses == pytest.approx(result.last("loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({**MODEL, "width": 32}, "'conv.weight' is .* in this model; give `model` the same sizes"),
        ({**MODEL, "depth": 2}, "this model has 'layers.1.norm1.weight' and the file has not"),
        ({"name": "logistic"}, "in this model; give `model` the same sizes"),
    ],
)
def test_a_seed_of_other_sizes_is_refused(model: dict[str, Any], told: str, tmp_path: Path) -> None:
    file = tmp_path / "seed.safetensors"
    options = {k: v for k, v in MODEL.items() if k != "name"}
    save_weights(models.build("ctc-transformer", (80,), 30, **options), file)
    with pytest.raises(UserError, match=told):
        build_job(speech(model={**model, "start": str(file)}), tmp_path, dataset=tiny(speakers=4))


def test_impossible_starts_are_told(tmp_path: Path) -> None:
    other = models.build("logistic", (80,), 30)
    with pytest.raises(UserError, match=r"model\.start: .*nowhere is neither a run nor"):
        start_from(other, tmp_path / "nowhere")
    (tmp_path / "bad.safetensors").write_bytes(b"not a model")
    with pytest.raises(UserError, match="cannot be read"):
        start_from(other, tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rounds": 3}, "rounds: with `pretrain` there are no clients"),
        ({"privacy__noise": 1.0}, "privacy: with `pretrain`"),
        ({"data__partition": {"kind": "iid", "clients": 2}}, "data.partition: with `pretrain`"),
        ({"pretrain__steps": 0}, "pretrain.steps"),
        ({"pretrain__optimizer": "larss"}, "did you mean 'lars'"),
    ],
)
def test_impossible_pretraining_is_told(
    changes: dict[str, Any], told: str, corpus: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        tacit.run(seed_config(**changes), tmp_path / "run", dataset=corpus)
