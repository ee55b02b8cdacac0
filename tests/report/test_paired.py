"""Paired differences: against scipy's own paired test, by seed and never by order."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

import tacit
from command import tacit as command
from conftest import blobs
from tacit.errors import UserError
from tacit.report.compare import Row, Run, against, find_row
from tacit.report.paired import paired


@pytest.mark.parametrize("n", [2, 3, 10, 1000])
def test_the_interval_is_that_of_the_paired_t_test(n: int) -> None:
    rng = np.random.default_rng(n)
    one, other = rng.normal(size=n), rng.normal(0.3, 2.0, n)
    found = paired(dict(enumerate(one)), dict(enumerate(other)))
    expected = ttest_rel(one, other).confidence_interval(0.95)
    assert found.pairs == n and found.mean == pytest.approx((one - other).mean())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.settled == (ttest_rel(one, other).pvalue < 0.05)


def test_values_are_paired_by_seed_whatever_their_order_and_lonely_ones_are_left_out() -> None:
    found = paired({2: 5.0, 0: 1.0, 7: 99.0}, {0: 0.0, 2: 4.0, 8: -99.0})
    assert (found.mean, found.low, found.high, found.pairs) == (1.0, 1.0, 1.0, 2)


def test_one_pair_settles_nothing() -> None:
    found = paired({0: 0.9}, {0: 0.1})
    assert not found.settled and found.high == math.inf and found.text(100) == "+80.0"
    with pytest.raises(ValueError, match="no seed in common"):
        paired({0: 1.0}, {1: 1.0})


def row(label: str, values: dict[int, float], own: dict[int, float], tuned: bool = False) -> Row:
    name = "tuned_accuracy" if tuned else "personal_accuracy"
    return Row(label, tuple(
        Run(Path(f"{label}{seed}"), {"seed": seed}, [{"round": 1, "accuracy": v, name: own[seed]}])
        for seed, v in values.items()
    ), tuned)  # fmt: skip


def test_rows_are_compared_with_their_own_kind_of_personal_accuracy() -> None:
    table = [
        row("a", {0: 0.5, 1: 0.6}, {0: 0.7, 1: 0.9}),
        row("b", {1: 0.4, 0: 0.2}, {0: 0.4, 1: 0.6}, tuned=True),
        row("c", {5: 0.0}, {5: 0.0}),
    ]
    found = against(table, find_row(table, "b"))
    assert found.keys() == {"a"}, "c shares no seed with it"
    assert found["a"]["last"].mean == pytest.approx(0.25) and found["a"]["own"].mean == pytest.approx(0.3)
    with pytest.raises(UserError, match="there are 'a', 'b', 'c'"):
        find_row(table, "d")


def test_the_command_shows_each_rows_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {
        "rounds": 1, "model": "logistic", "cohort": 2, "engine": {"workers": 0},
        "data": {"name": "blobs", "partition": {"kind": "iid", "clients": 4}},
        "local": {"epochs": 1, "batch": 10, "lr": 0.1},
    }  # fmt: skip
    for method in ("fedavg", "fedsam"):
        for seed in (0, 1, 2):
            more = {"method": method, "seed": seed}
            tacit.run(tacit.load(base, more), f"runs/{method}-{seed}", dataset=blobs())
    arguments = ("compare", *sorted(map(str, Path("runs").iterdir())), "--against", "fedavg")
    code, out, _ = command(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and "difference from fedavg, paired over seeds [95% interval]" in " ".join(out.split())
    code, out, _ = command(*arguments, "--json", monkeypatch=monkeypatch, capsys=capsys)
    rows = {one["label"]: one for one in json.loads(out)}
    gap = rows["fedsam"]["against"]["last"]
    means = rows["fedsam"]["accuracy_last"]["mean"] - rows["fedavg"]["accuracy_last"]["mean"]
    assert gap["pairs"] == 3 and gap["mean"] == pytest.approx(means) and gap["low"] <= means <= gap["high"]
