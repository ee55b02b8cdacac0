"""ε for a group: a person with k records, or a person who is k clients.

Unit: k of the mechanism's units, all present or all absent. Group privacy by k·ε is a bound for every
mechanism, but a poor one for Gaussians, so ε is computed from the events:

- without sampling, k units move a sum k times as far: the noise multiplier is divided by k, exactly;
- under Poisson sampling the number of units that join is binomial. The worst case of the whole group is a
  mixture of Gaussians, shifted by i with the binomial probability of i (Ganesh 2024, arXiv:2401.10294), which
  dp_accounting composes as privacy-loss distributions;
- for cohorts of a fixed size no such bound is available: (ε′, δ′) for one unit gives kε′ at δ′(eᵏᵉ − 1)/(eᵉ −
  1) for k, with the ε′ and δ′ that fit.

>>> from tacit.privacy.events import PoissonGaussian
>>> spend = {PoissonGaussian(rate=0.05, noise=1.0): 20}
>>> round(group_epsilon(spend, 1e-5, 1), 1), round(group_epsilon(spend, 1e-5, 2), 1)
(2.0, 4.2)
"""

from __future__ import annotations

import math
from collections import Counter

from tacit.privacy.accountants import epsilon
from tacit.privacy.accountants.pld import SMALLEST_DELTA, rounding
from tacit.privacy.events import LEAST, Event, PoissonGaussian, Spend, unsampled

SIZES = (2, 5, 10)
"""The group sizes that a statement reports."""
_POINTS = 8_000
"""The most points on the grid of one event's privacy losses."""


def group_epsilon(spend: Spend, delta: float, size: int) -> float:
    """ε at δ for `size` units together."""
    if size == 1 or not spend:
        return epsilon(spend, delta).value
    items: list[tuple[PoissonGaussian, int]] = []
    for event, count in spend.items():
        gaussian = unsampled(event) or event
        if not isinstance(gaussian, PoissonGaussian):
            return any_group_epsilon(spend, delta, size)
        items.append((gaussian, count))
    if all(gaussian.rate == 1 for gaussian, _ in items):
        scaled = [(PoissonGaussian(1.0, gaussian.noise / size), count) for gaussian, count in items]
        return epsilon(_summed(scaled), delta).value
    if delta < SMALLEST_DELTA:
        return any_group_epsilon(spend, delta, size)
    left = delta - rounding(count for _, count in items)
    if left < delta / 2:
        return any_group_epsilon(spend, delta, size)
    return _mixture(items, delta, left, size)


def _summed(items: list[tuple[PoissonGaussian, int]]) -> Spend:
    total: Counter[Event] = Counter()
    for event, count in items:
        total[event] += count
    return total


def _mixture(items: list[tuple[PoissonGaussian, int]], delta: float, left: float, size: int) -> float:
    """`left` is δ minus what is reserved for the rounding of transforms."""
    from tacit.privacy.library import dp_accounting

    if any(event.noise < LEAST for event, _ in items):
        return math.inf
    tail = math.log(delta * 1e-4 / sum(count for _, count in items))
    interval = max(_reach(event, size, tail) / _POINTS for event, _ in items)
    losses = dp_accounting.pld.privacy_loss_distribution
    total = losses.identity(value_discretization_interval=interval)
    for event, count in items:
        joined = [
            math.comb(size, i) * event.rate**i * (1 - event.rate) ** (size - i) for i in range(size + 1)
        ]
        one = losses.from_mixture_gaussian_mechanism(
            event.noise,
            sensitivities=[float(i) for i in range(size + 1)],
            sampling_probs=joined,
            pessimistic_estimate=True,
            value_discretization_interval=interval,
            log_mass_truncation_bound=tail,
        )
        total = total.compose(one.self_compose(count))
    return float(total.get_epsilon_for_delta(left))


def _reach(event: PoissonGaussian, size: int, tail: float) -> float:
    """The largest extent of one event's privacy losses."""
    return size * math.sqrt(-2 * tail) / event.noise + size**2 / event.noise**2


def any_group_epsilon(spend: Spend, delta: float, size: int) -> float:
    """ε at δ for `size` units together, whatever the mechanism.

    It is k·ε′ for the largest δ′ that leaves δ for the group: δ′·(eᵏᵉ − 1)/(eᵉ − 1) ≤ δ.
    """
    best = math.inf
    share = delta / size
    for _ in range(40):
        if share < 1e-60:
            break
        one = epsilon(spend, share).value
        if not math.isfinite(one) or size * one > 600:
            break
        if not one or share * math.expm1(size * one) / math.expm1(one) <= delta:
            best = size * one
            break
        share = min(share / 4, delta * math.expm1(one) / math.expm1(size * one))
    return best
