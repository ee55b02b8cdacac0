"""Whoever asks about a run is told of that run's own model."""

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
