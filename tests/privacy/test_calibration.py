"""Planning: answers are the best ones that keep the guarantee; and the command's interface."""

import json
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tacit.cli.plan import plan
from tacit.errors import UserError
from tacit.privacy import PoissonGaussian
from tacit.privacy.accountants import pld_epsilon, rdp_epsilon
from tacit.privacy.answers import Question, answer
from tacit.privacy.calibration import _digits, _index, _noise, closed_form_noise, solve_noise

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(plan)


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, arguments, catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return result.output


def ask(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return found


def test_epsilon_as_json() -> None:
    found = ask("--rate", "0.029465", "--noise", "1.536", "--rounds", "2006", "--delta", "1e-9")
    assert found["epsilon"] == pytest.approx(6.175, rel=2e-3)
    assert found["epsilon_rdp"] == pytest.approx(6.506, rel=1e-3)
    assert found["rdp_order"] == pytest.approx(6.7)
    assert (found["delta"], found["noise"], found["rate"], found["rounds"]) == (1e-9, 1.536, 0.029465, 2006)


def test_solving_for_noise_as_json() -> None:
    found = ask("--rate", "0.05", "--epsilon", "1", "--rounds", "200", "--delta", "1e-3")
    assert found["noise"] == 2.02
    assert found["epsilon"] <= 1


@pytest.mark.parametrize(
    ("rate", "rounds", "target", "delta"),
    [(0.05, 200, 1.0, 1e-3), (0.01, 50, 8.0, 1e-5), (1.0, 10, 0.5, 1e-6)],
)
def test_noise_is_the_smallest_of_three_digits(rate: float, rounds: int, target: float, delta: float) -> None:
    noise = solve_noise(lambda noise: [{PoissonGaussian(rate, noise): rounds}], target, delta)
    digits = f"{noise:.2e}"
    assert float(digits) == noise
    below = noise - 10.0 ** (int(digits.split("e")[1]) - 2)
    assert pld_epsilon({PoissonGaussian(rate, noise): rounds}, delta) <= target
    assert pld_epsilon({PoissonGaussian(rate, below): rounds}, delta) > target


@pytest.mark.slow
def test_rounds_and_cohort_are_the_largest() -> None:
    rounds = answer(Question(rate=0.01, noise=1.0, target=1.0, delta=1e-5)).question.rounds
    assert rounds is not None
    event = PoissonGaussian(0.01, 1.0)
    assert pld_epsilon({event: rounds}, 1e-5) <= 1 < pld_epsilon({event: rounds + 1}, 1e-5)
    cohort = answer(
        Question(population=20_000, rounds=500, noise=1.0, target=1.0, delta=1e-5)
    ).question.cohort
    assert cohort is not None
    assert pld_epsilon({PoissonGaussian(cohort / 20_000, 1.0): 500}, 1e-5) <= 1
    assert pld_epsilon({PoissonGaussian((cohort + 1) / 20_000, 1.0): 500}, 1e-5) > 1


def test_at_scale() -> None:
    small = ask(
        "--population", "34753", "--cohort", "1024", "--noise", "1", "--rounds", "2000", "--delta", "1e-9"
    )
    large = ask("--population", "70000000", "--cohort", "200000", "--noise", "1", "--rounds", "2000",
                "--delta", "1e-9")  # fmt: skip
    assert large["rate"] == 200_000 / 70_000_000
    assert large["epsilon"] < small["epsilon"] / 5


@pytest.mark.slow
def test_example_level_and_sam() -> None:
    settings = (
        "--examples",
        "1000",
        "--batch",
        "16",
        "--local-steps",
        "20",
        "--noise",
        "1",
        "--delta",
        "1e-5",
    )
    once = ask(*settings, "--participations", "10")
    assert once["epsilon_rdp"] == pytest.approx(1.85, abs=0.005)
    assert (once["unit"], once["steps"], once["rate"]) == ("example", 200, 0.016)
    assert ask(*settings, "--participations", "10", "--queries", "2")["epsilon_rdp"] == pytest.approx(
        4.65, abs=0.005
    )
    often = ask(*settings, "--epsilon", "2")
    assert often["solved_for"] == "participations" and often["epsilon"] <= 2
    again = ask(*settings, "--participations", str(often["participations"] + 1))
    assert again["epsilon"] > 2


def test_fixed_size_uses_its_own_bound() -> None:
    settings = (
        "--population",
        "1000",
        "--cohort",
        "50",
        "--noise",
        "4",
        "--rounds",
        "100",
        "--delta",
        "1e-5",
    )
    found = ask(*settings, "--sampling", "fixed")
    assert found["accountant"] == "rdp" and found["epsilon_pld"] is None
    assert found["relation"] == "replace-one"
    assert found["epsilon"] > ask(*settings)["epsilon"]


def test_closed_form_is_shown_and_is_no_bound_we_use() -> None:
    assert closed_form_noise(0.05, 200, 1.0, 1e-3) == pytest.approx(7.20, abs=0.005)
    found = ask(
        "--rate", "0.05", "--epsilon", "1", "--rounds", "200", "--delta", "1e-3", "--compare-closed-form"
    )
    assert found["closed_form_noise"] == pytest.approx(7.20, abs=0.005)
    assert found["noise"] < 2.3
    # What the numerical RDP bound needs for the same settings.
    assert rdp_epsilon({PoissonGaussian(0.05, 2.26): 200}, 1e-3) <= 1
    assert rdp_epsilon({PoissonGaussian(0.05, 2.25): 200}, 1e-3) > 1


@pytest.mark.slow
def test_output_for_people_fits_a_terminal_and_names_units() -> None:
    text = run(
        "--rate",
        "0.05",
        "--noise",
        "2",
        "--rounds",
        "20",
        "--delta",
        "1e-3",
        "--population",
        "1000",
        "--table",
    )
    assert max(len(line) for line in text.splitlines()) <= 80
    for word in ("by PLD", "by RDP", "rounds", "clipping bound", "whole clients", "warning: δ"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate 0.1 --noise 1 --rounds 10", "give --delta"),
        ("--epsilon 2 --rate 0.1 --rounds 9 --delta 1e-5 --noise-on average", "give --noise too"),
        ("--delta 2 --rate 0.1 --noise 1 --rounds 10", "not a probability"),
        ("--delta 1e-5 --rate 1.5 --noise 1 --rounds 10", "0 < rate ≤ 1"),
        ("--delta 1e-5 --rate 0.1 --noise 0 --rounds 10", "number > 0"),
        ("--delta 1e-5 --rate 0.1 --noise nan --rounds 10", "number > 0"),
        ("--delta 1e-5 --rate 0.1 --noise 1 --rounds 0", "whole number"),
        ("--delta 1e-5 --noise 1", "give --rate and --rounds"),
        ("--delta 1e-5 --epsilon 1 --rate 0.1", "give all but one"),
        ("--delta 1e-5 --epsilon 1 --rate 0.1 --noise 1 --rounds 10", "leave out"),
        ("--delta 1e-5 --epsilon 1 --noise 1 --rounds 10", "give --population"),
        ("--delta 1e-5 --population 10 --cohort 11 --noise 1 --rounds 10", "larger than"),
        (
            "--delta 1e-5 --population 10 --cohort 1 --rate 0.1 --noise 1 --rounds 10",
            "give the rate or these",
        ),
        ("--delta 1e-5 --examples 100 --rate 0.1 --noise 1", "client level"),
        ("--delta 1e-5 --examples 100 --batch 10 --noise 1", "--local-steps and --participations"),
        ("--delta 1e-5 --examples 100 --noise 1 --epsilon 1", "--noise or --participations is solved for"),
        ("--delta 1e-5 --rate 0.5 --noise 0.1 --epsilon 1", "one round costs more"),
        ("--delta 1e-5 --rate 0.1 --noise 1 --rounds 5 --queries 2", "example level"),
        ("--delta 1e-5 --sampling fixed --cohort 5 --noise 1 --rounds 5", "give --population"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run(*arguments.split())
    assert "\n" not in str(caught.value)


def test_three_digit_numbers_are_counted_without_gaps() -> None:
    values = [_digits(i) for i in range(1, 4000)]
    assert values == sorted(set(values))
    assert all(float(f"{v:.2e}") == v for v in values)
    for index in (1, 99, 100, 999, 1000, 1899, 1900, 2500):
        assert _index(_noise(index) * 1.0000001) == index


def test_an_answer_that_bounds_next_to_nothing_is_told() -> None:
    asked = Question(rate=0.1, rounds=2, delta=1e-5, noise=1.0)
    assert not answer(asked).warnings()
    (warning,) = answer(replace(asked, noise=1e-2)).warnings()
    assert warning.startswith("ε above 20 bounds next to nothing")
