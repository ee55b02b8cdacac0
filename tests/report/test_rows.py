"""A table's rows: runs are merged if they differ only in the seed, and named by all other differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tacit
from command import tacit as cli
from tacit.report import compare

CLIENT = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: cli(*arguments, monkeypatch=monkeypatch, capsys=capsys)


DIFFERENT: list[dict[str, Any]] = [
    {"privacy.clip.bound": 0.2},
    {"privacy.clip.per": "dim"},
    {"privacy.delta": 1e-6},
    {"privacy.unit": "example"},
    {"privacy.entropy": "seed"},
    {"privacy": None},
    {"local.batch": 7},
    {"local.lr": 0.3},
    {"server.lr": 0.3},
    {"server.optimizer": "adam"},
    {"model.hidden": [9]},
    {"data.name": "emnist"},
    {"data.partition.alpha": 0.1},
    {"cohort.size": 3},
    {"weights": "examples"},
    {"rounds": 9},
    {"evaluate.split": "validation"},
]


def made(
    folder: str, overrides: dict[str, Any], seed: int = 0, rounds: int = 4, played: int = 4
) -> compare.Run:
    values = {
        "rounds": rounds, "seed": seed, "cohort": 5, "model": {"name": "mlp", "hidden": [8]},
        "data": {"name": "emnist-slice", "partition": {"kind": "dirichlet", "clients": 12, "alpha": 0.5}},
        "local": {"epochs": 1, "batch": 6, "lr": 0.1}, "privacy": CLIENT,
    }  # fmt: skip
    resolved = tacit.load(values, overrides).model_dump(mode="json")
    return compare.Run(Path(folder), resolved, [{"round": n + 1, "accuracy": 0.5} for n in range(played)])


@pytest.mark.parametrize("overrides", DIFFERENT, ids=lambda o: next(iter(o)))
def test_a_row_is_named_by_every_key_that_differs(overrides) -> None:
    """Two runs that differ in one key, and in nothing else but the seed, are two rows with two names."""
    table = compare.rows([made("a", {}, 0), made("b", overrides, 1)])
    assert [len(row.runs) for row in table] == [1, 1]
    assert table[0].label != table[1].label
    key, value = next(iter(overrides.items()))
    assert (f"no {key}" if value is None else str(value)) in table[1].label.replace("1e-06", "1e-06")


def test_all_of_them_at_once_have_names_of_their_own() -> None:
    table = compare.rows([made("base", {}), *(made(str(n), o) for n, o in enumerate(DIFFERENT))])
    assert len({row.label for row in table}) == len(DIFFERENT) + 1


def test_equal_seeds_are_never_merged() -> None:
    table = compare.rows([made("x/a", {}), made("x/b", {}), made("x/c", {}, seed=1)])
    assert [len(row.runs) for row in table] == [1, 1, 1]
    assert [row.label for row in table] == ["fedavg, in a", "fedavg, in b", "fedavg, in c"]


def test_the_table_marks_units_simulations_and_unfinished_runs(command, recipe_runs) -> None:
    code, out, _ = command("compare", "runs")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "1 of 2" in out and "1 of these runs is not finished" in out
    assert "client, simulated" in out and "is no claim" in out
    assert "record" in out and "not the same promise" in out
    assert all(f"runs/{name}" in out for name in ("half", "sim", "rec"))
    facts = {Path(row["runs"][0]).name: row for row in json.loads(command("compare", "runs", "--json")[1])}
    assert facts["half"]["unfinished"] == 1 and facts["sim"]["unfinished"] == 0
    assert facts["sim"]["simulation"] and facts["rec"]["unit"] == "example"


def test_a_run_whose_budget_was_spent_early_is_no_equal_of_the_others(command, config, dataset) -> None:
    privacy = {"unit": "client", "clip": 0.5, "noise": 2.0, "delta": 1e-3, "entropy": "seed"}
    one = tacit.run(config(rounds=1, privacy=privacy), "runs/one", dataset=dataset)
    spent = {**privacy, "epsilon": 1.01 * one.last("epsilon")}
    cut = tacit.run(config(rounds=3, privacy=spent), "runs/cut", dataset=dataset)
    assert cut.finished and cut.stopped is not None and len(cut.metrics) == 1
    _, out, _ = command("compare", "runs")
    told = " ".join(out.split())
    assert "1 of these runs ended before the last round: the next round would exceed the privacy" in told


@pytest.fixture
def recipe_runs(config, dataset) -> None:
    tacit.run(config(rounds=2), "runs/half", dataset=dataset)
    lines = Path("runs/half/metrics.jsonl").read_text().splitlines(True)
    Path("runs/half/metrics.jsonl").write_text(lines[0])
    Path("runs/half/result.json").unlink()
    tacit.run(config(rounds=2, privacy={**CLIENT, "entropy": "seed"}), "runs/sim", dataset=dataset)
    tacit.run(config(rounds=2, privacy={**CLIENT, "unit": "example"}), "runs/rec", dataset=dataset)
