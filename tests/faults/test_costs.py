"""What a private round costs beside its training does not grow with the rounds before it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tacit.federation.spending import Spending
from tacit.privacy import ClientLevel, Clip, ExampleLevel, Mechanism, Poisson, Workload, make_statement
from tacit.privacy.events import PoissonGaussian
from tacit.privacy.totals import ClientTotals, rounded_count

SIZES = np.random.default_rng(1).integers(50, 500, 200)
RUNS: dict[str, tuple[Mechanism, Workload]] = {
    "client": (
        ClientLevel(noise=1.0, delta=1e-5, clip=Clip(0.5), sampling=Poisson(0.01)),
        Workload(population=10_000),
    ),
    "example": (
        ExampleLevel(noise=1.0, delta=1e-5, clip=Clip(0.5), sampling=Poisson(0.1)),
        Workload(population=200, sizes=SIZES, batch=16, steps=lambda records: 10),
    ),
}


def play(spending: Spending, mechanism: Mechanism, workload: Workload, round: int) -> None:
    cohort = mechanism.sample(round, 0, workload)
    spending.record(mechanism.charge(round, cohort, workload), cohort)


@pytest.mark.parametrize("kind", list(RUNS))
def test_saving_takes_no_longer_after_many_rounds(tmp_path: Path, kind: str) -> None:
    """The accountants aside (their answers are warm here), round 1,000 costs what round 100 did."""
    mechanism, workload = RUNS[kind]
    spending = Spending(mechanism, workload, tmp_path, "data")
    spending.open({})

    def seconds(rounds: range) -> float:
        took = []
        for round in rounds:
            play(spending, mechanism, workload, round)
            spending.facts(), spending.explain()
            start = time.process_time()
            spending.facts(), spending.saved(), spending.explain()
            took.append(time.process_time() - start)
        return float(np.median(took))

    for round in range(95):
        play(spending, mechanism, workload, round)
    early = seconds(range(95, 105))
    for round in range(105, 995):
        play(spending, mechanism, workload, round)
    late = seconds(range(995, 1005))
    assert late < 3 * early + 0.005, f"{1e3 * early:.1f} ms became {1e3 * late:.1f} ms"
    spending.close()


@pytest.mark.parametrize("kind", list(RUNS))
def test_the_running_totals_say_what_a_replay_says(tmp_path: Path, kind: str) -> None:
    mechanism, workload = RUNS[kind]
    spending = Spending(mechanism, workload, tmp_path, "data")
    spending.open({})
    for round in [*range(70), 3, 3]:
        play(spending, mechanism, workload, round)
        if round % 20 == 0:
            bound = spending.facts()["epsilon"]
            exact = make_statement(mechanism, spending.ledger.charges, workload.population)
            assert exact.epsilon <= bound <= 1.05 * exact.epsilon
    exact = make_statement(mechanism, spending.ledger.charges, workload.population)
    assert spending.facts(final=True)["epsilon"] == exact.epsilon
    assert (exact.rounds, exact.repeated) == (72, 2)
    spending.close()


def test_rounded_counts_are_upper_bounds_and_few() -> None:
    counts = [rounded_count(n) for n in range(1, 100_000)]
    assert all(n <= c <= 1.035 * n for n, c in enumerate(counts, start=1))
    assert len(set(counts)) < 64 + 32 * 12
    assert counts[:63] == list(range(1, 64))


def test_rounding_never_states_less() -> None:
    totals = ClientTotals()
    rng = np.random.default_rng(3)
    events = [PoissonGaussian(rate=rate, noise=1.0) for rate in (0.01, 0.02, 0.05)]
    for _ in range(200):
        totals.add(events[rng.integers(3)], int(rng.integers(1, 30)), clients=rng.integers(0, 8, 3).tolist())
    assert totals.worst(1e-5, rounded=True).epsilon.value >= totals.worst(1e-5).epsilon.value
