"""The Ray engine: the same bits as in one process, whoever is killed, leaves or joins; and no leftovers.

One cluster serves the whole file: a head with two processors, to which tests add machines. It listens on
loopback and requires a token, like the clusters that a run starts for itself.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tacit
from conftest import blobs
from methods_small import configured, halves, memories, play, small
from tacit.algorithms import Algorithm, FedAvg
from tacit.config.build import build_job
from tacit.engine import (
    ClientError,
    InProcess,
    InProcessSettings,
    Order,
    Participant,
    RaySettings,
    ray_fitness,
)
from tacit.engine import ray as engine_ray
from tacit.engine.ray import SERVER, Ray, _Actor
from tacit.engine.ray_cluster import LEFTOVER, remove_leftovers
from tacit.engine.ray_job import LARGE
from tacit.engine.ray_settings import Patience
from tacit.engine.ray_worker import CarriedStates, RayWorker, processor, software
from tacit.engine.states import STATES, DirectoryStates
from tacit.federation import checkpoint
from tacit.federation.statements import read_ledger
from tacit.vector import Vectors, read_values

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("TACIT_RAY_KILLS", "3"))
"""Workers killed at random moments."""
IMPATIENT = Patience(nobody=240.0, look=0.5, settle=30.0, least=8.0, times=3.0)
TWO = RaySettings(workers=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray._private import ray_constants, utils
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_TOKEN", os.environ.get("RAY_AUTH_TOKEN", secrets.token_hex(32)))
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # loopback
    from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default

    patch.setenv("RAY_AUTH_MODE", "token")  # for its end to be undone
    patch.delenv("RAY_AUTH_MODE")
    enable_token_auth_by_default()
    patch.setattr(utils, "write_ray_address", lambda *_: None)  # nobody else is to find it
    folder = Path(f"/tmp/{LEFTOVER}{os.getpid()}-tests")
    head: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 150 << 20, "include_dashboard": False}
    head |= {"temp_dir": str(folder), "_system_config": {"worker_niceness": 0}}
    here = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=here.address, log_to_driver=False, logging_level="ERROR")
        yield here
    finally:
        ray.shutdown()
        here.shutdown()
        patch.undo()
        shutil.rmtree(folder, ignore_errors=True)


def vectors(folder: Path, round: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(folder / "checkpoint" / f"{round:06d}" / "state.safetensors")
    return found


def same(a: Vectors, b: Vectors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def told(result: tacit.Result) -> list[dict[str, Any]]:
    """What a run recorded, but for what depends on where it ran."""
    place = {"seconds", "workers", "workers_lost", "shards_replayed", "workers_busy"}
    return [{k: v for k, v in record.items() if k not in place} for record in result.metrics]


@pytest.mark.parametrize(
    ("method", "state"),
    [("fedavg", "auto"), ("scaffold", "shared"), ("dp2-fedsam", "carried"), ("dp-fedadamw", "auto")],
)
def test_the_same_bits_as_in_process(cluster: Any, method: str, state: str) -> None:
    config = configured(method, {"evaluate.clients": 3, "data.holdout": 0.25})
    here = play(config, "here")
    there = play(config, "there", engine=RaySettings(workers=2, state=state))
    assert told(there.result) == told(here.result)
    assert same(there.state(2), here.state(2))
    kept, expected = memories(Path("there")), memories(Path("here"))
    assert all(same(kept[client], expected[client]) for client in expected)
    assert any(expected.values()) == (state != "auto"), "only these two keep anything"
    assert there.result.metrics[-1]["workers"] == 2
    assert not list(Path("there").glob(".seen-*"))


def test_client_state_lies_in_an_object_store_and_the_run_resumes_without_the_cluster(
    cluster: Any, tmp_path: Path
) -> None:
    config, store = configured("scaffold"), f"file://{tmp_path}/store"
    here = play(config, "here")
    there = play(config, "there", engine=RaySettings(workers=2, state=store))
    assert same(there.state(2), here.state(2))
    assert not (Path("there") / STATES).exists()
    told = [checkpoint.newest(Path(run) / "checkpoint")[0] for run in ("here", "there")]
    assert all(told) and told[0].facts["states"] == told[1].facts["states"], "byte for byte"
    assert all(not finding.problem for finding in tacit.verify("there"))
    again = play(config, "again", engine=RaySettings(workers=1, state=store))
    assert same(again.state(2), here.state(2)), "another run has a place of its own"
    assert len(list((tmp_path / "store").iterdir())) == 2
    resumed = [
        tacit.resume(run, rounds=3, dataset=small(), model=halves(), engine=InProcessSettings())
        for run in ("here", "there")
    ]
    assert all(result.finished for result in resumed)
    assert same(vectors(Path("here"), 3), vectors(Path("there"), 3))


def test_masks_change_no_bit_on_a_cluster(cluster: Any) -> None:
    privacy = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3, "entropy": "seed"}
    config = settings(1, privacy={**privacy, "aggregation": "secure"}, cohort=4)
    here = tacit.run(config, "here", dataset=blobs(48))
    there = tacit.run(config, "there", dataset=blobs(48), engine=TWO)
    assert same(vectors(there.path, 1), vectors(here.path, 1))


SWEEP = """
rounds: 2
seed: 0
data: {name: fashion-mnist-slice, partition: {kind: iid, clients: 40}}
model: logistic
cohort: 8
local: {steps: 2, batch: 10, lr: 0.1}
engine: {workers: 0}
sweep: {seed: [0, 1]}
"""


def test_runs_of_a_sweep_share_the_cluster(cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    engine = {"engine": {"kind": "ray", "address": cluster.address, "workers": 1}}
    (here,) = tacit.sweep(file, folder="here", jobs=1)
    (there,) = tacit.sweep(file, engine, folder="there", jobs=2)
    assert (there["seeds"], there["unfinished"]) == (2, 0)
    assert there["accuracy_last"] == here["accuracy_last"]
    for run in Path("there").glob("*/metrics.jsonl"):
        assert json.loads(run.read_text().splitlines()[-1])["workers"] == 1


# --- workers are lost -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slow(Algorithm):
    """Averages gradients, slowly, and ends its own process when a file says so."""

    trap: str = ""

    def client(self, msg: Any, memory: Any, work: Any) -> Any:
        y = work.load(msg["theta"])
        for lr in work.steps():
            y.sub_(work.gradient(), alpha=lr)
            time.sleep(0.05)
        trap = Path(self.trap)
        if self.trap and trap.exists() and (trap.read_text() == "always" or _mine(trap)):
            os.kill(os.getpid(), signal.SIGKILL)
        return {"delta": y - msg["theta"]}, {"count": memory.get("count", torch.zeros(1)) + 1}


@dataclass(frozen=True)
class Hungry(Slow):
    """Asks for more memory than there is, once."""

    def client(self, msg: Any, memory: Any, work: Any) -> Any:
        if _mine(Path(self.trap)):
            torch.empty(1 << 60, dtype=torch.uint8)
        return Slow("").client(msg, memory, work)


def _mine(trap: Path) -> bool:
    try:
        trap.rename(trap.with_name(f"sprung-{os.getpid()}"))
    except FileNotFoundError:
        return False
    return True


def settings(rounds: int = 3, **overrides: Any) -> tacit.Config:
    values = {
        "rounds": rounds,
        "data": {"name": "x", "partition": {"kind": "iid", "clients": 12}},
        "model": {"name": "logistic"},
        "cohort": 6,
        "local": {"steps": 2, "batch": 4, "lr": 0.1},
        "engine": {"workers": 0},
    }
    return tacit.load(values, {key.replace("__", "."): value for key, value in overrides.items()})


PARTICIPANTS = [Participant(client) for client in range(12)]


@dataclass
class Opened:
    engine: Ray
    message: Vectors
    expected: torch.Tensor
    replayed: list[Participant]

    def sum(self) -> None:
        """Once more the same round: the same bits, every client once."""
        total, reports = self.engine.sum(Order(0, 0.1, 2), self.message, PARTICIPANTS)
        assert torch.equal(total["delta"], self.expected)
        assert sorted(report.client for report in reports) == list(range(12))

    def pids(self) -> list[int]:
        return [a.facts["pid"] for a in self.engine._actors if a.facts is not None and a.pending is None]

    def until(self, holds: Callable[[], bool]) -> None:
        """Play on until something holds: workers come while there is work."""
        end = time.monotonic() + 200
        while not holds():
            assert time.monotonic() < end
            self.sum()


@pytest.fixture(scope="class")
def opened(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("ray")
    job = build_job(settings(), folder, None, blobs(48), Slow())
    message = {"theta": read_values(job.model, job.layout).clone()}
    plain = InProcess(job)
    expected = plain.sum(Order(0, 0.1, 2), message, PARTICIPANTS)[0]["delta"].clone()
    plain.close()
    replayed: list[Participant] = []
    engine = Ray(job, message, 12, RaySettings(), replayed.extend, IMPATIENT)
    yield Opened(engine, message, expected, replayed)
    engine.close()


class TestOneEngine:
    """Its two workers have the head's two processors; it is closed before others want them."""

    def test_workers_killed_at_random_moments(self, opened: Opened) -> None:
        opened.sum()
        slowest = 0.0
        for seed in range(KILLS):
            rng = random.Random(seed)
            opened.until(lambda: len(opened.pids()) == 2)
            before, victim = opened.engine.facts()["workers_lost"], rng.choice(opened.pids())
            opened.replayed.clear()
            how = signal.SIGSTOP if seed == 1 else signal.SIGKILL  # one hangs instead
            threading.Timer(rng.uniform(0.0, 0.8), os.kill, (victim, how)).start()
            while opened.engine.facts()["workers_lost"] == before:
                begin = time.monotonic()
                opened.sum()
            slowest = max(slowest, time.monotonic() - begin)
            played = [participant.client for participant in opened.replayed]
            assert 0 < len(played) <= 2, "what it had, and nothing else"
            assert all(participant.replay == 0 for participant in opened.replayed)
        print(f"{KILLS} workers lost; the slowest round with one took {slowest:.1f} s")

    def test_evaluation_survives_a_killed_worker(self, opened: Opened) -> None:
        opened.until(lambda: len(opened.pids()) == 2)
        message = opened.message
        whole, each = opened.engine.evaluate(message), opened.engine.evaluate_clients(message, PARTICIPANTS)
        opened.replayed.clear()
        os.kill(opened.pids()[0], signal.SIGKILL)
        assert opened.engine.evaluate(message) == whole
        assert opened.engine.evaluate_clients(message, PARTICIPANTS) == each
        assert not opened.replayed

    def test_a_sum_that_is_lost_is_made_again_and_added_once(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened.until(lambda: len(opened.pids()) == 2)
        opened.replayed.clear()
        real, lost = ray.get, []

        def get(refs: Any, **options: Any) -> Any:
            if isinstance(refs, list) and not lost:
                lost.append(refs)
                raise ray.exceptions.ObjectLostError(refs[1].hex(), None, "")
            return real(refs, **options)

        monkeypatch.setattr(ray, "get", get)
        before = opened.engine.facts()["workers_lost"]
        opened.sum()
        assert lost and opened.replayed
        assert opened.engine.facts()["workers_lost"] == before + 1

    def test_a_machine_joins_and_is_taken_away(self, opened: Opened, cluster: Any) -> None:
        opened.until(lambda: len(opened.pids()) == 2)
        machine = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        opened.until(lambda: len(opened.pids()) == 3)
        opened.sum()
        lost = opened.engine.facts()["workers_lost"]
        threading.Timer(0.3, cluster.remove_node, (machine, False)).start()
        while opened.engine.facts()["workers_lost"] == lost:
            opened.sum()
        opened.sum()
        assert len(opened.pids()) == 2


def test_short_clients_are_played_in_bundles_with_the_same_bits(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a worker is lost with what it had."""
    job = build_job(settings(), tmp_path, None, blobs(48), FedAvg())
    message = {"theta": read_values(job.model, job.layout).clone()}
    plain = InProcess(job)
    expected = plain.sum(Order(0, 0.1, 2), message, PARTICIPANTS)[0]["delta"].clone()
    plain.close()
    sizes: list[list[int]] = []
    real = Ray._bundles

    def spied(self: Ray, parts: Any) -> Any:
        made = real(self, parts)
        sizes.append([len(bundle) for bundle in made])
        return made

    monkeypatch.setattr(Ray, "_bundles", spied)
    monkeypatch.setattr(engine_ray, "SHORT", 60.0)  # however busy the machine is
    replayed: list[Participant] = []
    engine = Ray(job, message, 12, TWO, replayed.extend, IMPATIENT)
    try:
        opened = Opened(engine, message, expected, replayed)
        for _ in range(2):
            opened.sum()
        assert sizes == [[1] * 12, [3] * 4], "nothing is known of clients before the first round"
        victim = opened.pids()[0]
        os.kill(victim, signal.SIGKILL)
        opened.sum()
        assert engine.facts()["shards_replayed"] == len(replayed) > 0, "a shard is one client here"
        assert sorted({p.client for p in replayed}) == sorted(p.client for p in replayed)
    finally:
        engine.close()


def test_bundles_are_short_small_and_leave_everyone_two() -> None:
    def bundles(client: float, shards: int, workers: int, size: int) -> list[int]:
        judge = Ray.__new__(Ray)
        judge._client, judge._total = client, {"delta": torch.empty(size)}
        judge._actors = [_Actor(None, None, number) for number in range(workers)]
        made = judge._bundles([[Participant(number)] for number in range(shards)])
        assert [p.client for bundle in made for shard in bundle for p in shard] == list(range(shards))
        return [len(bundle) for bundle in made]

    assert bundles(0.001, 16, 2, 1000) == [4] * 4
    assert bundles(0.001, 100, 1, 1000) == [39, 39, 22]
    assert bundles(0.001, 16, 8, 1000) == [1] * 16
    assert bundles(0.5, 16, 2, 1000) == bundles(np.inf, 16, 2, 1000) == [1] * 16
    assert bundles(0.001, 16, 2, 3 << 20) == [1] * 16
    assert bundles(0.001, 0, 2, 1000) == []


def test_a_shard_lost_three_times_ends_the_run_in_one_line_and_it_resumes_elsewhere(
    cluster: Any, tmp_path: Path
) -> None:
    trap, whole = tmp_path / "trap", Slow("")
    reference = tacit.run(settings(), "reference", dataset=blobs(48), algorithm=whole)

    class Spring(tacit.Tracker):
        def round(self, record: Any) -> None:
            trap.write_text("always")

    with pytest.raises(
        tacit.UserError, match=f"lost 3 times, the last time on {os.uname().nodename}"
    ) as said:
        tacit.run(
            settings(), "run", dataset=blobs(48), algorithm=Slow(str(trap)), engine=TWO, trackers=[Spring()]
        )
    assert "\n" not in str(said.value)
    trap.unlink()
    result = tacit.resume("run", dataset=blobs(48), algorithm=Slow(str(trap)))
    assert result.finished
    assert same(vectors(Path("run"), 3), vectors(Path("reference"), 3))
    assert told(result)[0] == told(reference)[0]


def test_a_worker_out_of_memory_is_replaced(cluster: Any, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    reference = tacit.run(settings(2), "reference", dataset=blobs(48), algorithm=Slow(""))
    trap.write_text("once")
    result = tacit.run(settings(2), "run", dataset=blobs(48), algorithm=Hungry(str(trap)), engine=TWO)
    assert not trap.exists()
    assert (result.metrics[-1]["workers_lost"], result.metrics[-1]["shards_replayed"] > 0) == (1, True)
    assert same(vectors(Path("run"), 2), vectors(Path("reference"), 2))
    assert told(result) == told(reference)


def test_every_way_in_which_ray_loses_work_is_one_that_is_caught() -> None:
    names = "ActorDiedError ActorUnavailableError ObjectLostError ObjectFreedError NodeDiedError "
    names += "WorkerCrashedError OutOfMemoryError OwnerDiedError ObjectFetchTimedOutError GetTimeoutError"
    for name in names.split():
        assert issubclass(getattr(ray.exceptions, name), ray.exceptions.RayError), name


def test_workers_are_held_to_instructions_that_all_have(cluster: Any, tmp_path: Path) -> None:
    job = build_job(settings(), tmp_path, None, blobs(48), FedAvg())
    message = {"theta": read_values(job.model, job.layout).clone()}
    engine = Ray(job, message, 12, RaySettings(workers=1, isa="avx2"), patience=IMPATIENT)
    try:
        (actor,) = engine._actors
        assert actor.facts is not None and actor.facts["processor"].endswith("AVX2, pinned")
    finally:
        engine.close()


def test_workers_that_want_a_part_of_a_gpu_go_where_one_is(cluster: Any, tmp_path: Path) -> None:
    """As Ray counts them; there is none in this machine."""
    job = build_job(settings(), tmp_path, None, blobs(48), FedAvg())
    message = {"theta": read_values(job.model, job.layout).clone()}
    machine = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100 << 20)
    try:
        engine = Ray(job, message, 12, RaySettings(gpus=0.5), patience=IMPATIENT)
        try:
            assert [a.facts["node"] for a in engine._actors if a.facts] == [machine.node_id]
            assert engine._room() == 1, "two halves, and one processor"
        finally:
            engine.close()
    finally:
        cluster.remove_node(machine)


def test_without_a_worker_it_says_so(cluster: Any) -> None:
    """More processors than any machine has: nobody will ever come."""
    with pytest.raises(tacit.UserError, match=r"no worker of the Ray cluster was to be had for 1 seconds"):
        tacit.run(settings(), "run", dataset=blobs(48), engine=RaySettings(workers=1, threads=64, wait=1.0))


def test_clients_that_release_are_charged_again_and_the_statement_says_who_is_the_server(
    cluster: Any, tmp_path: Path
) -> None:
    trap = tmp_path / "trap"
    trap.write_text("once")
    privacy = {"unit": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-3}
    config = settings(2, privacy=privacy)
    tacit.run(config, "run", dataset=blobs(48), algorithm=Slow(str(trap)), engine=RaySettings(workers=1))
    assert not trap.exists()
    charges = read_ledger(Path("run")).charges
    assert [charge.round for charge in charges] == [0, 0, 1]
    first, again = ({c for part in charge.parts for c in part.clients} for charge in charges[:2])
    assert again < first
    assert SERVER in tacit.statement("run").text()
    assert SERVER in json.loads(Path("run/statement.json").read_text())["text"]
    resumed = tacit.resume("run", rounds=3, dataset=blobs(48), algorithm=Slow(str(trap)))
    assert resumed.finished
    assert SERVER in tacit.statement("run").text(), "what was played there stays so"


# --- hostile code -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Writer(FedAvg):
    """Writes to what the server sent, after it has trained honestly."""

    def client(self, msg: Vectors, memory: Vectors, work: Any) -> tuple[Vectors, Vectors]:
        upload, _ = super().client(msg, memory, work)
        msg["theta"].numpy()[:] += 100
        return upload, {}


def test_writing_to_the_message_is_told(cluster: Any) -> None:
    with pytest.raises(ClientError, match=r"client \d+, round 1, .* wrote to the message's 'theta'"):
        tacit.run(settings(), "run", dataset=blobs(48), algorithm=Writer(), engine=RaySettings(workers=1))
    assert not [p for p in Path("run").iterdir() if p.name.startswith(".seen")]


# --- a cluster of one's own -------------------------------------------------------------------------------

PROGRAM = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + '/support', {here!r}]
from test_ray import Slow, blobs, settings, tacit
tacit.run(settings(4, local__steps=4), "run", dataset=blobs(48), algorithm=Slow(""),
          engine=tacit.engine.RaySettings(address="local", workers=2))
"""


def test_a_killed_driver_leaves_nothing_running_and_its_run_resumes(tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = PROGRAM.format(tests=str(here.parent), here=str(here))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    mark = f"{LEFTOVER}{process.pid}-"
    try:
        first = tmp_path / "run" / "checkpoint" / "000001"
        _wait(lambda: first.exists() or process.poll() is not None)
        assert process.poll() is None, process.stderr and process.stderr.read()
        listening = _listening(_of(mark) | {process.pid})
        assert listening, "Ray listens somewhere"
        assert {address for address, _ in listening} == {"127.0.0.1"}
    finally:
        process.kill()
        process.wait()
    _wait(lambda: not _of(mark))
    assert list(Path("/tmp").glob(f"{mark}*")), "killed, it could not clean up"
    remove_leftovers()
    assert not list(Path("/tmp").glob(f"{mark}*"))
    resumed = tacit.resume(tmp_path / "run", dataset=blobs(48), algorithm=Slow(""))
    assert resumed.finished
    config = settings(4, local__steps=4)
    tacit.run(config, "reference", dataset=blobs(48), algorithm=Slow(""))
    assert same(vectors(tmp_path / "run", 4), vectors(Path("reference"), 4))


def test_a_run_that_ends_leaves_nothing(tmp_path: Path) -> None:
    before = {p.name for p in Path("/dev/shm").iterdir()}
    code = PROGRAM.format(tests=str(Path(__file__).parent.parent), here=str(Path(__file__).parent))
    home = {**os.environ, "HOME": str(tmp_path)}
    home.pop("RAY_AUTH_TOKEN", None)
    done = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=home, stderr=subprocess.PIPE, text=True
    )
    _, err = done.communicate(timeout=400)
    assert done.returncode == 0, err
    mark = f"{LEFTOVER}{done.pid}-"
    assert not _of(mark)
    assert not list(Path("/tmp").glob(f"{mark}*"))
    assert {p.name for p in Path("/dev/shm").iterdir() if p.name.startswith("plasma")} <= before
    assert [p.name for p in tmp_path.iterdir()] == ["run"], "no token in the home"
    assert not list((tmp_path / "run").glob(".seen-*"))


def _wait(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


def _of(mark: str) -> set[int]:
    """Processes that know of a cluster's folder, by their arguments or surroundings."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            text = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in text:
            found.add(int(place.name))
    return found


def _listening(pids: set[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = str(handle.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                address, port = parts[1].split(":")
                raw = bytes.fromhex(address)[::-1] if len(address) == 8 else bytes.fromhex(address)[-4:][::-1]
                mapped = len(address) == 8 or address[16:24] == "FFFF0000"
                found.add((".".join(map(str, raw)) if mapped else address, int(port, 16)))
    return found


# --- without a cluster ------------------------------------------------------------------------------------


def facts(**others: Any) -> dict[str, Any]:
    known = {"authenticated": True, "seen": None, "processor": "x AVX2", "node": "n", "pid": 1, "host": "far"}
    return {**known, **software(), **others}


def unfit(engine: RaySettings, told: dict[str, Any], first: dict[str, Any] | None = None) -> str | None:
    first = first and {**first, "host": "near"}
    why = ray_fitness.unfit(told, first, engine, sees=False)
    return why or ray_fitness.other_results(told, first)


def test_a_machine_that_would_give_other_results_is_named() -> None:
    assert unfit(RaySettings(), facts(), facts()) is None
    assert "far has torch 1.0" in str(unfit(RaySettings(), facts(torch="1.0")))
    assert "far has tacit 0" in str(unfit(RaySettings(isa="any"), facts(tacit="0")))
    other = facts(processor="y AVX512")
    assert "engine.isa: avx2 or any" in str(unfit(RaySettings(), other, facts()))
    assert "set engine.isa: any" in str(unfit(RaySettings(isa="avx2"), other, facts()))
    said = str(unfit(RaySettings(isa="any"), other, facts()))
    assert said.startswith("far has another processor than near"), "used, and said"


def test_a_cluster_without_authentication_or_a_folder_that_is_not_seen_is_refused() -> None:
    assert "engine.insecure: true" in str(unfit(RaySettings(), facts(authenticated=False)))
    assert unfit(RaySettings(insecure=True), facts(authenticated=False)) is None
    assert "engine.state: carried" in str(unfit(RaySettings(state="shared"), facts()))
    assert unfit(RaySettings(state="carried"), facts()) is None


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(tacit.UserError, match=r'pip install "tacit\[ray\]"'):
        tacit.run(settings(), "run", dataset=blobs(48), engine=RaySettings())


@pytest.mark.parametrize("address", ["here", "http://x/1", "host:port", "a b:1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(tacit.UserError, match=r"engine\.(ray\.)?address|address"):
        settings(engine={"kind": "ray", "address": address})


def test_a_state_that_travels_is_the_state_that_stays(tmp_path: Path) -> None:
    """What a worker hands over, saved by the driver, is byte for byte what it would have saved itself."""
    state = {"c": torch.randn(5), "b": torch.arange(3.0)}
    carried, kept = CarriedStates(), DirectoryStates(tmp_path)
    carried.save(3, "1-0-0", state)
    kept.save(3, "1-0-0", state)
    made = carried.drain()
    again = DirectoryStates(tmp_path / "driver")
    again.save(3, "1-0-0", {n: torch.from_numpy(v) for n, v in made[3]["1-0-0"].items()})
    assert again.digest(3, "1-0-0") == kept.digest(3, "1-0-0")
    carried.fill(made)
    loaded = carried.load(3, "1-0-0")
    loaded["c"].zero_()
    assert torch.equal(carried.load(3, "1-0-0")["c"], state["c"]), "a client's own copy"
    assert not carried.drain()


def test_small_arrays_are_a_workers_own_and_large_ones_are_apart() -> None:
    from tacit.engine import shared
    from tacit.engine.ray_worker import joined, split

    small, large = np.arange(10.0), np.arange(500_000.0)
    body, buffers = shared.dump_apart((small, large), LARGE)
    assert [b.nbytes for b in buffers] == [large.nbytes]
    again = split(joined([*buffers, memoryview(b"abc")]), [large.nbytes, 3])
    a, b = shared.load_apart(body, again[:1])
    a[0] = 7.0
    assert np.array_equal(b, large)
    assert small[0] == 0.0


@pytest.mark.parametrize(
    "privacy", [None, {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3, "entropy": "seed"}]
)
def test_the_sums_of_a_bundle_are_those_of_its_shards_one_by_one(
    privacy: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Larger bundles after smaller ones and the other way round: rows are used again."""
    from tacit.engine import shared
    from tacit.engine.device import DeviceSettings

    job = build_job(settings(privacy=privacy), tmp_path, None, blobs(48), FedAvg())
    message = {"theta": read_values(job.model, job.layout).clone()}
    mechanism, bounding = job.privacy, None
    if mechanism is not None:
        bounding = mechanism.bounding(mechanism.init(), job.upload_sizes, job.layout, 1)
    order = Order(0, 0.1, 2, bounding=bounding)
    shards = [[Participant(2 * n), Participant(2 * n + 1)] for n in range(4)]
    plain, expected = InProcess(job), []
    for shard in shards:
        expected.append(plain.sum(order, message, shard)[0]["delta"].clone())
    plain.close()
    worker = RayWorker(1)
    body, large = shared.dump_apart(job, 1 << 40)
    assert not large
    assert worker.start(DeviceSettings(), True, ([], body, [])) == ("answer", None)
    arrays = {name: vector.numpy() for name, vector in message.items()}
    for bundle in ([0, 1, 2], [3], [1, 0], [0, 1, 2, 3]):
        (kind, told), sums = worker.run(1, arrays, "sum", {}, order, [shards[n] for n in bundle])
        assert kind == "answer" and len(told[0]) == 2 * len(bundle)
        assert [r.client for r in told[0]] == [p.client for n in bundle for p in shards[n]]
        assert sums["delta"].shape == (len(bundle), job.layout.size)
        for row, number in enumerate(bundle):
            assert torch.equal(torch.from_numpy(sums["delta"][row]), expected[number])


def test_a_worker_says_what_it_is() -> None:
    worker = RayWorker(1)
    assert worker._worker is None
    assert processor() == processor()
    assert set(software()) == {"tacit", "torch", "numpy"}
