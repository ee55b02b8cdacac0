"""Public records: the same for every run, an equal share of each class, and fit for pre-training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tacit
from conftest import blobs as people
from tacit.config.build import build_job
from tacit.data.clients import split_public
from tacit.errors import UserError

SHARE = 0.1


def blobs(n: int) -> tacit.Dataset:
    """Records that are nobody's."""
    made = people(n)
    train = made.train
    assert isinstance(train, tacit.ArrayRecords)
    return replace(made, train=tacit.ArrayRecords(train.x, train.y))


def federated(seed: int, partition: dict[str, Any] | None = None, **more: Any) -> tacit.Config:
    split = partition or {"kind": "classes", "clients": 10, "classes": 2}
    return tacit.load(
        {
            "seed": seed, "rounds": 1, "model": "logistic", "cohort": 2,
            "data": {"name": "blobs", "public": SHARE, "partition": split},
            "local": {"epochs": 1, "batch": 10, "lr": 0.1}, "engine": {"workers": 0},
        }, more,
    )  # fmt: skip


def central(**more: Any) -> tacit.Config:
    section = {"records": "public", "steps": 3, "lr": 0.1, "batch": 8, "optimizer": "sgd"}
    values = {"data": {"name": "blobs", "public": SHARE}, "model": "logistic", "pretrain": section}
    return tacit.load(values, {"engine.workers": 0, **more})


def test_every_seed_sets_the_same_records_aside_the_same_share_of_each_class() -> None:
    dataset = blobs(1000)
    labels = dataset.train.labels
    assert labels is not None
    public, private = split_public(federated(0).data, dataset)
    assert np.array_equal(np.sort(np.concatenate([public, private])), np.arange(1000))
    assert len(public) == 100
    for kind in range(4):
        assert abs(int((labels[public] == kind).sum()) - SHARE * int((labels == kind).sum())) <= 1
    for seed in (1, 2):
        assert np.array_equal(split_public(federated(seed).data, dataset)[0], public)


def test_which_of_a_class_is_public_is_drawn_and_not_its_first() -> None:
    dataset = blobs(1000)
    public, _ = split_public(federated(0).data, dataset)
    assert abs(public.mean() - 500) < 120, "four standard errors of a uniform draw of a hundred"


def test_no_client_of_any_seed_holds_a_record_that_pre_trained_the_model(tmp_path: Path) -> None:
    dataset = blobs(1000)
    seen = build_job(central(), tmp_path, dataset=dataset).population.indices
    assert len(seen) == 100
    for seed, partition in ((0, None), (3, {"kind": "iid", "clients": 4}), (4, None)):
        held = build_job(federated(seed, partition), tmp_path, dataset=dataset).population.indices
        assert len(held) == 900 and not np.intersect1d(held, seen).size


def test_pre_training_on_public_records_ends_with_a_model_to_start_from() -> None:
    dataset = blobs(1000)
    made = tacit.run(central(), "seed", dataset=dataset)
    assert made.finished
    started = tacit.load(federated(0).model_dump(mode="json"), {"model.start": "seed"})
    assert tacit.run(started, "run", dataset=dataset).finished


def test_without_public_records_there_is_nothing_to_pre_train_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no record is public; set"):
        build_job(central(**{"data.public": 0.0}), tmp_path, dataset=blobs(100))


def test_where_records_have_users_none_is_pre_trained_on_by_itself(tmp_path: Path) -> None:
    """A run whose clients are the users sets whole users aside: other records than these."""
    with pytest.raises(UserError, match="has users"):
        build_job(central(), tmp_path, dataset=people(1000))
