"""Kill a run at any moment: after a resume it ends with exactly the model it would have had."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tacit.federation import checkpoint
from tacit.federation.checkpoint import Checkpoint

SCRIPT = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import torch
    from conftest import blobs
    import tacit
    from tacit.federation import checkpoint
    from tacit.algorithms import FedAvg
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Remembering(FedAvg):
        # A client pulls towards where it was the last time: the result depends on every memory.
        def client(self, msg, memory, work):
            upload, _ = super().client(msg, memory, work)
            last = memory.get("last", torch.zeros_like(msg["theta"]))
            return {{"delta": upload["delta"] + 0.1 * last}}, {{"last": upload["delta"]}}

    die_at, calls = int(sys.argv[2]), 0
    sync = checkpoint.sync
    def counting(path):
        global calls
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)
    checkpoint.sync = counting

    folder = sys.argv[1]
    config = tacit.load({{
        "rounds": 8, "data": {{"name": "x", "partition": {{"kind": "iid", "clients": 12}}}},
        "model": {{"name": "mlp", "hidden": [8]}}, "cohort": 5,
        "local": {{"epochs": 1, "batch": 6, "lr": 0.1}},
        "server": {{"optimizer": "adam", "lr": 0.01}}, "engine": {{"workers": int(sys.argv[3])}},
    }})
    parts = dict(dataset=blobs(), algorithm=Remembering())
    print("ready", flush=True)
    if os.path.exists(folder + "/config.yaml"):
        tacit.resume(folder, **parts)
    else:
        tacit.run(config, folder, **parts)
    print("finished", flush=True)
    """
).format(tests=str(Path(__file__).parents[1]))


def start(folder: Path, die_at: int = 0, workers: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), str(die_at), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(folder: Path, workers: int = 0) -> None:
    process = start(folder, workers=workers)
    out, err = process.communicate(timeout=120)
    assert "finished" in out, err


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["round"] for r in records] == list(range(1, 9))
    return load_file(folder / "checkpoint" / "000008" / "state.safetensors"), [r["accuracy"] for r in records]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], list[float]]:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    finish(folder)
    return outcome(folder)


def same(
    a: tuple[dict[str, torch.Tensor], list[float]], b: tuple[dict[str, torch.Tensor], list[float]]
) -> None:
    assert a[0].keys() == b[0].keys()
    for name, value in a[0].items():
        assert torch.equal(value, b[0][name]), name
    assert a[1] == b[1]


@pytest.mark.slow
def test_killed_inside_every_step_of_a_checkpoint_write(uninterrupted, tmp_path: Path) -> None:
    """A save syncs twice here (the vectors, the folder of checkpoints); die at each, in several saves."""
    folder = tmp_path / "run"
    for die_at in (3, 2, 1, 4):
        process = start(folder, die_at)
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
    finish(folder)
    same(outcome(folder), uninterrupted)


@pytest.mark.slow
def test_killed_at_random_moments_with_a_pool(uninterrupted, tmp_path: Path) -> None:
    rng = random.Random(0)
    folder = tmp_path / "run"
    killed = 0
    for _ in range(3):
        process = start(folder, workers=2)
        assert process.stdout.readline() == "ready\n"
        time.sleep(2.0 + rng.random())  # workers need about two seconds to start; then rounds are quick
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate(timeout=60)
    finish(folder, workers=2)
    same(outcome(folder), uninterrupted)


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        checkpoint.save(tmp_path, Checkpoint(number, {"theta": torch.full((5,), float(number))}, {}), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000002", "000003"]
    file = tmp_path / "000003" / checkpoint.VECTORS
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    saved, notes = checkpoint.newest(tmp_path)
    assert saved is not None
    assert (saved.round, saved.vectors["theta"][0].item()) == (2, 2.0)
    assert "000003 is damaged" in notes[0]
    (tmp_path / "000002" / checkpoint.FACTS).write_text("{")
    with pytest.raises(Exception, match="all 2 checkpoints are damaged"):
        checkpoint.newest(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_finishes_the_round_saves_and_tells_how_to_go_on(tmp_path: Path, workers: int) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "rounds: 100000\n"
        "data: {name: fashion-mnist-slice, partition: {kind: iid, clients: 50}}\n"
        "model: {name: mlp, hidden: [8]}\ncohort: 4\nlocal: {steps: 2, batch: 10, lr: 0.1}\n"
        f"evaluate: {{every: 50}}\nengine: {{workers: {workers}}}\n"
    )
    command = [sys.executable, "-c", "from tacit.cli import main; main()", "run", str(recipe), "--out", "run"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size > 2000) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err  # as a shell reports a command that Ctrl-C ended
    assert "tacit resume run" in out
    assert "Traceback" not in err
    rounds = json.loads(metrics.read_text().splitlines()[-1])["round"]
    saved, _ = checkpoint.newest(tmp_path / "run" / "checkpoint")
    assert saved is not None
    assert saved.round == rounds
