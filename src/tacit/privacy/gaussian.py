"""Whole numbers distributed as a rounded Gaussian: noise without exploitable structure.

`add_rounded_gaussian_(total, std, bits)` adds R = ⌊σ Z + ½⌋, Z standard normal, to each coordinate of a
vector of whole numbers.

Why rounded. For a whole number x and a real Gaussian N, round(x + N) = x + round(N). So the released sum is a
function of x + N alone: it is *post-processing of the real Gaussian mechanism*. What an accountant proves for
real Gaussians therefore holds for the very bits that are released. There is no lattice, no missing tail and
no rounding that depends on the data (Mironov 2012 and Haney et al. 2022, arXiv:2207.10635, show what happens
otherwise).

How it is sampled: as a mixture of steps (a step function below p) and the remainder above them. The number
line is cut into cells of W = 2ᵏ whole numbers, σ/128 < W ≤ σ/64. Of the 2¹⁶ values of a 16-bit word, c_h
belong to cell h, with c_h so small that

    c_h / 2¹⁶ ≤ W · p(x)   for every x in the cell,     p(x) = P(R = x).

A word of a cell is followed by k bits that select one of the cell's numbers: one table lookup and one
addition, no comparison and no rejection. That gives x with probability c_h/(2¹⁶W). The missing probability,

    r(x) = p(x) − c_h / (2¹⁶ W) ≥ 0,

adds up to 1 − Σc_h/2¹⁶, which is the probability of the words that belong to no cell: about one in a hundred.
For those words the number is drawn from r ÷ Σr. In total x has probability p(x), whatever the c_h are.

Drawing from r uses rejection: cell h is proposed with probability n_h/2⁶³, a number in it uniformly, and the
number x is accepted with probability

    α(x) = K · W · 2⁶³ · r(x) / n_h,

where n_h is a whole number large enough that α ≤ 1 everywhere in the cell, and K is a constant. Accepted
numbers have exactly the distribution r ÷ Σr, whatever the n_h are. Both tails beyond 9 σ are proposed in the
same way, as one cell each. A number in a tail is then drawn by inversion with as many bits as needed, since
the tails have no end. r(x) is enclosed between two bounds. If u, the uniform number that accepts or rejects,
falls between them, mpmath computes p(x) with ever more digits, and u gets ever more bits, until the two are
apart.

What is proved and what is assumed:

- proved: the result has exactly the rounded Gaussian's distribution, for uniform bits;
- assumed: float64 `exp` and `erfc` err by less than 10⁻¹¹ relative to their result (libraries achieve 10⁻¹⁵),
  mpmath's erfc errs by less than 2⁻³² of its working precision, and AES is a secure cipher
  (`tacit.privacy.bits`).

>>> import torch
>>> total = torch.zeros(5, dtype=torch.int64)
>>> add_rounded_gaussian_(total, 1000.0, Bits.named(1))
>>> total.tolist()
[-783, 974, 1463, -454, 914]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

import mpmath
import numpy as np
from numpy.typing import NDArray

from tacit.errors import UserError
from tacit.lazy import Tensor, torch
from tacit.privacy.bits import Bits

STRETCH = 1 << 18
"""How many coordinates share one stream."""
BLOCK = 1 << 16
"""Coordinates processed at a time: few enough for the cache, enough to amortise the cost of a numpy call."""
LARGEST_STD = 2.0**36
"""This bound keeps a number in a cell within 30 bits, so that half a word is enough."""
SMALLEST_DELTA = 2.0**-100
"""δ below this would be a claim about the cipher rather than about the noise."""

_STEPS = 16
"""Bits that select the cell, if any."""
_WHOLE = 1 << 63
_REACH = 9
"""Standard deviations covered by cells."""
_GUIDE = 14
"""Bits of a proposal that nearly always determine the entry."""
_UNIFORM = 32
"""How many bits of u are drawn at first."""
_MARGIN = 1e-11
"""Relative error that is assumed for float64 results."""
_PRECISION = Lock()
"""mpmath's working precision is global to the process; only one thread at a time may change it."""


def add_rounded_gaussian_(total: Tensor, std: float, bits: Bits) -> None:
    """Add an independent rounded Gaussian of standard deviation `std` to each coordinate, in place.

    `total`: int64, or float64 that holds whole numbers below 2⁵² in size.
    """
    if total.dtype not in (torch.int64, torch.float64):
        raise TypeError(f"noise is added to whole numbers in int64 or float64, not to {total.dtype}")
    if std == 0:
        return
    if total.device.type != "cpu":  # drawn on the host, which has the generator, and copied once
        draws = torch.from_numpy(rounded_gaussian(total.numel(), std, bits))
        total.view(-1).add_(draws.to(total.device))
        return
    flat = total.view(-1).numpy()

    def add(start: int, draws: NDArray[np.int64]) -> None:
        flat[start : start + len(draws)] += draws

    for_each_stretch(len(flat), std, bits, add)


def for_each_stretch(
    count: int,
    std: float,
    bits: Bits,
    use: Callable[[int, NDArray[np.int64]], None],
    out: NDArray[np.int64] | None = None,
) -> None:
    """Call `use(start, draws)` for `count` draws in total, one stretch at a time; each stretch has its own
    stream.

    `out`: an array that keeps all draws. Runs on one thread: between calls of some microseconds, Python's
    threads would spend as much time on handing over the interpreter's lock as they would save (measured).
    """
    if not 0 < std <= LARGEST_STD:
        raise UserError(f"noise of {std:g} grid units cannot be sampled exactly; lower the noise multiplier")
    table = _table(std)
    starts = range(0, count, STRETCH)

    for start, own in zip(starts, bits.parts(len(starts)), strict=True):
        draws = np.empty(min(STRETCH, count - start), np.int64) if out is None else out[start:][:STRETCH]
        _draw_(draws, table, own)
        use(start, draws)


def rounded_gaussian(count: int, std: float, bits: Bits) -> NDArray[np.int64]:
    """`count` independent draws."""
    draws = np.empty(count, np.int64)
    for_each_stretch(count, std, bits, lambda start, drawn: None, draws)
    return draws


# --- the table ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """The precomputed data for one σ. Cell i holds the whole numbers from (i − H)·W up; the last two entries
    of `proposed`, `ends` and `scale` are the tails.
    """

    std: float
    shift: int
    """k; W = 2ᵏ."""
    half: int
    """H: cells to either side of 0."""
    first: NDArray[np.int32] | NDArray[np.int64]
    """The first number of the cell that a 16-bit word belongs to; cell h's number is repeated c_h times, in
    order.
    """
    covered: int
    """Σc_h; words from here on belong to no cell."""
    steps: NDArray[np.float64]
    """c_h/(2¹⁶W), exactly, for each cell."""
    keep: float
    """K."""
    accepted: float
    """The share of proposals that are accepted: K · Σr."""
    proposed: NDArray[np.uint64]
    """n_h of every cell, and of the upper and the lower tail."""
    ends: NDArray[np.uint64]
    """Running sums of `proposed`: entry i is proposed by numbers below ends[i] and not below ends[i − 1]."""
    guide: NDArray[np.int16]
    """The entry that all numbers with these first bits propose, or −1 if several; faster than a search."""
    scale: NDArray[np.float64]
    """α(x) ÷ r(x) in each cell; 0 for the tails, and for entries that are never proposed."""


@lru_cache(maxsize=16)
def _table(std: float) -> _Table:
    shift = max(0, math.floor(math.log2(std / 64)))
    width = 1 << shift
    half = math.ceil(_REACH * std / width) + 1
    first = np.arange(-half, half) * width
    last = first + (width - 1)
    near, far = np.where(first < 0, last, first), np.where(first < 0, first, last)
    most, least = _mass(near, std)[1], _mass(far, std)[0]  # p decreases with distance from 0
    counts = np.floor(least * (1 - _MARGIN) * (width << _STEPS))
    steps = counts / (width << _STEPS)
    covered = int(counts.sum())
    narrow = half * width < 2**31
    numbers = np.repeat(first.astype(np.int32 if narrow else np.int64), counts.astype(np.int64))
    left = most * (1 + _MARGIN) - steps  # at least r, since rounding is far below the margin
    tail = float(_tail(half * width, std)) * (1 + _MARGIN)
    keep = 1 / ((float(left.sum()) * width + 2 * tail) * (1 + 2.0**-20))
    # At least one: with very little noise, a far cell's probability underflows in float64.
    sizes = [max(1, math.ceil(value * (1 + _MARGIN))) for value in keep * width * _WHOLE * left]
    upper = max(1, math.ceil(keep * _WHOLE * tail))
    lower = upper  # the lower tail has fewer numbers, so this suffices
    proposed = np.array([*sizes, upper, lower], np.uint64)
    ends = np.cumsum(proposed, dtype=np.uint64)
    starts = np.arange(1 << _GUIDE, dtype=np.uint64) << np.uint64(63 - _GUIDE)
    lowest = np.searchsorted(ends, starts, side="right")
    highest = np.searchsorted(ends, starts + np.uint64((1 << 63 - _GUIDE) - 1), side="right")
    assert covered < 1 << _STEPS
    assert sum(map(int, proposed)) <= _WHOLE
    return _Table(
        std=std,
        shift=shift,
        half=half,
        first=np.append(numbers, np.zeros((1 << _STEPS) - covered, numbers.dtype)),
        covered=covered,
        steps=steps,
        keep=keep,
        accepted=keep * (1 - covered / (1 << _STEPS)),
        proposed=proposed,
        ends=ends,
        guide=np.where(lowest == highest, lowest, -1).astype(np.int16),
        scale=np.append(keep * width * _WHOLE / np.array(sizes, float), [0.0] * 3),
    )


def _mass(x: NDArray[np.int64], std: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A lower and an upper bound of p(x) = P(⌊σZ + ½⌋ = x)."""
    size = np.abs(x).astype(np.float64)
    if std < 512:
        # For x ≥ 1, a difference of two tails; at 0, the whole minus both.
        edges = np.stack([size - 0.5, size + 0.5]) / (std * math.sqrt(2.0))
        lower, upper = torch.erfc(torch.from_numpy(edges)).numpy()
        p = (lower - upper) / 2
        error = (lower + upper) * _MARGIN
        return np.maximum(p - error, 0.0), p + error
    # ∫ exp(−(x + t)²/2σ²) dt over |t| ≤ ½ is exp(−x²/2σ²) · ∫ exp(−xt/σ²) · exp(−t²/2σ²) dt. The first factor
    # inside integrates to sinh(a)/a with a = x/2σ²; the second is between exp(−1/8σ²) and 1.
    z = size / std
    most = np.exp(z * z / -2) / (std * math.sqrt(2 * math.pi))
    most *= 1 + (z / (2 * std)) ** 2 / 6  # of sinh(a)/a; the next term is below 10⁻¹² for z < 10
    return most * (math.exp(-1 / (8 * std * std)) * (1 - _MARGIN)), most * (1 + _MARGIN)


def _tail(start: int, std: float) -> mpmath.mpf:
    """P(R ≥ start) for start > 0, to mpmath's working precision."""
    return mpmath.erfc((start - mpmath.mpf(0.5)) / mpmath.mpf(std) / mpmath.sqrt(2)) / 2


# --- drawing --------------------------------------------------------------------------------------------


def _draw_(x: NDArray[np.int64], table: _Table, bits: Bits) -> None:
    """Fill `x` from one stream."""
    left = []
    for start in range(0, len(x), BLOCK):
        part = x[start : start + BLOCK]
        words = _uniform(bits, len(part), np.uint16)
        part[:] = words  # words as indices, overwritten by what they select
        numbers = table.first.take(part, mode="wrap")
        if table.shift:
            numbers += _inside(bits, len(part), table.shift)
        part[:] = numbers
        left.append(np.flatnonzero(words >= table.covered) + start)
    places = np.concatenate(left)
    x[places] = _above_steps(len(places), table, bits)


def _inside(bits: Bits, count: int, shift: int) -> NDArray[Any]:
    """Uniform numbers of `shift` bits."""
    if shift <= 16:
        return _uniform(bits, count, np.uint16) & np.uint16((1 << shift) - 1)
    return (_uniform(bits, count, np.uint32) & np.uint32((1 << shift) - 1)).view(np.int32)


def _uniform(bits: Bits, count: int, kind: type[np.uint16 | np.uint32]) -> NDArray[Any]:
    """`count` uniform numbers of 16 or 32 bits."""
    each = 8 // np.dtype(kind).itemsize
    return bits.words(-(-count // each)).view(kind)[:count]


def _above_steps(count: int, table: _Table, bits: Bits) -> NDArray[np.int64]:
    """`count` draws from r ÷ Σr: the first `count` proposals that are accepted."""
    found = [np.empty(0, np.int64)]
    while count > 0:
        x, accepted = _proposed(math.ceil(count / table.accepted) + 8, table, bits)
        found.append(x[accepted][:count])
        count -= len(found[-1])
    return np.concatenate(found)


def _proposed(count: int, table: _Table, bits: Bits) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """`count` proposals and which of them are accepted."""
    numbers, words = bits.words(count) >> np.uint64(1), bits.words(count)
    entry = table.guide[numbers >> np.uint64(63 - _GUIDE)].astype(np.int64)
    unsure = np.flatnonzero(entry < 0)
    entry[unsure] = np.searchsorted(table.ends, numbers[unsure], side="right")
    uniforms = (words >> np.uint64(64 - _UNIFORM)).astype(np.float64) * 2.0**-_UNIFORM
    x = (entry - table.half) << table.shift
    x += (words & np.uint64((1 << table.shift) - 1)).view(np.int64)
    low, high = _mass(x, table.std)
    steps = table.steps.take(entry, mode="clip")
    scale = table.scale[entry]  # 0 for the tails, and beyond
    low, high = low * (1 - _MARGIN) - steps, high * (1 + _MARGIN) - steps
    accepted = uniforms + 2.0**-_UNIFORM <= low * scale * (1 - _MARGIN)
    # Not where both are 0: there float64 underflows.
    rejected = (uniforms > high * scale * (1 + _MARGIN)) & (scale > 0)
    rejected |= entry >= len(table.proposed)
    for place in np.flatnonzero(~(accepted | rejected)):
        uniform = _Uniform(int(words[place]) >> 64 - _UNIFORM, _UNIFORM, bits)
        x[place], accepted[place] = _decided(int(entry[place]), int(x[place]), uniform, table, bits)
    return x, accepted


def _decided(entry: int, x: int, uniform: _Uniform, table: _Table, bits: Bits) -> tuple[int, bool]:
    """A number and whether it is accepted, decided with as many digits and bits as needed.

    A step is below p by at least a share of `_MARGIN`, so r has at most 37 digits fewer than p.
    """
    std, width, cells = table.std, 1 << table.shift, 2 * table.half
    factor = table.keep, _WHOLE, int(table.proposed[entry])

    def times(chance: mpmath.mpf, many: int = 1) -> mpmath.mpf:
        keep, whole, proposed = factor
        return chance * mpmath.mpf(keep) * (many * whole) / proposed

    def alpha() -> mpmath.mpf:
        beyond = _tail(abs(x) + 1, std)
        p = _tail(abs(x), std) - beyond if x else 1 - 2 * beyond
        return times(p - mpmath.mpf(float(table.steps[entry])), width)

    with _PRECISION:
        if entry < cells:
            return x, uniform.below(alpha)
        start = cells // 2 * width + (entry - cells)  # the lower tail begins at −H·W − 1
        if not uniform.below(lambda: times(_tail(start, std))):
            return 0, False
        far = _beyond(start, std, bits)
        return (far if entry == cells else -far), True


def _beyond(start: int, std: float, bits: Bits) -> int:
    """A draw of R given R ≥ start, by inversion."""
    uniform = _Uniform(bits.integer(), 64, bits)

    def reaches(m: int) -> bool:
        return uniform.below(lambda: _tail(m, std) / _tail(start, std))

    low, step = start, 1
    while reaches(low + step):
        low, step = low + step, 2 * step
    high = low + step  # R ≥ low, and not R ≥ high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reaches(middle) else (low, middle)
    return low


class _Uniform:
    """A uniform number whose bits are drawn only as comparisons need them."""

    def __init__(self, first: int, width: int, bits: Bits) -> None:
        self._number, self._width, self._bits = first, width, bits  # in [number, number + 1) / 2^width

    def below(self, chance: Callable[[], mpmath.mpf]) -> bool:
        """Whether it is below `chance()`, which is computed to mpmath's working precision."""
        while True:
            with mpmath.workprec(2 * self._width + 128):
                p, slack = chance(), mpmath.ldexp(1, -self._width - 32)
                if self._over(self._number + 1) <= p * (1 - slack):
                    return True
                if self._over(self._number) >= p * (1 + slack):
                    return False
            self._number = (self._number << 64) + self._bits.integer()
            self._width += 64

    def _over(self, number: int) -> mpmath.mpf:
        return mpmath.ldexp(mpmath.mpf(number), -self._width)
