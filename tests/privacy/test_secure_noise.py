"""Noise in integer shares: the theorem by brute force, sizes, top-ups, and two numbers in the statement."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import erfc, roots_legendre
from torch import nn

from tacit.errors import UserError
from tacit.privacy import (
    Arrivals,
    Bits,
    Clip,
    FixedSize,
    FixedSizeGaussian,
    Poisson,
    PoissonGaussian,
    SecureSum,
    Workload,
    epsilon,
    make_statement,
)
from tacit.privacy.gaussian import rounded_gaussian
from tacit.privacy.metrics import Metrics
from tacit.privacy.rounding import rounded_up
from tacit.privacy.shares import LEAST_SHARE, lengthened, log_ratio
from tacit.vector import Layout

LAYOUT = Layout.of(nn.Linear(3, 2))
SETTINGS: dict[str, Any] = {"noise": 1.0, "delta": 1e-5, "clip": Clip(0.5), "sampling": Poisson(0.1)}
REACH = 60


def secure(**changes: Any) -> SecureSum:
    return SecureSum(**SETTINGS | changes)


# --- the theorem ----------------------------------------------------------------------------------------


def rounded_pmf(std: float) -> np.ndarray:
    """P(⌊σZ + ½⌋ = k) for |k| ≤ REACH, to a relative 10⁻¹², tails included."""
    k = np.abs(np.arange(-REACH, REACH + 1))
    tail = lambda x: erfc(x / (std * math.sqrt(2))) / 2  # noqa: E731
    return np.where(k == 0, 1 - 2 * tail(0.5), tail(k - 0.5) - tail(k + 0.5))


def summed_pmf(*stds: float) -> np.ndarray:
    total = np.ones(1)
    for std in stds:
        total = np.convolve(total, rounded_pmf(std))
    middle = len(total) // 2
    return total[middle - REACH : middle + REACH + 1]


def smooth_density(*stds: float) -> np.ndarray:
    """Density of N(0, Σs²) + U₁ + … + U_m at whole numbers, by Gauss and Legendre in m dimensions."""
    points, weights = roots_legendre(8)
    offsets, mass = np.zeros(1), np.ones(1)
    for _ in stds:
        offsets = (offsets[:, None] + points / 2).ravel()
        mass = (mass[:, None] * weights / 2).ravel()
    std = math.hypot(*stds)
    return np.array([mass @ stats.norm.pdf(k + offsets, scale=std) for k in range(-REACH, REACH + 1)])


@pytest.mark.parametrize(
    "stds", [(0.6, 0.6), (0.7, 0.7, 0.7), (0.8, 0.8, 0.8, 0.8), (0.7, 1.1), (1.2, 0.9, 2.0)]
)
def test_a_sum_of_rounded_gaussians_has_the_probabilities_of_the_theorem(stds: tuple[float, ...]) -> None:
    """Every probability out to seven standard deviations, where an additive error would be everything."""
    near = slice(REACH - int(7 * math.hypot(*stds)), REACH + int(7 * math.hypot(*stds)) + 1)
    found = np.log(summed_pmf(*stds)[near] / smooth_density(*stds)[near])
    bound = log_ratio(min(stds), len(stds), 1)
    assert np.abs(found).max() <= bound + 1e-9
    if len(set(stds)) == 1:
        assert np.abs(found).max() > bound / 100  # the bound is of the right kind


def test_the_theorem_is_exact_to_the_last_digit_for_shares_of_several_units() -> None:
    near = slice(REACH - 40, REACH + 41)
    found = np.log(summed_pmf(3.0, 3.0)[near] / smooth_density(3.0, 3.0)[near])
    assert np.abs(found).max() < 1e-9
    assert log_ratio(3.0, 2, 1) < 1e-37 and log_ratio(LEAST_SHARE, 10**6, 10**12) == 0.0


def hockey_stick(p: np.ndarray, q: np.ndarray, eps: float) -> float:
    return float(np.maximum(p - math.exp(eps) * q, 0).sum())


def gaussian_delta(mu: float, eps: float) -> float:
    """δ(ε) of the Gaussian mechanism with sensitivity ÷ noise = μ (Balle and Wang 2018)."""
    return float(stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu))


@pytest.mark.parametrize("shares", [1, 2, 4, 9])
@pytest.mark.parametrize("moved", [1, 3])
def test_the_divergence_of_sums_is_at_most_the_gaussian_mechanisms(shares: int, moved: int) -> None:
    """Brute force: the exact distribution of a sum, and of the sum moved by one client's contribution."""
    std, slack = 0.9, log_ratio(0.9, shares, 1)
    noise = summed_pmf(*[std] * shares)
    for eps in (0.1, 0.5, 1.0, 2.0):
        found = hockey_stick(np.roll(noise, moved), noise, eps)
        mu = moved / (std * math.sqrt(shares))
        assert found <= math.exp(slack) * gaussian_delta(mu, max(eps - 2 * slack, 0)) + 1e-12
        if gaussian_delta(mu, eps) > 1e-4:
            assert found > gaussian_delta(mu, eps) / 3  # and nearly that much
        if shares > 1:  # one client's own share would not do
            assert found < hockey_stick(np.roll(rounded_pmf(std), moved), rounded_pmf(std), eps) / 1.05


@pytest.mark.parametrize("drawn", [1, 2, 5])
def test_whether_somebody_was_drawn_shows_no_more_than_the_lengthened_contribution(drawn: int) -> None:
    """Poisson cohorts: with one client more there is one share more, each a little smaller. The mixture's
    divergence is at most that of the sampled Gaussian mechanism with contribution |x| + ½, both ways.
    """
    rate, moved, std = 0.3, 3, 3.0
    without = summed_pmf(*[std / math.sqrt(drawn)] * drawn)
    joined = np.roll(summed_pmf(*[std / math.sqrt(drawn + 1)] * (drawn + 1)), moved)
    mixed = (1 - rate) * without + rate * joined
    at = np.linspace(-40, 40, 400_001)
    step = at[1] - at[0]
    base = stats.norm.pdf(at, scale=std) * step
    ideal = (1 - rate) * base + rate * stats.norm.pdf(at - moved - 0.5, scale=std) * step
    slack = log_ratio(std / math.sqrt(drawn + 1), drawn + 1, 1)
    for eps in (0.05, 0.2, 0.5, 1.0):
        room = 1e-6 + 4 * slack
        assert hockey_stick(mixed, without, eps) <= hockey_stick(ideal, base, eps - 2 * slack) + room
        assert hockey_stick(without, mixed, eps) <= hockey_stick(base, ideal, eps - 2 * slack) + room


def test_lengthened_is_radius_and_half_a_root_of_the_dimension() -> None:
    for d in [*range(1, 3000), 10**6, 10**9, 10**12 + 1]:
        assert math.sqrt(d) / 2 <= lengthened(7, d) - 7 <= math.sqrt(d) / 2 + 1


def test_the_shares_that_are_drawn_sum_to_the_theorems_distribution() -> None:
    """The sampler itself, with shares of 1.5 units. χ², false alarm 10⁻⁶."""
    draws = sum(rounded_gaussian(200_000, 1.5, Bits.named(3, share)) for share in range(4))
    expected = summed_pmf(*[1.5] * 4)
    inside = slice(REACH - 11, REACH + 12)
    counts = np.bincount(draws + REACH, minlength=2 * REACH + 1)
    observed = np.append(counts[inside], counts.sum() - counts[inside].sum())
    wanted = np.append(expected[inside], 1 - expected[inside].sum()) * counts.sum()
    assert stats.chisquare(observed, wanted).pvalue > 1e-6


# --- the mechanism --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"threshold": 0.5, "colluding": 0.0}, "threshold above 0.5"),
        ({"threshold": 0.6, "colluding": 0.2}, "less colluding"),
        ({"threshold": 1.2}, "shares of a cohort"),
        ({"colluding": -0.1}, "shares of a cohort"),
        ({"colluding": math.nan}, "shares of a cohort"),
        ({"noise_at": "clients"}, "leave it out"),
        ({"metrics": Metrics()}, "leave them out"),
        ({"noise": 0.0, "clip": Clip(math.inf)}, "set a clip"),
    ],
)
def test_what_is_not_sound_cannot_be_built(changes: dict[str, Any], fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        secure(**changes)


@pytest.mark.parametrize("drawn", [1, 2, 3, 7, 10, 100, 999])
@pytest.mark.parametrize(("threshold", "colluding"), [(2 / 3, 0.1), (0.51, 0.0), (0.9, 0.75), (1.0, 0.9)])
def test_thresholds_fit_the_protocol_and_the_noise_fits_the_threshold(
    drawn: int, threshold: float, colluding: float
) -> None:
    mechanism = secure(threshold=threshold, colluding=colluding)
    t, c = mechanism.threshold_of(drawn), mechanism.colluding_of(drawn)
    assert 2 * t > drawn + c and threshold * drawn <= t <= drawn and c <= colluding * drawn
    bounding = mechanism.bounding({}, {"delta": 400}, LAYOUT, drawn)
    assert bounding.grid is not None
    # t shares carry z × (2ᵇ + √d/2), and those of t − c honest clients what is claimed against the server.
    needed = mechanism.noise * (bounding.grid.radius + 10)
    assert bounding.share * math.sqrt(t) >= needed * (1 - 1e-12)
    assert bounding.share * math.sqrt(t - c) >= needed * mechanism.seen_noise * (1 - 1e-12)


def test_too_small_shares_are_refused() -> None:
    with pytest.raises(UserError, match="too little to be added"):
        secure(noise=1e-4).bounding({}, {"delta": 8}, LAYOUT, 1000)


@pytest.mark.parametrize(("drawn", "missing"), [(0, 0), (1, 0), (6, 0), (6, 2), (9, 3)])
def test_what_is_published_has_the_same_noise_whoever_came(drawn: int, missing: int) -> None:
    """z·C ÷ √τ ÷ expected cohort, to 5 standard errors (false alarm 6·10⁻⁷)."""
    mechanism = secure(noise=2.0, threshold=0.6, colluding=0.1, entropy="seed")
    sizes, count = {"delta": 60_000}, 60_000
    bounding = mechanism.bounding({}, sizes, LAYOUT, drawn)
    total = {"delta": torch.zeros(count, dtype=torch.int64)}
    for n in range(drawn - missing):
        bounding.add_({"delta": torch.zeros(count)}, total, Bits.named(5, n))
    arrivals = Arrivals(drawn=drawn, arrived=drawn - missing, missing=missing)
    mean, _ = mechanism.release(total, arrivals, {}, 0, 0, Workload(population=100))
    measured = mean["delta"].double().std().item() * 10
    slack = lengthened(2**20, count) / 2**20
    assert abs(measured / (2.0 * 0.5 / math.sqrt(0.6) * slack) - 1) < 5 / math.sqrt(2 * count) + 1e-3


def for_everybody(threshold: float, colluding: float) -> SecureSum:
    """Noise 2 on cohorts of all there are."""
    shares = {"threshold": threshold, "colluding": colluding}
    return secure(noise=2.0, sampling=Poisson(1.0), entropy="seed", **shares)


def left_over(mechanism: SecureSum, drawn: int, silent: int = 0, known: int = 0) -> float:
    """The multiplier of the noise on a published sum if some make none, for who knows some of the shares."""
    count = 200_000
    bounding = mechanism.bounding({}, {"delta": count}, LAYOUT, drawn)
    assert bounding.grid is not None
    shares = [torch.zeros(count, dtype=torch.int64) for _ in range(drawn)]
    for n, share in enumerate(shares[silent:]):
        bounding.add_({"delta": torch.zeros(count)}, {"delta": share}, Bits.named(7, n))
    arrivals = Arrivals(drawn=drawn, arrived=drawn, missing=0)
    everybody = Workload(population=drawn)
    mean, _ = mechanism.release(
        {"delta": sum(shares, torch.zeros_like(shares[0]))}, arrivals, {}, 0, 0, everybody
    )
    rest = mean["delta"].double() * mechanism.expected(drawn) / mechanism.clip.bound
    for share in shares[drawn - known :]:
        rest -= share.double() * bounding.grid.unit / mechanism.clip.bound
    return float(rest.std())


@pytest.mark.parametrize(("threshold", "colluding"), [(2 / 3, 0.1), (0.9, 0.3), (1.0, 0.3), (1.0, 0.0)])
def test_the_models_have_the_noise_that_is_charged_though_colluders_make_none(
    threshold: float, colluding: float
) -> None:
    """To 6 standard errors (false alarm 10⁻⁹)."""
    mechanism = for_everybody(threshold, colluding)
    event = mechanism.charge(0, np.arange(10), Workload(population=10)).parts[0].event
    assert isinstance(event, PoissonGaussian)
    seen = left_over(mechanism, 10, silent=mechanism.colluding_of(10))
    assert seen >= event.noise * (1 - 6 / math.sqrt(2 * 200_000))
    (planned,) = mechanism.planned(Workload(population=10), 3, 2.0)
    assert planned == {event: 3}, "noise is calibrated by the same number"


@pytest.mark.parametrize(("threshold", "colluding"), [(2 / 3, 0.1), (0.75, 0.0), (0.9, 0.1), (0.6, 0.1)])
def test_a_client_that_knows_its_own_share_leaves_the_others_what_is_charged(
    threshold: float, colluding: float
) -> None:
    mechanism = for_everybody(threshold, colluding)
    for charged in (mechanism.published(2.0), mechanism.seen_noise):
        least = mechanism.least_members(charged)
        assert least is not None
        assert left_over(mechanism, least, known=1) >= charged * (1 - 6 / math.sqrt(2 * 200_000))
        if least > 2:
            assert left_over(mechanism, least - 1, known=1) < charged, "no smaller one would do"
    least = mechanism.least_members(mechanism.published(2.0))
    told = mechanism.describe(10, 1.0, {}).not_covered
    assert any(f"of fewer than {least}, which knows the noise that it made itself" in line for line in told)
    assert secure(threshold=1.0, colluding=0.0).least_members(1.0) is None, "a share is always missing"


ALLOWED = [
    (threshold, colluding)
    for threshold in (0.51, 0.6, 2 / 3, 0.75, 0.9, 0.95, 1.0)
    for colluding in (0.0, 0.05, 0.1, 0.3, 0.75, 0.9)
    if 2 * threshold > 1 + colluding
]


@pytest.mark.parametrize(("threshold", "colluding"), ALLOWED)
def test_no_setting_is_charged_for_more_noise_than_is_left(threshold: float, colluding: float) -> None:
    """Colluders make none, or one client, a colluder if there are any, knows its own: in every cohort."""
    mechanism = for_everybody(threshold, colluding)
    least = mechanism.least_members(mechanism.seen_noise)
    for drawn in (2, 3, 4, 5, 7, 10, 11, 19, 20, 50, 128):
        known = mechanism.colluding_of(drawn)
        assert 2.0 * math.sqrt((drawn - known) / (threshold * drawn)) >= mechanism.published(2.0) * (1 - 1e-9)
        if least is not None and drawn >= least:
            left = 2.0 * math.sqrt((drawn - max(1, known)) / (threshold * drawn))
            assert left >= mechanism.seen_noise * (1 - 1e-9)


def test_a_client_with_nothing_of_use_still_makes_its_share_of_the_noise() -> None:
    bounding = secure().bounding({}, {"delta": 5000}, LAYOUT, 4)
    into = {"delta": torch.zeros(5000, dtype=torch.int64)}
    upload = {"delta": torch.full((5000,), math.inf)}
    assert bounding.add_(upload, into, Bits.named(1)) == math.inf
    assert abs(into["delta"].double().std().item() / bounding.share - 1) < 0.06


def test_outsiders_are_charged_with_sampling_and_the_server_without() -> None:
    mechanism, crowd = secure(colluding=0.2), Workload(population=100)
    cohort = np.array([3, 8])
    assert mechanism.charge(4, cohort, crowd).parts[0].event == PoissonGaussian(0.1, 1.0)
    (part,) = mechanism.seen_by_server(4, cohort).parts
    assert part.event == PoissonGaussian(1.0, math.sqrt(1 - 0.2 * 3 / 2)) and part.clients == (3, 8)
    fixed = secure(sampling=FixedSize(10))
    assert fixed.charge(0, cohort, crowd).parts[0].event == FixedSizeGaussian(10, 100, 1.0)
    assert fixed.seen_by_server(0, cohort).parts[0].event.relation == "add-remove"
    assert mechanism.seen_header("data").costliest.event.dominates(part.event)


def test_the_statement_has_two_numbers() -> None:
    mechanism, crowd = secure(noise=2.0), Workload(population=100)
    cohorts = [np.array([1, 2]), np.array([2, 5]), np.array([2]), np.array([9])]
    charges = [mechanism.charge(n, cohort, crowd) for n, cohort in enumerate(cohorts)]
    seen = [mechanism.seen_by_server(n, cohort) for n, cohort in enumerate(cohorts)]
    statement = make_statement(mechanism, charges, 100, seen=seen)
    outside, server = statement.observers
    assert outside.epsilon == statement.epsilon == epsilon({PoissonGaussian(0.1, 2.0): 4}, 1e-5).value
    three = epsilon({PoissonGaussian(1.0, 2.0 * math.sqrt(1 - 0.15)): 3}, 1e-5).value  # client 2
    assert server.epsilon == pytest.approx(three) and server.epsilon > 2 * statement.epsilon
    assert "the server, with up to 10% of each cohort: ε =" in statement.text()
    # The first number is not sold as protection from the server.
    held = statement.summary().split("It holds against ")[1]
    assert held.startswith("whoever sees every released model, but not who took part; against the server")
    assert f"ε = {rounded_up(server.epsilon)}" in held
    silent = make_statement(mechanism, charges, 100)  # without the second ledger nothing is claimed
    assert silent.observers[1].epsilon is None and "must be trusted" in silent.summary()
