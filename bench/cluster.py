"""The cost of a lost worker for the Ray engine, and the bytes that a round moves between machines; needs
tacit[ray].

    python bench/cluster.py recovery                    two local workers on the CNN, one killed five times
    python bench/cluster.py bytes                       255M parameters, a worker on another machine
    python bench/cluster.py bytes --parameters 16e6 --workers 2 --clients 8

The other machine is a node of `ray.cluster_utils` with its own object store, so vectors cross the loopback
interface. They are counted in a network namespace that nothing else uses (`unshare`, as root).
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tacit
from contenders import build, dataset, settings
from gradients import machine
from tacit.algorithms import Algorithm
from tacit.config.build import build_job
from tacit.engine import Order, Participant, RaySettings
from tacit.engine.ray import Patience, Ray
from tacit.vector import read_values

ALONE = "TACIT_BENCH_ALONE"
KILLS = 5


def recovery() -> None:
    """Kill one of two workers at a random moment of a round; how much longer the round takes, and when there
    are two again.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(settings("cnn", 0), Path(folder), build("cnn"), dataset("cnn"))
        message = {"theta": read_values(job.model, job.layout).clone()}
        cohort = [Participant(client) for client in range(50)]
        engine = Ray(job, message, len(cohort), RaySettings(address="local", workers=2))

        def played() -> float:
            begin = time.monotonic()
            engine.sum(Order(0, 0.05, 5), message, cohort)
            return time.monotonic() - begin

        def pids() -> list[int]:
            return [a.facts["pid"] for a in engine._actors if a.facts is not None and a.pending is None]

        played()
        usual = statistics.median(played() for _ in range(3))
        rng, later, back = random.Random(0), [], []
        for _ in range(KILLS):
            wait, victim = rng.uniform(0.1, 0.9) * usual, rng.choice(pids())
            begin = time.monotonic()
            threading.Timer(wait, os.kill, (victim, signal.SIGKILL)).start()
            later.append(played() - usual)
            while victim in pids() or len(pids()) < 2:
                played()
            back.append(time.monotonic() - begin - wait)
        facts = engine.facts()
        engine.close()
    print(f"a round of 50 clients takes {usual:.1f} s; with a worker killed in it, longer by (s), goal ≤ 15:")
    print("  " + ", ".join(f"{seconds:.1f}" for seconds in later) + f"; the longest {max(later):.1f}")
    print("until a round that began with one worker has ended with two (s):")
    print("  " + ", ".join(f"{seconds:.1f}" for seconds in back))
    print(f"{facts['workers_lost']} workers lost, {facts['shards_replayed']} shards repeated")


@dataclass(frozen=True)
class Idle(Algorithm):
    """Sends a vector without training: what moves is all that is measured."""

    def client(self, msg: Any, memory: Any, work: Any) -> Any:
        return {"delta": msg["theta"] * 0.5}, {}


def moved() -> int:
    """Bytes that have crossed the loopback interface."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def traffic(parameters: int, workers: int, clients: int) -> None:
    """A round between the machine that adds and another one with so many workers."""
    import ray
    from ray._private import ray_constants, utils
    from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False  # loopback
    enable_token_auth_by_default()
    utils.write_ray_address = lambda *_: None  # nobody else is to find it
    vector = 4 * parameters
    store = (clients + 4) * vector + (256 << 20)
    folder = Path(f"/tmp/tacit-ray-{os.getpid()}-bench")
    options = {"object_store_memory": store, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "temp_dir": str(folder), **options}
    )
    try:
        cluster.add_node(num_cpus=workers, object_store_memory=store)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        data = tacit.dataset((torch.randn(4 * clients, 4), torch.randint(0, 2, (4 * clients,))))
        values = {
            "rounds": 1, "data": {"name": "x", "partition": {"kind": "iid", "clients": clients}},
            "model": "mlp", "cohort": clients, "local": {"steps": 1, "batch": 4, "lr": 0.1},
        }  # fmt: skip
        model = torch.nn.Sequential(torch.nn.Linear(4, parameters // 7), torch.nn.Linear(parameters // 7, 2))
        with tempfile.TemporaryDirectory() as place:
            job = build_job(tacit.load(values), Path(place), model, data, Idle())
            message = {"theta": read_values(job.model, job.layout).clone()}
            vector = 4 * message["theta"].numel()
            before = moved()
            engine = Ray(job, message, clients, RaySettings(workers=workers), patience=Patience(settle=300.0))
            print(
                f"{message['theta'].numel():,} parameters, {vector / 1e9:.2f} GB; {workers} workers elsewhere"
            )
            print(f"  the job: {(moved() - before) / vector:.2f} vectors moved (the model is one)")
            for round in range(2):
                before, begin = moved(), time.monotonic()
                engine.sum(Order(round, 0.1, 1), message, [Participant(c) for c in range(clients)])
                took, vectors = time.monotonic() - begin, (moved() - before) / vector
                sent = f"one message and {clients} shards' sums"
                print(
                    f"  round {round + 1}: {vectors:.2f} vectors moved for {sent}, {took:.1f} s", flush=True
                )
            engine.close()
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def alone() -> None:
    """Go on in a network namespace of our own, if that can be had."""
    if ALONE not in os.environ and shutil.which("unshare") and shutil.which("ip") and os.geteuid() == 0:
        again = 'ip link set lo up && exec "$@"'
        os.environ[ALONE] = "1"
        os.execvp("unshare", ["unshare", "-n", "sh", "-c", again, "sh", sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("recovery", "bytes"))
    parser.add_argument("--parameters", type=float, default=255e6)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--clients", type=int, default=2)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    if given.what == "bytes":
        alone()
    print(machine(), flush=True)
    if given.what == "recovery":
        recovery()
    else:
        traffic(int(given.parameters), given.workers, given.clients)


if __name__ == "__main__":
    main()
