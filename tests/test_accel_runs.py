"""Runs on the pretended accelerator: the CPU's very bits, nothing on the wrong device, few copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import accel
import tacit
from conftest import blobs
from methods_small import CLIENTS, STEPS, configured, halves, memories, small
from tacit.config.methods import METHODS
from tacit.config.schema import Config

accel.install()
TIMES = {"seconds", "client_seconds", "evaluation_seconds"}


def vectors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything that a run's newest checkpoint holds."""
    newest = max((folder / "checkpoint").glob("[0-9]*"))
    return {
        f"{file.stem}.{name}": vector
        for file in sorted(newest.glob("*.safetensors"))
        for name, vector in load_file(file).items()
    }


def facts(result: tacit.Result) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in result.metrics]


def both(config: Config, **objects: Any) -> accel.Traffic:
    """Run on either device, compare all that was saved, and say what moved between host and device."""
    runs = {}
    for device in ("cpu", accel.NAME):
        with accel.counting() as traffic:
            runs[device] = tacit.run(config, device, device=device, progress=False, **objects)
    here, there = runs["cpu"], runs[accel.NAME]
    assert facts(here) == facts(there)
    ours, theirs = vectors(there.path), vectors(here.path)
    assert ours.keys() == theirs.keys()
    for name, vector in ours.items():
        assert torch.equal(vector, theirs[name]), name
    kept, also = memories(there.path), memories(here.path)
    assert kept.keys() == also.keys()
    for client, state in kept.items():
        assert all(torch.equal(vector, also[client][name]) for name, vector in state.items())
    assert (there.path / "config.yaml").read_text().count("device: accel") == 1
    return traffic


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str) -> None:
    noise = {"privacy.noise": 1.0} if METHODS[method].unit == "client" else {}
    config = configured(method, {**noise, "rounds": 2})
    traffic = both(config, model=halves(), dataset=small(method == "adadps"))
    # Up: the message, and a batch (two tensors) for each step, of which some methods take two; one vector of
    # noise a step. Down: sums once a round, losses and state once a client. 2 rounds.
    vectors_sent, visits = 4, 2 * CLIENTS
    assert traffic.up <= 2 * vectors_sent * 2 + visits * (vectors_sent + STEPS * 2 * (2 + 1 + 1))
    assert traffic.down <= 2 * vectors_sent + visits * (vectors_sent + 2) + 40


MECHANISMS = {
    "noise at the clients": {"privacy.noise_at": "clients"},
    "adaptive clipping": {"privacy.adaptive": {}},
    "a bound for each layer": {"privacy.clip.per": "dim"},
    "normalised updates": {"privacy.clip.mode": "normalize"},
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism(name: str) -> None:
    config = configured("dp-fedavg-client", {"privacy.noise": 1.0, "rounds": 2, **MECHANISMS[name]})
    both(config, model=halves(), dataset=small())


MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": [8]},
    "cnn": {"name": "cnn"},
    "resnet": {"name": "resnet18"},
    "vit": {"name": "vit", "patch": 4, "width": 12, "depth": 2, "heads": 3, "dropout": 0.1},
}


@pytest.mark.parametrize("unit", ["none", "example", "client"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_family(name: str, unit: str) -> None:
    method = {"none": "fedavg", "example": "dp-fedadamw", "client": "dp-fedavg-client"}[unit]
    options: dict[str, Any] = {"model": MODELS[name], "local.batch": 4, "local.steps": 2, "cohort": 2}
    if unit == "client":
        options["privacy.noise"] = 1.0
    both(configured(method, options), dataset=blobs(24, side=16 if name == "cnn" else 8))
