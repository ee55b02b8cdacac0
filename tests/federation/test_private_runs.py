"""Privacy in the round loop: what is charged, when, and what survives a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tacit
from conftest import blobs
from tacit.algorithms import FedAvg
from tacit.federation.statements import LEDGER
from tacit.privacy.calibration import cost
from tacit.privacy.ledger import Ledger, replay
from tacit.vector import Layout, read_values

CLIENT = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3}
EXAMPLE = {"unit": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-3}


def charged(folder: Path) -> float:
    contents = Ledger.read(folder / LEDGER)
    return replay(contents.charges).worst(contents.header.delta).epsilon.value


def test_the_runs_epsilon_is_the_planners(config, dataset) -> None:
    from tacit.privacy.events import PoissonGaussian

    result = tacit.run(config(rounds=3, privacy=CLIENT), "run", dataset=dataset)
    assert result.last("epsilon") == cost(PoissonGaussian(5 / 12, 1.0), 3, 1e-3).value
    assert tacit.statement("run").epsilon == result.last("epsilon")
    assert json.loads(Path("run/statement.json").read_text())["epsilon"] == result.last("epsilon")


def test_example_level_charges_the_worst_clients_own_steps(config, dataset) -> None:
    """Full participation: everyone takes 3 rounds × 2 steps at rate 6/20."""
    from tacit.privacy.events import PoissonGaussian

    settings = config(rounds=3, cohort=12, local={"steps": 2, "batch": 6, "lr": 0.1}, privacy=EXAMPLE,
                      data__partition={"kind": "iid", "clients": 12})  # fmt: skip
    result = tacit.run(settings, "run", dataset=dataset)
    assert result.last("epsilon") == cost(PoissonGaussian(6 / 20, 1.0), 6, 1e-3).value


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE])
def test_the_run_stops_before_the_budget_is_exceeded(config, dataset, privacy) -> None:
    free = tacit.run(config(rounds=6, privacy=privacy), "free", dataset=dataset)
    budget = free.metrics[3]["epsilon"] + 1e-6
    result = tacit.run(config(rounds=6, privacy={**privacy, "epsilon": budget}), "run", dataset=dataset)
    assert result.stopped is not None
    assert result.finished
    assert charged(Path("run")) <= budget
    assert len(result.metrics) >= 4
    again = tacit.resume("run", dataset=dataset)
    assert len(again.metrics) == len(result.metrics), "a resume does not spend beyond the budget either"


def test_noise_found_for_a_budget_keeps_all_rounds_within_it(config, dataset) -> None:
    for n, privacy in enumerate(
        ({**CLIENT, "noise": None, "epsilon": 3.0}, {**EXAMPLE, "noise": None, "epsilon": 3.0})
    ):
        result = tacit.run(config(rounds=5, privacy=privacy), f"run-{n}", dataset=dataset)
        assert len(result.metrics) == 5
        assert 2.7 < result.last("epsilon") <= 3.0


def test_without_noise_and_clip_a_private_run_is_the_plain_one(config, dataset) -> None:
    plain = tacit.run(config(cohort=12), "plain", dataset=dataset)
    loose = {"unit": "client", "clip": 1e9, "noise": 0.0, "delta": 1e-3, "entropy": "seed"}
    private = tacit.run(
        config(cohort={"size": 12, "sampling": "poisson"}, privacy=loose), "private", dataset=dataset
    )
    a, b = (read_values(r.model, Layout.of(r.model)) for r in (plain, private))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_released_mean_is_bounded_noised_and_divided_by_a_constant(config, dataset) -> None:
    """One round, many coordinates: (θ' − θ)·m − Σ clip(Δ) must be N(0, (σC)²)."""

    class Nothing(FedAvg):
        def client(self, msg, memory, work):
            return {"delta": torch.zeros_like(msg["theta"])}, {}

    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4000), nn.Linear(4000, 4))
    before = read_values(model, Layout.of(model)).clone()
    privacy = {"unit": "client", "clip": 0.5, "noise": 3.0, "delta": 1e-3}
    settings = config(rounds=1, cohort=4, privacy=privacy)
    result = tacit.run(settings, model=model, dataset=dataset, algorithm=Nothing())
    noise = (read_values(result.model, Layout.of(result.model)) - before) * 4
    # 84,004 draws: the deviation's own error is 0.24 %, the mean's 0.0052; five of each is 1 in a million.
    assert abs(noise.std().item() / 1.5 - 1) < 5 * 0.0025
    assert abs(noise.mean().item()) < 5 * 0.0052


def test_an_empty_cohort_is_a_noise_only_round(config, dataset) -> None:
    result = tacit.run(config(rounds=12, cohort=1, privacy=CLIENT), dataset=dataset)
    sizes = [r["clients"] for r in result.metrics]
    epsilons = [r["epsilon"] for r in result.metrics]
    assert all(a < b for a, b in pairwise(epsilons)), "each round is charged"
    # P(no empty round of 12) = (1 − (11/12)^12)^12 ≈ 0.6 %: a false alarm in 170 runs would be too many, so
    # the assertion is on the charge alone; sizes are looked at only to see that cohorts vary.
    assert len(set(sizes)) > 1


def test_secret_runs_do_not_repeat_and_simulations_do(config, dataset) -> None:
    def final(folder: str, entropy: str) -> torch.Tensor:
        result = tacit.run(config(privacy={**CLIENT, "entropy": entropy}), folder, dataset=dataset)
        return read_values(result.model, Layout.of(result.model))

    assert not torch.equal(final("a", "os"), final("b", "os"))
    assert torch.equal(final("c", "seed"), final("d", "seed"))
    assert "Simulation" in tacit.statement("c").text()
    assert "Simulation" not in tacit.statement("a").text()


@pytest.mark.parametrize("unit", ["client", "example"])
def test_batchnorm_is_refused_with_the_fix(config, dataset, unit) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4))
    with pytest.raises(tacit.UserError, match="GroupNorm"):
        tacit.run(config(privacy={**CLIENT, "unit": unit}), "run", model=model, dataset=dataset)
    assert not Path("run").exists()


def test_weights_by_examples_are_refused_at_client_level(config, dataset) -> None:
    with pytest.raises(tacit.UserError, match="uniform"):
        tacit.run(config(privacy=CLIENT, weights="examples"), "run", dataset=dataset)


def test_noise_shares_of_clients_add_up_whoever_drops_out(config) -> None:
    """Half of the clients send infinities; the server tops up what they took away."""

    class HalfExplode(FedAvg):
        def client(self, msg, memory, work):
            delta = torch.zeros_like(msg["theta"])
            if work.examples % 2:
                delta += float("inf")
            return {"delta": delta}, {}

    base = blobs(120)
    users = np.repeat(np.arange(12), [10] * 6 + [9, 11] * 3)
    records = tacit.ArrayRecords(base.train.x, base.train.y, users=users)
    dataset = tacit.Dataset("odd", records, base.test, 4, (1, 4, 4))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4000), nn.Linear(4000, 4))
    before = read_values(model, Layout.of(model)).clone()
    privacy = {"unit": "client", "clip": 1.0, "noise": 2.0, "delta": 1e-3, "noise_at": "clients"}
    settings = config(rounds=1, cohort=8, data__partition={"kind": "natural"}, privacy=privacy)
    result = tacit.run(settings, model=model, dataset=dataset, algorithm=HalfExplode())
    noise = (read_values(result.model, Layout.of(result.model)) - before) * 8
    assert abs(noise.std().item() / 2.0 - 1) < 5 * 0.0025


CRASHER = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from conftest import blobs
    import tacit
    from tacit.federation import checkpoint
    from tacit.privacy import ClientLevel

    where, after = sys.argv[2], int(sys.argv[3])
    count = 0
    def crash_at(function):
        def wrapped(*args, **kwargs):
            global count
            count += 1
            if count == after:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return wrapped
    released = open(sys.argv[1] + ".released", "a")
    release = ClientLevel.release
    def recording(self, *args, **kwargs):
        released.write("x"); released.flush(); os.fsync(released.fileno())
        return release(self, *args, **kwargs)
    ClientLevel.release = recording
    if where == "between charge and release":
        ClientLevel.release = crash_at(ClientLevel.release)
    else:
        checkpoint.save = crash_at(checkpoint.save)
    config = tacit.load({{
        "rounds": 12, "data": {{"name": "x", "partition": {{"kind": "iid", "clients": 12}}}},
        "model": {{"name": "logistic"}}, "cohort": 5, "local": {{"steps": 1, "batch": 6, "lr": 0.1}},
        "engine": {{"workers": 0}}, "evaluate": {{"every": 100}},
        "privacy": {{"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3}},
    }})
    if os.path.exists(sys.argv[1] + "/config.yaml"):
        tacit.resume(sys.argv[1], dataset=blobs())
    else:
        tacit.run(config, sys.argv[1], dataset=blobs())
    """
).format(tests=str(Path(__file__).parents[1]))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["between charge and release", "between release and checkpoint"])
def test_what_was_released_is_on_disk_after_every_kill(tmp_path: Path, where: str) -> None:
    """Each release is counted in a file of its own; after each kill the ledger holds at least as many."""
    folder = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for after in (1, 2, 3):
        command = [sys.executable, "-c", CRASHER, str(folder), where, str(after)]
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environment, check=False
        )
        assert process.returncode == -signal.SIGKILL, process.stderr
        released = len(Path(f"{folder}.released").read_text())
        assert Ledger.read(folder / LEDGER).rounds >= released
    command = [sys.executable, "-c", CRASHER, str(folder), where, "1000"]
    subprocess.run(command, check=True, timeout=120, env=environment)
    assert Ledger.read(folder / LEDGER).rounds > 12, "the rounds played again were charged again"
    assert "a second time after a crash" in tacit.statement(folder).text()
