"""Speed of the Ray engine relative to the pool: `python bench/engines.py [PYTHON]`; it needs tacit[ray].

Two workers each, on the workload of `simulation.py`, in turns. Flower's simulation needs another version of
Ray: to include it in the table, give the interpreter of the benchmarks' environment
(`.venv-bench/bin/python`, which `make bench` sets up). Ray polls while it waits, also during the pool's
turns, which costs the pool a little.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack

from simulation import FLOWER_TURNS, LAPS, ROUNDS, SECONDS, Failed, playing

GOALS = {"cnn": "≥ 0.90", "mlp": "≥ 0.70"}
LABELS = {"two workers": "tacit, pool", "ray": "tacit, Ray", "flower": "Flower, two one-CPU actors"}


def speeds(model: str, seconds: float) -> dict[str, float]:
    """Clients per second of pool and Ray, each in its best turn."""
    with ExitStack() as stack:
        players = {name: stack.enter_context(playing(name, model)) for name in ("two workers", "ray")}
        best = dict.fromkeys(players, 0.0)
        end = time.monotonic() + seconds
        for lap in range(LAPS[model]):
            if lap >= 2 and time.monotonic() > end:
                break
            for name, player in players.items():
                best[name] = max(best[name], player.rounds(ROUNDS[model]))
    return best


def main(flower: str | None, seconds: float) -> None:
    print(f"{os.cpu_count()} cores, load before the start {os.getloadavg()[0]:.1f}\n")
    print(f"{'':6}{'clients per second, two workers':34}{'best':>9}{'× pool':>9}   goal", flush=True)
    for model in ("cnn", "mlp"):
        best = speeds(model, seconds)
        if flower is not None:
            try:
                with playing("flower", model, flower) as player:
                    best["flower"] = max(player.rounds(1) for _ in range(FLOWER_TURNS[model]))
            except Failed as failure:
                print(f"{model:6}{LABELS['flower']:34} cannot run here: {str(failure)[:40]}")
        for name, speed in best.items():
            goal = GOALS[model] if name == "ray" else ""
            print(
                f"{model:6}{LABELS[name]:34}{speed:9.1f}{speed / best['two workers']:9.2f}   {goal}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("python", nargs="?", help="an interpreter that has Flower")
    main(parser.parse_args().python, float(os.environ.get("SECONDS_A_MODEL", SECONDS)))
