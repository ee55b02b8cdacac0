"""Rényi differential privacy (Mironov 2017, arXiv:1702.07476): looser and older than PLD, and common in
papers.

The divergences of each event at a fixed list of orders are added up and converted to (ε, δ) at the best
order. dp_accounting computes them for each event; sampling without replacement is bounded as in Wang, Balle
and Kasiviswanathan 2019 (arXiv:1808.00087).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from tacit.privacy.events import LEAST, MOST, Event, FixedSizeGaussian, Spend

Items = tuple[tuple[Event, int], ...]


def supports(event: Event) -> bool:
    """Whether this accountant has a bound for an event."""
    from tacit.privacy.library import dp_accounting

    return bool(dp_accounting.rdp.RdpAccountant(_ORDERS[:1], _relation(event)).supports(event.dp_event()))


@lru_cache(maxsize=4096)
def epsilon(items: Items, delta: float) -> tuple[float, float]:
    """ε of these events at δ, and the order that gave it."""
    return converted(sum(count * _rdp(event) for event, count in items), delta)


def divergences(spend: Spend) -> tuple[Any, Any]:
    """Orders, and the Rényi divergences of all these events together at each order."""
    return _ORDERS, sum((count * _rdp(event) for event, count in spend.items()), np.zeros(len(_ORDERS)))


def converted(divergences: Any, delta: float) -> tuple[float, float]:
    """ε at δ for these divergences, and the order that gave it."""
    from tacit.privacy.library import dp_accounting

    value, order = dp_accounting.rdp.compute_epsilon(_ORDERS, divergences, delta)
    return float(value), float(order)


_ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256, 512, 1024])
_FEW_ORDERS = (1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, *range(3, 17), 20, 24, 32, 48, 63, 128)


def _relation(event: Event) -> Any:
    from tacit.privacy.library import dp_accounting

    replaces = event.relation == "replace-one"
    relations = dp_accounting.NeighboringRelation
    return relations.REPLACE_ONE if replaces else relations.ADD_OR_REMOVE_ONE


@lru_cache(maxsize=1024)
def _rdp(event: Event) -> Any:
    """Rényi divergences of one event, at all orders; infinite where computing one is not worthwhile."""
    from tacit.privacy.library import dp_accounting

    # The bound without replacement takes a hundred times longer per order, and its best orders are low.
    few = event.relation == "replace-one"
    chosen = np.isin(_ORDERS, _FEW_ORDERS) if few else np.full(len(_ORDERS), True)
    accountant = dp_accounting.rdp.RdpAccountant(_ORDERS[chosen], _relation(event))
    with _quiet():
        accountant.compose(event.dp_event())
    divergences = np.full(len(_ORDERS), np.inf)
    # With very much noise, the true divergence is lost in rounding (1e-15) and may come out negative, which
    # dp_accounting would turn into ε = 0. Round up instead; even 10⁷ events then add only 1e-6.
    divergences[chosen] = np.maximum(accountant.rdp, 0) + 1e-13
    if isinstance(event, FixedSizeGaussian) and event.noise >= LEAST:
        # A mixture over the same subsets is no further from its neighbour than the furthest pair of its
        # components (Rényi divergences are quasi-convex): N(0, σ²C²) shifted by 2C. For large cohorts this
        # bound is smaller.
        divergences = np.minimum(divergences, 2 * _ORDERS / min(event.noise, MOST) ** 2 + 1e-13)
    return divergences


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about orders whose series does not converge: leaving these orders out is sound."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
