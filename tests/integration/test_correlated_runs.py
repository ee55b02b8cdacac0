"""Runs with correlated noise: a config line, a resume after kill -9, and the cost of an interrupted round."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tacit
from tacit.federation import checkpoint
from tacit.federation.statements import LEDGER
from tacit.privacy import MatrixRow, epsilon
from tacit.privacy.ledger import Ledger
from tacit.vector import Layout, read_values

FLEET = {"unit": "client", "clip": 0.5, "noise": 4.0, "delta": 1e-3}
KINDS = [
    {"privacy": {**FLEET, "mechanism": "blt"}},
    {"privacy": {**FLEET, "mechanism": {"kind": "banded", "bands": 2}}},
    {
        "privacy": {**FLEET, "mechanism": {"kind": "banded", "bands": 2}},
        "cohort": {"size": 5, "sampling": "poisson"},
    },
]


@pytest.mark.parametrize("settings", KINDS)
def test_a_run_is_one_config_line_away(config, dataset, settings) -> None:
    result = tacit.run(config(rounds=6, **settings), "run", dataset=dataset)
    assert [record["round"] for record in result.metrics] == [1, 2, 3, 4, 5, 6]
    statement = tacit.statement("run")
    assert statement.epsilon == result.last("epsilon") > 0
    assert "Correlated by a" in statement.text()


def test_a_budget_is_kept_by_all_rounds(config, dataset) -> None:
    privacy = {**FLEET, "noise": None, "epsilon": 3.0, "mechanism": "blt"}
    result = tacit.run(config(rounds=6, privacy=privacy), "run", dataset=dataset)
    assert len(result.metrics) == 6
    assert 2.7 < result.last("epsilon") <= 3.0
    assert tacit.resume("run", dataset=dataset).finished


def test_what_does_not_fit_is_refused_before_anything_is_charged(config, dataset) -> None:
    for privacy, words in [
        ({**FLEET, "mechanism": "blt", "adaptive": {}}, "must not move"),
        ({**FLEET, "mechanism": "blt", "unit": "example"}, "unit: client"),
        ({**FLEET, "mechanism": "blt", "noise_at": "clients"}, "only the server"),
    ]:
        with pytest.raises(tacit.UserError, match=words):
            tacit.run(config(privacy=privacy), "run", dataset=dataset)
    with pytest.raises(tacit.UserError, match="bands to banded"):
        config(privacy={**FLEET, "mechanism": {"kind": "blt", "bands": 3}})
    assert not Path("run").exists()


SCRIPT = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from conftest import blobs
    import tacit
    from tacit.federation import checkpoint

    folder, entropy, die_at, calls = sys.argv[1], sys.argv[2], int(sys.argv[3]), 0
    save = checkpoint.save
    def counting(*args):
        global calls
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        save(*args)
    checkpoint.save = counting
    if os.path.exists(folder + "/config.yaml"):
        tacit.resume(folder, dataset=blobs())
    else:
        tacit.run(tacit.load({{
            "rounds": 6, "data": {{"name": "x", "partition": {{"kind": "iid", "clients": 12}}}},
            "model": {{"name": "mlp", "hidden": [8]}}, "cohort": 3, "engine": {{"workers": 0}},
            "local": {{"epochs": 1, "batch": 6, "lr": 0.1}},
            "privacy": {{"unit": "client", "clip": 0.5, "noise": 4.0, "delta": 1e-3, "entropy": entropy,
                         "mechanism": sys.argv[4]}},
        }}), folder, dataset=blobs())
    """
).format(tests=str(Path(__file__).parents[1]))


def play(folder: Path, entropy: str, die_at: int, kind: str) -> int:
    command = [sys.executable, "-c", SCRIPT, str(folder), entropy, str(die_at), kind]
    return subprocess.run(command, timeout=120, check=False, env=dict(os.environ)).returncode


@pytest.mark.slow
def test_killed_while_saving_it_goes_on_with_the_noise_it_had(tmp_path: Path) -> None:
    """Die at the fourth save, when round 4 was charged and released.

    Resumed, round 4 starts from the memory of round 3's checkpoint, gets other noise, and its row is charged
    once more as the longest there is.
    """
    folder = tmp_path / "run"
    assert play(folder, "seed", 4, "blt") == -signal.SIGKILL
    saved = load_file(folder / "checkpoint" / "000003" / "state.safetensors")
    assert play(folder, "seed", 0, "blt") == 0
    charges = Ledger.read(folder / LEDGER).charges
    assert [charge.round for charge in charges] == [0, 1, 2, 3, 3, 4, 5]
    squares = [charge.parts[0].event.square for charge in charges]
    assert squares[4] == max(squares) >= squares[3]
    assert saved["mechanism.delta"].dtype == torch.int64
    assert saved["mechanism.delta"].shape[0] == 2, "two buffers as long as the model"


class Interrupt:
    """A tracker that asks the run to stop after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def start(self, *args: object) -> None: ...
    def clients(self, *args: object) -> None: ...
    def close(self) -> None: ...
    def round(self, record: dict[str, object]) -> None:
        if record["round"] == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def weights(result: tacit.Result) -> torch.Tensor:
    return read_values(result.model, Layout.of(result.model))


@pytest.mark.parametrize("settings", KINDS)
def test_a_resume_goes_on_with_the_remembered_noise(config, dataset, settings) -> None:
    """In a simulation: stopped after three rounds and resumed, the very bits of an unbroken run."""
    settings = {**settings, "privacy": {**settings["privacy"], "entropy": "seed"}}
    whole = tacit.run(config(rounds=6, **settings), "whole", dataset=dataset)
    stopped = tacit.run(config(rounds=6, **settings), "stopped", dataset=dataset, trackers=[Interrupt(3)])
    assert not stopped.finished
    assert torch.equal(weights(whole), weights(tacit.resume("stopped", dataset=dataset)))


def test_a_round_that_is_played_again_has_noise_of_its_own(config, dataset, monkeypatch) -> None:
    """Broken off after round 4 was released and before it was saved."""
    settings = config(rounds=6, privacy={**FLEET, "mechanism": "blt", "entropy": "seed"})
    whole = tacit.run(settings, "whole", dataset=dataset)
    save, saved = checkpoint.save, []

    def breaks(folder: Path, state: checkpoint.Checkpoint, keep: int) -> None:
        saved.append(state.round)
        if state.round >= 4:
            raise RuntimeError("torn")
        save(folder, state, keep)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="torn"):
        patch.setattr(checkpoint, "save", breaks)
        tacit.run(settings, "torn", dataset=dataset)
    assert saved[:4] == [1, 2, 3, 4]
    resumed = tacit.resume("torn", dataset=dataset)
    assert [charge.round for charge in Ledger.read(Path("torn") / LEDGER).charges] == [0, 1, 2, 3, 3, 4, 5]
    assert not torch.equal(weights(whole), weights(resumed))


def test_the_ledger_holds_rows_and_epsilon_is_their_replay(config, dataset) -> None:
    tacit.run(config(rounds=4, privacy={**FLEET, "mechanism": "blt"}), "run", dataset=dataset)
    contents = Ledger.read(Path("run") / LEDGER)
    events = [charge.parts[0].event for charge in contents.charges]
    assert all(isinstance(event, MatrixRow) and event.noise == 4.0 for event in events)
    total = sum(event.square for event in events if isinstance(event, MatrixRow))
    assert tacit.statement("run").epsilon == pytest.approx(epsilon({MatrixRow(4.0, total): 1}, 1e-3).value)
