"""Correlated noise against another library: opake-dpftrl's sensitivities, inverses, noise and optimizer."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from tacit.privacy import Arrivals, BandedNoise, BltNoise, Clip, FixedSize, Workload
from tacit.privacy.matrices import PRECISION, Banded, Blt, dense, error, optimal_blt, row_squares

if sys.version_info >= (3, 14):
    pytest.skip("opake-dpftrl has no release for this Python", allow_module_level=True)

from opake.dpftrl.noise import blt_strategy, bsr_strategy

SCENARIOS = [(40, 1), (40, 7), (100, 20), (64, 64), (50, 60)]


class Column(Banded):
    """Any first column, for the formulas alone."""

    def __post_init__(self) -> None:
        pass


def sensitivity(column: torch.Tensor, rounds: int, separation: int) -> float:
    return math.sqrt(float(row_squares(Column(tuple(column.tolist())), rounds, separation).sum()))


@pytest.mark.parametrize(("rounds", "separation"), SCENARIOS)
@pytest.mark.parametrize("bands", [1, 4, 16])
def test_banded_coefficients_and_sensitivity(rounds: int, separation: int, bands: int) -> None:
    theirs = bsr_strategy(bandwidth=bands, alpha=1.0, beta=0.0)
    column = theirs.coefficients(n_steps=rounds)
    ours = Banded.square_root(bands)
    np.testing.assert_allclose(ours.coefficients(rounds), column.numpy(), atol=0.5 / 2**PRECISION)
    claimed = theirs.sensitivity(n_steps=rounds, min_sep=separation, max_participations=None)
    assert sensitivity(column, rounds, separation) == pytest.approx(claimed, rel=1e-8)
    own = math.sqrt(float(row_squares(ours, rounds, separation).sum()))
    assert own == pytest.approx(claimed, rel=bands / 2**PRECISION), "with coefficients of twelve bits"


@pytest.mark.parametrize(("rounds", "separation"), SCENARIOS)
def test_blt_sensitivity_and_that_our_optimum_is_no_worse(rounds: int, separation: int) -> None:
    theirs = blt_strategy(max_buffers=2)
    column = theirs.coefficients(n_steps=rounds, min_sep=separation)
    claimed = theirs.sensitivity(n_steps=rounds, min_sep=separation)
    assert sensitivity(column, rounds, separation) == pytest.approx(claimed, rel=1e-7)
    best = error(optimal_blt(rounds, separation, 2), rounds, separation)
    assert best <= error(Column(tuple(column.tolist())), rounds, separation) * 1.01


def test_our_recursion_is_their_inverse() -> None:
    """C⁻¹ by their streaming product, and by our whole numbers, of an impulse of 2⁴⁰ fine units."""
    rounds = 30
    inverse = bsr_strategy(bandwidth=5, alpha=1.0, beta=0.0).streaming_matrix().materialize(rounds)
    matrix = Banded.square_root(5)
    buffers, found = torch.zeros(matrix.buffers, 1, dtype=torch.int64), []
    for t in range(rounds):
        fine = torch.tensor([1 << 40 if t == 0 else 0])
        noise = (fine - matrix.offset(buffers) + (1 << (PRECISION - 1))) >> PRECISION
        buffers = matrix.advance(buffers, noise)
        found.append(float(noise) * 2**PRECISION / 2**40)
    np.testing.assert_allclose(found, inverse[:, 0].numpy(), atol=rounds / 2**PRECISION)


@pytest.mark.parametrize(
    "fleet",
    [
        BandedNoise(2.0, 1e-5, Clip(0.5), FixedSize(10), rounds=6, bands=4),
        BltNoise(2.0, 1e-5, Clip(0.5), FixedSize(10), rounds=6),
    ],
)
def test_what_is_released_is_white_after_their_matrix(fleet: BandedNoise | BltNoise) -> None:
    """Noise of six rounds of 20,000 coordinates, from the mechanism itself, times C by their coefficients
    (banded) or by a dense matrix: independent, of the announced deviation. χ² of each row at 1e-6, and
    correlations within six deviations (15 of them: false alarms below 1e-7).
    """
    rounds, size, workload = 6, 20_000, Workload(60)
    matrix = fleet.matrix(60)
    state, seen = fleet.init(), []
    for t in range(rounds):
        total = {"delta": torch.zeros(size, dtype=torch.int64)}
        mean, state = fleet.release(total, Arrivals(0, 0), state, t, 0, workload)
        seen.append(mean["delta"].double().numpy() * fleet.expected(60))
    if isinstance(matrix, Blt):
        column = matrix.coefficients(rounds)
    else:
        column = bsr_strategy(bandwidth=4, alpha=1.0, beta=0.0).coefficients(n_steps=rounds).numpy()
    white = dense(column, rounds) @ np.array(seen) / (2.0 * 0.5)
    low, high = chi2.ppf([5e-7, 1 - 5e-7], size) / size
    variances = (white**2).mean(axis=1)
    assert (low < variances).all() and (variances < high * 1.003).all(), "and the grid's own margin"
    correlations = np.corrcoef(white)[np.triu_indices(rounds, 1)]
    assert np.abs(correlations).max() < 6 / math.sqrt(size)
