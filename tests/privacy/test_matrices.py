"""Matrices of correlated noise: sensitivity by brute force, recursion against a dense inverse, error."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tacit.privacy.matrices import (
    PRECISION,
    Banded,
    Blt,
    Matrix,
    best_bands,
    dense,
    error,
    largest_row,
    optimal_blt,
    row_squares,
    spread,
)

MATRICES: list[Matrix] = [
    Banded((1.0,)),
    Banded.square_root(3),
    Banded.square_root(9),
    Blt((0.9,), (0.4,)),
    Blt((0.3, 0.97), (0.3, 0.2)),
    optimal_blt(10, 3, 2),
]


def patterns(rounds: int, separation: int) -> list[tuple[int, ...]]:
    """Every set of rounds that are at least `separation` apart."""
    return [
        chosen
        for size in range(1, rounds + 1)
        for chosen in itertools.combinations(range(rounds), size)
        if all(b - a >= separation for a, b in itertools.pairwise(chosen))
    ]


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("separation", [1, 2, 3, 5, 10])
def test_sensitivity_is_that_of_the_worst_pattern(matrix: Matrix, separation: int) -> None:
    """For every number of rounds up to 10, over every pattern the separation allows: no more, no less."""
    squares = row_squares(matrix, 10, separation)
    longest = 0.0
    for rounds in range(1, 11):
        c = dense(matrix.coefficients(10), rounds)
        worst = max(float(np.square(c[:, list(p)].sum(axis=1)).sum()) for p in patterns(rounds, separation))
        assert squares[:rounds].sum() == pytest.approx(worst, rel=1e-8)
        assert squares[:rounds].sum() >= worst
        longest = max(
            longest, *(float(c[:, list(p)].sum(axis=1).max()) for p in patterns(rounds, separation))
        )
    assert largest_row(matrix, 10, separation) == pytest.approx(longest**2, rel=1e-8)


@pytest.mark.parametrize("matrix", MATRICES)
def test_unequal_and_opposite_contributions_are_no_worse(matrix: Matrix) -> None:
    rng = np.random.default_rng(0)
    c = dense(matrix.coefficients(8), 8)
    bound = row_squares(matrix, 8, 2).sum()
    for pattern in patterns(8, 2):
        u = rng.normal(size=(20, len(pattern), 3))
        u /= np.maximum(np.linalg.norm(u, axis=-1, keepdims=True), 1)
        moved = np.einsum("tp,npd->ntd", c[:, list(pattern)], u)
        assert np.square(moved).sum(axis=(1, 2)).max() <= bound


@pytest.mark.parametrize("matrix", MATRICES)
def test_the_recursion_is_the_dense_inverse(matrix: Matrix) -> None:
    """n = C⁻¹z up to rounding to whole units, and the offset errs by no more than it says."""
    rounds, width = 40, 500
    rng = np.random.default_rng(1)
    fine = torch.from_numpy(np.rint(rng.normal(size=(rounds, width)) * 2.0**30).astype(np.int64))
    c = dense(matrix.coefficients(rounds), rounds)
    buffers = torch.zeros(matrix.buffers, width, dtype=torch.int64)
    noise = torch.zeros(rounds, width, dtype=torch.int64)
    for t in range(rounds):
        offset = matrix.offset(buffers)
        exact = (c[t, :t] @ noise[:t].numpy().astype(np.float64)) * 2**PRECISION
        assert np.abs(offset.numpy() - exact).max() <= matrix.drift + 1e-3  # float64 of the reference itself
        noise[t] = (fine[t] - offset + (1 << (PRECISION - 1))) >> PRECISION
        buffers = matrix.advance(buffers, noise[t])
    wanted = np.linalg.solve(c, fine.numpy().astype(np.float64)) / 2**PRECISION
    np.testing.assert_allclose(noise.numpy(), wanted, atol=3.0)


def test_moving_the_sums_moves_the_releases_alike() -> None:
    """The proof's heart, banded: whole x and z give w = x + n, and w is a function of 2ᶠCx + z alone."""
    matrix, rounds = Banded.square_root(4), 12
    rng = np.random.default_rng(2)
    x = torch.from_numpy(rng.integers(-(2**20), 2**20, (rounds, 50)))
    z = torch.from_numpy(np.rint(rng.normal(size=(rounds, 50)) * 2.0**28).astype(np.int64))
    scaled = torch.from_numpy((dense(matrix.coefficients(rounds), rounds) * 2**PRECISION).astype(np.int64))
    y = scaled @ x + z

    def released(noise: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        buffers, out = torch.zeros(3, 50, dtype=torch.int64), []
        for t in range(rounds):
            n = (noise[t] - matrix.offset(buffers) + (1 << (PRECISION - 1))) >> PRECISION
            buffers = matrix.advance(buffers, n)
            out.append(sums[t] + n)
        return torch.stack(out)

    assert torch.equal(released(z, x), released(y, torch.zeros_like(x)))


@pytest.mark.parametrize(("rounds", "separation"), [(100, 20), (400, 10), (1000, 50), (300, 300)])
def test_correlated_noise_beats_independent_noise_on_prefix_sums(rounds: int, separation: int) -> None:
    """Measured with noise that was drawn: the error is what `error` says, and less than half."""
    independent = Banded((1.0,))
    rng = np.random.default_rng(3)
    z = rng.normal(size=(rounds, 2000))
    for matrix in (optimal_blt(rounds, separation, 2), best_bands(rounds, separation)):
        sensitivity = math.sqrt(row_squares(matrix, rounds, separation).sum())
        noise = np.linalg.solve(dense(matrix.coefficients(rounds), rounds), z) * sensitivity
        measured = math.sqrt(float(np.square(np.cumsum(noise, axis=0)).mean()))
        assert measured == pytest.approx(error(matrix, rounds, separation), rel=0.1)
        assert measured < 0.5 * error(independent, rounds, separation)
        assert spread(matrix, rounds) * sensitivity == pytest.approx(error(matrix, rounds, separation))


def test_without_correlation_the_error_is_known() -> None:
    """T rounds of independent noise: prefix t has variance t, and a client pays for ⌈T/b⌉ of them."""
    assert error(Banded((1.0,)), 100, 20) == pytest.approx(math.sqrt(5 * 50.5))


def test_coefficients_that_grow_are_refused() -> None:
    for column in [(1.0, 0.5, 0.75), (0.5, 0.25), (1.0, -0.5), (1.0, 0.3)]:
        with pytest.raises(ValueError):
            Banded(column)
    with pytest.raises(ValueError):
        Blt((0.9, 0.5), (0.8, 0.3))
