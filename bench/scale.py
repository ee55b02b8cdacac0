"""A million clients a day: how many machines, how many bytes, and the scheduler's overhead.

`python bench/scale.py` measures the cost of clients of two small models on this processor (one thread,
processor time). It then simulates rounds with the Ray engine's scheduling: shards go in order to the first
free worker, at most `AHEAD` for each worker beyond the next one to add, and sums go through the single
network card of the machine that adds them. Clients' sizes and machines' speeds are drawn from log-normal
distributions. `docs/scale.md` has its table.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from contenders import build, dataset, settings
from tacit.config.build import build_job
from tacit.engine import InProcess, Order, Participant, shards
from tacit.engine.contract import SHARD
from tacit.engine.ray import AHEAD
from tacit.vector import read_values

CORES = 8
"""Workers of a machine."""
MOST = 1024
"""Machines that are tried."""
GIGABIT = 1e9 / 8
ADD = 3e-10
"""Seconds to add a byte of a sum: about 3 GB/s from memory."""


@dataclass(frozen=True)
class Plan:
    """A federation and the machines that play it."""

    machines: int
    cohort: int
    client: float
    """Seconds of a client of average size, on one worker."""
    parameters: int
    bytes_each: int = 8
    """Of a sum's number: 8 under client-level privacy, else 4."""
    network: float = 10 * GIGABIT
    """Of each machine, in bytes a second."""
    spread: float = 0.5
    """Deviation of the logarithm of a client's size."""
    noise: float = 0.1
    """The same of a machine's speed, from shard to shard."""
    lost: float = 0.0
    """Share of shards whose worker is lost half-way."""

    @property
    def workers(self) -> int:
        return self.machines * CORES


def round_seconds(plan: Plan, rng: np.random.Generator) -> tuple[float, float]:
    """How long a round takes, and how much of that the workers work, by the engine's own cut into shards."""
    size = rng.lognormal(-(plan.spread**2) / 2, plan.spread, plan.cohort)
    parts = shards([Participant(i) for i in range(plan.cohort)], np.round(1e6 * size).astype(np.int64))
    work = np.array([plan.client * sum(float(size[v.client]) for v in part) for part in parts])
    work *= rng.lognormal(0.0, plan.noise, len(parts))
    begin = (
        plan.parameters * 4 * plan.machines / plan.network
    )  # the message leaves one machine, once for each
    return begin + scheduled(work * _replays(plan, rng, len(parts)), plan, begin=0.0), float(work.sum())


def scheduled(work: NDArray[np.float64], plan: Plan, begin: float) -> float:
    """When the last shard is added. Shards start in order, each on the worker that is free first."""
    free = [begin] * plan.workers
    up = plan.parameters * plan.bytes_each
    added: list[float] = []
    link = 0.0
    for shard, seconds in enumerate(work):
        gate = added[shard - AHEAD * plan.workers] if shard >= AHEAD * plan.workers else begin
        end = max(heapq.heappop(free), gate) + seconds
        heapq.heappush(free, end)
        # In order: a sum that comes early waits, and the card carries one after the other.
        link = max(link, end) + up / plan.network
        added.append(max(link, added[-1] if added else 0.0) + up * ADD)
    return added[-1]


def _replays(plan: Plan, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return 1.0 + 0.5 * (rng.random(count) < plan.lost)


def clients_a_day(plan: Plan, rounds: int = 20) -> tuple[float, float]:
    """Clients in 24 hours, and the share of the workers' time that is work."""
    rng = np.random.default_rng(0)
    played = [round_seconds(plan, rng) for _ in range(rounds)]
    wall, work = (float(sum(values)) for values in zip(*played, strict=True))
    return 86400 * rounds * plan.cohort / wall, work / (wall * plan.workers)


def measured(model: str, clients: int = 24) -> tuple[float, int]:
    """Processor seconds of one client (50 records, 5 steps), and the model's parameters."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(settings(model, 0), Path(folder), build(model), dataset(model))
        message = {"theta": read_values(job.model, job.layout).clone()}
        engine = InProcess(job)
        times = []
        for turn in range(3):
            start = time.process_time()
            engine.sum(Order(turn, 0.05, 5), message, [Participant(c) for c in range(clients)])
            times.append((time.process_time() - start) / clients)
        engine.close()
    return min(times), job.layout.size


def machines_for(day: float, plan: Callable[[int], Plan]) -> int:
    """The fewest machines that play so many clients a day; 0 if no number does."""
    count = 1
    while clients_a_day(plan(count), 2)[0] < day:
        if count >= MOST:
            return 0
        count *= 2
    low = count // 2
    while count - low > 1:
        middle = (low + count) // 2
        low, count = (low, middle) if clients_a_day(plan(middle), 2)[0] >= day else (middle, count)
    return count


def main() -> None:
    known = {name: measured(name) for name in ("mlp", "cnn")}
    for name, (seconds, parameters) in known.items():
        print(f"{name}: {1000 * seconds:.1f} ms of processor time a client, {parameters:,} parameters")
    cases = [(name, *known[name], 5000) for name in known]
    cases += [("a minute, 1M", 60.0, 10**6, cohort) for cohort in (5000, 20_000, 50_000)]
    cases += [("a minute, 100M", 60.0, 10**8, 50_000), ("a minute, LoRA 2M", 60.0, 2 * 10**6, 50_000)]
    print(f"\na million clients a day; machines of {CORES} workers, 10 Gbit/s, 1 % of shards lost")
    print(f"{'model':20}{'cohort':>7}{'machines':>10}{'on paper':>9}{'busy':>6}{'round, s':>9}{'up, GB':>8}")
    for name, seconds, parameters, cohort in cases:

        def plan(
            machines: int, seconds: float = seconds, parameters: int = parameters, cohort: int = cohort
        ) -> Plan:
            return Plan(machines, cohort, seconds, parameters, lost=0.01)

        count, up = machines_for(1e6, plan), cohort // SHARD * parameters * 8
        line = f"{name:20}{cohort:7}{count or 'none':>10}{1e6 * seconds / 86400 / CORES:9.1f}"
        if count:
            day, busy = clients_a_day(plan(count), 5)
            print(f"{line}{busy:6.2f}{86400 * cohort / day:9.1f}{up / 1e9:8.1f}", flush=True)
        else:
            longest = max(round_seconds(plan(MOST), np.random.default_rng(n))[0] for n in range(5))
            print(
                f"{line}   a round may take {0.0864 * cohort:.0f} s; with any number it takes {longest:.0f} s"
            )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    main()
