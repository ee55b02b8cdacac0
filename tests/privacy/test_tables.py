"""Plans side by side: every cell equals the separate plan, and the noise under dropout adds up."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from command import tacit as run_command
from tacit.cli.plan_table import numbers
from tacit.errors import UserError
from tacit.privacy import Clip, Poisson
from tacit.privacy.answers import Question, answer
from tacit.privacy.fleets import compare_mechanisms
from tacit.privacy.mechanisms.secure import SecureSum
from tacit.privacy.tables import shares, signal_to_noise, table

FLEET = {"population": 2000, "cohort": 50}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def asked(text: str, code: int = 0) -> str:
        found, out, err = run_command("plan", *text.split(), monkeypatch=monkeypatch, capsys=capsys)
        assert found == code, err
        if code:
            assert out == "" and len(err.splitlines()) == 1
        return err if code else out

    return asked


@pytest.mark.slow
def test_cells_are_single_plans() -> None:
    axes = {"cohort": [20, 50], "noise": [0.8, 2.0]}
    for cell in table(Question(delta=1e-5, population=2000, rounds=30), axes, dimension=10_000):
        alone = answer(
            Question(delta=1e-5, population=2000, rounds=30, cohort=cell["cohort"], noise=cell["noise"])
        )
        assert cell["epsilon"] == alone.epsilon.value
        assert cell["signal_to_noise"] == signal_to_noise(cell["noise"], cell["cohort"], 10_000)
    (low, high) = table(Question(delta=1e-5, rounds=30, **FLEET), {"epsilon": [0.5, 2.0]})
    assert low["epsilon"] <= 0.5 < 2 * high["noise"] and low["noise"] > high["noise"]


def test_noise_on_the_average_follows_the_cohort() -> None:
    axes = {"cohort": [20, 50]}
    cells = table(Question(delta=1e-5, population=2000, rounds=9, noise=0.1), axes, "average")
    assert [cell["noise"] for cell in cells] == [2.0, 5.0]


@pytest.mark.slow
def test_samplings_side_by_side_are_those_of_the_mechanisms() -> None:
    axes = {"sampling": ["poisson", "fixed", "blt"]}
    poisson, fixed, blt = table(Question(delta=1e-5, rounds=30, target=2.0, **FLEET), axes)
    known = {
        (row.kind, row.secret_sampling): row for row in compare_mechanisms(2000, 50, 30, 2.0, 1e-5, ["blt"])
    }
    assert (poisson["noise"], blt["noise"]) == (known["independent", True].noise, known["blt", False].noise)
    assert poisson["error"] == pytest.approx(known["independent", True].error)
    assert blt["error"] == pytest.approx(known["blt", False].error)
    assert all(cell["epsilon"] <= 2 for cell in (poisson, fixed, blt)) and fixed["noise"] > poisson["noise"]
    (again,) = table(Question(delta=1e-5, rounds=30, noise=blt["noise"], **FLEET), {"sampling": ["blt"]})
    assert again["epsilon"] == blt["epsilon"]


@pytest.mark.parametrize("dropout", [0.0, 0.2, 0.4, 0.7])
def test_the_noise_adds_up_whoever_makes_it(dropout: float) -> None:
    """With a share of m devices gone, what is left and what the server adds make z or more."""
    z, m = 1.3, 1000
    found = shares(z, m, dropout)
    for share in found:
        left = (1 - dropout) * m * share.client**2
        assert left + share.server**2 == pytest.approx(share.published**2)
        assert share.published >= z * (1 - 1e-12)
        assert share.signal == pytest.approx((1 - dropout) * z / share.published)
    assert len(found) == (4 if dropout < 0.5 else 3)
    if dropout == 0.2:  # as the mechanism itself sizes them
        mechanism = SecureSum(z, 1e-5, Clip(0.5), Poisson(0.1), threshold=1 - dropout)
        assert found[-1].client == pytest.approx(z / (mechanism.threshold * m) ** 0.5)


@pytest.mark.slow
def test_the_command_shows_writes_and_draws(plan) -> None:
    out = plan("--population 2000 --cohort 20,50 --noise 1,2,4 --rounds 9 --delta 1e-5 --dimension 1e4 "
               "--csv t.csv --picture t.png")  # fmt: skip
    assert "ε by noise and cohort" in out and "signal by noise and cohort" in out
    assert max(map(len, out.splitlines())) <= 80
    rows = list(csv.DictReader(Path("t.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 6 and {row["cohort"] for row in rows} == {"20", "50"}
    told = json.loads(plan("--population 2000 --cohort 20,50 --noise 1,2,4 --rounds 9 --delta 1e-5 --json"))
    assert [str(cell["epsilon"]) for cell in told["cells"]] == [row["epsilon"] for row in rows]
    assert Path("t.png").read_bytes().startswith(b"\x89PNG")
    out = plan("--population 100 --cohort 20,500 --noise 1 --rounds 9 --delta 1e-5")
    assert "larger than --population" in out and "–" in out, "a cell without a plan says why"


@pytest.mark.slow
def test_what_is_drawn_of_samplings_is_what_may_be_compared(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, list[float]]] = []

    def saved(figure: Figure, *_: object, **__: object) -> None:
        (axes,) = figure.axes
        drawn.extend((axes.get_ylabel(), list(line.get_ydata())) for line in axes.get_lines())

    monkeypatch.setattr(Figure, "savefig", saved)
    asked = "--population 1000 --cohort 20 --epsilon 1,4 --rounds 50 --delta 1e-5 --picture t.png --json "
    cells = json.loads(plan(asked + "--sampling poisson,blt"))["cells"]
    assert {label for label, _ in drawn} == {"error × clip"}
    errors = {value for _, values in drawn for value in values}
    assert errors == {cell["error"] for cell in cells} and None not in errors
    drawn.clear()
    plan(asked + "--sampling poisson,fixed")
    assert {label for label, _ in drawn} == {"noise"}


@pytest.mark.slow
def test_dropout_is_answered(plan) -> None:
    told = json.loads(
        plan(
            "--population 2000 --cohort 50 --epsilon 2 --rounds 9 --delta 1e-5 --dropout 0.2 --dimension 100 "
            "--clip 0.5 --json"
        )
    )
    assert next(share["who"] for share in told["shares"]) == "the server"
    assert told["drawing_more"]["cohort"] == 63 and told["drawing_more"]["epsilon"] <= 2
    assert told["drawing_more"]["noise"] > told["noise"]
    assert told["noise_length"] == pytest.approx(0.5 * told["noise"] * 10 / 50)
    out = plan("--population 2000 --cohort 50 --noise 2 --rounds 9 --delta 1e-5 --dropout 0.2")
    assert "20% of 50 devices vanish" in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--cohort 1,x", "--cohort 1,x: give a number, or several"),
        ("--cohort 1.5", "--cohort 1.5: give a whole number"),
        ("--noise 1,1", "a value is there twice"),
        ("--noise 1,2 --cohort 1,2 --rounds 1,2 --population 9", "a table goes along two settings"),
        ("--sampling sometimes", "choose among poisson, fixed, blt, banded"),
        ("--noise 1 --rate 0.1 --rounds 9 --csv t.csv", "--csv and --picture are of a table"),
        ("--noise 1,2 --rate 0.1 --rounds 9 --dropout 0.2", "are for one plan"),
        ("--noise 1 --population 9 --cohort 3 --rounds 9 --dropout 1.5", "--dropout 1.5: give the share"),
        ("--noise 1 --rate 0.1 --rounds 9 --dimension 10", "give --population and --cohort"),
        ("--noise 1,2 --rate 0.1", "give --rounds"),
        ("--noise 1 --rate 0.1 --rounds 9 --metrics 2", "--metrics 2: give a share from 0.0001 to 0.9"),
        ("--noise 1 --rate 0.1 --rounds 9 --metrics nan", "--metrics nan: give a share from 0.0001 to 0.9"),
        ("c.yaml --noise 1", "c.yaml has the settings"),
        ("--set rounds=3 --noise 1", "--set changes a config's settings"),
        (f"--noise {','.join(map(str, range(1, 300)))} --rate 0.1 --rounds 9", "at most 200"),
    ],
)
def test_refusals_are_one_line(plan, asked: str, said: str) -> None:
    assert said in plan(f"{asked} --delta 1e-5", code=2)


def test_numbers() -> None:
    assert numbers("1_000, 2e3", "cohort", whole=True) == [1000, 2000]
    with pytest.raises(UserError, match="whole number"):
        numbers("inf", "cohort", whole=True)


@pytest.mark.parametrize("text", ["300,000", "2,000", "1,050,000"])
def test_a_comma_among_thousands_is_no_list(text: str) -> None:
    """As a list, 2,000 of 300,000 would be 2 of 300: an ε that looks right and is another's."""
    with pytest.raises(UserError, match=f"write {text.replace(',', '')}$"):
        numbers(text, "population", whole=True)
    assert numbers("100,200", "rounds", whole=True) == [100, 200]
