"""Noise and random bits, by statistics and by proof. False alarms: 1e-6 a test, unless stated otherwise."""

import math
from collections.abc import Iterator

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from tacit.errors import UserError
from tacit.privacy import Bits, FixedSize, Poisson
from tacit.privacy import gaussian as gaussian_room
from tacit.privacy.gaussian import LARGEST_STD, STRETCH, add_rounded_gaussian_

ALARM = 1e-6
SOURCES = [Bits.secret, lambda: Bits.named(7)]


def sample(bits: Bits, size: int, std: float) -> np.ndarray:
    vector = torch.zeros(size, dtype=torch.int64)
    add_rounded_gaussian_(vector, std, bits)
    return vector.numpy()


class Script(Bits):
    """A stream that says what it is told to, and then goes on like another."""

    def __init__(self, words: list[int], then: Bits) -> None:
        self._said, self._then = list(words), then

    def words(self, count: int) -> np.ndarray:
        said, self._said = self._said[:count], self._said[count:]
        return np.concatenate([np.array(said, np.uint64), self._then.words(count - len(said))])

    def parts(self, count: int) -> Iterator[Bits]:
        return iter([self] * count)


# --- the distribution -------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.3, 1.0, 3.7, 20.0])
def test_probabilities_of_small_numbers_against_mpmath(std: float) -> None:
    """χ² of a million draws against ∫ of the normal density over [k − ½, k + ½], computed to 30 digits."""
    values = sample(Bits.named(11), 1_000_000, std)
    reach = max(2, math.ceil(3 * std))
    with mpmath.workdps(30):

        def below(x: float) -> mpmath.mpf:
            return mpmath.erfc(-mpmath.mpf(x) / std / mpmath.sqrt(2)) / 2

        inner = [float(below(k + 0.5) - below(k - 0.5)) for k in range(-reach, reach + 1)]
        outer = [float(below(-reach - 0.5))] * 2
    seen = [int((values == k).sum()) for k in range(-reach, reach + 1)]
    seen += [int((values < -reach).sum()), int((values > reach).sum())]
    expected = len(values) * np.array(inner + outer)
    kept = expected > 5
    chi2 = float(((np.array(seen)[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    assert stats.chi2.sf(chi2, int(kept.sum()) - 1) > ALARM


@pytest.mark.parametrize("source", SOURCES, ids=["secret", "named"])
@pytest.mark.parametrize("size", [1, 15, 1000, STRETCH, STRETCH + 7])
@pytest.mark.parametrize("std", [3e3, 2.0**24])
def test_moments_and_shape(source, size: int, std: float) -> None:
    """Mean and variance by normal and χ² tests, the shape by Kolmogorov–Smirnov, for all vector lengths."""
    repeats = min(max(5, 100_000 // size), 2000)
    bits = source()
    values = np.concatenate([sample(bits, size, std) for _ in range(repeats)]) / std
    n = len(values)
    assert abs(values.mean()) < stats.norm.isf(ALARM / 2) / math.sqrt(n)
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], n)
    assert low < (values**2).sum() < high
    assert stats.kstest(values, "norm").pvalue > ALARM


def test_coordinates_calls_and_streams_are_independent() -> None:
    """Correlations of neighbours, of coordinates 8 apart (as in Box–Muller), of calls and of streams."""
    one, other = Bits.secret(), Bits.secret()
    first, second, third = (sample(b, 4 * STRETCH, 1e6) / 1e6 for b in (one, one, other))
    stretches = first.reshape(4, STRETCH)
    pairs = [(first, second), (first, third)] + [(first[k:], first[:-k]) for k in (1, 2, 8, 16)]
    pairs += [(stretches[i], stretches[j]) for i in range(4) for j in range(i)]
    for a, b in pairs:
        for x, y in ((a, b), (a**2 - 1, b**2 - 1)):
            z = (x * y).sum() / math.sqrt((x**2).mean() * (y**2).mean() * len(x))
            assert abs(z) < stats.norm.isf(ALARM / 4 / len(pairs))


def proposal(table: gaussian_room._Table, number: int, u: int, then: Bits) -> tuple[int, bool]:
    """What `number` of 2⁶³ proposes, and whether that is accepted with these 32 bits of u."""
    x, accepted = gaussian_room._proposed(1, table, Script([number << 1, u << 32], then))
    return int(x[0]), bool(accepted[0])


def probability(x: int, std: float) -> mpmath.mpf:
    beyond = gaussian_room._tail(abs(x) + 1, std)
    return gaussian_room._tail(abs(x), std) - beyond if x else 1 - 2 * beyond


@pytest.mark.parametrize("std", [3.0, 1000.0, pytest.param(2.0**20, marks=pytest.mark.slow)])
def test_the_tails_have_no_end(std: float) -> None:
    """By importance: propose a tail, and look whether what is drawn follows the conditional law beyond 9 σ.

    It does so without an end: among 2 × 120 draws the farthest go well beyond where they begin.
    """
    table = gaussian_room._table(std)
    cells = 2 * table.half
    start = table.half << table.shift
    for entry, sign in ((cells, 1), (cells + 1, -1)):
        drawn = [proposal(table, int(table.ends[entry]) - 1, 0, Bits.named(entry, i)) for i in range(120)]
        assert all(accepted for _, accepted in drawn)
        values = np.array([sign * x for x, _ in drawn])
        assert values.min() >= start + (sign < 0) >= 9 * std
        if std > 100:
            with mpmath.workprec(100):
                first = gaussian_room._tail(start + (sign < 0), std)
                share = [float(gaussian_room._tail(int(v), std) / first) for v in values]
            assert stats.kstest(share, "uniform").pvalue > ALARM
            assert values.max() > start + 0.3 * std


STDS = [0.01, 0.3, 1.0, 255.0, 511.9, 512.0, 777.7, 2.0**20, 1.9 * 2.0**22, 1.3 * 2.0**30, LARGEST_STD]


@pytest.mark.parametrize("std", STDS)
def test_the_table_is_what_the_proof_asks_for(std: float) -> None:
    """Steps lie below p and are as high as words say, α ≤ 1 everywhere, and the guide is right."""
    table, rng = gaussian_room._table(std), np.random.default_rng(0)
    width, cells = 1 << table.shift, 2 * table.half
    assert width == 1 or std / 128 < width <= std / 64
    assert width <= 2**30, "a number in a cell has 32 bits at most"
    firsts = (np.arange(cells) - table.half) * width
    assert len(table.first) == 2**16 > table.covered and (table.first[table.covered :] == 0).all()
    counts = table.steps * width * 2**16
    assert (np.repeat(firsts, counts.astype(np.int64)) == table.first[: table.covered]).all()
    assert counts.sum() == table.covered and (counts == counts.astype(np.int64)).all()
    assert table.covered > 0.985 * 2**16
    assert sum(map(int, table.proposed)) <= 2**63
    assert int(table.ends[-1]) == sum(map(int, table.proposed))
    with mpmath.workprec(300):
        for cell in {0, cells - 1, table.half - 1, table.half, *map(int, rng.integers(0, cells, 60))}:
            for x in {int(firsts[cell]) + inside for inside in (0, width // 2, width - 1)}:
                left = probability(x, std) - mpmath.mpf(float(table.steps[cell]))
                assert left > 0
                alpha = left * mpmath.mpf(table.keep) * width * 2**63 / int(table.proposed[cell])
                assert 0 < alpha <= 1
        for entry, start in ((cells, table.half * width), (cells + 1, table.half * width + 1)):
            assert gaussian_room._tail(start, std) * mpmath.mpf(table.keep) * 2**63 <= int(
                table.proposed[entry]
            )
    rest = 63 - gaussian_room._GUIDE
    for prefix in map(int, rng.integers(0, 1 << gaussian_room._GUIDE, 300)):
        reached = {
            int(np.searchsorted(table.ends, np.uint64((prefix << rest) + low), side="right"))
            for low in (0, 2**rest - 1, int(rng.integers(2**rest)))
        }
        assert table.guide[prefix] == -1 or reached == {int(table.guide[prefix])}


@pytest.mark.parametrize("std", [50.0, 700.0, 2.0**24 * 1.1])
def test_every_word_draws_its_own_number(std: float) -> None:
    """All 2¹⁶ words, each with a few numbers inside its cell: the steps, as the table has them."""
    table, width = gaussian_room._table(std), 1 << gaussian_room._table(std).shift
    words = np.arange(2**16, dtype=np.uint16)
    lane = np.uint16 if table.shift <= 16 else np.uint32
    for inside in {0, width // 3, width - 1}:
        # Bits above the k that count are noise: they must not matter.
        high = np.random.default_rng(inside).integers(0, np.iinfo(lane).max // width + 1, 2**16, dtype=lane)
        said = [words.view(np.uint64)]
        if table.shift:
            said.append((high * lane(width) + lane(inside)).view(np.uint64))
        drawn = np.empty(2**16, np.int64)
        gaussian_room._draw_(drawn, table, Script(np.concatenate(said).tolist(), Bits.named(1)))
        assert (drawn[: table.covered] == table.first[: table.covered].astype(np.int64) + inside).all()


@pytest.mark.parametrize("std", [0.3, 3.7, 100.0, 700.0])
def test_what_is_drawn_above_the_steps_is_what_is_missing(std: float) -> None:
    """χ² of half a million draws against r(x) = p(x) − c_h/(2¹⁶W), with p computed to 30 digits."""
    table = gaussian_room._table(std)
    values = gaussian_room._above_steps(500_000, table, Bits.named(5))
    reach = math.ceil(4 * std)
    x = np.arange(-reach, reach + 1)
    with mpmath.workdps(30):
        p = [probability(int(k), std) for k in x]
        steps = table.steps[(x >> table.shift) + table.half]
        left = np.array([float(a - mpmath.mpf(float(b))) for a, b in zip(p, steps, strict=True)])
        beyond = float(gaussian_room._tail(reach + 1, std))
    missing = 1 - table.covered / 2**16
    assert left.sum() + 2 * beyond == pytest.approx(missing, rel=1e-9), "nothing is missing twice"
    seen = np.array([*np.bincount((values + reach)[np.abs(values) <= reach], minlength=len(x)), 0])
    seen[-1] = len(values) - seen.sum()
    expected = len(values) * np.append(left, 2 * beyond) / missing
    kept = expected > 5
    chi2 = float(((seen[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    assert stats.chi2.sf(chi2, max(1, int(kept.sum()) - 1)) > ALARM
    rare = int(seen[~kept].sum())
    assert stats.poisson.sf(rare - 1, max(float(expected[~kept].sum()), 1e-9)) > ALARM or rare == 0


def test_a_chance_that_floats_have_no_number_for_is_still_a_chance() -> None:
    """At σ = 0.01 the number 1 has one of 10⁻⁵⁴⁵: u = 0 leaves the question to mpmath, u > 0 does not."""
    std = 0.01
    table = gaussian_room._table(std)
    number = int(table.ends[table.half + 1]) - 1  # W is 1: this entry is the number 1
    for u, asked in ((0, True), (1, False)):
        stream = Script([number << 1, u << 32, 0, 2**64 - 1], Bits.named(1))
        x, accepted = gaussian_room._proposed(1, table, stream)
        assert x.tolist() == [1]
        assert not accepted[0]
        assert (len(stream._said) < 2) == asked


@pytest.mark.parametrize("std", [0.3, 20.0, 511.0, 512.0, 5e4, 2.0**20, LARGEST_STD])
def test_probabilities_are_enclosed(std: float) -> None:
    rng = np.random.default_rng(2)
    x = np.unique(np.concatenate([[0, 1, -1], (rng.normal(size=200) * 3 * std).astype(np.int64)]))
    x = x[np.abs(x) < 9 * std]
    low, high = gaussian_room._mass(x, std)
    with mpmath.workprec(200):
        for place, value in enumerate(map(abs, map(int, x))):
            beyond = gaussian_room._tail(value + 1, std)
            exact = gaussian_room._tail(value, std) - beyond if value else 1 - 2 * beyond
            assert low[place] <= exact <= high[place], value
            if value < 4 * std:
                assert high[place] - low[place] <= 1e-6 * exact


def test_a_coin_that_is_too_near_to_call_gets_more_bits() -> None:
    """The coin's first bits leave the question open; those that follow answer it, either way."""
    for width in (18, 40):
        for number in (0, 5, 2**width - 1):

            def chance(number: int = number, width: int = width) -> mpmath.mpf:
                return (number + mpmath.mpf(1) / 3) / 2**width

            for more, answer in (
                (0, True),
                (2**64 // 3 - 1, True),
                (2**64 // 3 + 1, False),
                (2**64 - 1, False),
            ):
                uniform = gaussian_room._Uniform(number, width, Script([more], Bits.named(1)))
                assert uniform.below(chance) == answer
                assert uniform._width == width + 64
    third = 2**64 // 3  # 0101…: the first 64 further bits agree with ⅓, so another 64 are needed
    uniform = gaussian_room._Uniform(0, 18, Script([third, 0], Bits.named(1)))
    with mpmath.workprec(300):
        assert uniform.below(lambda: mpmath.mpf(1) / 3 / 2**18) and uniform._width == 18 + 128


def test_threads_do_not_change_what_is_drawn() -> None:
    before = torch.get_num_threads()
    try:
        drawn = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            drawn.append(sample(Bits.named(8), 3 * STRETCH + 5, 1e5))
    finally:
        torch.set_num_threads(before)
    assert (drawn[0] == drawn[1]).all() and (drawn[0] == drawn[2]).all()


def test_what_cannot_be_noised_is_refused() -> None:
    with pytest.raises(TypeError, match="whole numbers"):
        add_rounded_gaussian_(torch.zeros(3), 1.0, Bits.secret())
    for std in (-1.0, math.nan, 2 * LARGEST_STD):
        with pytest.raises(UserError, match="cannot be sampled"):
            add_rounded_gaussian_(torch.zeros(3, dtype=torch.int64), std, Bits.secret())
    untouched = torch.arange(3)
    add_rounded_gaussian_(untouched, 0.0, Bits.secret())
    assert untouched.tolist() == [0, 1, 2]


@pytest.mark.parametrize("shares", [1, 2, 5])
def test_a_sum_of_rounded_gaussians_is_a_rounded_sum(shares: int) -> None:
    """The lemma behind noise in shares, by brute force: Σ round(N_i) has the law of round(N + U₂ + … + U_m).

    Probabilities of the former by convolution of exact ones, of the latter by numerical convolution of
    densities on a fine grid. The claimed error at σ = 2 is of order exp(−4π²) ≈ 1e-17.
    """
    sigma, reach, fine = 2.0, 40, 64
    k = np.arange(-reach, reach + 1)
    one = stats.norm.cdf((k + 0.5) / sigma) - stats.norm.cdf((k - 0.5) / sigma)
    total = np.array([1.0])
    for _ in range(shares):
        total = np.convolve(total, one)
    middle = len(total) // 2
    # The density of N + U₂ + … + U_m, integrated over [k − ½, k + ½]: one more box.
    x = (np.arange(-reach * fine, reach * fine + 1)) / fine
    density = stats.norm.pdf(x, scale=sigma * math.sqrt(shares))
    width = np.ones(fine + 1)
    width[[0, -1]] = 0.5
    for _ in range(shares):
        density = np.convolve(density, width / fine, mode="same")
    for k in range(-15, 16):
        assert density[reach * fine + k * fine] == pytest.approx(total[middle + k], rel=2e-4, abs=1e-9)


# --- bits and coins ---------------------------------------------------------------------------------------


def test_named_bits_repeat_and_secret_ones_do_not() -> None:
    one, other = (Bits.named(1, 2) for _ in "ab")
    assert all((a.words(9) == b.words(9)).all() for a, b in zip(one.parts(3), other.parts(3), strict=True))
    streams = [next(one.parts(1)).integer() for _ in range(5)] + [Bits.named(1, 2).integer()]
    assert len(set(streams)) == 6, "a part is given once"
    assert (sample(Bits.named(1, 2), 100, 9.0) == sample(Bits.named(1, 2), 100, 9.0)).all()
    assert (sample(Bits.named(1, 2), 100, 9.0) != sample(Bits.named(1, 3), 100, 9.0)).any()
    bits = Bits.named(1, 2)
    assert (sample(bits, 100, 9.0) != sample(bits, 100, 9.0)).any()
    torch.manual_seed(0)
    first = sample(Bits.secret(), 50, 9.0)
    torch.manual_seed(0)
    assert (first != sample(Bits.secret(), 50, 9.0)).any()


def test_the_stream_does_not_depend_on_how_it_is_asked_for() -> None:
    whole = Bits.named(5).words(200_000).copy()
    bits = Bits.named(5)
    parts = [bits.words(n).copy() for n in (1, 65_535, 70_000, 64_464)]
    assert (np.concatenate(parts) == whole).all()


def test_bits_are_fair_one_by_one() -> None:
    words = Bits.secret().words(60_000).copy()
    ones = np.array([int(((words >> np.uint64(i)) & np.uint64(1)).sum()) for i in range(64)])
    z = (ones - len(words) / 2) / math.sqrt(len(words) / 4)
    assert np.abs(z).max() < stats.norm.isf(ALARM / 128)


def test_poisson_inclusion_rate_and_independence() -> None:
    """400 units, 5000 draws, rate 0.03; every bound is 5.5 deviations or more.

    With 400 + 3 comparisons against a two-sided tail of 4e-8 the whole test raises a false alarm for less
    than one seed in 60,000.
    """
    n, count, q = 400, 5000, 0.03
    joined = np.zeros((count, n))
    bits = Bits.named(7)
    for row in joined:
        drawn = Poisson(q).draw(bits, n)
        assert (np.diff(drawn) > 0).all(), "nobody twice"
        row[drawn] = 1
    deviation = np.sqrt(q * (1 - q))
    assert np.abs(joined.mean(axis=0) - q).max() < 5.5 * deviation / np.sqrt(count), "each unit's own rate"
    z = (joined - q) / deviation
    # Sizes: independent units make the size's variance n·q(1-q); fixed-size cohorts would have none.
    size = z.sum(axis=1) / np.sqrt(n)
    assert abs((size**2).mean() - 1) < 5.5 * np.sqrt(2.1 / count)
    # Neighbouring units of one draw, and one unit in neighbouring draws.
    assert abs((z[:, :-1] * z[:, 1:]).mean()) < 5.5 / np.sqrt(z[:, 1:].size)
    assert abs((z[:-1] * z[1:]).mean()) < 5.5 / np.sqrt(z[1:].size)


def test_coins_at_the_edges() -> None:
    bits = Bits.secret()
    assert bits.bernoulli(3, 1.0).tolist() == [0, 1, 2]
    assert bits.bernoulli(0, 0.5).tolist() == []
    assert bits.bernoulli(100, 1e-300).tolist() == []
    assert bits.bernoulli(10_000, math.nextafter(1.0, 0.0)).size == 10_000
    assert bits.bernoulli(200_000, 0.5).max() >= 65_536  # beyond one chunk


def test_a_cohort_of_a_fixed_size_is_uniform() -> None:
    """Each of 20 units equally often in 5 of 20, by χ² with a finite-population correction."""
    taken = np.zeros(20)
    bits = Bits.named(3)
    for _ in range(8000):
        ids = FixedSize(5).draw(bits, 20)
        assert len(ids) == len(set(ids.tolist())) == 5
        taken[ids] += 1
    expected = 8000 * 0.25
    chi2 = (((taken - expected) ** 2) / (expected * 0.75)).sum() * 19 / 20
    assert stats.chi2.sf(chi2, 19) > ALARM
    assert FixedSize(7).draw(bits, 7).tolist() == list(range(7))
