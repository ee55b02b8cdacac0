"""Speed of planning and releasing: `python bench/privacy.py`.

Goals: plan 100,000 rounds in under 1 s with either accountant; solve for the noise in under 5 s; release a
sum of 255 million coordinates (exact noise, divided, as float32) in 10 s on one core. Times are the best of
several interleaved repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from tacit.privacy import Arrivals, ClientLevel, Clip, Poisson, PoissonGaussian, Workload, accountants
from tacit.privacy.accountants import pld, rdp
from tacit.privacy.calibration import solve_noise
from tacit.vector import Layout

NO_LAYOUT = Layout.of(nn.Linear(1, 1))
"""Of no consequence where all is clipped together."""

ROUNDS = 100_000
SETTINGS = [(1e-5, 1.0, 1e-9), (1e-3, 1.0, 1e-6), (0.03, 1.5, 1e-9), (0.5, 2.0, 1e-5)]
TARGETS = [
    (0.05, 200, 1.0, 1e-3),
    (1e-3, ROUNDS, 2.0, 1e-6),
    (0.03, 2000, 2.0, 1e-9),
    (1e-5, ROUNDS, 0.5, 1e-9),
]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forget() -> None:
    """Empty the accountants' caches: a plan is asked once."""
    for room in (accountants, pld, rdp):
        for cached in vars(room).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


def planning() -> None:
    accountants.epsilon({PoissonGaussian(0.1, 1.0): 1}, 1e-5)  # imports
    print(f"ε of {ROUNDS:,} rounds, goal 1 s each")
    for rate, noise, delta in SETTINGS:
        spend = {PoissonGaussian(rate, noise): ROUNDS}
        forget()
        by_rdp = seconds(lambda spend=spend, delta=delta: accountants.rdp_epsilon(spend, delta))
        by_pld = seconds(lambda spend=spend, delta=delta: accountants.pld_epsilon(spend, delta))
        print(f"  rate {rate:<8g} noise {noise:<4g} δ {delta:<6g} RDP {by_rdp:5.2f} s   PLD {by_pld:5.2f} s")
    print("noise for a target ε by PLD, goal 5 s")
    for rate, rounds, target, delta in TARGETS:
        forget()
        taken = seconds(
            lambda rate=rate, rounds=rounds, target=target, delta=delta: solve_noise(
                lambda noise: [{PoissonGaussian(rate, noise): rounds}], target, delta
            )
        )
        print(f"  rate {rate:<8g} rounds {rounds:<7,} ε {target:<4g} δ {delta:<6g} {taken:5.2f} s")


def release(size: int, repeats: int) -> None:
    """Bound and add one upload, then noise and decode the sum, on one core; beside one randn."""
    torch.set_num_threads(1)
    mechanism = ClientLevel(noise=1.0, delta=1e-9, clip=Clip(1.0), sampling=Poisson(0.01))
    workload = Workload(population=100_000)
    bounding = mechanism.bounding({}, {"delta": size}, NO_LAYOUT, 1000)
    update, total = torch.randn(size), {"delta": torch.zeros(size, dtype=torch.int64)}
    parts: dict[str, list[float]] = {"randn": [], "bound and add": [], "release": []}
    for _ in range(repeats):
        parts["randn"].append(seconds(lambda: torch.randn(size)))
        parts["bound and add"].append(seconds(lambda: bounding.add_({"delta": update}, total)))
        parts["release"].append(seconds(lambda: mechanism.release(total, Arrivals(1, 1), {}, 0, 0, workload)))
    print(f"{size:,} coordinates on one core; goal: a release of 255,000,000 in 10 s")
    for name, times in parts.items():
        print(f"  {name:14s} {min(times):6.2f} s   {min(times) / size * 1e9:5.1f} ns a coordinate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=255_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    planning()
    release(arguments.size, arguments.repeats)


if __name__ == "__main__":
    main()
