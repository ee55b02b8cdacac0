"""Correlated noise as a mechanism: who takes part, what is charged, what is released and stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tacit.errors import UserError
from tacit.privacy import (
    Arrivals,
    BandedNoise,
    BltNoise,
    Clip,
    FixedSize,
    MatrixRow,
    Poisson,
    PoissonGaussian,
    Workload,
    epsilon,
    make_statement,
    replay,
)
from tacit.privacy.fleets import compare_mechanisms
from tacit.privacy.matrices import Banded, dense, row_squares
from tacit.privacy.mechanisms.correlated import MATRIX, Correlated
from tacit.vector import Layout

FLEET = Workload(population=100, seed=7)
LAYOUT = Layout.of(nn.Linear(3, 2))
SHARED: dict[str, Any] = {"noise": 4.0, "delta": 1e-5, "clip": Clip(0.5), "rounds": 30}


def blt(**changes: Any) -> BltNoise:
    return BltNoise(**SHARED | {"sampling": FixedSize(10)} | changes)


def banded(**changes: Any) -> BandedNoise:
    return BandedNoise(**SHARED | {"sampling": FixedSize(10)} | changes)


def amplified(**changes: Any) -> BandedNoise:
    return BandedNoise(**SHARED | {"sampling": Poisson(0.02), "bands": 5} | changes)


def played(mechanism: Correlated, rounds: int, width: int = 2000) -> torch.Tensor:
    """Releases of rounds in which nobody sends anything, in units of clip ÷ expected cohort: noise alone."""
    state, out = mechanism.init(), []
    for number in range(rounds):
        total = {"delta": torch.zeros(width, dtype=torch.int64)}
        mean, state = mechanism.release(total, Arrivals(0, 0), state, number, 0, FLEET)
        out.append(mean["delta"].double() * mechanism.expected(FLEET.population) / mechanism.clip.bound)
    return torch.stack(out)


# --- who takes part --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", [blt(), banded(), banded(bands=4), amplified()])
def test_participations_are_as_far_apart_as_is_charged(mechanism: Correlated) -> None:
    turns: dict[int, list[int]] = {}
    for number in range(30):
        for who in mechanism.sample(number, 0, FLEET):
            turns.setdefault(int(who), []).append(number)
    apart = mechanism.separation(FLEET.population)
    assert all(b - a >= apart for rounds in turns.values() for a, b in itertools.pairwise(rounds))
    if not isinstance(mechanism.sampling, Poisson):
        assert sorted(turns) == list(range(100)), "everyone has a turn"
        # Played again, the round takes the same clients: no other separation, whatever the attempt.
        assert mechanism.sample(3, 0, FLEET).tolist() == mechanism.sample(3, 5, FLEET).tolist()


def test_uneven_fleets_have_a_constant_divisor() -> None:
    assert blt(sampling=FixedSize(30)).separation(100) == 3
    sizes = [len(blt(sampling=FixedSize(30)).sample(t, 0, FLEET)) for t in range(3)]
    assert sorted(sizes) == [33, 33, 34]
    assert blt(sampling=FixedSize(30)).expected(100) == pytest.approx(100 / 3)


def test_poisson_cohorts_come_from_the_rounds_group() -> None:
    mechanism = amplified()
    rng = [mechanism.sample(0, 0, FLEET).size for _ in range(3000)]
    assert np.mean(rng) == pytest.approx(2.0, abs=5 * math.sqrt(1.8 / 3000))
    group = set(mechanism.group(0, FLEET).tolist())
    assert len(group) == 20
    assert all(set(mechanism.sample(0, 0, FLEET).tolist()) <= group for _ in range(50))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: banded(bands=0), r"privacy\.mechanism\.bands 0: choose at least 1"),
        (lambda: amplified(bands=None), r"privacy\.mechanism\.bands: with Poisson cohorts give the number"),
        (lambda: amplified(bands=60), r"privacy\.mechanism\.bands 60: .* lower it to 50"),
        (lambda: blt(buffers=7), r"privacy\.mechanism\.buffers 7: choose 1 to 6"),
    ],
)
def test_what_cannot_be_is_told_by_its_key(make: Callable[[], Correlated], said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}"):
        make()


# --- what is charged -------------------------------------------------------------------------------------


def total(mechanism: Correlated, attempts: list[tuple[int, int]]) -> dict[Any, int]:
    charges = [mechanism.charge(r, mechanism.sample(r, a, FLEET), FLEET, a) for r, a in attempts]
    return dict(replay(charges).worst(mechanism.delta).profile)


@pytest.mark.parametrize("mechanism", [blt(), banded()])
def test_charges_add_up_to_one_gaussian_of_the_prefix(mechanism: Correlated) -> None:
    """After t rounds ε is that of Cx + z restricted to t rows, by both accountants, and as it was planned."""
    squares = row_squares(mechanism.matrix(100), 30, 10)
    for rounds in (1, 11, 30):
        spent = epsilon(total(mechanism, [(r, 0) for r in range(rounds)]), 1e-5)
        exact = epsilon({PoissonGaussian(1.0, 4.0 / math.sqrt(squares[:rounds].sum())): 1}, 1e-5)
        planned = epsilon(mechanism.planned(FLEET, rounds, 4.0)[0], 1e-5)
        assert spent.pld == pytest.approx(exact.pld, rel=1e-6) == planned.pld
        assert spent.rdp == pytest.approx(exact.rdp, rel=1e-6)
        assert spent.value >= exact.value * (1 - 1e-9)


@pytest.mark.parametrize("mechanism", [blt(), banded(), banded(bands=20)])
def test_a_torn_round_is_charged_for_whatever_pattern(mechanism: Correlated) -> None:
    """Brute force over patterns: rows of the whole sequence, and the torn ones again."""
    c = dense(mechanism.matrix(100).coefficients(30), 30)
    for torn in ([4], [10, 11, 12], [29], [0, 10, 20]):
        charged = sum(
            e.square * n
            for e, n in total(mechanism, [*((r, 0) for r in range(30)), *((r, 1) for r in torn)]).items()
        )
        for first in range(10):
            rows = c[:, first::10].sum(axis=1)
            assert np.square(rows).sum() + np.square(rows[torn]).sum() <= charged


def test_amplified_rounds_are_charged_by_the_turn() -> None:
    mechanism = amplified()
    column = np.array(Banded.square_root(5).column)
    turn = PoissonGaussian(0.1, 4.0 / (np.linalg.norm(column) * (1 + 1e-12)))
    assert total(mechanism, [(r, 0) for r in range(11)]) == {turn: 3}
    assert mechanism.planned(FLEET, 11, 4.0) == [{turn: 3}]
    again = total(mechanism, [(0, 0), (0, 1), (1, 1)])
    assert again == {turn: 1, PoissonGaussian(1.0, turn.noise): 2}
    assert mechanism.costliest(FLEET).event.dominates(turn)


def test_more_rounds_than_the_matrix_was_made_for_are_refused() -> None:
    with pytest.raises(UserError, match="30 rounds"):
        blt().charge(30, np.arange(3), FLEET)


@pytest.mark.parametrize("make", [blt, banded, pytest.param(amplified, marks=pytest.mark.slow)])
def test_noise_is_found_for_a_budget(make: Any) -> None:
    found = make(epsilon=2.0).calibrated(FLEET, 30)
    assert 1.9 < epsilon(found.planned(FLEET, 30, found.noise)[0], 1e-5).value <= 2.0


# --- what is released ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [blt, banded, amplified])
def test_the_releases_noise_is_the_matrix_inverse_of_independent_noise(make: Any) -> None:
    """C·n must be white with deviation z·clip: 24,000 values, bounds of five deviations."""
    mechanism = make(rounds=12)
    noise = played(mechanism, 12).numpy()
    c = dense(mechanism.matrix(100).coefficients(12), 12)
    white = c @ noise / mechanism.noise
    assert white.std() == pytest.approx(1.0, abs=5 / math.sqrt(2 * white.size) + 2e-3)
    correlation = np.corrcoef(white)
    off = correlation[~np.eye(12, dtype=bool)]
    assert np.abs(off).max() < 5.5 / math.sqrt(2000)
    assert abs(np.corrcoef(noise)[0, 1]) > 5.5 / math.sqrt(2000), "and the noise itself is correlated"


def test_one_band_is_independent_noise() -> None:
    noise = played(banded(bands=1), 6).numpy()
    assert noise.std() == pytest.approx(4.0, rel=5 / math.sqrt(2 * noise.size) + 1e-3)


def test_a_real_sum_comes_through_whole() -> None:
    """The bounded uploads' sum is released with this round's noise on top, whatever was before."""
    mechanism = banded(noise=1e-4)
    state = mechanism.init()
    rng = np.random.default_rng(0)
    for number in range(8):
        bounding = mechanism.bounding(state, {"delta": 40}, LAYOUT, 3)
        sums = {"delta": torch.zeros(40, dtype=torch.int64)}
        uploads = [torch.from_numpy(rng.normal(size=40) * 0.01).float() for _ in range(3)]
        for upload in uploads:
            bounding.add_({"delta": upload}, sums)
        mean, state = mechanism.release(sums, Arrivals(3, 3), state, number, 0, FLEET)
        torch.testing.assert_close(mean["delta"] * 10, sum(uploads), atol=2e-3, rtol=0)


@pytest.mark.parametrize("make", [blt, banded])
def test_a_round_played_again_gets_other_noise_on_the_same_memory(make: Any) -> None:
    """Also in a simulation: attempt 1 differs from attempt 0, and the state given is left as it was."""
    mechanism = make(entropy="seed")
    _, state = mechanism.release({"d": torch.zeros(9, dtype=torch.int64)}, Arrivals(0, 0), {}, 0, 0, FLEET)
    before = {name: value.clone() for name, value in state.items()}
    first, again, repeat = (
        mechanism.release({"d": torch.zeros(9, dtype=torch.int64)}, Arrivals(0, 0), state, 1, attempt, FLEET)[
            0
        ]
        for attempt in (0, 1, 0)
    )
    assert not torch.equal(first["d"], again["d"])
    assert torch.equal(first["d"], repeat["d"])
    assert all(torch.equal(before[name], value) for name, value in state.items())


def test_a_memory_of_another_matrix_or_none_is_refused() -> None:
    mechanism = blt()
    _, state = mechanism.release({"d": torch.zeros(9, dtype=torch.int64)}, Arrivals(0, 0), {}, 0, 0, FLEET)
    with pytest.raises(UserError, match="not in the checkpoint"):
        mechanism.release({"d": torch.zeros(9, dtype=torch.int64)}, Arrivals(0, 0), {}, 1, 0, FLEET)
    with pytest.raises(UserError, match="another matrix"):
        blt(buffers=1).release({"d": torch.zeros(9, dtype=torch.int64)}, Arrivals(0, 0), state, 1, 0, FLEET)
    assert state[MATRIX].tolist() == list(mechanism.matrix(100).numbers)


def test_the_drift_of_rounded_buffers_is_in_the_noise() -> None:
    """Deviation in fine units: noise × (2ᵇ⁺ᶠ + the rounding's part), so never less than is charged."""
    mechanism = blt()
    grid = mechanism.grid({}, 10_000)
    std = mechanism.fine_std(grid, 10_000, FLEET)
    drift = mechanism.matrix(100).drift
    assert std >= 4.0 * ((grid.radius << 12) + 2 * drift * 100)
    assert std == pytest.approx(4.0 * (grid.radius << 12), rel=1e-3)
    exact = banded()
    assert exact.fine_std(exact.grid({}, 10_000), 10_000, FLEET) == 4.0 * (
        exact.grid({}, 10_000).radius << 12
    )


# --- what is refused and told ----------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_the_fix() -> None:
    for build, words in [
        (lambda: blt(sampling=Poisson(0.1)), "banded"),
        (lambda: blt(noise_at="clients"), "leave it out"),
        (lambda: amplified(bands=None), "number of bands"),
        (lambda: amplified(bands=51), "lower it to 50"),
    ]:
        with pytest.raises(UserError, match=words):
            build()


def test_the_statement_says_what_is_and_is_not_secret() -> None:
    for mechanism, words in [
        (
            blt(),
            [
                "none that is claimed",
                "10 groups",
                "BLT matrix with 2 buffers",
                "and who took part when",
                "checkpoints hold it",
            ],
        ),
        (amplified(), ["5 groups", "probability 0.1", "but not who took part", "5 bands"]),
    ]:
        charge = mechanism.charge(0, mechanism.sample(0, 0, FLEET), FLEET)
        text = make_statement(mechanism, [charge], 100).text()
        for expected in words:
            assert expected in text


def test_rows_of_a_matrix_are_no_cheaper_than_they_cost() -> None:
    big, small = MatrixRow(2.0, 1.5), MatrixRow(3.0, 1.0)
    assert big.dominates(small) and not small.dominates(big)
    assert big.joined(small) == big and MatrixRow(3.0, 2.0).joined(big) == MatrixRow(2.0, 2.0)
    mixed = {big: 3, PoissonGaussian(1.0, 2.0): 2, PoissonGaussian(0.1, 1.0): 4}
    merged = {PoissonGaussian(1.0, (3 * 1.5 / 4 + 2 / 4) ** -0.5): 1, PoissonGaussian(0.1, 1.0): 4}
    assert epsilon(mixed, 1e-5).value == pytest.approx(epsilon(merged, 1e-5).value, rel=1e-6)
    assert math.isinf(epsilon({big: 1, PoissonGaussian(1.0, 0.0): 1}, 1e-5).value)


@pytest.mark.slow
def test_fleets_are_told_what_suits_them() -> None:
    rows = {
        (row.kind, row.secret_sampling): row for row in compare_mechanisms(1000, 50, 40, 4.0, 1e-4, ["blt"])
    }
    assert rows["blt", False].error < 0.6 * rows["independent", False].error
    assert rows["independent", True].error < rows["independent", False].error
