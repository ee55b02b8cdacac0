"""Choosing the best of a random number of runs: against brute force, dp_accounting and published numbers."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from scipy.special import logsumexp

from tacit.errors import UserError
from tacit.privacy import PoissonGaussian
from tacit.privacy.accountants import rdp
from tacit.privacy.tuning import SHAPES, find_gamma, mean_trials, probabilities, tuned_epsilon, tuned_rdp

ONE = {PoissonGaussian(0.05, 2.0): 200}
ORDERS, _ = rdp.divergences(ONE)


def renyi(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """D_λ(P‖Q) of two distributions on a few outcomes at all orders, by its definition."""
    powers = np.outer(ORDERS, np.log(p)) + np.outer(1 - ORDERS, np.log(q))
    return logsumexp(powers, axis=1) / (ORDERS - 1)


def both(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.maximum(renyi(p, q), renyi(q, p))


def best_of(p: np.ndarray, trials: float, shape: float) -> np.ndarray:
    """The law of the best of K draws from p, outcomes in the order of their scores: P(K = k) summed up."""
    below = np.concatenate([[0.0], np.cumsum(p)])
    below[-1] = 1.0
    if math.isinf(shape):  # K = 0 shows nothing, which is one more outcome
        law = np.diff(np.exp(trials * (below - 1)))
        return np.concatenate([[math.exp(-trials)], law])
    weights = number_of_runs(trials, shape)
    return np.diff(below[:, None] ** np.arange(1, len(weights) + 1) @ weights)


@cache
def number_of_runs(trials: float, shape: float) -> np.ndarray:
    weights = probabilities(find_gamma(trials, shape), shape, 40_000 if shape < 0 else 2000)
    assert weights.sum() == pytest.approx(1, abs=1e-9)
    return weights


@pytest.mark.parametrize(
    ("shape", "trials"), itertools.product([-0.5, 0.0, 1.0, 2.5, math.inf], [1.5, 4, 20])
)
def test_the_bound_holds_for_small_mechanisms(shape: float, trials: float) -> None:
    """Random distributions on five outcomes and the worst kind, whose best outcome gives a record away."""
    rng = np.random.default_rng(0)
    pairs = [(rng.dirichlet(np.ones(5)) + 0.02, rng.dirichlet(np.ones(5)) + 0.02) for _ in range(15)]
    pairs += [
        (np.array([1 - a, a]), np.array([1 - a * r, a * r])) for a in (1e-3, 0.05, 0.4) for r in (1.1, 2.0)
    ]
    tightest = math.inf
    for p, q in pairs:
        p, q = p / p.sum(), q / q.sum()
        bound = tuned_rdp(ORDERS, both(p, q), trials, shape)
        true = both(best_of(p, trials, shape), best_of(q, trials, shape))
        assert (true <= bound + 1e-9).all()
        tightest = min(tightest, float(np.min(bound / np.maximum(true, 1e-9))))
    assert tightest < 6, "and it is not empty"


def test_pure_privacy_costs_what_was_published() -> None:
    """Liu and Talwar 2019: 3ε for a geometric number; Papernot and Steinke 2022: (2 + η)ε, 2ε at η = 0."""
    orders = np.array([2.0, 1e6, 1e9])
    for shape, times in ((1.0, 3.0), (0.0, 2.0), (-0.5, 1.5)):
        found = tuned_rdp(orders, np.full(3, 0.7), 50.0, shape)
        assert found[-1] == pytest.approx(times * 0.7, rel=1e-4)


@pytest.mark.parametrize(("shape", "trials"), itertools.product([0.0, 1.0, 3.0, math.inf], [1.5, 10, 300]))
def test_it_agrees_with_dp_accounting(shape: float, trials: float) -> None:
    import dp_accounting
    from dp_accounting.dp_event import RepeatAndSelectDpEvent
    from dp_accounting.rdp import RdpAccountant

    one = dp_accounting.SelfComposedDpEvent(PoissonGaussian(0.05, 2.0).dp_event(), 200)
    accountant = RdpAccountant(ORDERS)
    accountant.compose(RepeatAndSelectDpEvent(one, trials, shape))
    ours = rdp.converted(tuned_rdp(*rdp.divergences(ONE), trials, shape), 1e-5)[0]
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize(("shape", "trials"), itertools.product([-0.5, 0.0, 1.0, 3.0], [1.2, 10, 1000]))
def test_the_number_of_runs_has_the_mean_that_is_paid_for(shape: float, trials: float) -> None:
    gamma = find_gamma(trials, shape)
    assert mean_trials(gamma, shape) == pytest.approx(trials, rel=1e-9)
    if trials <= 10:
        weights = probabilities(gamma, shape, 3000)
        assert float(weights @ np.arange(1, 3001)) == pytest.approx(trials, rel=1e-3)


def test_a_few_trials_cost_more_than_one_and_less_than_all() -> None:
    last = 0.0
    for trials in (1.5, 3, 10, 100):
        paid = tuned_epsilon(ONE, 1e-5, trials)
        assert last < paid.epsilon and paid.alone < paid.epsilon < 3.5 * paid.alone
        assert paid.epsilon == min(tuned_epsilon(ONE, 1e-5, trials, kind).epsilon for kind in SHAPES)
        last = paid.epsilon
    all_of_them = rdp.converted(100 * rdp.divergences(ONE)[1], 1e-5)[0]
    assert last < all_of_them / 4
    with pytest.raises(UserError, match="more than 1"):
        tuned_epsilon(ONE, 1e-5, 1)


def test_the_plan_tells_the_price() -> None:
    import json

    from typer.testing import CliRunner

    from tacit.cli.app import app

    ask = ["plan", "--rate", "0.05", "--noise", "2", "--rounds", "200", "--delta", "1e-5", "--trials", "10"]
    paid = tuned_epsilon(ONE, 1e-5, 10)
    told = json.loads(CliRunner().invoke(app, [*ask, "--json"]).stdout)["tuned"]
    assert told["epsilon"] == paid.epsilon and told["kind"] == "logarithmic"
    assert "The best of K runs" in CliRunner().invoke(app, ask).stdout
