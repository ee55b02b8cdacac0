"""Layer statistics: the clients' own norms, before clipping; never of protected clients."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tacit
from tacit.algorithms import FedAvg
from tacit.cli import main
from tacit.config import Config
from tacit.data import Dataset
from tacit.errors import UserError
from tacit.federation.layers import by_kind, over_rounds
from tacit.vector import Vectors

DELTAS: list[Vectors] = []


class Watched(FedAvg):
    """FedAvg whose updates are written down."""

    def client(self, msg: Vectors, memory: Vectors, work: Any) -> tuple[Vectors, Vectors]:
        upload, memory = super().client(msg, memory, work)
        DELTAS.append({name: vector.clone() for name, vector in upload.items()})
        return upload, memory


@pytest.mark.parametrize("private", [False, True])
def test_statistics_are_those_of_the_updates_before_clipping(
    private: bool, config: Callable[..., Config], dataset: Dataset, tmp_path: Path
) -> None:
    DELTAS.clear()
    more: dict[str, Any] = {"evaluate__layers": True, "rounds": 2}
    if private:
        section = {"unit": "client", "clip": 1e-3, "noise": 1.0, "delta": 1e-3, "entropy": "seed"}
        more["privacy"] = section
    result = tacit.run(config(**more), tmp_path / "run", dataset=dataset, algorithm=Watched())
    layout = tacit.vector.Layout.of(result.model)
    slices = layout.layer_slices()
    norms = np.array(
        [
            [torch.cat([d["delta"][part] for part in parts]).norm().item() for _, parts in slices]
            for d in DELTAS
        ]
    )
    first = int(result.metrics[0]["clients"])
    for i, (name, _) in enumerate(slices):
        mean, std = result.metrics[0]["layers"][name]
        assert mean == pytest.approx(norms[:first, i].mean(), rel=1e-4)
        assert std == pytest.approx(norms[:first, i].std(), rel=1e-3, abs=1e-7)
        mean, std = over_rounds(result.metrics)[name]
        assert mean == pytest.approx(norms[:, i].mean(), rel=1e-4)
        assert std == pytest.approx(norms[:, i].std(), rel=1e-3)
        # One bound for everything: each layer shrinks as the whole does (Algorithm 1 of paper 003).
        if private:
            shrunk = norms * np.minimum(1, 1e-3 / np.linalg.norm(norms, axis=1, keepdims=True))
            mean, std = over_rounds(result.metrics, "clipped_layers")[name]
            assert mean == pytest.approx(shrunk[:, i].mean(), rel=1e-4)
            assert std == pytest.approx(shrunk[:, i].std(), rel=1e-3)
    assert private or not over_rounds(result.metrics, "clipped_layers")
    assert set(by_kind(over_rounds(result.metrics))) <= {"MLP", "head", "other"}


def test_protected_clients_are_not_measured(
    config: Callable[..., Config], dataset: Dataset, tmp_path: Path
) -> None:
    section = {"unit": "client", "clip": 0.1, "noise": 1.0, "delta": 1e-3}
    with pytest.raises(UserError, match=r"evaluate\.layers: exact norms of protected clients"):
        tacit.run(config(privacy=section, evaluate__layers=True), tmp_path / "run", dataset=dataset)


def test_the_command_and_its_picture(
    config: Callable[..., Config],
    dataset: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tacit.run(config(evaluate__layers=True, rounds=1), tmp_path / "run", dataset=dataset)
    picture = tmp_path / "layers.png"
    arguments = ["tacit", "layers", str(tmp_path / "run"), "--picture", str(picture), "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        main()
    assert set(json.loads(capsys.readouterr().out)) == {"layers", "kinds"}
    assert picture.stat().st_size > 5000


def test_gradients_and_the_servers_update_layer_by_layer(tmp_path: Path) -> None:
    """One client, one step: its gradient times the rate is its update, which is the server's, before any
    noise.
    """
    from methods_small import configured, play
    from tacit.federation.layers import of_server

    one = {"local.steps": 1, "cohort": 4, "evaluate.layers": True, "rounds": 1}
    plain = play(configured("fedavg", one), "plain").result.metrics[0]
    for name, (mean, _) in plain["gradient_layers"].items():
        assert plain["layers"][name][0] == pytest.approx(0.1 * mean, rel=1e-3)
        before, after = plain["server_layers"][name]
        assert before == after <= plain["layers"][name][0] * 1.001, (
            "a mean is no longer than what it is a mean of"
        )
    noisy = play(
        configured(
            "dp-fedavg-client", one | {"privacy.noise": 50.0, "privacy.clip": 0.01, "method.momentum": 0.0}
        ),
        "noisy",
    ).result.metrics
    for before, after in of_server(noisy).values():
        assert before <= 0.0101 < after, "bounded before the noise, drowned after it"


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_without_noise_the_server_has_the_same_before_and_after(
    weights: str, config: Callable[..., Config], dataset: Dataset, tmp_path: Path
) -> None:
    """What is not bounded is divided by the weights that came, and so is what it is compared with."""
    more = {"evaluate__layers": True, "rounds": 1, "weights": weights}
    result = tacit.run(config(**more), tmp_path / "run", dataset=dataset)
    for before, after in result.metrics[0]["server_layers"].values():
        assert before == pytest.approx(after, rel=1e-5)
