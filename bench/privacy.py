"""How fast planning and releasing are: `python bench/privacy.py`.

Goals: planning 100,000 rounds under 1 s with either accountant; solving for the noise under 5 s; clipping,
noising and adding an update of 100 million coordinates within twice the time of one `torch.randn` of that
size. Ratios are of the best of several interleaved repeats on this machine, with the threads torch takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from tacit.privacy.planning import solve_noise

from tacit.privacy import Clip, OsNoise, PoissonGaussian
from tacit.privacy import accounting as accountants

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
    for cached in (accountants._rdp_epsilon, accountants._rdp, accountants._pld_epsilon, accountants._pld):
        cached.cache_clear()


def planning() -> None:
    accountants.epsilon({PoissonGaussian(0.1, 1.0): 1}, 1e-5)  # imports
    print(f"ε of {ROUNDS:,} rounds, goal 1 s each")
    for rate, noise, delta in SETTINGS:
        spend = {PoissonGaussian(rate, noise): ROUNDS}
        forget()
        rdp = seconds(lambda spend=spend, delta=delta: accountants.rdp_epsilon(spend, delta))
        pld = seconds(lambda spend=spend, delta=delta: accountants.pld_epsilon(spend, delta))
        print(f"  rate {rate:<8g} noise {noise:<4g} δ {delta:<6g} RDP {rdp:5.2f} s   PLD {pld:5.2f} s")
    print("noise for a target ε by PLD, goal 5 s")
    for rate, rounds, target, delta in TARGETS:
        forget()
        taken = seconds(
            lambda rate=rate, rounds=rounds, target=target, delta=delta: solve_noise(
                lambda noise: PoissonGaussian(rate, noise), rounds, target, delta
            )
        )
        print(f"  rate {rate:<8g} rounds {rounds:<7,} ε {target:<4g} δ {delta:<6g} {taken:5.2f} s")


def release(size: int, repeats: int) -> None:
    """Clip one update, add it to a sum, noise the sum; beside one randn."""
    update, total = torch.randn(size), torch.zeros(size)
    bound, noise = Clip(1.0).bind({"delta": size}), OsNoise()
    parts: dict[str, list[float]] = {"randn": [], "clip": [], "sum": [], "noise": []}
    for _ in range(repeats):
        update.normal_()
        parts["randn"].append(seconds(lambda: torch.randn(size)))
        parts["clip"].append(seconds(lambda: bound.apply({"delta": update})))
        parts["sum"].append(seconds(lambda: total.add_(update)))
        parts["noise"].append(seconds(lambda: noise.add_(total, 0.01)))
    best = {name: min(times) for name, times in parts.items()}
    whole = best["clip"] + best["sum"] + best["noise"]
    print(f"{size:,} coordinates, {torch.get_num_threads()} threads; goal 2 × randn")
    print("  " + "   ".join(f"{name} {taken:.2f} s" for name, taken in best.items()))
    print(f"  clip + sum + noise: {whole:.2f} s = {whole / best['randn']:.2f} × randn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    planning()
    release(arguments.size, arguments.repeats)


if __name__ == "__main__":
    main()
