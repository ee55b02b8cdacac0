"""Worker processes are killed, stopped, hung and crashed: the round continues, or ends in one line, saved."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faults_small as small
import pytest
import torch

import tacit
from conftest import blobs
from tacit.algorithms import Algorithm
from tacit.config.build import build_job
from tacit.engine import InProcess, Order, Participant, Pool
from tacit.engine.pool import Patience
from tacit.federation.statements import read_ledger
from tacit.vector import read_values

pytestmark = pytest.mark.slow
LOADED = 300.0
"""Seconds that something of a second may take on a machine that is busy with other things."""
QUICK = Patience(silence=3.0, start=60.0, least=4.0, times=3.0)


@dataclass(frozen=True)
class Slow(Algorithm):
    """Averages gradients, slowly, and does something to its own process when a file says so."""

    trap: str = ""

    def client(self, msg: Any, memory: Any, work: Any) -> Any:
        y = work.load(msg["theta"])
        for lr in work.steps():
            y.sub_(work.gradient(), alpha=lr)
            time.sleep(0.02)
        match _sprung(Path(self.trap)):
            case "hang":
                time.sleep(1000)
            case "crash once" | "crash always":
                os._exit(7)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return {"delta": y - msg["theta"]}, {}


def _sprung(trap: Path) -> str:
    """What the trap does to whoever comes first; one of two workers only."""
    mine = trap.with_name(f"sprung-{os.getpid()}")
    try:
        if trap.read_text() == "crash always":
            return "crash always"
        trap.rename(mine)
        return mine.read_text()
    except FileNotFoundError:
        return ""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pool of two impatient workers, and the sum it should give."""
    tmp_path = tmp_path_factory.mktemp("pool")
    trap = tmp_path / "trap"
    job = build_job(small.settings("plain"), tmp_path, None, blobs(48), Slow(str(trap)))
    message = {"theta": read_values(job.model, job.layout).clone()}
    participants = [Participant(client) for client in range(12)]
    plain = InProcess(job)
    expected = plain.sum(Order(0, 0.1, 2), message, participants)[0]["delta"].clone()
    plain.close()
    replayed: list[int] = []
    pool = Pool(
        job,
        message,
        2,
        before_replay=lambda shard: replayed.extend(participant.client for participant in shard),
        patience=QUICK,
    )
    yield pool, message, participants, expected, replayed, trap
    pool.close()


@pytest.mark.parametrize("what", ["kill", "crash once", "stop", "hang"])
def test_a_shard_is_played_again_to_the_same_bits(engines: Any, what: str) -> None:
    pool, message, participants, expected, replayed, trap = engines
    pool.sum(Order(1, 0.1, 2), message, participants)  # how long a shard takes is known after this
    replayed.clear()
    trap.write_text(what)
    total, reports = pool.sum(Order(0, 0.1, 2), message, participants)
    assert torch.equal(total["delta"], expected)
    assert sorted(report.client for report in reports) == list(range(12))
    assert len(replayed) == 1
    assert not trap.exists()


def test_evaluation_survives_a_killed_worker(engines: Any) -> None:
    pool, message, _, _, replayed, _ = engines
    before = pool.evaluate(message)
    replayed.clear()
    os.kill(pool._processes[0].process.pid, signal.SIGKILL)  # the tests' own process has other children, too
    assert pool.evaluate(message) == before
    assert not replayed


def test_a_worker_that_fails_three_times_ends_the_round_in_one_line(engines: Any) -> None:
    pool, message, participants, _, _, trap = engines
    trap.write_text("crash always")
    with pytest.raises(tacit.UserError, match="failed 3 times in a row: it ended") as told:
        pool.sum(Order(0, 0.1, 2), message, participants)
    assert "\n" not in str(told.value)
    trap.unlink()


def test_a_run_whose_workers_keep_dying_ends_with_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = small.program("states", folder, 60, engine__workers=2, local__steps=20)
    reference = tmp_path / "reference"
    small.run("states", reference, 60, local__steps=20)
    deaths = 0
    while process.poll() is None and deaths < 4:
        time.sleep(1.0)
        for child in list(small.children(process.pid)) if process.poll() is None else []:
            os.kill(child, signal.SIGKILL if deaths % 2 else signal.SIGTERM)
            deaths += 1
            break
    out, err = process.communicate(timeout=LOADED)
    assert "finished" in out, err
    assert err == ""
    assert small.same(small.vectors(folder), small.vectors(reference))


def test_clients_that_release_are_charged_again_if_played_again(tmp_path: Path) -> None:
    """Under secret randomness a replay would be a second release: it is on disk before it begins."""
    trap = tmp_path / "trap"
    trap.write_text("kill")
    settings = small.settings("example", 3, engine__workers=1)
    tacit.run(settings, "run", dataset=blobs(48), algorithm=Slow(str(trap)))
    assert not trap.exists()
    charges = read_ledger(Path("run")).charges
    assert [charge.round for charge in charges] == [0, 0, 1, 2]
    again = {client for part in charges[1].parts for client in part.clients}
    assert again < {client for part in charges[0].parts for client in part.clients}
    assert tacit.statement("run").repeated == 1


# --- signals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "client"])
@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_to_the_whole_group_loses_no_round(tmp_path: Path, kind: str, workers: int) -> None:
    folder = tmp_path / "run"
    rarely = {"checkpoint__every": 1000, "evaluate__every": 1000}
    process = small.program(kind, folder, 100_000, engine__workers=workers, **rarely)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + LOADED
    while not (metrics.exists() and metrics.stat().st_size > 2000) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=LOADED)
    assert (out, err, process.returncode) == ("stopped\n", "", 0)
    rounds = small.metric_rounds(folder)
    assert len(rounds) > 5
    saved, _ = small.checkpoint.newest(folder / "checkpoint")
    assert saved is not None
    assert saved.round == rounds[-1] == len(rounds)
    if kind == "client":
        assert tacit.statement(folder).rounds == len(rounds)


def test_a_second_ctrl_c_drops_the_round_and_keeps_those_before_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rounds: list[int] = []

    class Impatient:
        def start(self, *args: Any) -> None: ...
        def round(self, record: Any) -> None:
            rounds.append(record["round"])

        def clients(self, done: int, cohort: int) -> None:
            if len(rounds) == 3:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        def close(self) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        tacit.run(
            small.settings("client", 10, checkpoint__every=100),
            "run",
            dataset=blobs(48),
            trackers=[Impatient()],
        )
    saved, _ = small.checkpoint.newest(Path("run/checkpoint"))
    assert saved is not None
    assert saved.round == 3


# --- what is left behind ----------------------------------------------------------------------------------


def test_nothing_is_left_in_shared_memory_at_any_kill(tmp_path: Path) -> None:
    """Killed at moments from before the workers start until rounds are played: no name, no process."""
    before = small.shm()
    for number, pause in enumerate((0.05, 0.3, 0.8, 1.6, math.inf)):
        folder = tmp_path / str(number)
        process = small.program("plain", folder, 100_000, engine__workers=2)
        deadline = time.monotonic() + min(pause, LOADED)
        while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        workers = list(small.children(process.pid, servers=True))
        process.kill()
        process.communicate()
        deadline = time.monotonic() + LOADED  # one that is still being imported notices only then
        while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()], "workers outlived their run"
        assert small.shm() <= before
    assert (folder / "metrics.jsonl").exists(), "the last of them was killed amid rounds"


def test_a_module_in_the_current_folder_does_not_run_in_workers(tmp_path: Path, monkeypatch) -> None:
    for name in ("random", "socket", "numbers", "tempfile"):
        (tmp_path / f"{name}.py").write_text("import os; os.write(2, b'ran\\n'); os._exit(9)\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "rounds: 2\ndata: {name: fashion-mnist-slice, partition: {kind: iid, clients: 20}}\n"
        "model: {name: logistic}\ncohort: 4\nlocal: {steps: 1, batch: 5, lr: 0.1}\nengine: {workers: 1}\n"
    )
    script = Path(sys.executable).with_name("tacit")
    command = [sys.executable, "-P", str(script)] if script.exists() else []
    command = command or [sys.executable, "-P", "-m", "tacit.cli"]
    done = subprocess.run(
        [*command, "run", str(recipe), "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ran" not in done.stderr
