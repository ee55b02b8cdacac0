"""Noise and coins, by statistics. Each test's false-alarm rate is at most 1e-6 unless it says otherwise."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from tacit.privacy import Clip, FixedSize, Noise, OsNoise, Poisson, Privacy, SeededNoise, secret_rng
from tacit.privacy.noise import _STRETCH, _state

ALARM = 1e-6
SOURCES = [OsNoise(), SeededNoise(7)]


def sample(source: Noise, size: int, std: float = 1.0) -> np.ndarray:
    vector = torch.zeros(size)
    source.add_(vector, std)
    return vector.numpy().astype(np.float64)


def test_the_whole_state_of_the_generator_is_set() -> None:
    """torch's uniforms after `_state` are those of NumPy's Mersenne Twister with the same 624 words."""
    words = np.random.SeedSequence(1).generate_state(624).astype(np.uint32)
    generator = torch.Generator()
    torch.empty(3).normal_(generator=generator)  # leaves a cached normal behind, which must be gone
    generator.set_state(_state(words))
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    expected = (twister.random_raw(2000) & 0xFFFFFF) / 2**24
    np.testing.assert_array_equal(torch.empty(2000).uniform_(generator=generator).numpy(), expected)


@pytest.mark.parametrize("source", SOURCES, ids=["os", "seeded"])
@pytest.mark.parametrize("size", [1, 15, 16, 1000, _STRETCH, _STRETCH + 7])
def test_moments_and_shape(source: Noise, size: int) -> None:
    """Mean and variance by normal and χ² tests, the shape by Kolmogorov–Smirnov, for all vector lengths."""
    repeats = max(1, 200_000 // size) if size < 1000 else 5
    repeats = min(repeats, 4000)
    values = np.concatenate([sample(source, size, std=3.0) for _ in range(repeats)])
    n = len(values)
    assert abs(values.mean()) < stats.norm.isf(ALARM / 2) * 3.0 / math.sqrt(n)
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], n)
    assert low < (values**2).sum() / 9.0 < high
    assert stats.kstest(values / 3.0, "norm").pvalue > ALARM


@pytest.mark.parametrize("source", SOURCES, ids=["os", "seeded"])
def test_rounds_coordinates_and_stretches_are_independent(source: Noise) -> None:
    """Correlations between two calls, between neighbours, and between the stretches of one call."""
    first, second = sample(source, 4 * _STRETCH), sample(source, 4 * _STRETCH)
    stretches = first.reshape(4, _STRETCH)
    pairs = [(first, second), (first[1:], first[:-1]), (first[2:], first[:-2])]
    pairs += [(stretches[i], stretches[j]) for i in range(4) for j in range(i)]
    for a, b in pairs:
        z = (a * b).sum() / math.sqrt(len(a))  # standard normal for independent normals
        assert abs(z) < stats.norm.isf(ALARM / 2 / len(pairs))
        assert not (a == b).all()


def test_seeded_noise_repeats_and_secret_noise_does_not() -> None:
    assert (sample(SeededNoise(1, 2), 100) == sample(SeededNoise(1, 2), 100)).all()
    assert (sample(SeededNoise(1, 2), 100) != sample(SeededNoise(1, 3), 100)).any()
    source = SeededNoise(1, 2)
    assert (sample(source, 100) != sample(source, 100)).any()
    assert (sample(OsNoise(), 100) != sample(OsNoise(), 100)).any()


def test_secret_noise_ignores_every_seed() -> None:
    def drawn() -> np.ndarray:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 (the point is that it does not matter)
        return sample(OsNoise(), 50)

    assert (drawn() != drawn()).any()
    assert secret_rng().integers(2**62) != secret_rng().integers(2**62)


def test_noise_is_refused_where_it_would_be_rounded_away() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(TypeError, match="float32"):
            OsNoise().add_(torch.zeros(3, dtype=dtype), 1.0)


# --- coins ------------------------------------------------------------------------------------------------


def draws(sampling: Poisson | FixedSize, population: int, rounds: int) -> np.ndarray:
    taken = np.zeros((rounds, population), dtype=bool)
    for row in taken:
        ids = sampling.draw(secret_rng(), population)
        assert ids.dtype == np.int64 and (np.diff(ids) > 0).all()
        row[ids] = True
    return taken


def test_poisson_inclusion_rates_and_independence() -> None:
    """Each client's rate (χ² over clients), the cohort's size (exactly binomial), and pairs of clients."""
    rate, population, rounds = 0.3, 20, 6000
    taken = draws(Poisson(rate), population, rounds)
    expected = rounds * rate
    chi2 = (((taken.sum(0) - expected) ** 2) / (expected * (1 - rate))).sum()
    assert stats.chi2.sf(chi2, population) > ALARM and stats.chi2.cdf(chi2, population) > ALARM
    sizes = np.bincount(taken.sum(1), minlength=population + 1)
    law = stats.binom.pmf(np.arange(population + 1), population, rate) * rounds
    common = law > 5
    observed = np.append(sizes[common], sizes[~common].sum())
    assert stats.chisquare(observed, np.append(law[common], law[~common].sum())).pvalue > ALARM
    centred = (taken - rate) / math.sqrt(rate * (1 - rate))
    z = (centred.T @ centred / math.sqrt(rounds))[np.triu_indices(population, 1)]
    assert np.abs(z).max() < stats.norm.isf(ALARM / 2 / len(z))
    across = (centred[1:] * centred[:-1]).sum(0) / math.sqrt(rounds - 1)
    assert np.abs(across).max() < stats.norm.isf(ALARM / 2 / population)


def test_poisson_draws_can_be_empty_or_everyone() -> None:
    assert Poisson(1.0).draw(secret_rng(), 5).tolist() == [0, 1, 2, 3, 4]
    assert any(Poisson(0.01).draw(secret_rng(), 5).size == 0 for _ in range(20))  # misses with (0.05)^20


def test_fixed_size_is_uniform() -> None:
    taken = draws(FixedSize(5), 20, 4000)
    assert (taken.sum(1) == 5).all()
    expected = 4000 * 5 / 20
    # Without replacement the counts of 20 clients vary as 19 independent ones.
    chi2 = (((taken.sum(0) - expected) ** 2) / (expected * 0.75)).sum() * 19 / 20
    assert stats.chi2.sf(chi2, 19) > ALARM


def test_a_cohort_out_of_ten_million_costs_the_cohort() -> None:
    ids = Poisson(1e-4).draw(np.random.default_rng(0), 10_000_000)
    assert 800 < ids.size < 1200 and ids.nbytes < 10_000


# --- releases ---------------------------------------------------------------------------------------------


def client_level(**changes: object) -> Privacy:
    settings: dict[str, object] = {
        "unit": "client", "noise": 2.0, "delta": 1e-5, "clip": Clip(0.5), "sampling": Poisson(0.1)
    }  # fmt: skip
    return Privacy(**settings | changes)  # type: ignore[arg-type]


def within(values: np.ndarray, std: float) -> bool:
    """Whether zero-mean values have this standard deviation, by χ²."""
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], len(values))
    return bool(low < (values**2).sum() / std**2 < high)


def test_a_release_adds_sigma_c_and_divides_by_the_expected_cohort() -> None:
    """Also for an empty cohort; and never by the number of clients that were drawn."""
    total = {"delta": torch.zeros(50_000), "c": torch.full((50_000,), 30.0)}
    mean = client_level().release(total, OsNoise(), population=300)
    assert within(mean["delta"].numpy(), 2.0 * 0.5 / 30)
    assert within(mean["c"].numpy() - 1.0, 2.0 * 0.5 / 30)


def test_noise_follows_the_bound_in_force() -> None:
    mean = client_level().release({"delta": torch.zeros(50_000)}, OsNoise(), 10, bound=0.01)
    assert within(mean["delta"].numpy(), 2.0 * 0.01 / 1.0)


@pytest.mark.parametrize(("drawn", "arrived"), [(8, 8), (8, 5), (8, 0), (1, 1), (0, 0), (30, 29)])
def test_shares_and_top_up_add_up_to_the_announced_noise(drawn: int, arrived: int) -> None:
    """Whatever cohort was drawn and whoever dropped out, the release carries σC: no less, no more."""
    privacy = client_level(noise_at="clients")
    total = {"delta": torch.zeros(40_000)}
    for _ in range(arrived):
        upload = {"delta": torch.zeros(40_000)}
        privacy.share_(upload, OsNoise(), drawn)
        total["delta"] += upload["delta"]
    mean = privacy.release(total, OsNoise(), population=10, drawn=drawn, arrived=arrived)
    assert within(mean["delta"].numpy(), 2.0 * 0.5 / 1.0)


def test_the_private_gradient_divides_by_the_expected_batch() -> None:
    """g̃ = (1/B)[Σ clip(g_j) + N(0, σ²C²)]: one C in the noise, and B whatever batch was drawn."""
    privacy = client_level(unit="example")
    gradient = privacy.privatize_(torch.full((50_000,), 8.0), OsNoise(), batch=16)
    assert within(gradient.numpy() - 0.5, 2.0 * 0.5 / 16)
