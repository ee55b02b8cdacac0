"""The comparisons in docs/results.md: stored results are not recomputed, and the page agrees with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tacit.config.sweep import Family, Sweep, slug

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs/results"
sys.path.insert(0, str(ROOT / "docs/making"))

import results  # noqa: E402
import results_page  # noqa: E402
from results_page import Table, verdict  # noqa: E402

NAMES = sorted(file.stem for file in KEPT.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_a_comparison_is_about_runs_of_its_recipe(name: str) -> None:
    what, table = (
        results.comparison(name),
        Table(name, yaml.safe_load((KEPT / f"{name}.yaml").read_text()), []),
    )
    points = what.sweep.points
    assert table.about["runs"] == len(points)
    looks = len(results_page.COLOURS), len(results_page.MARKS)
    assert len(table.rows) <= min(looks), "no two rows look alike"
    every = Table(name, table.about, [{"point": point} for point in [*what.starts, *points]])
    for row in table.rows:
        assert any(every.chosen(row, n) for n in range(len(table.columns))), row.name
        assert len(row.paper) <= len(table.columns)
    for contrast in table.about["contrasts"]:
        for n in contrast.get("columns", range(len(table.columns))):
            seeds = [
                {c["point"]["seed"] for c in every.chosen(every.row(contrast[who]), n)}
                for who in ("one", "other")
            ]
            assert seeds[0] == seeds[1] == {point["seed"] for point in points}, (contrast, n)
    for recipe in what.pretrain.values():
        assert (ROOT / recipe).exists()
    known = {slug(point): what.sweep.config(point).rounds for point in points}
    known |= {slug(point): 0 for point in what.starts}
    for cell in results.kept(what):
        assert known[slug(cell["point"])] == cell["rounds"], "a cell is a whole run"


def test_the_page_says_what_the_cells_say() -> None:
    text = (ROOT / "docs/results.md").read_text("utf-8")
    assert results_page.page_text(KEPT, text) == text, "python docs/making/results.py --collect"


# --- what is still to run ------------------------------------------------------------------------------

SWEEP = Sweep(
    {"name": "x"},
    (
        Family({"method": ["a", "b"], "seed": [0, 1]}, {}),
        Family({"method": ["c"], "seed": [0, 1, 2]}, {"local.lr": [0.1, 0.2]}),
    ),
    "x", 0.1,
)  # fmt: skip


def kept_cell(point: dict[str, Any], tuned: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"point": point, "tuned": tuned or {}}


def test_everything_is_run_with_its_first_seed_before_the_next() -> None:
    steps = results.remaining(SWEEP, [])
    assert [[slug(point) for point in step.points] for step in steps] == [
        ["method=a,seed=0"], ["method=b,seed=0"], ["method=c,seed=0", "method=c,seed=1", "method=c,seed=2"],
        ["method=a,seed=1"], ["method=b,seed=1"],
    ]  # fmt: skip
    assert steps[2].families[0].tune == {"local.lr": [0.1, 0.2]}


def test_a_kept_cell_is_not_run_again_and_says_what_was_chosen() -> None:
    cells = [kept_cell({"method": "a", "seed": 0}), kept_cell({"method": "c", "seed": 0}, {"local.lr": 0.2})]
    steps = results.remaining(SWEEP, cells)
    assert [slug(point) for step in steps for point in step.points] == [
        "method=b,seed=0", "method=a,seed=1", "method=b,seed=1",
        "method=c,seed=1,lr=0.2", "method=c,seed=2,lr=0.2",
    ]  # fmt: skip
    assert not any(family.tune for step in steps for family in step.families)


def test_one_column_of_a_table_is_finished_before_the_next() -> None:
    grid = {"method": ["a", "b"], "server": [{"lr": 1}, {"lr": 2}], "seed": [0, 1]}
    sweep = Sweep({"name": "x"}, (Family(grid, {}),), "x", None)
    columns = [{"name": str(lr), "where": {"server": {"lr": lr}}} for lr in (2, 1)]
    steps = results.remaining(sweep, [], columns)
    points = [point for step in steps for point in step.points]
    found = [(point["server"]["lr"], point["seed"], point["method"]) for point in points]
    assert found == [(lr, seed, method) for lr in (2, 1) for seed in (0, 1) for method in "ab"]


# --- verdicts ------------------------------------------------------------------------------------------

ABOUT = {
    "value": "own.personal", "cost": "An hour.",
    "rows": [{"name": name, "where": {"method": name}} for name in "ab"],
    "contrasts": [{"say": "a beats b", "one": "a", "other": "b"}],
}  # fmt: skip


def cells(gaps: list[float], clients: int = 0, spread: float = 0.0) -> list[dict[str, Any]]:
    """Of a and b for each seed: a is ahead by the gap, in points; each client's too, give or take."""
    found = []
    for seed, gap in enumerate(gaps):
        base = 0.5 + 0.05 * seed
        for method, value in (("a", base + gap / 100), ("b", base)):
            own = [value + (spread if k % 2 and method == "a" else 0) for k in range(clients)] or [value]
            found.append({"point": {"method": method, "seed": seed}, "own": {"personal": own}})
    return found


@pytest.mark.parametrize(
    ("gaps", "better", "said"),
    [
        ([2.0, 2.5, 1.5], "higher", "**Reproduced.**"),
        ([2.0, 2.5, 1.5], "lower", "**Not reproduced**"),
        ([-2.0, -2.5, -1.5], "higher", "**Not reproduced**"),
        ([2.0, -2.0, 1.0], "higher", "zero is in the interval of “a beats b”."),
        ([2.0, 2.1], "higher", "of some there are 2 seeds where it takes 3"),
        ([9.0], "higher", "of some there is one seed where it takes 3"),
        ([], "higher", "**Not run yet.** An hour."),
    ],
)
def test_a_verdict_says_what_the_seeds_allow_and_no_more(gaps: list[float], better: str, said: str) -> None:
    assert said in verdict(Table("x", {**ABOUT, "better": better}, cells(gaps)))


def test_with_one_seed_the_clients_are_paired_and_nothing_is_settled() -> None:
    table = Table("x", ABOUT, cells([3.0], clients=40, spread=0.02))
    found = table.difference("a", "b", 0)
    assert found is not None
    difference, over = found
    assert over == "40 clients of one seed" and difference.settled and difference.mean == pytest.approx(4.0)
    assert table.outcome(ABOUT["contrasts"][0], 0) == ("as claimed", 1)
    assert verdict(table).startswith("**Not settled at this size**")


def test_a_question_of_our_own_is_no_part_of_the_papers_claim() -> None:
    more = {**ABOUT["contrasts"][0], "one": "b", "other": "a", "ours": True}
    table = Table("x", ABOUT | {"contrasts": [*ABOUT["contrasts"], more]}, cells([2.0, 2.5, 1.5]))
    assert table.outcome(more, 0) == ("the opposite", 3) and verdict(table) == "**Reproduced.**"


def test_where_the_paper_claims_nothing_nothing_is_reproduced() -> None:
    ours = {**ABOUT["contrasts"][0], "ours": True}
    said = verdict(Table("x", ABOUT | {"contrasts": [ours]}, cells([2.0, 2.5, 1.5])))
    assert "claims nothing" in said and "Reproduced" not in said


def test_what_came_out_as_claimed_is_named_beside_what_did_not() -> None:
    again, third = ({**ABOUT["contrasts"][0], "say": say, "one": "c"} for say in ("c beats b", "so it does"))
    rows = [*ABOUT["rows"], {"name": "c", "where": {"method": "c"}}]
    unclear = [
        {"point": {"method": "c", "seed": seed}, "own": {"personal": [value]}}
        for seed, value in enumerate((0.52, 0.51, 0.61))
    ]
    table = Table(
        "x",
        ABOUT | {"rows": rows, "contrasts": [*ABOUT["contrasts"], again, third]},
        cells([2.0, 2.5, 1.5]) + unclear,
    )
    said = verdict(table)
    assert "zero is in the intervals of “c beats b” and “so it does”. As claimed: “a beats b”." in said


@pytest.mark.parametrize(
    ("printed", "better", "gaps", "said", "counts"),
    [
        (5.0, "higher", [0.5, -0.5, 0.2], "open, less than the paper's", "– | – | 1 | – | –"),
        (-5.0, "lower", [0.5, -0.5, 0.2], "open, less than the paper's", "– | – | 1 | – | –"),
        (0.6, "higher", [0.5, -0.5, 0.2], "open", "– | – | – | 1 | –"),
        (-5.0, "higher", [0.5, -0.5, 0.2], "open, more than the paper's", "– | – | – | 1 | –"),
        (5.0, "higher", [2.0, 2.5, 1.5], "as claimed, less than the paper's", "1 | – | – | – | –"),
        (5.0, "higher", [-2.0, -2.5, -1.5], "the opposite", "– | 1 | – | – | –"),
        (5.0, "higher", [0.5, 0.5], "as claimed, less than the paper's", "– | – | – | 1 | –"),
        (5.0, "higher", [], "not run", "– | – | – | – | 1"),
    ],
)
def test_an_interval_is_held_against_the_papers_own_difference(
    printed: float, better: str, gaps: list[float], said: str, counts: str
) -> None:
    rows = [{**row, "paper": [50 + printed * (row["name"] == "a")]} for row in ABOUT["rows"]]
    table = Table("x", {**ABOUT, "rows": rows, "better": better, "title": "SAM² (paper 002)"}, cells(gaps))
    assert results_page._gaps(table)[-1].split(" | ")[-1] == f"{said} |"
    assert results_page.overview([table]).endswith(f"| [SAM² (paper 002)](#sam²-paper-002) | {counts} |")
    assert ("too large for “a beats b”" in verdict(table)) == (said == "open, less than the paper's")


def test_a_row_that_was_not_run_is_named() -> None:
    table = Table("x", ABOUT, [c for c in cells([1.0, 1.0, 1.0]) if c["point"]["method"] == "a"])
    assert "not all that it takes was run (for “a beats b”)" in verdict(table)


# --- from runs to cells --------------------------------------------------------------------------------


def test_finished_runs_become_cells_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs/results").mkdir(parents=True)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "KEPT", tmp_path / "docs/results")
    (tmp_path / "recipe.yaml").write_text(
        """
        name: small
        rounds: 2
        data: {name: fashion-mnist-slice, holdout: 0.1, partition: {kind: classes, clients: 100, classes: 2}}
        model: {name: mlp, hidden: [4]}
        cohort: 3
        local: {epochs: 1, batch: 20, lr: 0.1}
        privacy: null
        evaluate: {clients: 5, records: 100}
        sweep: {method: [fedavg, centaur], seed: [0, 1]}
        """
    )
    about = ABOUT | {
        "recipe": "recipe.yaml", "runs": 4, "clients": 7, "start": True, "title": "T", "claim": "C",
        "setting": "S", "unit": "%", "curve": "c", "figure": "F",
        "rows": [{"name": "a", "where": {"method": "fedavg"}}, {"name": "b", "where": {"method": "centaur"}}],
    }  # fmt: skip
    (tmp_path / "docs/results/one.yaml").write_text(yaml.safe_dump(about))
    what, runs = results.comparison("one"), tmp_path / "runs/small"
    monkeypatch.setattr(results, "run_sweep", in_turn)
    monkeypatch.setattr(results, "test_clients", None)
    with pytest.raises(TypeError):
        results.run(what, runs, 1)  # all runs are made before any client is tested
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "KEPT", tmp_path / "docs/results")
    assert results.collect(what, runs, quick=True) == 0
    page = tmp_path / "x.md"
    page.write_text(f"before\n{results_page.BEGIN}{results_page.END}\nafter\n")
    results_page.write_page(tmp_path / "docs/results", page)
    assert "- a, seed 0, 2 of 2 rounds done: " in page.read_text()
    assert len(results.remaining(what.sweep, results.kept(what))) == 4, "under way is not kept"
    monkeypatch.setattr(results, "run_sweep", in_turn)
    results.run(what, runs, 1)
    assert results.collect(what, runs) == 6 and results.collect(what, runs) == 0
    kept = json.loads((tmp_path / "docs/results/one.json").read_text())["cells"]
    assert [cell["rounds"] for cell in kept] == [0, 0, 2, 2, 2, 2]
    assert [slug(cell["point"]) for cell in kept[2:]] == [slug(point) for point in what.sweep.points]
    assert all(len(cell["own"]["personal"]) == 7 for cell in kept)
    assert all(str(tmp_path) not in json.dumps(cell) for cell in kept), "no path of this machine is kept"
    monkeypatch.setattr(results, "run_sweep", None)
    results.run(what, tmp_path / "elsewhere", 1)  # nothing is left to run
    results_page.write_page(tmp_path / "docs/results", page)
    assert "Under way" not in page.read_text()
    assert "| a − b | – |" in page.read_text() and page.read_text().endswith("after\n")
    assert (tmp_path / "docs/results/one.png").stat().st_size > 10_000


def in_turn(sweep: Sweep, folder: Path, jobs: int) -> None:
    """The runs of a sweep in this process."""
    from tacit.sweeps.schedule import run_point

    for point in sweep.points:
        assert run_point(sweep.base, point, str(folder / slug(point)))
