"""Sound runs with canaries, many times over: how often does the audit raise a false alarm?

`python bench/audits.py 200` audits this many small sound runs, each with fresh entropy and another seed, and
counts the refuted claims, of runs and of mechanisms alone. Kinds take turns: both units, three mechanisms,
Poisson and fixed cohorts, three clips, three methods, and three noise multipliers. With noise 2 a bound is
far below the claim; with 200 so little is claimed that any lucky guess is an alarm. At 95 % confidence, at
most one claim in twenty may be refuted. `docs/audit.md` has the counts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import tacit

CLIENTS: dict[str, Any] = {
    "rounds": 4,
    "data": {"name": "fashion-mnist-slice", "partition": {"kind": "iid", "clients": 400}},
    "model": {"name": "mlp", "hidden": [8]},
    "cohort": 200,
    "local": {"steps": 1, "batch": 5, "lr": 0.1},
    "privacy": {"unit": "client", "clip": 0.5, "delta": 1e-5},
}
RECORDS = CLIENTS | {
    "data": {"name": "fashion-mnist-slice", "partition": {"kind": "iid", "clients": 16}},
    "cohort": 8,
    "local": {"steps": 2, "batch": 100, "lr": 0.1},
    "privacy": {"unit": "example", "clip": 0.5, "delta": 1e-5},
}
KINDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (CLIENTS, {}),
    (CLIENTS, {"cohort": {"size": 100, "sampling": "fixed"}}),
    (CLIENTS, {"privacy.mechanism": "blt"}),
    (CLIENTS, {"privacy.adaptive": {"count_noise": 1000.0}}),
    (CLIENTS, {"method": "scaffold", "privacy.clip": {"bound": 0.5, "per": "dim"}}),
    (RECORDS, {}),
    (RECORDS, {"method": "fedsam", "privacy.clip": {"bound": 0.5, "per": "uniform"}}),
]
NOISES = (2.0, 20.0, 200.0)
CANARIES = 200


def main(count: int) -> None:
    """Audit `count` runs and print every alarm, and at last how many there were."""
    refuted = {noise: [0, 0, 0] for noise in NOISES}
    start = time.process_time()
    for seed in range(count):
        (base, more), noise = KINDS[seed % len(KINDS)], NOISES[seed % len(NOISES)]
        config = tacit.load(base, more | {"seed": seed, "privacy.noise": noise})
        report = tacit.audit(config, canaries=CANARIES, trials=256)
        assert report.run is not None
        for i, yes in enumerate((True, report.run.refuted, report.mechanism.refuted)):
            refuted[noise][i] += yes
        if report.refuted:
            print(f"seed {seed}, {more}:\n{report.text()}", flush=True)
    for noise, (made, runs, mechanisms) in refuted.items():
        print(f"noise {noise:g}: {made} audits, {runs} runs and {mechanisms} mechanisms alone refuted")
    print(f"{time.process_time() - start:.0f} s of processor time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "runs", nargs="?", type=int, default=200, help="how many runs to audit (default: 200)"
    )
    main(parser.parse_args().runs)
