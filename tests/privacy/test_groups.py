"""ε for several units together: by dp_accounting's own group event, by brute force, by the general bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from tacit.privacy import (
    AdaptiveClip,
    BandedNoise,
    BltNoise,
    Charge,
    ClientLevel,
    Clip,
    ExampleLevel,
    FixedSize,
    FixedSizeGaussian,
    MatrixRow,
    Mechanism,
    Part,
    Poisson,
    PoissonGaussian,
    Workload,
    epsilon,
    make_statement,
    replay,
)
from tacit.privacy.groups import SIZES, any_group_epsilon, group_epsilon
from tacit.privacy.matrices import dense
from tacit.privacy.mechanisms.correlated import Correlated
from tacit.privacy.totals import ClientTotals


def exact_delta(rate: float, noise: float, size: int, eps: float) -> float:
    """δ of one round for a group, both directions, by adding up over a fine grid."""
    x = np.linspace(-12 * noise, size + 12 * noise, 400_001)
    shares = [math.comb(size, i) * rate**i * (1 - rate) ** (size - i) for i in range(size + 1)]
    p = sum(share * norm.pdf(x, i, noise) for i, share in enumerate(shares))
    q = norm.pdf(x, 0, noise)
    step = x[1] - x[0]
    return float(
        max(np.maximum(p - math.exp(eps) * q, 0).sum(), np.maximum(q - math.exp(eps) * p, 0).sum()) * step
    )


@pytest.mark.parametrize(("rate", "noise", "size"), [(0.1, 1.0, 2), (0.3, 2.0, 5)])
def test_a_group_is_a_mixture(rate: float, noise: float, size: int) -> None:
    """One round, by numerical integration of the hockey stick: δ at the reported ε is δ, and a bound."""
    found = group_epsilon({PoissonGaussian(rate, noise): 1}, 1e-5, size)
    assert exact_delta(rate, noise, size, found) <= 1.001e-5
    assert exact_delta(rate, noise, size, found * 0.99) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 5, 10])
def test_it_is_dp_accountings_own_group_event(size: int) -> None:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    shares = [math.comb(size, i) * 0.1**i * 0.9 ** (size - i) for i in range(size + 1)]
    event = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(1.5, [float(i) for i in range(size + 1)], shares)
    accountant = PLDAccountant(value_discretization_interval=4e-3)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 10))
    found = group_epsilon({PoissonGaussian(0.1, 1.5): 10}, 1e-5, size)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)


def test_without_sampling_it_is_exact() -> None:
    for spend in ({PoissonGaussian(1.0, 6.0): 4}, {MatrixRow(6.0, 4.0): 1}):
        for size in (2, 5, 10):
            exact = epsilon({PoissonGaussian(1.0, 3.0 / size): 1}, 1e-5).value
            assert group_epsilon(spend, 1e-5, size) == pytest.approx(exact, rel=1e-6)


@pytest.mark.slow
def test_the_general_bound_holds_and_is_worse() -> None:
    spend = {PoissonGaussian(0.1, 2.0): 5}
    assert any_group_epsilon(spend, 1e-5, 2) > group_epsilon(spend, 1e-5, 2) > epsilon(spend, 1e-5).value
    fixed = {FixedSizeGaussian(20, 1000, 4.0): 20}
    one = epsilon(fixed, 1e-5).value
    assert 2 * one < group_epsilon(fixed, 1e-5, 2) < 4 * one
    assert math.isinf(any_group_epsilon({PoissonGaussian(1.0, 0.01): 9}, 1e-5, 10))


def test_the_statement_tells_it_when_asked() -> None:
    mechanism = ClientLevel(2.0, 1e-5, Clip(0.5), Poisson(0.1))
    charge = mechanism.charge(0, np.arange(3), Workload(1000))
    assert "Somebody with several" not in make_statement(mechanism, [charge], 1000).text()
    told = make_statement(mechanism, [charge], 1000, groups=(2,))
    assert "2 clients ε = " in told.text()
    assert told.to_dict()["groups"]["2"] > told.epsilon


@pytest.mark.slow
def test_the_worst_in_a_group_need_not_be_the_worst_alone() -> None:
    """Sixty steps at rate 0.1 cost one record more than one step at rate 1, and five of them less."""
    often, once = Part(PoissonGaussian(0.1, 1.5), 60, (0,)), Part(PoissonGaussian(1.0, 1.5), 1, (1,))
    charges = [Charge(0, (often, once))]
    mechanism = ExampleLevel(1.5, 1e-5, Clip(0.5), FixedSize(2))
    assert replay(charges).worst(1e-5).profile == ((often.event, 60),)
    told = make_statement(mechanism, charges, 2, groups=(5,)).groups
    assert told == ((5, group_epsilon({once.event: 1}, 1e-5, 5)),)
    assert told[0][1] > group_epsilon({often.event: 60}, 1e-5, 5)


@pytest.mark.parametrize("most", [1, 3])
def test_a_few_profiles_cover_everyone(most: int) -> None:
    rng = np.random.default_rng(0)
    other = PoissonGaussian(0.5, 3.0)
    for _ in range(30):
        totals, paid = ClientTotals(), dict[int, tuple[PoissonGaussian, int]]()
        totals.add(other, 2)
        for client in range(25):
            event = PoissonGaussian(float(rng.choice([0.01, 0.03, 0.1, 0.2, 0.5, 1.0])), 1.0)
            paid[client] = event, int(rng.integers(1, 200))
            totals.add(*paid[client], clients=[client])
        totals.add(other, 5, clients=[3, 7])
        found = totals.covering(most)
        assert len(found) <= most + 1
        for client, (event, count) in paid.items():
            asked = 2 + 5 * (client in (3, 7))
            assert any(
                dict(profile)[other] >= asked
                and sum(n for e, n in profile if e != other and e.dominates(event)) >= count
                for profile in found
            )


ROUNDS, CROWD = 4, Workload(100, sizes=np.full(100, 50), batch=5)


def by_dp_accounting(rate: float, noise: float, count: int, size: int) -> float:
    """ε of so many rounds for a group, from the library's own events."""
    from dp_accounting import SelfComposedDpEvent, dp_event
    from dp_accounting.pld import PLDAccountant

    event = dp_event.GaussianDpEvent(noise / size)
    if rate < 1:
        shares = [math.comb(size, i) * rate**i * (1 - rate) ** (size - i) for i in range(size + 1)]
        event = dp_event.MixtureOfGaussiansDpEvent(noise, [float(i) for i in range(size + 1)], shares)
    accountant = PLDAccountant(value_discretization_interval=4e-3)
    return float(accountant.compose(SelfComposedDpEvent(event, count)).get_epsilon(1e-5))


def of_statement(mechanism: Mechanism) -> dict[int, float]:
    """What a run of four rounds tells, if client 0 is in every cohort that it may be in."""
    charges = [mechanism.charge(t, mechanism.sample(t, 0, CROWD), CROWD) for t in range(ROUNDS)]
    told = make_statement(mechanism, charges, 100, groups=SIZES).groups
    assert tuple(size for size, _ in told) == (2, 5, 10)
    return dict(told)


@pytest.mark.parametrize(
    ("mechanism", "rate"),
    [
        (ClientLevel(8.0, 1e-5, Clip(0.5), Poisson(1.0)), 1.0),
        *(
            pytest.param(mechanism, 0.1, marks=pytest.mark.slow)
            for mechanism in (
                ClientLevel(4.0, 1e-5, Clip(0.5), Poisson(0.1)),
                ClientLevel(8.0, 1e-5, Clip(0.5), Poisson(0.1), noise_at="clients"),
                AdaptiveClip(4.0, 1e-5, Clip(0.5), Poisson(0.1)),
                ExampleLevel(4.0, 1e-5, Clip(0.5), Poisson(1.0)),
            )
        ),
    ],
)
def test_a_statements_groups_are_the_librarys(mechanism: Mechanism, rate: float) -> None:
    for size, told in of_statement(mechanism).items():
        assert told == pytest.approx(by_dp_accounting(rate, mechanism.noise, ROUNDS, size), rel=0.02)


@pytest.mark.parametrize("kind", [BltNoise, BandedNoise])
def test_a_statements_groups_of_correlated_noise(kind: type[Correlated]) -> None:
    """k clients move what is released by no more than k times the first column of C, whose rounds these are:
    with groups of ten nobody comes twice in four rounds.
    """
    mechanism = kind(8.0, 1e-5, Clip(0.5), FixedSize(10), rounds=ROUNDS)
    column = dense(mechanism.matrix(100).coefficients(ROUNDS), ROUNDS)[:, 0]
    for size, told in of_statement(mechanism).items():
        exact = by_dp_accounting(1.0, 8.0 / float(np.linalg.norm(column)), 1, size)
        assert told == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    "mechanism",
    [
        ClientLevel(20.0, 1e-5, Clip(0.5), FixedSize(10)),
        BandedNoise(40.0, 1e-5, Clip(0.5), Poisson(0.02), rounds=ROUNDS, bands=2),
    ],
)
def test_other_statements_groups_are_a_bound_that_holds_for_any_mechanism(mechanism: Mechanism) -> None:
    """ε for k is k·ε′, and one unit has this ε′ at the δ′ that leaves δ for the group."""
    charges = [mechanism.charge(t, np.arange(10), CROWD) for t in range(ROUNDS)]
    spend = dict(replay(charges).worst(1e-5).profile)
    for size, told in of_statement(mechanism).items():
        one = told / size
        assert epsilon(spend, 1e-5 * math.expm1(one) / math.expm1(told)).value <= one * (1 + 1e-9)
