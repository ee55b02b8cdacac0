"""The three ways to state noise, and paper 003's extrapolations to larger populations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tacit
from tacit.cli import main
from tacit.config import Config
from tacit.data import Dataset
from tacit.errors import UserError
from tacit.privacy.conventions import Scale, from_sum, to_sum

USERS, COHORT = 34_753, 1024


def test_the_three_conventions_are_one_mechanism() -> None:
    """Noise put where each convention says, and the variance of the average it leads to."""
    torch.manual_seed(0)
    cohort, clip, z, size = 16, 0.5, 1.3, 200_000
    stated = from_sum(z, cohort)
    clients = clip * stated["client"] * torch.randn(cohort, size)
    variances = {
        "sum": (clip * stated["sum"] * torch.randn(size) / cohort).var(),
        "average": (clip * stated["average"] * torch.randn(size)).var(),
        "client": clients.mean(0).var(),
    }
    expected = (clip * z / cohort) ** 2
    for name, variance in variances.items():  # the estimate's relative deviation is √(2/n) = 0.3 %
        assert abs(variance / expected - 1) < 0.02, name
        assert to_sum(stated[name], name, cohort) == pytest.approx(z)


@pytest.mark.parametrize(
    ("sigma", "population", "cohort", "rounds", "epsilon"),
    [
        (30e-6, 1_737_650, 51_200, 2006, 6.5),
        (20e-6, 3_475_300, 102_400, 2006, 4.5),
        (10e-6, 6_950_600, 204_800, 2006, 4.5),
        (10e-6, 3_475_300, 102_400, 2006, 12.6),
        (3e-6, 69_506_000, 204_800, 2034, 7.2),
        (3e-6, 695_060_000, 204_800, 3390, 3.7),
    ],
)
def test_the_extrapolated_rows_of_the_papers_table_1(
    sigma: float, population: int, cohort: int, rounds: int, epsilon: float
) -> None:
    trained = to_sum(sigma, "average", COHORT)
    found = Scale(population, cohort).cost(trained, COHORT, rounds, 1e-9)
    assert found.rdp == pytest.approx(epsilon, rel=0.03)
    assert found.pld is not None and found.pld <= found.rdp


def private(config: Callable[..., Config], **privacy: Any) -> Config:
    section = {"unit": "client", "clip": 0.1, "delta": 1e-3, "entropy": "seed", **privacy}
    return config(privacy=section, cohort=4, rounds=2)


@pytest.mark.parametrize(("name", "value"), [("sum", 0.8), ("average", 0.2), ("client", 0.4)])
def test_a_config_takes_any_of_them_and_keeps_the_multiplier(
    name: str, value: float, config: Callable[..., Config]
) -> None:
    found = private(config, noise={name: value})
    assert found.privacy is not None and found.privacy.noise == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("privacy", "told"),
    [
        ({"noise": {"sum": 1.0, "average": 1.0}}, "state the noise on one of"),
        ({"noise": {"mean": 1.0}}, "noise"),
        ({"unit": "example", "noise": {"average": 1.0}}, "one number"),
        ({"unit": "example", "noise": 1.0, "extrapolate": [{"population": 9, "cohort": 2}]}, "unit: client"),
        ({"noise": 1.0, "mechanism": "blt", "extrapolate": [{"population": 9, "cohort": 2}]}, "independent"),
    ],
)
def test_impossible_statements_are_told(
    privacy: dict[str, Any], told: str, config: Callable[..., Config]
) -> None:
    with pytest.raises(UserError, match=told):
        private(config, **privacy)


def test_a_run_tells_its_own_epsilon_from_the_extrapolated_one(
    config: Callable[..., Config], dataset: Dataset, tmp_path: Path
) -> None:
    larger = {"population": 12_000, "cohort": 4000}
    result = tacit.run(
        private(config, noise={"average": 0.5}, extrapolate=[larger]), tmp_path / "run", dataset=dataset
    )
    (line,) = tacit.api.extrapolations(result.path)
    assert line.startswith("Not this run, an extrapolation: 12,000 clients, 4,000 a round, noise 2000")
    expected = Scale(12_000, 4000).cost(2.0, 4, 2, 1e-3)
    assert f"ε = {expected.value:.3g}" in line
    own = tacit.api.statement(result.path)
    assert own.epsilon > 0.7 > 0.1 > expected.value
    assert "extrapolation" not in own.text(), "the statement claims nothing of the kind"
    assert len(tacit.api.extrapolations(result.path, [Scale(100, 50)])) == 2


def test_plan_shows_all_three_and_larger_populations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"--population {USERS} --cohort {COHORT} --rounds 20 --delta 1e-9 --at 1737650:51200 --json"
    answers = []
    for stated in ("--noise 0.03072", "--noise 3e-5 --noise-on average", "--noise 9.6e-4 --noise-on client"):
        monkeypatch.setattr(sys, "argv", ["tacit", "plan", *stated.split(), *run.split()])
        with pytest.raises(SystemExit):
            main()
        answers.append(json.loads(capsys.readouterr().out))
    assert all(a["noise"] == pytest.approx(0.03072) for a in answers)
    assert answers[0]["noise_on"] == pytest.approx({"sum": 0.03072, "average": 3e-5, "client": 9.6e-4})
    (there,) = answers[0]["extrapolations"]
    assert there["noise"] == pytest.approx(1.536) and there["rdp"] < answers[0]["epsilon_rdp"]


@pytest.mark.parametrize("text", ["1000", "a:b", "10:100", "1000:"])
def test_a_scale_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        Scale.parse(text)


def test_a_delta_that_gives_somebody_away_is_told() -> None:
    few, many = Scale(500, 50), Scale(240_000, 24_000)
    lines = [scale.text(scale.cost(1.0, 24, 10, 1e-3), 1.0, 10) for scale in (few, many)]
    assert ["too large" in line for line in lines] == [False, True]
