"""The table over runs, and its picture."""

from __future__ import annotations

import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from tacit.cli.compare import comparison
from tacit.errors import UserError
from tacit.report.compare import Row, Run, against, find_row, rows, to_json
from tacit.report.picture import curves

ACCURACIES, EPSILONS = (0.25, 0.5, 0.375), (3.91, 3.95, 3.98)


def seeds() -> list[Run]:
    record = {"round": 1, "bytes_up": 2e4, "bytes_down": 3e4, "seconds": 12345.0}
    return [
        Run(
            Path("runs/sweep") / f"method=dp-fedavg,lr=0.1,seed={seed}",
            {"seed": seed, "rounds": 1, "privacy": {"unit": "client", "epsilon": 4}},
            [{**record, "accuracy": accuracy, "epsilon": epsilon}],
        )
        for seed, (accuracy, epsilon) in enumerate(zip(ACCURACIES, EPSILONS, strict=True))
    ]


def test_a_row_claims_what_holds_for_each_of_its_runs() -> None:
    (row,) = rows(seeds())
    assert row.epsilon == max(EPSILONS), "a mean would claim less than one of them has spent"
    assert Row("", (Run(Path("x"), {}, [{"round": 1}]),)).epsilon is None


def test_a_program_is_told_the_largest_epsilon_and_nothing_that_json_lacks() -> None:
    (plain,) = to_json(rows(seeds()))
    assert plain["epsilon"] == max(EPSILONS)
    assert plain["accuracy_last"] == {"mean": 0.375, "std": 0.125}
    for run in (endless := seeds())[:2]:
        run.metrics[-1].update(epsilon=math.inf, accuracy=math.nan)
    (plain,) = json.loads(json.dumps(to_json(rows(endless)), allow_nan=False))
    assert plain["epsilon"] is None and plain["unit"] == "client"
    assert plain["accuracy_last"] == {"mean": None, "std": None}


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (["seed=0,lr=0.1", "seed=1,lr=0.1"], "r/seed={0,1},lr=0.1"),
        (["seed=9,lr=0.1,mu=0", "seed=10,lr=0.1,mu=0"], "r/seed={9,10},lr=0.1,mu=0"),
        (["lr=0.1,seed=10", "lr=0.1,seed=20"], "r/lr=0.1,seed={10,20}"),
        (
            ["seed=0,lr=0.1,noise=1", "seed=1,lr=0.1,noise=2"],
            "r/seed=0,lr=0.1,noise=1, r/seed=1,lr=0.1,noise=2",
        ),
    ],
)
def test_a_place_is_what_a_shell_would_expand(names: list[str], place: str) -> None:
    assert Row("", tuple(Run(Path("r", name), {}, []) for name in names)).place == place


def test_a_table_is_narrow_and_has_no_zeros_for_what_is_small() -> None:
    from rich.console import Console

    console = Console(width=80, record=True, highlight=False, file=io.StringIO())
    console.print(comparison(rows(seeds())))
    text = console.export_text()
    assert "37.5±12.5" in text and "3.98 client" in text and " 0.05 " in text and "12,345" in text
    assert text.count("seed") == 2, "the title, and one place for all seeds"


def test_small_errors_are_told_apart_and_a_run_that_diverged_has_no_spread() -> None:
    from rich.console import Console

    def run(lr: float, seed: int, rmse: float) -> Run:
        settings = {"seed": seed, "rounds": 1, "local": {"lr": lr}, "task": {"name": "regression"}}
        return Run(Path("s") / f"{lr},{seed}", settings, [{"round": 1, "rmse": rmse}])

    errors = [(0.1, 0, 0.0043), (0.1, 1, 0.0045), (0.2, 0, 0.0031), (0.2, 1, 0.0029), (9.0, 0, math.inf)]
    table = rows([run(*error) for error in [*errors, (9.0, 1, 2e15)]])
    console = Console(width=80, record=True, highlight=False, file=io.StringIO())
    console.print(comparison(table))
    text = console.export_text()
    assert "0.00440±0.00014" in text and "0.00300±0.00014" in text, text
    assert "nan" not in text and " inf " in text
    gap = against(table, find_row(table, "fedavg, lr 0.1"))["fedavg, lr 0.2"]["last"].text()
    assert gap.startswith("\N{MINUS SIGN}0.0014 ["), gap
    beyond = against(table, find_row(table, "fedavg, lr 0.1"))["fedavg, lr 9"]["last"]
    assert beyond.text() == "+∞ [\N{MINUS SIGN}∞, +∞]" and not beyond.settled


def test_bands_are_the_deviations_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(Axes, "fill_between", lambda self, x, low, high, **_: drawn.append((low, high)))
    curves(rows(seeds()), "accuracy", tmp_path / "c.pdf")
    ((low, high),) = drawn
    assert np.asarray(high - low).tolist() == pytest.approx([2 * statistics.stdev(ACCURACIES)])
    assert (tmp_path / "c.pdf").read_bytes().startswith(b"%PDF")


def test_a_row_is_found_by_how_its_label_begins() -> None:
    table = [Row(label, ()) for label in ("dp-fedavg, lr 1", "dp-fedavg, lr 2", "scaffold, lr 1", "scaffold")]
    assert (
        find_row(table, "scaffold").label == "scaffold"
        and find_row(table, "scaffold,").label == "scaffold, lr 1"
    )
    with pytest.raises(UserError, match=r"2 rows begin with 'dp-fedavg'; there are .*lr 1', .*lr 2'$"):
        find_row(table, "dp-fedavg")
    with pytest.raises(UserError, match="no row is called 'prox'"):
        find_row(table, "prox")
