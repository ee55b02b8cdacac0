"""Real clients compute the same as simulated ones, bit for bit, also after kills on either side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deploy_small import dataset, federation, same, settings, vectors

import tacit

SEEDED = {"privacy__entropy": "seed", "privacy__noise": 0.8, "privacy__clip": 0.5, "privacy__delta": 1e-3}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg by examples": {"method": "fedavg", "weights": "examples"},
    "scaffold": {},
    "dp2-fedsam": {**SEEDED, "privacy__unit": "client"},
    "dp-fedadamw": {**SEEDED, "privacy__unit": "example"},
    "dp-fedlamb": {**SEEDED, "privacy__unit": "client", "privacy__aggregation": "secure", "cohort": 4},
}


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_that_of_the_simulation(name: str, tmp_path: Path) -> None:
    asked = {"method": name, **METHODS[name]}
    simulated = tacit.run(settings(**asked), tmp_path / "sim", dataset=dataset(), progress=False)
    small = federation(tmp_path)
    deployed = small.run(settings(deployed=small.folder, **asked), tmp_path / "real")
    assert same(vectors(simulated.path), vectors(deployed.path))
    ours = [{k: v for k, v in r.items() if k != "seconds"} for r in deployed.metrics]
    theirs = [{k: v for k, v in r.items() if k != "seconds"} for r in simulated.metrics]
    assert ours == theirs
    assert not small.log()
    legs = 5 if "privacy__aggregation" in asked else 1
    assert len(small.transport.orders) == legs * sum(record["clients"] for record in theirs)


@pytest.mark.parametrize("name", ["scaffold", "dp-fedadamw"])
def test_both_sides_restart_in_the_middle_and_end_with_the_same_model(name: str, tmp_path: Path) -> None:
    asked = METHODS[name]
    full = settings(name, rounds=4, **asked)
    simulated = tacit.run(full, tmp_path / "sim", dataset=dataset(), progress=False)
    small = federation(tmp_path)
    small.run(settings(name, small.folder, rounds=2, **asked), tmp_path / "real")
    for number in range(len(small.clients)):
        small.reopened(number)
    deployed = small.resume(tmp_path / "real", rounds=4)
    assert same(vectors(simulated.path), vectors(deployed.path))
    assert torch.equal(
        *(torch.cat([p.flatten() for p in r.model.parameters()]) for r in (simulated, deployed))
    )
    assert all(not finding.problem for finding in tacit.verify(tmp_path / "real"))
