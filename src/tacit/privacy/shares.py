"""Gaussian noise that several parties make together, in whole numbers.

Each party adds its own rounded Gaussian (`tacit.privacy.gaussian`). Their sum is not a rounded Gaussian, but
may be used as one:

*Theorem.* Let R₁ … R_m be independent rounded Gaussians with standard deviations s_i ≥ s, and f the density
of N(0, Σs_i²) + U₁ + … + U_m with independent U_i uniform on ±½. Then for every whole number k

    P(R₁ + … + R_m = k) = f(k)·exp(η),    |η| ≤ (m − 1)·δ/(1 − δ),    δ = 2·Σ_{n≥1} exp(−π²s²n²).

*Proof.* P(R_i = k) is the integral of φ_{s_i}(k − u) over |u| ≤ ½. Fix all u's. For two Gaussians of
variances A and B, φ_A(k − a)·φ_B(x − k − b) = φ_{A+B}(x − a − b)·φ_D(k − c) with D = AB/(A + B) and some c;
summed over whole k, the last factor is 1 + 2·Σ_n exp(−2π²Dn²)·cos(2πnc), by Poisson summation. If A, B ≥ s²
then D ≥ s²/2, and this is within δ of 1, whatever x and c are. Add one share after the other, and integrate
over the u's. ∎

(Kairouz, Liu and Steinke 2021, arXiv:2102.06387, prove a similar result for discrete Gaussians.) Now f(k) is
the probability that round(N + U₂ + … + U_m) is k. So x + ΣR_i, for a vector x of d whole numbers, has the
probabilities of round(x + N + U₂ + … + U_m), up to a factor between exp(±dη). That is *post-processing of the
Gaussian mechanism* with the variance of all shares together. With s ≥ 16, dη is below 10⁻¹⁰⁰⁰ for any d and m
that fit into a computer.

If the number of shares itself depends on whether a unit is present (Poisson cohorts), one world has one U
more than the other. Count this U as part of the unit's contribution, which it lengthens by at most √d/2
(`lengthened`); the rest is the same post-processing in both worlds. (Shares are sized in float64, to 2⁻⁵² of
their standard deviation. For an observer who knows the number of shares this changes nothing; for others it
changes δ by less than √d·2⁻⁵³.)

>>> log_ratio(share=16.0, shares=10_000, dimension=10**9)
0.0
>>> round(log_ratio(share=0.6, shares=3, dimension=2), 3)
0.243
"""

from __future__ import annotations

import math

LEAST_SHARE = 16.0
"""The least standard deviation of a share, in whole numbers."""


def log_ratio(share: float, shares: int, dimension: int) -> float:
    """The theorem's dη: how far ln P may be from that of the post-processed Gaussian mechanism."""
    delta = 2 * math.fsum(math.exp(-((math.pi * share * n) ** 2)) for n in range(1, 10))
    return math.inf if delta >= 1 else dimension * (shares - 1) * delta / (1 - delta)


def lengthened(radius: int, dimension: int) -> int:
    """The norm of a contribution (≤ radius) with one rounding more or less: radius + √d/2, rounded up."""
    return radius + math.isqrt(max(dimension - 1, 0) // 4) + 1
