"""Privacy accounting: (ε, δ) of any number of events, by two accountants.

>>> from tacit.privacy.events import PoissonGaussian
>>> cost = epsilon({PoissonGaussian(rate=0.029465, noise=1.536): 2006}, delta=1e-9)
>>> print(f"ε {cost.pld:.2f} by PLD, {cost.rdp:.2f} by RDP at order {cost.order:.1f}")
ε 6.17 by PLD, 6.51 by RDP at order 6.7

`pld` and `rdp` are one file each, and each says which events it `supports`. Both are proved upper bounds, so
the smaller one is a guarantee as well. An event that neither supports is refused, since its cost is unknown.

| event | relation | sensitivity | PLD | RDP |
|---|---|---|---|---|
| `PoissonGaussian` | add or remove one | C | yes | yes |
| `FixedSizeGaussian` | replace one | 2C | no | yes |
| `MatrixRow` | add or remove one | C·√square | yes | yes |

dp_accounting is imported only where it is used, through `tacit.privacy.library`: commands and workers that
never need ε should not wait for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from tacit.errors import UserError
from tacit.privacy.accountants import pld, rdp
from tacit.privacy.accountants.rdp import Items
from tacit.privacy.events import LEAST, Event, PoissonGaussian, Spend, unsampled


@dataclass(frozen=True)
class Epsilon:
    """ε at `delta` by each accountant; `pld` is None where it has no bound."""

    delta: float
    pld: float | None
    rdp: float
    order: float
    """The Rényi order at which `rdp` was reached."""

    @property
    def value(self) -> float:
        """The guarantee: the smaller of the proved bounds (the PLD one, up to rounding)."""
        return self.rdp if self.pld is None else min(self.pld, self.rdp)

    def at_most(self, bound: float) -> Epsilon:
        """The same, given other proof that `value` is at most `bound`."""
        if self.pld is None:
            return replace(self, rdp=min(self.rdp, bound))
        return replace(self, pld=min(self.pld, bound))


def epsilon(spend: Spend, delta: float) -> Epsilon:
    """ε of the whole of `spend` by both accountants. All events must share one neighbouring relation."""
    items = _items(spend, delta)
    if not items:
        return Epsilon(delta, 0.0, 0.0, math.inf)
    value, order = rdp.epsilon(items, delta)
    return Epsilon(delta, pld.epsilon(items, delta, pld.FINE), value, order)


def rdp_epsilon(spend: Spend, delta: float) -> float:
    """The RDP bound alone, which is fast: an upper bound of `epsilon(...).value`."""
    items = _items(spend, delta)
    return rdp.epsilon(items, delta)[0] if items else 0.0


def pld_epsilon(spend: Spend, delta: float, rough: bool = False) -> float:
    """The PLD bound alone, or RDP if there is none. `rough`: fast and coarse, but still an upper bound."""
    items = _items(spend, delta)
    value = pld.epsilon(items, delta, pld.ROUGH if rough else pld.FINE) if items else 0.0
    return rdp_epsilon(spend, delta) if value is None else value


def exceeds(spend: Spend, budget: float, delta: float) -> bool:
    """Whether `spend` is not proved to stay within ε ≤ `budget`. Tries the fast bounds first."""
    quick = rdp_epsilon(spend, delta) <= budget or pld_epsilon(spend, delta, rough=True) <= budget
    return not quick and epsilon(spend, delta).value > budget


def check_delta(delta: float) -> None:
    """Refuse a δ that is not a probability."""
    if not 0 < delta < 1:
        raise UserError(
            f"δ = {delta:g} is not a probability between 0 and 1, for which Gaussian noise has a guarantee; "
            "choose 0 < δ < 1, well below 1 ÷ population"
        )


@lru_cache(maxsize=4096)
def _refuse_unknown(event: Event) -> None:
    if not rdp.supports(event):
        raise UserError(
            f"no accountant knows what an event of kind {event.kind!r} costs ({event}); nothing is claimed"
        )


def _items(spend: Spend, delta: float) -> Items:
    check_delta(delta)
    if len({event.relation for event in spend}) > 1:
        raise UserError(
            "Poisson and fixed-size sampling in one ledger: their guarantees speak of different neighbours "
            "and do not add up; keep one sampling for the whole run"
        )
    for event in spend:
        _refuse_unknown(event)
    items = _merged({event: count for event, count in spend.items() if count > 0})
    return tuple(sorted(items.items(), key=lambda item: (item[0].key, item[1])))


def _merged(spend: Spend) -> Spend:
    """The same, with all Gaussian queries without sampling merged into one that costs exactly the same.

    The rounds of a matrix mechanism are different events, and composing thousands would be slow.
    """
    found = {event: gaussian for event in spend if (gaussian := unsampled(event)) is not None}
    if len(found) < 2:
        return {found.get(event, event): count for event, count in spend.items()}
    rest = {event: count for event, count in spend.items() if event not in found}
    if any(gaussian.noise < LEAST for gaussian in found.values()):
        return rest | {PoissonGaussian(1.0, 0.0): 1}
    precision = math.fsum(spend[event] / gaussian.noise**2 for event, gaussian in found.items())
    return rest | {PoissonGaussian(1.0, (1 - 1e-12) / math.sqrt(precision)): 1}
