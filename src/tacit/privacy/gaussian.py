"""Whole numbers distributed as a rounded Gaussian: noise without a structure to find.

`add_rounded_gaussian_(total, std, bits)` adds R = ⌊σ Z + ½⌋, Z standard normal, to each coordinate of a
vector of whole numbers.

Why rounded. For a whole number x and a real Gaussian N, round(x + N) = x + round(N). So the sum that is
released is a function of x + N alone: it is *post-processing of the real Gaussian mechanism*, and what an
accountant proves for real Gaussians holds for the very bits that are released. There is no lattice, no
missing tail and no rounding that depends on the data (Mironov 2012 and Haney et al. 2022, arXiv:2207.10635,
show what happens otherwise).

How it is sampled. By rejection from steps, in whole numbers. The number line is cut into cells of W = 2ᵏ
whole numbers, σ/512 < W ≤ σ/256. Cell h is proposed with probability n_h/2⁶³, a number in it uniformly, and
the number x is accepted with probability

    α(x) = K · W · 2⁶³ · p(x) / n_h,     p(x) = P(R = x),

where n_h is a whole number so large that α ≤ 1 everywhere in the cell and K is a constant. What is accepted
has exactly the distribution p, whatever the n_h are; the rest is drawn again. Both tails beyond 9 σ are
proposed likewise, as one cell each, and then drawn by inversion with as many bits as it takes: they have no
end. Per coordinate this is one 64-bit word (18 bits that nearly always decide the cell, k for the number in
it, the rest for u, the uniform number that accepts or rejects), one look into a table and a comparison: in a
cell where α ≥ 63/64, u below 63/64 accepts. The other 2 % of draws are decided with care: p(x) is enclosed
between two numbers, and where u falls in between, mpmath computes p(x) with ever more digits, and u gets ever
more bits, until the two are apart.

What is proved, and what is assumed:

- proved: the result has exactly the rounded Gaussian's distribution, for uniform bits;
- assumed: float64 `exp` and `erfc` err by less than 10⁻¹¹ relative to their result (libraries keep 10⁻¹⁵),
  mpmath's erfc by less than 2⁻³² of its working precision, and AES is a cipher (`tacit.privacy.bits`).

>>> import torch
>>> total = torch.zeros(5, dtype=torch.int64)
>>> add_rounded_gaussian_(total, 1000.0, Bits.named(1))
>>> total.tolist()
[-463, 1380, 803, -1562, 1101]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import mpmath
import numpy as np
from numpy.typing import NDArray

from tacit.errors import UserError
from tacit.lazy import Tensor, torch
from tacit.privacy.bits import Bits, Words

STRETCH = 1 << 17
"""Coordinates of one stream."""
BLOCK = 1 << 14
"""Coordinates at a time: they stay in the cache."""
LARGEST_STD = 2.0**36
"""So that a word has room for a cell, a number in it and 18 bits of u."""
SMALLEST_DELTA = 2.0**-100
"""δ below this would be a claim about the cipher rather than about the noise."""

_PREFIX = 18
"""Bits of a word that nearly always decide the cell."""
_WHOLE = 1 << 63
_REACH = 9
"""Standard deviations covered by cells."""
_UNSURE = np.int16(-(2**15))
_QUICK = 6
"""u below 1 − 2⁻⁶ accepts at once, where α is larger than that."""
_MARGIN = 1e-11
"""Relative error that is allowed for in float64 results."""
_PARALLEL = 2 * STRETCH
"""From so many coordinates on, several threads pay."""
_PRECISION = Lock()
"""mpmath's working precision belongs to the whole process; one thread at a time may change it."""


def add_rounded_gaussian_(total: Tensor, std: float, bits: Bits) -> None:
    """Add an independent rounded Gaussian of standard deviation `std` to each coordinate, in place.

    `total`: int64, or float64 that holds whole numbers below 2⁵² in size.
    """
    if total.dtype not in (torch.int64, torch.float64):
        raise TypeError(f"noise is added to whole numbers in int64 or float64, not to {total.dtype}")
    if std == 0:
        return
    if total.device.type != "cpu":  # drawn on the host, whose generator it is, and copied once
        draws = torch.from_numpy(rounded_gaussian(total.numel(), std, bits))
        total.view(-1).add_(draws.to(total.device))
        return
    flat = total.view(-1).numpy()

    def add(start: int, draws: NDArray[np.int64]) -> None:
        flat[start : start + len(draws)] += draws

    for_each_stretch(len(flat), std, bits, add)


def for_each_stretch(
    count: int, std: float, bits: Bits, use: Callable[[int, NDArray[np.int64]], None]
) -> None:
    """Call `use(start, draws)` with `count` draws in all, a stretch at a time, perhaps in several threads.

    Each stretch has a stream of its own, so what is drawn does not depend on the number of threads.
    """
    if not 0 < std <= LARGEST_STD:
        raise UserError(f"noise of {std:g} grid units cannot be sampled exactly; lower the noise multiplier")
    table = _table(std)
    starts = range(0, count, STRETCH)

    def one(part: tuple[int, Bits]) -> None:
        start, own = part
        use(start, _drawn(min(STRETCH, count - start), table, own))

    parts = zip(starts, bits.parts(len(starts)), strict=True)
    threads = torch.get_num_threads()
    if count < _PARALLEL or threads == 1:
        for part in parts:
            one(part)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(one, parts):
            pass


def rounded_gaussian(count: int, std: float, bits: Bits) -> NDArray[np.int64]:
    """`count` independent draws."""
    draws = np.zeros(count, np.int64)

    def keep(start: int, drawn: NDArray[np.int64]) -> None:
        draws[start : start + len(drawn)] = drawn

    for_each_stretch(count, std, bits, keep)
    return draws


# --- the table ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """What is needed to draw with one σ. Cell i holds the whole numbers from (i − H)·W up; the last two
    entries are the tails.
    """

    std: float
    shift: int
    """k; W = 2ᵏ."""
    half: int
    """H: cells to either side of 0."""
    keep: float
    """K."""
    proposed: NDArray[np.uint64]
    """n_h of every cell, and of the upper and the lower tail."""
    ends: NDArray[np.uint64]
    """Running sums of `proposed`: entry i is proposed by numbers below ends[i] and not below ends[i − 1]."""
    cells: NDArray[np.int16]
    """h for each prefix whose continuations all propose the same quick cell, else _UNSURE."""
    scale: NDArray[np.float64]
    """α(x) ÷ p(x) in each cell; 0 for the tails and for what proposes nothing."""
    uniform_bits: int
    uniform: np.uint64
    """The bits of a word that are u, the uniform number of the rejection step."""
    inside: np.uint64
    """The bits of a word that say which number of a cell, once they are shifted down."""
    quick: np.uint64
    """u below it accepts in every quick cell."""


@lru_cache(maxsize=16)
def _table(std: float) -> _Table:
    shift = max(0, math.floor(math.log2(std / 256)))
    width = 1 << shift
    half = math.ceil(_REACH * std / width) + 1
    first = np.arange(-half, half) * width
    last = first + (width - 1)
    near, far = np.where(first < 0, last, first), np.where(first < 0, first, last)
    most, least = _mass(near, std)[1], _mass(far, std)[0]  # p falls with distance from 0
    tail = float(_tail(half * width, std)) * (1 + _MARGIN)
    keep = 1 / ((float(most.sum()) * width + 2 * tail) * (1 + 2.0**-20))
    sizes = [math.ceil(value * (1 + _MARGIN)) for value in keep * width * _WHOLE * most]
    upper = math.ceil(keep * _WHOLE * tail)
    lower = upper  # the numbers below −H·W are fewer, so this is enough
    proposed = np.array([*sizes, upper, lower], np.uint64)
    assert sum(map(int, proposed)) <= _WHOLE
    ends = np.cumsum(proposed, dtype=np.uint64)
    quick = keep * width * _WHOLE * least * (1 - _MARGIN) >= np.array(sizes, float) * (1 - 2.0**-_QUICK)
    # Prefixes whose first continuation proposes entry i are those from until[i − 1] up to until[i].
    rest = np.uint64((1 << 63 - _PREFIX) - 1)
    until = (ends + rest >> np.uint64(63 - _PREFIX)).astype(np.int64)
    which = np.where(quick, np.arange(-half, half), _UNSURE).astype(np.int16)
    cells = np.full(1 << _PREFIX, _UNSURE)
    cells[: until[2 * half - 1]] = np.repeat(which, np.diff(until[: 2 * half], prepend=0))
    cells[until[until > 0] - 1] = _UNSURE  # the last of them may propose the next entry, too
    uniform_bits = 64 - _PREFIX - shift
    return _Table(
        std=std,
        shift=shift,
        half=half,
        keep=keep,
        proposed=proposed,
        ends=ends,
        cells=cells,
        # Of what is never proposed (with very little noise), the scale is never asked for.
        scale=np.append(keep * width * _WHOLE / np.maximum(np.array(sizes, float), 1.0), [0.0] * 3),
        uniform_bits=uniform_bits,
        uniform=np.uint64((1 << uniform_bits) - 1),
        inside=np.uint64(width - 1),
        quick=np.uint64((1 << uniform_bits) - (1 << uniform_bits - _QUICK)),
    )


def _mass(x: NDArray[np.int64], std: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two numbers between which p(x) = P(⌊σZ + ½⌋ = x) lies."""
    size = np.abs(x).astype(np.float64)
    if std < 512:
        # x ≥ 1: a difference of two tails; at 0 it is the whole less both.
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
    """P(R ≥ start), for start > 0, to the precision that mpmath works with."""
    return mpmath.erfc((start - mpmath.mpf(0.5)) / mpmath.mpf(std) / mpmath.sqrt(2)) / 2


# --- drawing --------------------------------------------------------------------------------------------


def _drawn(count: int, table: _Table, bits: Bits) -> NDArray[np.int64]:
    """`count` draws from one stream."""
    x = np.empty(count, np.int64)
    unsure, left = [], []
    for start in range(0, count, BLOCK):
        words = bits.words(min(BLOCK, count - start))
        prefixes = (words >> np.uint64(64 - _PREFIX)).view(np.int64)
        cells = table.cells.take(prefixes, mode="wrap")
        part = x[start : start + len(words)]
        part[:] = cells
        if table.shift:
            part <<= table.shift
            part += ((words >> np.uint64(table.uniform_bits)) & table.inside).view(np.int64)
        careful = np.flatnonzero(((words & table.uniform) >= table.quick) | (cells == _UNSURE))
        unsure.append(careful + start)
        left.append(words[careful])
    places = np.concatenate(unsure)
    if len(places):
        x[places] = _with_care(np.concatenate(left), table, bits)
    return x


def _with_care(words: Words, table: _Table, bits: Bits) -> NDArray[np.int64]:
    """Draws that begin with these words; where one is rejected, a draw of fresh ones."""
    prefixes = words >> np.uint64(64 - _PREFIX)
    entry = table.cells[prefixes.view(np.int64)].astype(np.int64) + table.half
    unsure = np.flatnonzero(entry < 0)
    numbers = prefixes[unsure] << np.uint64(63 - _PREFIX) | bits.words(len(unsure)) >> np.uint64(1 + _PREFIX)
    entry[unsure] = np.searchsorted(table.ends, numbers, side="right")
    uniforms = (words & table.uniform).astype(
        np.float64
    ) * 2.0**-table.uniform_bits  # exact: they have 46 bits at most
    x = (entry - table.half) << table.shift
    x += ((words >> np.uint64(table.uniform_bits)) & table.inside).view(np.int64)
    low, high = _mass(x, table.std)
    scale = table.scale[entry]  # 0 for the tails, and beyond
    accepted = uniforms + 2.0**-table.uniform_bits <= low * scale * (1 - _MARGIN)
    rejected = (uniforms >= high * scale * (1 + _MARGIN)) & (scale > 0)
    rejected |= entry >= len(table.proposed)
    for place in np.flatnonzero(~(accepted | rejected)):
        uniform = _Uniform(int(words[place] & table.uniform), table.uniform_bits, bits)
        x[place], accepted[place] = _decided(int(entry[place]), int(x[place]), uniform, table, bits)
    again = np.flatnonzero(~accepted)
    if len(again):
        x[again] = _drawn(len(again), table, bits)
    return x


def _decided(entry: int, x: int, uniform: _Uniform, table: _Table, bits: Bits) -> tuple[int, bool]:
    """A number and whether it is accepted, decided by as many digits and bits as it takes."""
    std, width, cells = table.std, 1 << table.shift, 2 * table.half
    factor = table.keep, _WHOLE, int(table.proposed[entry])

    def times(chance: mpmath.mpf, many: int = 1) -> mpmath.mpf:
        keep, whole, proposed = factor
        return chance * mpmath.mpf(keep) * (many * whole) / proposed

    def alpha() -> mpmath.mpf:
        beyond = _tail(abs(x) + 1, std)
        return times(_tail(abs(x), std) - beyond if x else 1 - 2 * beyond, width)

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
    """A uniform number of which ever more bits are looked at, as questions need them."""

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
