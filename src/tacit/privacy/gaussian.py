"""Whole numbers distributed as a rounded Gaussian: noise without a structure to find.

`add_rounded_gaussian_(total, std, bits)` adds R = ⌊σ Z + ½⌋, Z standard normal, to each coordinate of a
vector of whole numbers.

Why rounded. For a whole number x and a real Gaussian N, round(x + N) = x + round(N). So the sum that is
released is a function of x + N alone: it is *post-processing of the real Gaussian mechanism*, and what an
accountant proves for real Gaussians holds for the very bits that are released. There is no lattice, no
missing tail and no rounding that depends on the data (Mironov 2012 and Haney et al. 2022, arXiv:2207.10635,
show what happens otherwise).

How it is sampled. By inversion of an infinitely long uniform number of which only as many bits are looked
at as the answer needs: 64 at first (a sign and 63 of the magnitude). float64 arithmetic then gives |σZ|
with an error below `σ · tolerance`; if no rounding boundary (m + ½) is that near, every continuation of
those 64 bits, and every error within the tolerance, gives the same whole number. Otherwise the question "is
|Z| beyond t = (m + ½)/σ?" is decided by comparing the uniform number with the tail probability erfc(t/√2),
computed by mpmath with ever more digits, and ever more bits, until the two are apart. Tails have no end:
the rarest 2⁻²³ of draws always go that way.

What is proved, and what is assumed:

- proved: given the tolerance, the result has exactly the rounded Gaussian's distribution (for uniform bits);
- assumed: float64 `erfinv` and `ndtri` of torch err by less than 2⁻⁴² relative to max(1, |Z|). Measured
  against mpmath on 400,000 points, also at the ends, they err by less than 2.5e-16: the margin is a
  thousand. Each process checks the functions it will use at its first draw, and refuses to go on if they do
  not keep a tenth of that;
- assumed: mpmath's erfc is right to within 2⁻³² of its working precision, and AES is a cipher
  (`tacit.privacy.bits`).

>>> import torch
>>> total = torch.zeros(5, dtype=torch.int64)
>>> add_rounded_gaussian_(total, 1000.0, Bits.named(1))
>>> total.tolist()
[126, 1061, -2478, -548, -50]
"""

from __future__ import annotations

import math
from functools import cache

import mpmath
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit.errors import UserError
from tacit.privacy.bits import Bits

STRETCH = 1 << 15
"""Coordinates at a time: they stay in the cache, and torch does not split so few over threads."""
TOLERANCE = 2.0**-42
"""How far float64 may be from the real |Z|, relative to max(1, |Z|)."""
LARGEST_STD = 2.0**36
"""Beyond it float64 decides too few coordinates; a coarser grid serves as well."""
SMALLEST_DELTA = 2.0**-100
"""δ below this would be a claim about the cipher rather than about the noise."""

_CENTRE = 1 - 2.0**-6
"""Magnitudes' uniform numbers below this go by erfinv; the rest, whose digits lie in 1 − v, by ndtri."""
_TAIL = np.uint64(2**63 - 2**57)
"""The same in units of 2⁻⁶³."""
_CENTRE_TOLERANCE = 2.5 * TOLERANCE
"""There |Z| < 2.42."""
_MAGNITUDE = np.uint64(2**63 - 1)
_RARE = 2**40
"""Tails of fewer units of 2⁻⁶³ than this are always decided with more bits."""
_SQRT2 = math.sqrt(2.0)


def add_rounded_gaussian_(total: Tensor, std: float, bits: Bits) -> None:
    """Add an independent rounded Gaussian of standard deviation `std` to each coordinate, in place.

    `total`: int64, or float64 that holds whole numbers below 2⁵² in size.
    """
    if total.dtype not in (torch.int64, torch.float64):
        raise TypeError(f"noise is added to whole numbers in int64 or float64, not to {total.dtype}")
    if std == 0:
        return
    if not 0 < std <= LARGEST_STD:
        raise UserError(f"noise of {std:g} grid units cannot be sampled exactly; lower the noise multiplier")
    _check_functions()
    for stretch in torch.split(total.view(-1), STRETCH):
        draws = torch.from_numpy(rounded_gaussian(stretch.numel(), std, bits))
        stretch.add_(draws.to(total.dtype))


def rounded_gaussian(count: int, std: float, bits: Bits) -> NDArray[np.float64]:
    """`count` ≤ STRETCH independent draws, as whole numbers in float64."""
    words = bits.words(count)
    signs = words.view(np.float64).copy()  # a word's first bit, which is also the sign of a float64
    k = words & _MAGNITUDE  # the magnitude's uniform number v is in [k, k + 1) / 2⁶³
    tails = np.flatnonzero(k >= _TAIL)
    scaled = k.view(np.int64).astype(np.float64)
    scaled *= 2.0**-63
    torch.from_numpy(scaled).erfinv_()
    scaled *= std * _SQRT2
    left = _MAGNITUDE - k[tails]  # 1 − v is in (left, left + 1] / 2⁶³
    share = left.astype(np.float64)
    reach = -torch.special.ndtri(torch.from_numpy((share + 0.5) * 2.0**-64)).numpy()
    scaled[tails] = reach * std
    nearest = np.rint(scaled)
    # The nearest boundary m + ½ is a half away, less the distance to the nearest whole number.
    distance = np.abs(scaled - nearest)
    doubtful = distance > 0.5 - std * _CENTRE_TOLERANCE
    room = std * (reach * TOLERANCE + 1 / (share + 1))
    doubtful[tails] = (left < _RARE) | (distance[tails] > 0.5 - room)
    for place in np.flatnonzero(doubtful):
        nearest[place] = _decide(int(k[place]), std, float(scaled[place]), bits)
    return np.copysign(nearest, signs, out=nearest)


def _decide(k: int, std: float, estimate: float, bits: Bits) -> int:
    """|σZ|, rounded, for a magnitude whose uniform number v begins with the 63 bits `k`.

    `estimate` of |σZ| is used unless this is a rare tail, and is right to within a half.
    """
    upper, width = (1 << 63) - k, 63  # 1 − v is in (upper − 1, upper] / 2^width
    if upper <= _RARE:
        while upper <= _RARE:
            upper, width = (upper << 64) - bits.integer(), width + 64
        with mpmath.workprec(width + 64):
            estimate = float(std * mpmath.sqrt(2) * mpmath.erfinv(1 - _over(upper, width)))
    below = math.floor(estimate)
    while True:
        with mpmath.workprec(width + 64):
            slack = mpmath.ldexp(1, -width - 32)  # more than mpmath errs
            tail = mpmath.erfc((below + mpmath.mpf(0.5)) / std / mpmath.sqrt(2))  # P(|σZ| > below + ½)
            if _over(upper - 1, width) >= tail * (1 + slack):
                return below
            if _over(upper, width) <= tail * (1 - slack):
                return below + 1
        upper, width = (upper << 64) - bits.integer(), width + 64


def _over(numerator: int, width: int) -> mpmath.mpf:
    return mpmath.ldexp(mpmath.mpf(numerator), -width)


@cache
def _check_functions() -> None:
    """Refuse a build of torch whose erfinv or ndtri is wrong by more than a tenth of the tolerance.

    The inverse is checked by the C library's erf and erfc: an error of z in Φ⁻¹ moves the probability by z
    times the density, which float64 shows well enough for this.
    """
    v = torch.linspace(1e-6, _CENTRE, 513, dtype=torch.float64)
    p = torch.logspace(-80, -8, 513, base=2.0, dtype=torch.float64)
    centre = (torch.erfinv(v) * _SQRT2).tolist()
    tails = (-torch.special.ndtri(p)).tolist()
    worst = 0.0
    for z, wanted in zip(centre, v.tolist(), strict=True):
        density = math.sqrt(2 / math.pi) * math.exp(-z * z / 2)
        worst = max(worst, abs(math.erf(z / _SQRT2) - wanted) / density / max(1.0, z))
    for z, wanted in zip(tails, p.tolist(), strict=True):
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        worst = max(worst, abs(math.erfc(z / _SQRT2) / 2 - wanted) / density / max(1.0, z))
    if not worst < TOLERANCE / 10:
        raise UserError(
            f"this build of torch computes the inverse error function wrongly (by {worst:.1g}), so private "
            "noise "
            "would not be what is claimed; install another build of torch"
        )
