"""Private metrics: what one client can change, what they cost together with the update, and their values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2, norm

from tacit.errors import UserError
from tacit.privacy import (
    AdaptiveClip,
    BandedNoise,
    Bits,
    BltNoise,
    ClientLevel,
    Clip,
    ExampleLevel,
    FixedSize,
    MatrixRow,
    Metrics,
    Poisson,
    PoissonGaussian,
    Seen,
    Workload,
    epsilon,
    make_statement,
)
from tacit.privacy.matrices import dense
from tacit.privacy.mechanisms import plain_mechanism, read_mechanism

DELTA = 1e-5
ODD = (-math.inf, -1.0, 0.0, 1e-300, 0.25, 0.5, 1.0, 2.0, 3.999, 10.0, 1e300, math.inf, math.nan)


def client(kind: type[ClientLevel] = ClientLevel, noise: float = 1.0, **more: Any) -> ClientLevel:
    sampling = more.pop("sampling", Poisson(0.1))
    return kind(noise, DELTA, Clip(0.5), sampling, metrics=more.pop("metrics", Metrics()), **more)


def test_one_client_moves_the_sums_by_no_more_than_the_radius() -> None:
    """Brute force over what a client may say, in whole numbers, on fine and coarse grids."""
    longest = 0.0
    for accuracy, radius in itertools.product((False, True), (7, 1000, 2**20)):
        rule = Metrics(loss=4.0, norm=2.0, accuracy=accuracy)
        tests = [rule.test(value, radius) for value in ODD] if accuracy else [[]]
        seen = [Seen(True, loss, size) for loss, size in itertools.product(ODD, ODD)] + [Seen(False)]
        for one, test in itertools.product(seen, [[0, 0], *tests] if accuracy else tests):
            vector = rule.client(one, 0.5, radius) + test
            assert len(vector) == rule.entries
            assert sum(k * k for k in vector) <= radius**2
            longest = max(longest, sum(k * k for k in vector) / radius**2)
    assert longest > 0.999, "and no noise is wasted: somebody moves them that far"


def test_update_and_metrics_together_are_the_round_that_is_charged() -> None:
    """Two accounts of one cohort, without sampling: two Gaussian queries compose to the announced one."""
    for make in (
        client(sampling=Poisson(1.0)),
        client(AdaptiveClip, sampling=Poisson(1.0), count_noise=3.0, metrics=Metrics(share=0.3)),
    ):
        assert make.metrics is not None
        parts = {PoissonGaussian(1.0, make.sum_noise): 1, PoissonGaussian(1.0, make.metrics.noise(1.0)): 1}
        if isinstance(make, AdaptiveClip):
            parts[PoissonGaussian(1.0, 2 * make.count_noise)] = 1
        apart = epsilon(parts, DELTA).value
        (charged,) = make.charge(0, np.array([1]), Workload(100)).parts
        assert charged.event == PoissonGaussian(1.0, 1.0)
        assert epsilon({charged.event: 1}, DELTA).value == pytest.approx(apart, rel=1e-3)
        without = epsilon({PoissonGaussian(1.0, make.sum_noise): 1}, DELTA).value
        assert without < apart, "metrics are not free"


def test_with_sampling_the_pair_is_as_private_as_the_event_says() -> None:
    """The worst case in two dimensions, integrated: (1 − q)N(0) + qN(shift) against N(0), both ways."""
    q, z, rule = 0.1, 1.0, Metrics(share=0.2)
    stds = np.array([rule.rest(z), rule.noise(z)])
    axes = [np.linspace(-9 * s, 9 * s + 1, 1201) for s in stds]
    cell = np.prod([axis[1] - axis[0] for axis in axes])
    here = np.outer(*(norm.pdf(axis, 0, s) for axis, s in zip(axes, stds, strict=True)))
    there = np.outer(*(norm.pdf(axis, 1, s) for axis, s in zip(axes, stds, strict=True)))
    mixed = (1 - q) * here + q * there
    for eps in (0.1, 0.5, 1.0):
        delta = max(
            float(np.maximum(a - math.exp(eps) * b, 0).sum() * cell)
            for a, b in ((mixed, here), (here, mixed))
        )
        assert epsilon({PoissonGaussian(q, z): 1}, delta).value == pytest.approx(eps, abs=2e-3)


def test_metrics_of_nobody_are_noise_of_the_stated_size() -> None:
    """2,000 releases of an empty cohort: variances by their χ² at 1e-6 each."""
    rule, trials, noise, expected = Metrics(share=0.25, accuracy=True), 2000, 3.0, 1000.0
    told = [rule.release([], [], 0.5, expected, noise, Bits.secret()) for _ in range(trials)]
    low, high = chi2.ppf([5e-7, 1 - 5e-7], trials) / trials
    unit = rule.noise(noise) * math.sqrt(6)  # six entries of equal weight
    for name, std, centre in [
        ("private_clients", unit, 0.0),
        ("private_failed", unit / 2, 0.0),
        ("private_loss", unit / 500 * 5, 5.0),
        ("private_norm", unit / 500 * 2 * 0.5, 1.0),
        ("private_clipped", unit / 500 / 2, 0.5),
        ("private_accuracy", unit / 500 / 2, 0.5),
    ]:
        values = np.array([record[name] for record in told])
        assert low < float(((values - centre) ** 2).mean()) / std**2 < high, name


def test_without_noise_they_are_the_clipped_means() -> None:
    cohort = [Seen(True, 1.0, 0.2), Seen(True, 3.0, 0.6), Seen(True, math.nan, 9.0), Seen(False)]
    rule = Metrics(loss=4.0, norm=2.0, accuracy=True)
    told = rule.release(cohort, [0.25, 0.75, 1.0], 0.5, 4.0, 0.0, Bits.secret())
    assert told == {
        "private_clients": pytest.approx(3, rel=1e-4),
        "private_failed": pytest.approx(1, rel=1e-4),
        "private_loss": pytest.approx((1 + 3 + 4) / 3, rel=1e-3),
        "private_norm": pytest.approx((0.2 + 0.6 + 1.0) / 3, rel=1e-3),
        "private_clipped": pytest.approx(2 / 3, rel=1e-3),
        "private_accuracy": pytest.approx(2 / 3, rel=1e-3),
    }


@pytest.mark.parametrize(
    "fleet",
    [
        client(BltNoise, sampling=FixedSize(20), rounds=12, metrics=Metrics(share=0.3)),
        client(BandedNoise, sampling=FixedSize(20), rounds=12, bands=3, metrics=Metrics(share=0.3)),
        client(BandedNoise, sampling=FixedSize(20), rounds=12, bands=3, metrics=None),
    ],
)
def test_correlated_noise_pays_for_each_participation(fleet: BltNoise | BandedNoise) -> None:
    """Every client's joint query (its columns of C, and its metrics), after every round, against the sum of
    what was charged.
    """
    workload, rounds, share = Workload(100), 12, 0.0 if fleet.metrics is None else 0.3
    turns, charged = fleet.separation(100), []
    c = dense(fleet.matrix(100).coefficients(rounds), rounds)
    for t in range(rounds):
        for part in fleet.charge(t, fleet.sample(t, 0, workload), workload).parts:
            assert isinstance(part.event, MatrixRow)
            charged.append(part.event.square)
        for offset in range(turns):
            takes = list(range(offset, t + 1, turns))
            joint = float((c[: t + 1, takes].sum(axis=1) ** 2).sum()) + share * len(takes)
            assert joint <= sum(charged) * (1 + 1e-9)
    (planned,) = fleet.planned(workload, rounds, 1.0)
    assert [event.square for event in planned] == [pytest.approx(sum(charged))]  # type: ignore[attr-defined]


def test_banded_turns_with_secret_coins_pay_too() -> None:
    def fleet(metrics: Metrics | None) -> BandedNoise:
        return BandedNoise(2.0, DELTA, Clip(0.5), Poisson(0.01), rounds=8, bands=4, metrics=metrics)

    with_, without = fleet(Metrics(share=0.3)).turn(), fleet(None).turn()
    assert with_.noise**-2 == pytest.approx(without.noise**-2 + 0.3 / 4, rel=1e-9)


@pytest.mark.parametrize(
    "mechanism",
    [
        client(),
        client(sampling=FixedSize(10)),
        client(AdaptiveClip),
        client(BltNoise, sampling=FixedSize(10), rounds=20),
        pytest.param(client(BandedNoise, rounds=20, bands=2), marks=pytest.mark.slow),
    ],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_calibration_keeps_the_budget_with_metrics_in_it(mechanism: ClientLevel) -> None:
    from dataclasses import replace

    workload = Workload(100)
    budget = replace(mechanism, epsilon=3.0)
    found = budget.calibrated(workload, 20)
    spent: dict[Any, int] = {}
    for t in range(20):
        for part in found.charge(t, np.arange(10), workload).parts:
            spent[part.event] = spent.get(part.event, 0) + part.steps
    assert 2.8 < epsilon(spent, DELTA).value <= 3.0
    plain = replace(budget, metrics=None).calibrated(workload, 20)
    assert found.sum_noise > plain.sum_noise, "the update pays for them"
    assert read_mechanism(plain_mechanism(found)) == found


def test_the_statement_lists_what_was_released_and_its_cost() -> None:
    mechanism = client(metrics=Metrics(share=0.1, accuracy=True))
    charge = mechanism.charge(0, np.array([3]), Workload(1000))
    told = make_statement(mechanism, [charge], population=1000)
    assert "mean training loss (clipped to 10)" in told.text() and "own test records" in told.text()
    assert "take 0.1 of a round's 1/noise²: with the update they cost what noise 1 would" in told.text()
    assert not any("exact" in item for item in told.not_covered)
    assert "Metrics" not in make_statement(client(metrics=None), [charge], 1000).text()
    simulated = make_statement(client(entropy="seed"), [charge], 1000)
    assert any("they are exact" in item for item in simulated.not_covered), "a simulation tells both"
    records = ExampleLevel(1.0, DELTA, Clip(0.5), Poisson(0.1), metrics=Metrics())
    part = records.charge(0, np.array([0]), Workload(1, sizes=np.array([50])))
    assert "Losses are exact, and not told" in make_statement(records, [part], 1).text()


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.0}, {"loss": 0.0}, {"norm": math.inf}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Metrics(**wrong)  # type: ignore[arg-type]
