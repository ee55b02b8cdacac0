"""Two settings measured on the same seeds or clients: the difference, with its confidence interval.

A seed that is hard for one method is hard for the other too, so the difference within a seed is more
informative than two means with their spreads.

>>> paired({0: 0.81, 1: 0.74, 2: 0.78}, {0: 0.79, 1: 0.73, 2: 0.75, 3: 0.9}).text(100)
'+2.0 [−0.5, +4.5]'
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tacit.tasks.headline import decimals

LEVEL = 0.95
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Difference:
    """A mean difference with its confidence interval."""

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def settled(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def text(self, scale: float = 1.0) -> str:
        """Signed, with the interval in brackets."""
        values = [scale * value for value in (self.mean, self.low, self.high)]
        largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
        mean, low, high = (_signed(value, decimals(largest, least=1, significant=2)) for value in values)
        if math.isnan(self.mean):  # two that diverged are no further apart than others
            return "–"
        return f"{mean} [{low}, {high}]" if self.pairs > 1 else mean


def paired(one: Mapping[Key, float], other: Mapping[Key, float], level: float = LEVEL) -> Difference:
    """The mean of `one` − `other` over the keys that both have, with Student's t interval.

    Args:
        one: a value for each seed (or client).
        other: the same for what it is compared with.
        level: of confidence.

    Returns:
        The difference. A single pair has the interval from −∞ to ∞, and so have runs of which one diverged:
        nothing is known about the spread.

    Raises:
        ValueError: they have no key in common.
    """
    shared = [key for key in one if key in other]
    if not shared:
        raise ValueError("nothing is paired: the two have no seed in common")
    found = [one[key] - other[key] for key in shared]
    mean, n = statistics.fmean(found), len(found)
    if n == 1 or not all(map(math.isfinite, found)):
        return Difference(mean, -math.inf, math.inf, n)
    half = quantile(0.5 + level / 2, n - 1) * statistics.stdev(found) / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)


def quantile(p: float, freedom: int) -> float:
    """A quantile of Student's t distribution."""
    from scipy.special import stdtrit  # slow to import, and only needed here

    return float(stdtrit(freedom, p))


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}").replace("inf", "∞")
