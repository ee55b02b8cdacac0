"""The privacy cost of choosing the best of several runs: with a random number of runs, a few times one.

Choosing settings by the results of private runs is itself an access to the data. Papernot and Steinke 2022
(arXiv:2110.03620) bound its cost. Suppose that the number K of runs is drawn at random, that each run draws
its settings at random (from any fixed list) and returns a model with a private score (or one from public
records), and that only the best run is ever shown. Then the whole costs a few times one run, however large K
turns out to be.

Unit and neighbours: those of one run. Two families for K, with mean m:

- truncated negative binomial with shape η and parameter γ (theorem 2; η = 0 is the logarithmic, η = 1 the
  geometric distribution of Liu and Talwar 2019, arXiv:1811.07971). If one run is (λ, ε(λ))-RDP,

      ε′(λ) = ε(λ) + (1 + η) min_λ̂ [(1 − 1/λ̂) ε(λ̂) + ln(1/γ)/λ̂] + ln(m)/(λ − 1);

- Poisson (theorem 6; K = 0 shows nothing at all): with δ̂ such that one run is (ln(1 + 1/(λ − 1)), δ̂)-DP,

      ε′(λ) = ε(λ) + m·δ̂ + ln(m)/(λ − 1).

>>> from tacit.privacy.events import PoissonGaussian
>>> one = {PoissonGaussian(rate=0.05, noise=2.0): 200}
>>> paid = tuned_epsilon(one, delta=1e-5, trials=10)
>>> print(paid.kind, round(paid.epsilon, 2), "for the best of ten; one alone", round(paid.alone, 2))
logarithmic 2.93 for the best of ten; one alone 1.72
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tacit.errors import UserError
from tacit.privacy.accountants import rdp, rdp_epsilon
from tacit.privacy.events import Spend
from tacit.privacy.rounding import rounded_up

Floats = NDArray[np.float64]

SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""The distributions of the number of runs, by their shape η."""


@dataclass(frozen=True)
class Tuned:
    """ε of showing the best of K runs, beside the ε of one run (both by RDP)."""

    epsilon: float
    alone: float
    trials: float
    """The mean of K."""
    kind: str
    """The distribution from which K must be drawn for this ε: a key of `SHAPES`."""

    def text(self) -> str:
        """The same as text."""
        best, alone = rounded_up(self.epsilon), rounded_up(self.alone)
        return (
            f"The best of K runs, K drawn from the {self.kind} distribution of mean {self.trials:g}: "
            f"ε = {best}, where one run alone has {alone} (both by RDP). Each run takes "
            "its settings at random, is judged by public records or private metrics, and all but the best "
            "are never shown (Papernot and Steinke 2022)."
        )


def tuned_epsilon(spend: Spend, delta: float, trials: float, kind: str | None = None) -> Tuned:
    """ε at δ of showing the best of K runs that each cost `spend`, for the best or the given `kind` of K."""
    if not 1 < trials < math.inf:
        raise UserError(f"{trials:g} trials: the mean number of runs to choose from is more than 1")
    orders, one = rdp.divergences(spend)
    found = {
        name: rdp.converted(tuned_rdp(orders, one, trials, shape), delta)[0]
        for name, shape in SHAPES.items()
        if kind in (None, name)
    }
    best = min(found, key=lambda name: found[name])
    return Tuned(found[best], rdp_epsilon(spend, delta), trials, best)


def tuned_rdp(orders: Floats, one: Floats, trials: float, shape: float) -> Floats:
    """Rényi divergences at the given `orders` of showing the best of K runs with divergences `one`.

    `shape`: η > −1 for a truncated negative binomial with mean `trials`, or infinity for a Poisson number.
    """
    count = math.log(trials) / (orders - 1)
    if math.isinf(shape):
        # δ̂(λ) of one run at ε̂ = ln(1 + 1/(λ − 1)), from its own divergences at all orders.
        own = np.log1p(1 / (orders - 1))
        return one + trials * np.array([_delta(orders, one, float(e)) for e in own]) + count
    gamma = find_gamma(trials, shape)
    extra = float(np.min((1 - 1 / orders) * one + math.log(1 / gamma) / orders))
    return one + (1 + shape) * extra + count


def _delta(orders: Floats, one: Floats, epsilon: float) -> float:
    """δ of a mechanism at ε, from its divergences (Canonne, Kamath and Steinke 2020, arXiv:2004.00010,
    proposition 12).
    """
    logs = (orders - 1) * (one - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    return min(1.0, math.exp(min(0.0, float(np.min(logs)))))


def mean_trials(gamma: float, shape: float) -> float:
    """E[K] of the truncated negative binomial distribution."""
    if abs(shape) < 1e-9:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


def find_gamma(trials: float, shape: float) -> float:
    """γ, rounded down, for which K has at most this mean; the mean falls as γ grows."""
    low, high = -700.0, -1e-12  # of ln γ
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if mean_trials(math.exp(middle), shape) <= trials else (middle, high)
    return math.exp(high)


def probabilities(gamma: float, shape: float, most: int) -> Floats:
    """P(K = 1), …, P(K = most): the distribution from which K is drawn."""
    logs, term = [], 0.0
    for k in range(1, most + 1):
        if abs(shape) < 1e-9:
            logs.append(k * math.log1p(-gamma) - math.log(k) - math.log(math.log(1 / gamma)))
            continue
        term += math.log(abs(k - 1 + shape) / k)
        logs.append(k * math.log1p(-gamma) + term - math.log(abs(math.expm1(-shape * math.log(gamma)))))
    found: Floats = np.exp(np.array(logs))
    return found
