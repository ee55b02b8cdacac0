"""Planning a run: what will it cost, and what must change to cost less?

>>> from tacit.privacy.events import PoissonGaussian
>>> solve_noise(lambda noise: [{PoissonGaussian(0.05, noise): 200}], epsilon=1.0, delta=1e-3)
2.02
>>> solve_times(PoissonGaussian(0.05, noise=2.02), epsilon=1.0, delta=1e-3)
201

Answers are rounded to the safe side: noise up, rounds and cohorts down, so ε never exceeds the target. All of
them use the numerical bounds of `tacit.privacy.accountants` and the events of a mechanism.
`closed_form_noise` exists only for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tacit.errors import UserError
from tacit.privacy.accountants import Epsilon, epsilon, pld_epsilon
from tacit.privacy.events import Event, Spend
from tacit.privacy.rounding import rounded_up

MOST_TIMES = 10_000_000


def cost(event: Event, times: int, delta: float) -> Epsilon:
    """ε of `times` repetitions of an event."""
    return epsilon({event: times}, delta)


def solve_noise(spends: Callable[[float], Sequence[Spend]], epsilon: float, delta: float) -> float:
    """The smallest three-digit noise multiplier that keeps every one of `spends(noise)` within ε."""

    def fits(index: int, bound: Bound) -> bool:
        return all(bound(spend, delta) <= epsilon for spend in spends(_noise(index)))

    found = _solve(fits, _LEAST_NOISE, _MOST_NOISE, guess=_index(1.0))
    if found is None:
        raise UserError(f"ε = {epsilon:g} at δ = {delta:g} needs more noise than makes sense; raise ε or δ")
    return _noise(found)


def solve_times(event: Event, epsilon: float, delta: float) -> int:
    """How often an event may happen while ε ≤ `epsilon`; at client level, the largest number of rounds."""
    over = _solve(lambda times, bound: bound({event: times}, delta) > epsilon, 1, MOST_TIMES, guess=1)
    if over == 1:
        raise UserError(
            f"one round costs more than ε = {epsilon:g}, namely {rounded_up(cost(event, 1, delta).value)}; "
            "raise the noise or lower the rate"
        )
    return MOST_TIMES if over is None else over - 1


def solve_cohort(
    event: Callable[[int], Event], population: int, times: int, epsilon: float, delta: float
) -> int:
    """The largest cohort, to three digits, that keeps ε ≤ `epsilon`."""

    def exceeds(index: int, bound: Bound) -> bool:
        return bound({event(min(_digits(index), population)): times}, delta) > epsilon

    over = _solve(exceeds, 1, _index(population / 1e4) + 1, guess=1)
    if over == 1:
        raise UserError(
            f"even a cohort of one client in {population:,} costs more than ε = {epsilon:g}; "
            "raise the noise or run fewer rounds"
        )
    return population if over is None else _digits(over - 1)


def closed_form_noise(rate: float, rounds: int, epsilon: float, delta: float) -> float:
    """σ = √(7 q² T (ε + 2 ln 1/δ))/ε of the DP²-FedSAM paper: for comparison, never as a guarantee.

    At that paper's own settings the formula is outside the range of the lemma that it comes from. It demands
    about three times the noise that is sufficient by the numerical bounds.

    >>> round(closed_form_noise(rate=0.05, rounds=200, epsilon=1.0, delta=1e-3), 2)
    7.2
    """
    if not epsilon:
        return math.inf
    return math.sqrt(7 * rate**2 * rounds * (epsilon + 2 * math.log(1 / delta))) / epsilon


# --- searching -------------------------------------------------------------------------------------------

Bound = Callable[[Spend, float], float]
"""Computes ε of a spend, at δ."""


def _rough(spend: Spend, delta: float) -> float:
    return pld_epsilon(spend, delta, rough=True)


def _solve(holds: Callable[[int, Bound], bool], low: int, high: int, guess: int) -> int | None:
    """The smallest number at which a monotone condition on ε holds, first by a rough bound, then exactly."""
    near = _gallop(lambda number: holds(number, _rough), guess, low, high)
    return _gallop(lambda number: holds(number, pld_epsilon), high if near is None else near, low, high)


def _smallest(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest number in [low, high] at which a monotone condition holds; None if it never does."""
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


def _gallop(holds: Callable[[int], bool], guess: int, low: int, high: int) -> int | None:
    """`_smallest`, for a condition that is expensive to evaluate and a guess that is close."""
    step = 1
    if holds(guess):
        while guess > low and holds(max(low, guess - step)):
            guess = max(low, guess - step)
            step *= 2
        return _smallest(holds, max(low, guess - step + 1), guess)
    while guess < high:
        below, guess = guess, min(high, guess + step)
        if holds(guess):
            return _smallest(holds, below + 1, guess)
        step *= 2
    return None


# --- indices of three-digit numbers ----------------------------------------------------------------------

_LEAST_NOISE, _MOST_NOISE = 100, 6400
"""Indices of the multipliers 0.01 and 100,000."""


def _digits(index: int) -> int:
    """1, 2, …, 999, 1000, 1010, …: the integers with at most three digits before zeros.

    >>> [_digits(i) for i in (1, 999, 1000, 1001, 1900)]
    [1, 999, 1000, 1010, 10000]
    """
    if index < 1000:
        return index
    exponent, mantissa = divmod(index - 100, 900)
    return int((100 + mantissa) * 10**exponent)


def _noise(index: int) -> float:
    """Three-digit multipliers; decimal, so that 2.26 is exactly 2.26."""
    return float(f"{_digits(index)}e-4")


def _index(noise: float) -> int:
    """The largest index whose multiplier is at most `noise`, up to rounding."""
    scaled = noise * 1e4
    exponent = max(0, math.floor(math.log10(max(scaled, 1.0))) - 2)
    return max(1, int(scaled / 10**exponent) + 900 * exponent)
