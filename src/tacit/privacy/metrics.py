"""Private metrics: the numbers to monitor in each round, as one more sum under the same guarantee.

Unit: one client, present or absent (or replaced by another, if that is the mechanism's relation). Each client
of the cohort adds a vector: whether it counted or failed, its training loss, the norm of its update in
clipping norms, whether the update was clipped, and perhaps its accuracy on its own test records. Each entry
is clipped to a stated range and centred, so that it lies between −1 and 1, and is weighted so that the whole
vector has norm ≤ 1. The vector is in whole numbers of a grid, of which R make up that norm:

>>> rule = Metrics(share=0.05, loss=4.0)
>>> rule.client(Seen(True, loss=3.0, norm=0.2), clip=0.5, radius=1000)      # weight ½, centred on 2 and on 2C
[500, 0, 250, -400, -500]
>>> rule.client(Seen(False), clip=0.5, radius=1000)
[0, 1000, 0, 0, 0]
>>> all(sum(k * k for k in rule.client(seen, 0.5, 1000)) <= 1000**2
...     for seen in [Seen(True, 1e9, 1e9), Seen(True, -1.0, 0.0), Seen(True, math.nan, 0.3), Seen(False)])
True

The sums get the exact rounded Gaussian of `tacit.privacy.gaussian`, with multiplier z/√s, where s is the
`share` and z the mechanism's multiplier. The update's sum and these sums are over one cohort, so together
they are one Gaussian query on it. With z/√(1 − s) on the update, 1/z² = (1 − s)/z² + s/z², and the accountant
uses z. Everything made from the noisy sums (means, shares) is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveFloat

from tacit.lazy import torch
from tacit.privacy.bits import Bits
from tacit.privacy.gaussian import add_rounded_gaussian_
from tacit.privacy.grid import Grid
from tacit.section import section

PREFIX = "private_"
"""Prefix of the private metrics' names in a round's record."""
Range = PositiveFloat
_ARRIVED = 4
"""Entries of a client that counted: its count, loss, norm, clipped."""


@dataclass(frozen=True)
class Seen:
    """What one client of the cohort knows about its own round: exact, so it never leaves the mechanism."""

    finite: bool
    """Whether its update counted."""
    loss: float = 0.0
    norm: float = 0.0


@section
class Metrics:
    """What is released of a round beside the model, and for which share of the round's budget."""

    share: Annotated[float, Field(ge=1e-4, le=0.9)] = 0.05
    """s, of the round's 1/noise²: 0.05 takes 2.6 % more noise on the update for the same ε."""
    loss: Range = 10.0
    """Losses are clipped to [0, this]; the closer, the less noise."""
    norm: Range = 4.0
    """Norms of updates are clipped to [0, this many clipping norms]."""
    accuracy: bool = False
    """Also accuracy on the records that each client of the cohort holds out for its own tests
    (`data.holdout`).
    """

    @property
    def entries(self) -> int:
        """The number of entries of one client's vector."""
        return _ARRIVED + 1 + (2 if self.accuracy else 0)

    def noise(self, whole: float) -> float:
        """The multiplier of the metrics' own noise, if `whole` is the round's.

        Slightly more than z/√s: the rounding of this and of `rest` must not cost any privacy.
        """
        return whole / math.sqrt(self.share) * (1 + 1e-9)

    def rest(self, whole: float) -> float:
        """The multiplier that remains for the round's other sums."""
        return whole / math.sqrt(1 - self.share)

    def _weight(self, radius: int) -> int:
        """w: n entries of it in one vector have norm ≤ R."""
        return math.isqrt(radius**2 // (_ARRIVED + (2 if self.accuracy else 0)))

    def client(self, seen: Seen, clip: float, radius: int) -> list[int]:
        """One client's vector in whole numbers; together with `test`, its norm is still ≤ R."""
        w = self._weight(radius)
        if not seen.finite:
            return [0, math.isqrt(_ARRIVED) * w, 0, 0, 0]
        loss, norm = _centred(seen.loss, self.loss), _centred(seen.norm / clip, self.norm)
        return [w, 0, int(w * loss), int(w * norm), w if seen.norm > clip else -w]

    def test(self, accuracy: float, radius: int) -> list[int]:
        """One client's test entries: that it was tested, and its accuracy."""
        w = self._weight(radius)
        return [w, int(w * _centred(accuracy, 1.0))]

    def release(
        self,
        cohort: Sequence[Seen],
        tests: Sequence[float],
        clip: float,
        expected: float,
        noise: float,
        bits: Bits,
    ) -> dict[str, float]:
        """A round's private metrics. `tests`: accuracies, at most one per client; `noise`: the round's
        multiplier.
        """
        radius = Grid.fit(1.0, self.entries, self.noise(noise)).radius
        total = torch.zeros(self.entries, dtype=torch.int64)
        for seen in cohort:
            total[: _ARRIVED + 1] += torch.tensor(self.client(seen, clip, radius))
        if self.accuracy:
            for accuracy in tests:
                total[_ARRIVED + 1 :] += torch.tensor(self.test(accuracy, radius))
        if noise:
            add_rounded_gaussian_(total, self.noise(noise) * radius, bits)
        clients, failed, loss, norm, clipped, *tested = (total.double() / self._weight(radius)).tolist()
        # Means over few clients, or over noise alone, would be arbitrary: a count below half of the expected
        # one is replaced by that half.
        count = max(clients, expected / 2)
        told = {
            "clients": clients,
            "failed": failed / math.isqrt(_ARRIVED),
            "loss": _uncentred(loss / count, self.loss),
            "norm": _uncentred(norm / count, self.norm) * clip,
            "clipped": _uncentred(clipped / count, 1.0),
        }
        if tested:
            told["accuracy"] = _uncentred(tested[1] / max(tested[0], expected / 2), 1.0)
        return {PREFIX + name: float(f"{value:.4g}") for name, value in told.items()}

    def describe(self, noise: float) -> str:
        """The statement's sentence."""
        own = ", and accuracy on clients' own test records" if self.accuracy else ""
        return (
            "Metrics: each round also released the number of clients that counted and that failed, the mean "
            f"training loss (clipped to {self.loss:g}), the mean norm of updates (clipped to {self.norm:g} "
            f"clipping norms), the share that was clipped{own}: sums on the same cohort, each client's part "
            f"of norm 1 at most, with a rounded Gaussian of {self.noise(noise):.4g} × that."
        )


def _centred(value: float, top: float) -> float:
    """A value clipped to [0, top] and mapped to −1 … 1; NaN counts as the largest."""
    clipped = min(max(value, 0.0), top) if value == value else top
    return min(max(2 * clipped / top - 1, -1.0), 1.0)


def _uncentred(value: float, top: float) -> float:
    return min(max((value + 1) / 2, 0.0), 1.0) * top
