"""Reading a run returns that run's own model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tacit
from command import tacit as command
from tacit.config import Config
from tacit.data import Dataset
from tacit.errors import UserError
from tacit.federation.result import Result


class Twin(nn.Module):
    """As many parameters as the config's network, and another function."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.inner = like

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.flip(-1)) - 0.1
        return out


@pytest.mark.parametrize("groups", [[0], [-1], [2.5], 3, ["2"], [2, None]])
def test_groups_are_whole_numbers_of_units(
    config: Callable[..., Config], dataset: Dataset, tmp_path: Path, groups: Any
) -> None:
    privacy = {"unit": "client", "clip": 0.5, "noise": 4.0, "delta": 1e-3, "entropy": "seed"}
    tacit.run(config(rounds=1, privacy=privacy), tmp_path / "run", dataset=dataset)
    with pytest.raises(UserError, match=r"^groups: .* give whole numbers from 1"):
        tacit.statement(tmp_path / "run", groups)
    assert [size for size, _ in tacit.statement(tmp_path / "run", np.array([1, 2])).groups] == [1, 2]


PRIVATE = {"unit": "client", "clip": 0.5, "noise": 4.0, "delta": 1e-3, "entropy": "seed"}


@pytest.mark.parametrize("damage", ["a charge is changed", "the last charge is cut off", "it is removed"])
def test_a_comparison_tells_no_epsilon_that_the_ledger_does_not(
    config: Callable[..., Config],
    dataset: Dataset,
    tmp_path: Path,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Metrics say it, too, but nothing seals them."""
    tacit.run(config(rounds=2, privacy=PRIVATE), tmp_path / "run", dataset=dataset)
    (sound,) = tacit.compare(tmp_path / "run")
    assert sound["epsilon"] == pytest.approx(tacit.statement(tmp_path / "run").epsilon)
    ledger = tmp_path / "run" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    if damage == "a charge is changed":
        assert "4.0" in lines[-1]
        ledger.write_text("".join([*lines[:-1], lines[-1].replace("4.0", "9.0")]))
    elif damage == "the last charge is cut off":
        ledger.write_text("".join(lines[:-1]))
    else:
        ledger.unlink()
    (row,) = tacit.compare(tmp_path / "run")
    assert row["epsilon"] is None and row["accuracy_last"] == sound["accuracy_last"]
    code, shown, _ = command("compare", tmp_path / "run", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and "note: ε ?:" in shown and "ledger.jsonl" in shown.replace("\n", "")


def test_a_private_run_without_a_statement_is_not_called_one_without_privacy(
    config: Callable[..., Config], dataset: Dataset, tmp_path: Path
) -> None:
    tacit.run(config(rounds=1, privacy=PRIVATE), tmp_path / "run", dataset=dataset)
    (tmp_path / "run" / "statement.json").unlink()
    with pytest.raises(UserError, match=r"no statement.json yet; the ledger holds 1 charge: `tacit resume"):
        tacit.statement(tmp_path / "run")


def test_what_is_no_config_is_told_so() -> None:
    with pytest.raises(UserError, match=r"config: this is a dict; tacit\.load"):
        tacit.plan({"rounds": 1})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"config: give a file or a mapping \(got None\)"):
        tacit.load(None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"overrides: give keys and values, such as {'local.lr': 0.1}"):
        tacit.load({"rounds": 1}, ["rounds=3"])  # type: ignore[arg-type]


def test_the_ledger_of_one_run_is_read_by_its_path(
    config: Callable[..., Config], dataset: Dataset, tmp_path: Path
) -> None:
    """A text is one path, not as many as it has letters."""
    tacit.run(config(rounds=2, privacy=PRIVATE), tmp_path / "run", dataset=dataset)
    alone = tacit.ledger(str(tmp_path / "run"))
    assert alone.epsilon == tacit.ledger([tmp_path / "run"]).epsilon


def test_a_model_that_was_given_is_the_one_that_is_tested(
    config: Callable[..., Config], dataset: Dataset, tmp_path: Path
) -> None:
    """The config names a network with as many parameters, which loads and says other numbers."""
    plain = tacit.run(config(rounds=1), tmp_path / "plain", dataset=dataset).model
    torch.manual_seed(0)
    given = Twin(plain)
    result = tacit.run(config(rounds=2, data__holdout=0.2), tmp_path / "run", dataset=dataset, model=given)
    with pytest.raises(UserError, match=r"give it again from Python: tacit\.test\(.*model=Twin"):
        tacit.test(tmp_path / "run", dataset=dataset)
    with pytest.raises(UserError, match=r"tacit\.test_clients\(.*model=Twin"):
        tacit.test_clients(tmp_path / "run", 2, dataset=dataset)
    tested = tacit.test(tmp_path / "run", dataset=dataset, model=given)
    assert tested.whole["loss"] == pytest.approx(result.last("loss"), rel=1e-6)
    assert tacit.test_clients(tmp_path / "run", 2, dataset=dataset, model=given)[0] == 2
    with pytest.raises(UserError, match=r"give it again from Python: .*dataset="):
        tacit.test(tmp_path / "run", model=given)


def test_a_diagnosis_has_only_the_config(
    config: Callable[..., Config], dataset: Dataset, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    tacit.run(config(rounds=1), tmp_path / "run", dataset=dataset)
    for name in ("drift", "hessian"):
        code, _, said = command(name, str(tmp_path / "run"), monkeypatch=monkeypatch, capsys=capsys)
        assert code == 2 and "was given from Python" in said


def test_the_best_of_an_error_is_its_smallest(tmp_path: Path) -> None:
    rounds = [{"cer": 0.3, "personal_loss": 2.0, "tuned_accuracy": 0.5}]
    rounds += [{"cer": 0.2, "personal_loss": 3.0, "tuned_accuracy": 0.4}]
    result = Result(tmp_path, nn.Identity(), rounds, True)
    assert [result.best(name) for name in rounds[0]] == [0.2, 2.0, 0.5]
