"""LEAF's files, created here as its scripts write them: each record is read with its user, or refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tacit
from tacit.data import load
from tacit.errors import UserError
from tacit.fetching import cache


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path.with_name(f"{tmp_path.name}-cache")))


def written(folder: Path, users: dict[str, list[tuple[list[Any], Any]]], name: str = "data_0.json") -> None:
    data = {user: {"x": [x for x, _ in rows], "y": [y for _, y in rows]} for user, rows in users.items()}
    whole = {"users": list(users), "num_samples": [len(rows) for rows in users.values()], "user_data": data}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(whole))


def picture(grey: float) -> list[float]:
    return [grey, 0.0, 0.0, 1.0]


def test_records_keep_their_users_values_and_parts(tmp_path: Path) -> None:
    written(
        tmp_path / "train", {"f0_12": [(picture(0.2), 3), (picture(0.4), 0)], "f1_07": [(picture(0.6), 1)]}
    )
    written(tmp_path / "train", {"f2_00": [(picture(0.8), 2)]}, "data_1.json")
    written(tmp_path / "test", {"f2_00": [(picture(0.0), 2)], "f0_12": [(picture(1.0), 3)]})
    found = load("leaf", tmp_path)
    assert (found.classes, found.shape, len(found.train), len(found.test)) == (4, (1, 2, 2), 4, 2)
    assert found.train.x[:, 0, 0, 0].tolist() == [51, 102, 153, 204]
    assert found.train.y.tolist() == [3, 0, 1, 2] and found.test.y.tolist() == [2, 3]
    assert found.train.users.tolist() == ["f0_12", "f0_12", "f1_07", "f2_00"], "names, and not numbers"
    assert found.test.users.tolist() == ["f2_00", "f0_12"]


def test_files_without_a_split_lose_the_end_of_each_user_to_the_test(tmp_path: Path) -> None:
    written(tmp_path / "all_data", {"a": [(picture(0.1), 0)] * 20, "b": [(picture(0.1), 1)] * 3})
    found = load("leaf", tmp_path)
    assert Counter(found.train.users.tolist()) == {"a": 18, "b": 2}
    assert Counter(found.test.users.tolist()) == {"a": 2, "b": 1}


def test_a_federation_of_writers_trains(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    users = {f"w{u}": [(rng.random(16).tolist(), int(rng.integers(3))) for _ in range(6)] for u in range(8)}
    written(tmp_path / "train", users)
    written(tmp_path / "test", users)
    config = tacit.load({
        "rounds": 1,
        "data": {"name": "leaf", "path": str(tmp_path), "partition": {"kind": "natural", "clients": 5}},
        "model": {"name": "mlp", "hidden": [4]}, "cohort": 2, "local": {"steps": 1, "batch": 2, "lr": 0.1},
        "engine": {"workers": 0},
    })  # fmt: skip
    assert tacit.run(config, tmp_path / "run", progress=False).finished


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    for label in (1, 4):
        written(tmp_path / "train", {"a": [(picture(0.1), label)] * label})
        written(tmp_path / "test", {"a": [(picture(0.1), 0)]})
        assert load("leaf", tmp_path).classes == label + 1
    assert len(list(cache.root().glob("leaf-*"))) == 2


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([(["a", "b"], 0)], "not lists of numbers"),
        ([([0.1, 0.2, 0.3], 0)], "no square pictures"),
        ([(picture(1.5), 0)], "outside of 0 to 1"),
        ([(picture(float("nan")), 0)], "outside of 0 to 1"),
        ([(picture(0.5), -1)], "no classes from 0"),
        ([(picture(0.5), "cat")], "no classes from 0"),
        ([(picture(0.5), 0), ([0.5], 0)], "not lists of numbers of one length"),
    ],
)
def test_what_is_no_picture_is_named_with_its_user(
    tmp_path: Path, rows: list[tuple[list[Any], Any]], what: str
) -> None:
    written(tmp_path / "train", {"good": [(picture(0.1), 0)], "f3_9": rows})
    written(tmp_path / "test", {"good": [(picture(0.1), 0)]})
    with pytest.raises(UserError, match=f"'f3_9' .*{what}"):
        load("leaf", tmp_path)


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no \.json file"):
        load("leaf", tmp_path)
    (tmp_path / "x.json").write_text('{"users": []}')
    with pytest.raises(UserError, match=r"x\.json is not LEAF's"):
        load("leaf", tmp_path)
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"x\.json cannot be read"):
        load("leaf", tmp_path)
    with pytest.raises(UserError, match="needs a path"):
        load("leaf")
