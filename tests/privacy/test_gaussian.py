"""Noise and coins, by statistics and by proof. False alarms: 1e-6 a test, unless it says otherwise."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from tacit.errors import UserError
from tacit.privacy import Bits, FixedSize, Poisson
from tacit.privacy import gaussian as gaussian_room
from tacit.privacy.gaussian import LARGEST_STD, STRETCH, TOLERANCE, add_rounded_gaussian_, rounded_gaussian

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


def test_the_tails_have_no_end() -> None:
    """By importance: force the magnitude's first bits, and look whether the rest follows the conditional law.

    A magnitude whose 63 bits all but the last j are ones lies beyond t with P(|Z| > t) = 2^-(63 − j). What
    follows must have the normal's conditional distribution there; the float32 noise of before ended at 5.8
    σ.
    """
    std = 1000.0
    for j in (0, 10, 30, 50):
        beyond = float(-stats.norm.ppf(2.0 ** -(64 - j)))
        draws = []
        for seed in range(400):
            low = int(Bits.named(j, seed).words(1)[0]) % 2**j if j else 0
            word = (2**63 - 1) - low
            draws.append(rounded_gaussian(1, std, Script([word], Bits.named(99, seed)))[0] / std)
        values = np.array(draws)
        assert values.min() >= beyond - 1 / std
        share = 2 * stats.norm.sf(values) / 2.0 ** -(63 - j)  # uniform, if the law is right
        assert stats.kstest(share, "uniform").pvalue > ALARM
    assert beyond > 3.7


def test_a_release_reaches_beyond_six_deviations() -> None:
    word = 2**63 - 1 - 5  # six of 2⁶³: |Z| ≈ 8.9
    assert abs(rounded_gaussian(1, 1e6, Script([word], Bits.named(1)))[0]) > 8.5e6


def test_every_draw_is_the_inverse_of_its_bits() -> None:
    """Against mpmath: round(σ·Φ⁻¹) of the very bits that were used, also next to a rounding boundary."""
    rng = np.random.default_rng(0)
    for std in (1.0, 1000.3, 2.0**20, 2.0**30):
        words = [int(w) for w in rng.integers(0, 2**63, 60)] + [1, 2**40, 2**62, 2**63 - 2**56, 2**63 - 2**42]
        with mpmath.workprec(200):
            for m in (0, 1, int(0.7 * std), int(2.2 * std)):  # the nearest words to the boundary m + ½
                v = mpmath.erf((m + mpmath.mpf(0.5)) / std / mpmath.sqrt(2))
                words += [int(v * 2**63) + step for step in (-1, 0, 1) if 0 <= int(v * 2**63) + step < 2**63]
            for word in words:
                more = 2**63 + 12345  # the bits that follow, if they are needed
                found = rounded_gaussian(1, std, Script([word, more, more, more], Bits.named(3)))[0]
                v = (mpmath.mpf(word) + mpmath.mpf(more) / 2**64 + mpmath.mpf(more) / 2**128) / 2**63
                exact = std * mpmath.sqrt(2) * mpmath.erfinv(v)
                assert int(found) == int(mpmath.floor(exact + mpmath.mpf(0.5))), (std, word)
                negative = rounded_gaussian(1, std, Script([word + 2**63, more, more, more], Bits.named(3)))[
                    0
                ]
                assert negative == -found


def test_float64_errs_a_thousand_times_less_than_is_assumed() -> None:
    rng = np.random.default_rng(1)
    v = np.concatenate(
        [rng.random(1500), 1 - 2.0**-6 - rng.random(300) * 1e-9, 10.0 ** -rng.uniform(0, 12, 300)]
    )
    v = v[v < 1 - 2.0**-6]
    p = 2.0 ** -rng.uniform(7, 64, 1500)
    z = (torch.erfinv(torch.from_numpy(v)) * math.sqrt(2.0)).numpy()
    tails = -torch.special.ndtri(torch.from_numpy(p)).numpy()
    worst = 0.0
    with mpmath.workprec(160):
        for given, found in zip(v, z, strict=True):
            exact = mpmath.sqrt(2) * mpmath.erfinv(mpmath.mpf(float(given)))
            worst = max(worst, float(abs(exact - float(found)) / max(1, exact)))
        for given, found in zip(p, tails, strict=True):
            exact = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(float(given)))
            worst = max(worst, float(abs(exact - float(found)) / max(1, exact)))
    assert worst < TOLERANCE / 200  # 900 on most machines; another build may have another last digit


def test_a_build_with_a_wrong_inverse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gaussian_room._check_functions.cache_clear()
    real = torch.erfinv
    monkeypatch.setattr(torch, "erfinv", lambda v: real(v) * (1 + 1e-12))
    with pytest.raises(UserError, match="install another build"):
        sample(Bits.secret(), 5, 1.0)
    monkeypatch.undo()
    gaussian_room._check_functions.cache_clear()
    sample(Bits.secret(), 5, 1.0)


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
    assert bits.coins(3, 1.0).tolist() == [0, 1, 2]
    assert bits.coins(0, 0.5).tolist() == []
    assert bits.coins(100, 1e-300).tolist() == []
    assert bits.coins(10_000, math.nextafter(1.0, 0.0)).size == 10_000
    assert bits.coins(200_000, 0.5).max() >= 65_536  # beyond one chunk


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
