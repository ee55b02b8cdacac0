"""Matrices for correlated noise: lower triangular, Toeplitz, with little state to store.

Independent noise is fresh in every round, so a model, which is a sum over rounds, collects all of it. The
matrix mechanism adds C⁻¹z instead, with independent z: rounds cancel some of the noise of earlier rounds. The
accountant uses the sensitivity of Cx. The model's noise is the error of the prefix sums, A·C⁻¹·z with A all
ones below the diagonal (Denisov et al. 2022, arXiv:2202.08312).

>>> banded, blt = Banded.square_root(4), optimal_blt(rounds=100, separation=20, buffers=2)
>>> [round(float(c), 3) for c in banded.coefficients(5)]
[1.0, 0.5, 0.375, 0.312, 0.0]
>>> [round(error(m, rounds=100, separation=20), 1) for m in (Banded((1.0,)), banded, blt)]
[15.9, 9.2, 6.0]

Sensitivity
-----------
Unit: a client whose contributions of norm ≤ 1 are at least `separation` = b rounds apart, present or absent
(all of them zero). For coefficients 1 = c₀ ≥ c₁ ≥ … ≥ 0 the worst pattern is the rounds 0, b, 2b, …, for
every number of rounds T. Proof: with columns C_t, the squared sensitivity of a pattern t₁ < t₂ < … is max
Σᵢⱼ⟨C_tᵢ, C_tⱼ⟩⟨uᵢ, uⱼ⟩ over vectors of norm ≤ 1, attained by equal ones since all ⟨C_s, C_t⟩ ≥ 0. For s ≤ t,
⟨C_s, C_t⟩ = Σ_{u < T−t} c_u c_{u+t−s} decreases as t grows and as t − s grows. Any pattern has tⱼ ≥ (j−1)b
and tⱼ − tᵢ ≥ (j−i)b, so each of its terms is at most that of 0, b, 2b, …, which also has the most terms.
(Kalinin and Lampert 2024, arXiv:2405.13763, treat k participations.)

Under that pattern, row s of Cx is v_s = Σ_{ib ≤ s} c_{s−ib}, whatever T is. So the squared sensitivity of the
first T rounds is Σ_{s<T} v_s², and each round adds its own v_s². No row of any pattern is longer than c₀ +
c_b + c_2b + ….
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tacit.lazy import Tensor, torch

Floats = NDArray[np.float64]

PRECISION = 12
"""f: noise is made on a grid 2ᶠ times finer than the grid of the sums, and coefficients that must be exact
are multiples of 2⁻ᶠ.
"""
_ROUNDING = 1 + 1e-9
"""An upper bound on float64's error in a sensitivity."""
_LARGEST = 2**52
"""Whole numbers below this are exact in float64."""


class Matrix(Protocol):
    """C by its first column, and C⁻¹z computed one round at a time on whole numbers.

    `offset` and `advance` use n, the noise that earlier rounds got, in whole units of the sums' grid, and
    fine units, which are 2ᶠ times smaller.
    """

    @property
    def buffers(self) -> int:
        """How many vectors are stored between rounds."""

    @property
    def drift(self) -> float:
        """The largest distance that rounding may put between `offset` and Σ_{k≥1} c_k n_{t−k}, in fine units,
        in any round.
        """

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that define the matrix."""

    def coefficients(self, count: int) -> Floats:
        """c₀, c₁, …: c₀ = 1, never negative, never increasing."""

    def offset(self, buffers: Tensor) -> Tensor:
        """Σ_{k≥1} c_k n_{t−k} in fine units (int64), from the stored state."""

    def advance(self, buffers: Tensor, noise: Tensor) -> Tensor:
        """The state to store after a round whose sum got `noise`; a new tensor."""


@dataclass(frozen=True)
class Banded:
    """A few coefficients, then zeros (Choquette-Choo et al. 2023, arXiv:2306.08153). Stores n itself.

    Coefficients are multiples of 2⁻ᶠ, so `offset` is exact.
    """

    column: tuple[float, ...]

    def __post_init__(self) -> None:
        scaled = [c * 2**PRECISION for c in self.column]
        falling = all(a >= b >= 0 for a, b in zip(self.column, self.column[1:], strict=False))
        if self.column[:1] != (1.0,) or not falling or any(c != int(c) for c in scaled):
            raise ValueError(f"{self.column} does not fall from 1 in steps of 2^-{PRECISION}")

    @staticmethod
    def square_root(bands: int) -> Banded:
        """The square root of the matrix of prefix sums, cut off: c_k = (2k choose k)/4ᵏ (Kalinin and
        Lampert 2024).
        """
        column = [1.0]
        for k in range(1, bands):
            column.append(column[-1] * (2 * k - 1) / (2 * k))
        return Banded(tuple(round(c * 2**PRECISION) / 2**PRECISION for c in column))

    @property
    def buffers(self) -> int:
        return len(self.column) - 1

    @property
    def drift(self) -> float:
        return 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.column

    def coefficients(self, count: int) -> Floats:
        return np.array([*self.column[:count], *[0.0] * (count - len(self.column))])

    def offset(self, buffers: Tensor) -> Tensor:
        total = torch.zeros(buffers.shape[1:], dtype=torch.int64)
        for c, noise in zip(self.column[1:], buffers, strict=True):
            total.add_(noise, alpha=int(c * 2**PRECISION))
        return total

    def advance(self, buffers: Tensor, noise: Tensor) -> Tensor:
        return torch.cat([noise[None], buffers])[: self.buffers]


@dataclass(frozen=True)
class Blt:
    """A buffered linear Toeplitz matrix (Dvijotham et al. 2024, arXiv:2404.16706): c_k = Σⱼ ωⱼ θⱼ^{k−1}.

    Stores Sⱼ = Σ_{k≥1} θⱼ^{k−1} n_{t−k} for each j, rounded to the fine grid. The error is at most 1 in each
    round (½ by rounding, less than ½ by float64 while |Sⱼ| < 2⁵²); later rounds shrink it by θⱼ.
    """

    theta: tuple[float, ...]
    omega: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(0 < t < 1 for t in self.theta) or min(self.omega) <= 0 or sum(self.omega) > 1:
            raise ValueError(f"θ = {self.theta} and ω = {self.omega} make coefficients that do not fall")

    @property
    def buffers(self) -> int:
        return len(self.theta)

    @property
    def drift(self) -> float:
        return 1 + sum(o / (1 - t) for t, o in zip(self.theta, self.omega, strict=True))

    @property
    def numbers(self) -> tuple[float, ...]:
        return (*self.theta, *self.omega)

    def coefficients(self, count: int) -> Floats:
        powers = np.power.outer(np.array(self.theta), np.arange(max(0, count - 1)))
        return np.concatenate([[1.0], np.array(self.omega) @ powers])[:count]

    def offset(self, buffers: Tensor) -> Tensor:
        total = torch.zeros(buffers.shape[1:], dtype=torch.float64)
        for omega, buffer in zip(self.omega, buffers, strict=True):
            total.add_(buffer.double(), alpha=omega)
        return total.round_().long()

    def advance(self, buffers: Tensor, noise: Tensor) -> Tensor:
        fine = noise << PRECISION
        found = torch.stack([
            buffer.double().mul_(theta).round_().long().add_(fine)
            for theta, buffer in zip(self.theta, buffers, strict=True)
        ])  # fmt: skip
        if found.numel() and int(found.abs().max()) >= _LARGEST:
            raise ArithmeticError("correlated noise has left the numbers that are exact in float64")
        return found


def row_squares(matrix: Matrix, rounds: int, separation: int) -> Floats:
    """v₀², v₁², …: what each round adds to the squared sensitivity (see the module)."""
    return np.square(_rows(matrix.coefficients(rounds), separation)) * _ROUNDING


def largest_row(matrix: Matrix, rounds: int, separation: int) -> float:
    """An upper bound on the squared length of any row of Cx, whatever the pattern."""
    return float(matrix.coefficients(rounds)[::separation].sum() ** 2) * _ROUNDING


def error(matrix: Matrix, rounds: int, separation: int) -> float:
    """Root mean square, over rounds, of the noise in a prefix sum, for a sensitivity of 1: the quantity to
    minimise.
    """
    coefficients = matrix.coefficients(rounds)
    sensitivity = math.sqrt(float(np.square(_rows(coefficients, separation)).sum()))
    return sensitivity * spread(matrix, rounds)


def spread(matrix: Matrix, rounds: int) -> float:
    """Root mean square, over rounds, of the noise in a prefix sum, for z of deviation 1."""
    return math.sqrt(_mean_square(_prefix_sums(matrix.coefficients(rounds))))


@lru_cache(maxsize=64)
def optimal_blt(rounds: int, separation: int, buffers: int) -> Blt:
    """The best BLT for prefix sums over `rounds` rounds with this separation, to six digits."""
    from scipy.optimize import minimize

    def unpacked(point: Floats) -> tuple[Floats, Floats]:
        # Shares of ω sum to less than 1: the last one is the remainder.
        theta = 1 / (1 + np.exp(-point[:buffers]))
        shares = np.exp(np.clip(point[buffers:], -40, 40))
        return theta, shares / (1 + shares.sum())

    def loss(point: Floats) -> float:
        theta, omega = unpacked(point)
        powers = np.power.outer(theta, np.arange(max(0, rounds - 1)))
        coefficients = np.concatenate([[1.0], omega @ powers])[:rounds]
        squares = np.square(_rows(coefficients, separation)).sum()
        return math.log(squares) + math.log(_mean_square(_filtered(theta, omega, rounds)))

    horizon = math.log(max(rounds, 4))
    best = None
    for stretch in (0.6, 1.0):
        decays = np.linspace(0, stretch * horizon, buffers + 1)[1:]
        start = np.concatenate([decays, np.linspace(0, -decays[-1] / 2, buffers)])
        found = minimize(
            loss, start, method="L-BFGS-B", bounds=[(-6.0, 14.0)] * buffers + [(-20.0, 6.0)] * buffers
        )
        if best is None or found.fun < best.fun:
            best = found
    assert best is not None
    theta, omega = unpacked(best.x)
    order = np.argsort(theta)
    return Blt(
        tuple(1 - float(f"{1 - t:.6g}") for t in theta[order]),
        tuple(float(f"{o * (1 - 1e-6):.6g}") for o in omega[order]),
    )


def best_bands(rounds: int, separation: int) -> Banded:
    """The banded matrix with the least error. Tries powers of two, and the most bands that the separation and
    the rounds allow.
    """
    most = max(1, min(rounds, separation))
    numbers = {most, *(2**k for k in range(most.bit_length()))}
    return min(
        (Banded.square_root(bands) for bands in sorted(numbers)), key=lambda m: error(m, rounds, separation)
    )


def dense(coefficients: Sequence[float] | Floats, rounds: int) -> Floats:
    """C itself, for small cases."""
    rows = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    padded = np.concatenate([np.asarray(coefficients)[:rounds], np.zeros(rounds)])
    return np.where(rows >= 0, padded[np.maximum(rows, 0)], 0.0)


def _rows(coefficients: Floats, separation: int) -> Floats:
    """v_s = Σ c_{s−ib}: sums over the indices with the same remainder modulo b."""
    rounds = len(coefficients)
    padded = np.zeros(-(-rounds // separation) * separation)
    padded[:rounds] = coefficients
    rows: Floats = padded.reshape(-1, separation).cumsum(axis=0).ravel()[:rounds]
    return rows


def _prefix_sums(coefficients: Floats) -> Floats:
    """The first column of A·C⁻¹."""
    from scipy.signal import lfilter

    impulse = np.zeros(len(coefficients))
    impulse[0] = 1.0
    found: Floats = np.cumsum(lfilter([1.0], coefficients, impulse))
    return found


def _filtered(theta: Floats, omega: Floats, rounds: int) -> Floats:
    """The same for a BLT, in time proportional to its buffers: 1/C is a ratio of two polynomials."""
    from scipy.signal import lfilter

    bottom = np.array([1.0])
    for t in theta:
        bottom = np.convolve(bottom, [1.0, -t])
    top = bottom.copy()
    for j, o in enumerate(omega):
        part = np.array([1.0])
        for i, t in enumerate(theta):
            if i != j:
                part = np.convolve(part, [1.0, -t])
        top[1:] += o * part
    impulse = np.zeros(rounds)
    impulse[0] = 1.0
    found: Floats = np.cumsum(lfilter(bottom, top, impulse))
    return found


def _mean_square(prefix: Floats) -> float:
    """Mean over rounds t of Σ_{k≤t} a_k²."""
    return float(np.cumsum(np.square(prefix)).mean())
