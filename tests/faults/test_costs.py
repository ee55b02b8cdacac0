"""The overhead of a private round besides training does not grow with the number of earlier rounds."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import faults_small as small
import numpy as np
import pytest

from tacit.federation.spending import Spending
from tacit.federation.tracking import JsonLines
from tacit.privacy import ClientLevel, Clip, ExampleLevel, Mechanism, Poisson, Workload, make_statement
from tacit.privacy.accountants import pld, pld_epsilon
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
    """The accountants aside (their answers are warm here), round 600 costs what round 100 did."""
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
    for round in range(105, 595):
        play(spending, mechanism, workload, round)
    late = seconds(range(595, 605))
    assert late < 3 * early + 0.005, f"{1e3 * early:.1f} ms became {1e3 * late:.1f} ms"
    spending.close()


@pytest.mark.parametrize("budget", [False, True], ids=["free", "budget"])
@pytest.mark.parametrize("kind", list(RUNS))
def test_the_accountants_are_asked_no_more_often_after_many_rounds(
    tmp_path: Path, kind: str, budget: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: distributions composed and profiles compared in 64 rounds, early and late."""
    mechanism, workload = RUNS[kind]
    if budget:  # just enough for the rounds of this test: the last ones are the dearest to decide
        spent = {"client": PoissonGaussian(0.01, 1.0), "example": None}[kind]
        event, rounds = (spent, 1088) if spent else (PoissonGaussian(16 / 50, 1.0), 1500)
        mechanism = replace(mechanism, epsilon=pld_epsilon({event: rounds}, 1e-5))
    asked: Counter[str] = Counter()
    compose, compare = pld.epsilon.__wrapped__, PoissonGaussian.dominates

    def composed(*arguments: Any) -> float | None:
        asked["composed"] += 1
        return compose(*arguments)

    def compared(self: PoissonGaussian, other: Any) -> bool:
        asked["compared"] += 1
        return compare(self, other)

    monkeypatch.setattr(pld, "epsilon", lru_cache(maxsize=4096)(composed))
    monkeypatch.setattr(PoissonGaussian, "dominates", compared)
    spending = Spending(mechanism, workload, tmp_path, "data")
    spending.open({})

    def block(rounds: range) -> Counter[str]:
        asked.clear()
        for round in rounds:
            cohort = mechanism.sample(round, 0, workload)
            charge = mechanism.charge(round, cohort, workload)
            assert spending.affords(charge)
            spending.record(charge, cohort)
            spending.facts(), spending.explain()
        return Counter(asked)

    def skip(rounds: range) -> None:
        for round in rounds:
            play(spending, mechanism, workload, round)

    skip(range(128))
    early = block(range(128, 192))
    skip(range(192, 960))
    late = block(range(960, 1024))
    spending.close()
    # Less than one in four rounds, however long the run; counted each round it would be 64 and more.
    assert late["composed"] <= max(early["composed"], 16), (early, late)
    assert late["compared"] <= 1.5 * early["compared"] + 64, (early, late)


@pytest.mark.parametrize("kind", ["client", "example", "states"])
def test_a_round_reads_and_writes_as_much_as_the_one_before_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files opened and bytes written by each round of a run, from its ledger's line to its checkpoint."""
    done: Counter[str] = Counter()
    rounds: list[Counter[str]] = []
    opened, write, tell = os.open, os.write, JsonLines.round

    def counted_open(*arguments: Any, **options: Any) -> int:
        done["opened"] += 1
        return opened(*arguments, **options)

    def counted_write(fd: int, content: bytes) -> int:
        done["written"] += len(content)
        return write(fd, content)

    def told(self: Any, record: Any) -> None:
        tell(self, record)
        rounds.append(Counter(done))
        done.clear()

    monkeypatch.setattr(os, "open", counted_open)
    monkeypatch.setattr(os, "write", counted_write)
    monkeypatch.setattr(JsonLines, "round", told)
    small.run(kind, tmp_path / "run", 24)
    assert max(r["opened"] for r in rounds[16:]) <= max(r["opened"] for r in rounds[4:12]) + 2
    assert max(r["written"] for r in rounds[16:]) <= 1.1 * max(r["written"] for r in rounds[4:12])


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


def test_a_record_is_never_above_the_budget_nor_below_the_truth(tmp_path: Path) -> None:
    """Rounded up, a budget's last rounds would exceed it; they are known not to, so no more is asked."""
    free, workload = RUNS["client"]
    event, rounds = PoissonGaussian(0.01, 1.0), 500
    budget = pld_epsilon({event: rounds}, 1e-5)
    mechanism = replace(free, epsilon=budget)
    spending = Spending(mechanism, workload, tmp_path, "data")
    spending.open({})
    for round in range(480):
        play(spending, mechanism, workload, round)
    told = []
    for round in range(480, 510):
        cohort = mechanism.sample(round, 0, workload)
        charge = mechanism.charge(round, cohort, workload)
        if not spending.affords(charge):
            break
        spending.record(charge, cohort)
        told.append(spending.facts()["epsilon"])
        assert pld_epsilon({event: round + 1}, 1e-5) <= told[-1] <= budget
    assert round == rounds and told[-1] == budget, "the budget was spent to its end"
    assert spending.facts(final=True)["epsilon"] <= budget
    play(spending, mechanism, workload, 500)  # nobody asked whether that fits: it is counted, not assumed
    assert spending.facts()["epsilon"] == pld_epsilon({event: 501}, 1e-5) > budget
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
    assert totals.worst(1e-5, digits=5).epsilon.value >= totals.worst(1e-5).epsilon.value
