"""From what was done to what it cost: (ε, δ) of sampled Gaussian mechanisms, by two accountants.

An event is one noisy access to the data; `epsilon` composes any number of them.

>>> from tacit.privacy.events import PoissonGaussian
>>> cost = epsilon({PoissonGaussian(rate=0.029465, noise=1.536): 2006}, delta=1e-9)
>>> print(f"ε {cost.pld:.2f} by PLD, {cost.rdp:.2f} by RDP at order {cost.order:.1f}")
ε 6.17 by PLD, 6.51 by RDP at order 6.7

**PLD** composes discretised privacy-loss distributions. Every rounding is upwards (dp_accounting's
pessimistic "connect the dots"), so a coarse grid can only overstate ε; grids here are fine enough for about
three digits. **RDP** composes Rényi divergences over a fixed list of orders; it is looser, older and what
papers print. Both are proved upper bounds, so the smaller one is a guarantee as well.

Which neighbouring relation goes with which event:

| event | relation | sensitivity | PLD | RDP |
|---|---|---|---|---|
| `PoissonGaussian` | add or remove one | C | yes | yes |
| `FixedSizeGaussian` | replace one | 2C | no bound in dp_accounting | Wang, Balle, Kasiviswanathan 2019 |

`noise` is always the noise's standard deviation ÷ the clipping bound C. dp_accounting's fixed-size bound
takes the standard deviation ÷ the *sensitivity*, which is 2C when a unit is replaced: hence the half in
`dp_event`.

dp_accounting is imported where it is used: it takes a second, which commands and workers that never ask for
ε should not wait for.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tacit.errors import UserError
from tacit.privacy.events import Event, FixedSizeGaussian, Spend


@dataclass(frozen=True)
class Epsilon:
    """ε at `delta` by each accountant; `pld` is None where no such bound is at hand."""

    delta: float
    pld: float | None
    rdp: float
    order: float
    """The Rényi order at which `rdp` was reached."""

    @property
    def value(self) -> float:
        """The guarantee: the smaller of the proved bounds (the PLD one, but for rounding)."""
        return self.rdp if self.pld is None else min(self.pld, self.rdp)


def epsilon(spend: Spend, delta: float) -> Epsilon:
    """ε of the whole of `spend` by both accountants. All events must share one neighbouring relation."""
    items = _items(spend, delta)
    if not items:
        return Epsilon(delta, 0.0, 0.0, math.inf)
    rdp, order = _rdp_epsilon(items, delta)
    return Epsilon(delta, _pld_epsilon(items, delta, _FINE), rdp, order)


def rdp_epsilon(spend: Spend, delta: float) -> float:
    """The RDP bound alone, which is quick: an upper bound of `epsilon(...).value`."""
    items = _items(spend, delta)
    return _rdp_epsilon(items, delta)[0] if items else 0.0


def pld_epsilon(spend: Spend, delta: float, rough: bool = False) -> float:
    """The PLD bound alone, or RDP where there is none. `rough`: quick, coarse, still an upper bound."""
    items = _items(spend, delta)
    pld = _pld_epsilon(items, delta, _ROUGH if rough else _FINE) if items else 0.0
    return rdp_epsilon(spend, delta) if pld is None else pld


def exceeds(spend: Spend, budget: float, delta: float) -> bool:
    """Whether `spend` is not proved to stay within ε ≤ `budget`. Asks the quick bounds first."""
    quick = rdp_epsilon(spend, delta) <= budget or pld_epsilon(spend, delta, rough=True) <= budget
    return not quick and epsilon(spend, delta).value > budget


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise UserError(f"δ = {delta} is not a probability; choose 0 < δ < 1, well below 1 ÷ population")


def dp_event(event: Event) -> Any:
    """The same mechanism in dp_accounting's words; its fixed-size multiplier is per sensitivity (2C)."""
    import dp_accounting

    if event.noise == 0:
        return dp_accounting.NonPrivateDpEvent()
    if isinstance(event, FixedSizeGaussian):
        return dp_accounting.SampledWithoutReplacementDpEvent(
            event.population, event.size, dp_accounting.GaussianDpEvent(event.noise / 2)
        )
    return dp_accounting.PoissonSampledDpEvent(event.rate, dp_accounting.GaussianDpEvent(event.noise))


Items = tuple[tuple[Event, int], ...]


def _items(spend: Spend, delta: float) -> Items:
    check_delta(delta)
    if len({event.relation for event in spend}) > 1:
        raise UserError(
            "Poisson and fixed-size sampling in one ledger: their guarantees speak of different neighbours "
            "and do not add up; keep one sampling for the whole run"
        )
    return tuple(sorted((event, count) for event, count in spend.items() if count > 0))


# --- RDP ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _rdp_epsilon(items: Items, delta: float) -> tuple[float, float]:
    from dp_accounting.rdp import rdp_privacy_accountant

    total = sum(count * _rdp(event) for event, count in items)
    value, order = rdp_privacy_accountant.compute_epsilon(_ORDERS, total, delta)
    return float(value), float(order)


_ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256, 512, 1024])
_FEW_ORDERS = (1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, *range(3, 17), 20, 24, 32, 48, 63, 128)


@lru_cache(maxsize=1024)
def _rdp(event: Event) -> Any:
    """Rényi divergences of one event, at all orders; infinite where it was not worth computing."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    fixed = isinstance(event, FixedSizeGaussian)
    relation = NeighboringRelation.REPLACE_ONE if fixed else NeighboringRelation.ADD_OR_REMOVE_ONE
    # The fixed-size bound takes a hundred times longer for each order, and its best orders are low.
    chosen = np.isin(_ORDERS, _FEW_ORDERS) if fixed else np.full(len(_ORDERS), True)
    accountant = RdpAccountant(_ORDERS[chosen], relation)
    with _quiet():
        accountant.compose(dp_event(event))
    divergences = np.full(len(_ORDERS), np.inf)
    # With very much noise the true divergence drowns in rounding (1e-15) and may come out negative, which
    # dp_accounting would turn into ε = 0. Round up instead; even 10⁷ events then add only 1e-6.
    divergences[chosen] = np.maximum(accountant.rdp, 0) + 1e-13
    return divergences


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orders whose series does not converge are left out, which is sound and not worth a warning each."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# --- PLD ------------------------------------------------------------------------------------------------

SMALLEST_PLD_DELTA = 1e-11
"""Below this δ the rounding of the Fourier transforms is no longer small beside δ; only RDP is used there."""

_FINE, _ROUGH = 30_000, 2_000
"""Most points on the grid of one event's privacy losses; making them takes about 5 µs each."""


@lru_cache(maxsize=4096)
def _pld_epsilon(items: Items, delta: float, points: int) -> float | None:
    from dp_accounting.pld import privacy_loss_distribution

    if delta < SMALLEST_PLD_DELTA:
        return None
    merged: list[tuple[float, float, int]] = []
    for event, count in items:
        if isinstance(event, FixedSizeGaussian):
            return None
        if event.noise == 0:
            return math.inf
        # Without sampling, k Gaussians are one with noise ÷ √k: exact, with no grid to compose on.
        merged.append(
            (1.0, event.noise / math.sqrt(count), 1) if event.rate == 1 else (event.rate, event.noise, count)
        )
    # Outcomes this rare are counted as if they revealed everything: ten thousand times rarer than δ in all.
    tail = 5 * math.floor(math.log(delta * 1e-4 / sum(count for _, _, count in merged)) / 5)
    interval = min(_grid(*part, tail, points) for part in merged)
    total = privacy_loss_distribution.identity(value_discretization_interval=interval)
    for rate, noise, count in merged:
        total = total.compose(_pld(rate, noise, interval, tail).self_compose(count))
    return float(total.get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _pld(rate: float, noise: float, interval: float, tail: int) -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        value_discretization_interval=interval,
        log_mass_truncation_bound=tail,
        pessimistic_estimate=True,
    )


@lru_cache(maxsize=4096)
def _grid(rate: float, noise: float, count: int, tail: int, points: int) -> float:
    """The spacing of privacy losses: fine beside one event's loss, quick enough for `count` of them.

    Rounding to a grid wider than the typical loss of one event would add up over many events: the spread of
    one loss decides. Its range and the spread of the sum decide what a grid costs.
    """
    reach = math.sqrt(-2 * tail) * noise
    x = np.linspace(-reach, 1 + reach, 4001)
    density = (1 - rate) * np.exp(-0.5 * (x / noise) ** 2) + rate * np.exp(-0.5 * ((x - 1) / noise) ** 2)
    likelihood = (2 * x - 1) / (2 * noise**2)
    loss = np.logaddexp(math.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + likelihood)
    weight = density / density.sum()
    spread = math.sqrt(float(weight @ (loss - weight @ loss) ** 2))
    width = float(loss[-1] - loss[0])
    composed = width + 20 * spread * math.sqrt(count)
    wanted = min(1e-4, spread / 10)
    # Never wider than the spread for the sum's sake: rounding up would stretch the sum itself.
    affordable = max(width / points, min(composed / (7 * points), spread / 4))
    # A power of two, so that a run that grows by one event at a time meets the same few cached grids.
    return float(2.0 ** round(math.log2(max(wanted, affordable))))
