"""Client level under secure aggregation: clients make the noise, and the server sees no sum without it.

Unit: one client with all its data. A cohort of m is drawn. Each client bounds its upload to norm C on the
grid (Σk² ≤ 2²ᵇ, in integers), adds a rounded Gaussian of variance (zΔ)²/(τm), and sends the result masked
(`tacit.secure`). If fewer than t = ⌈τm⌉ clients stay to the end there is no sum, so every sum that the server
sees has noise of at least z. The server adds the shares of clients that dropped out, so what it publishes
always has noise z/√τ, however many were drawn. Δ = 2ᵇ + √d/2; `tacit.privacy.shares` has the theorem by which
a sum of rounded Gaussians is as good as one rounded Gaussian.

There are two values of ε:

- *outsiders* see the models but not who took part: noise z, amplified by sampling, as in any client-level
  run. A share γ of the cohort may make no noise, which leaves z·√((1 − γ)/τ); if that is less than z, it is
  charged instead;
- *the server* knows who took part, so nothing is amplified, and a share γ of the cohort may tell it their
  noise, or make none. The honest clients among t leave (t − c)/(τm) ≥ 1 − γ/τ of the variance: a Gaussian
  mechanism with noise z·√(1 − γ/τ) for each round that a client took part in. Adjacency here: what the client
  sent, or zeros in its place (the server knows that the client took part).

*Another client* of the cohort knows one of the m shares, its own. This leaves z·√((1 − 1/m)/τ), which is at
least what is charged in all but the smallest cohorts (`least_members`).

>>> import numpy as np
>>> from tacit.privacy import Clip, Poisson, Workload
>>> mechanism = SecureSum(1.0, 1e-5, Clip(0.5), Poisson(0.1), threshold=0.75, colluding=0.12)
>>> mechanism.threshold_of(10), mechanism.colluding_of(10)
(8, 1)
>>> mechanism.charge(0, np.array([4, 17]), Workload(population=100)).parts[0].event
PoissonGaussian(rate=0.1, noise=1.0)
>>> mechanism.seen_by_server(0, np.array([4, 17])).parts[0]
Part(event=PoissonGaussian(rate=1.0, noise=0.916515138991168), steps=1, clients=(4, 17))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from tacit.errors import UserError
from tacit.privacy.bounding import Bounding
from tacit.privacy.grid import Grid
from tacit.privacy.mechanisms.base import NAMES_KEPT, Arrivals, Description, Observer, State
from tacit.privacy.mechanisms.client import ClientLevel
from tacit.privacy.shares import LEAST_SHARE
from tacit.privacy.totals import Profile
from tacit.vector import Layout


@dataclass(frozen=True)
class SecureSum(ClientLevel):
    """Noise in shares under secure aggregation."""

    threshold: float = 2 / 3
    """τ: the share of a cohort that must stay to the end; these alone carry the noise."""
    colluding: float = 0.1
    """γ: the share of a cohort that may collude with the server."""

    kind: ClassVar[str] = "secure"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_at != "server":
            raise UserError("privacy.noise_at: under secure aggregation clients make the noise; leave it out")
        if self.metrics is not None:
            raise UserError(
                "privacy.metrics: the server makes their noise, so it would see each client's own numbers; "
                "leave them out under secure aggregation"
            )
        if not 0 < self.threshold <= 1 or not self.colluding >= 0:
            raise UserError(
                f"privacy.threshold {self.threshold:g} and privacy.colluding {self.colluding:g} are shares "
                "of a cohort; choose for example 0.67 and 0.1"
            )
        if 2 * self.threshold <= 1 + self.colluding:
            raise UserError(
                f"privacy.threshold {self.threshold:g}: a server that tells clients different things could "
                f"take a sum apart with {self.colluding:.0%} of them; choose a threshold above "
                f"{(1 + self.colluding) / 2:g}, or less colluding"
            )
        if math.isinf(self.clip.bound):
            raise UserError("privacy.clip is infinite: secure aggregation adds whole numbers; set a clip")

    @property
    def sums_integers(self) -> bool:
        """Always true: masks are integers."""
        return True

    @property
    def clients_release(self) -> bool:
        """True: what clients send is a release to the server."""
        return True

    # --- how many must stay, and how many may collude ---------------------------------------------------

    def threshold_of(self, drawn: int) -> int:
        """t: the number of drawn clients that must stay."""
        return math.ceil(Fraction(self.threshold) * drawn)

    def colluding_of(self, drawn: int) -> int:
        """c: the number of drawn clients that may collude with the server."""
        return math.floor(Fraction(self.colluding) * drawn)

    @property
    def seen_noise(self) -> float:
        """The noise multiplier that holds against the server and its colluders."""
        return self.noise * math.sqrt(max(0.0, 1 - self.colluding / self.threshold))

    def published(self, noise: float) -> float:
        return noise * min(1.0, math.sqrt(max(0.0, 1 - self.colluding) / self.threshold))

    def least_members(self, noise: float) -> int | None:
        """The smallest cohort in which the noise that a client does not know (all but its own share) has at
        least this multiplier; None if there is no such cohort.
        """
        known = 1 - self.threshold * (noise / self.noise) ** 2 if self.noise else 1.0
        return math.ceil(1 / known - 1e-9) if known > 1e-9 else None

    # --- noise ------------------------------------------------------------------------------------------

    def bounding(self, state: State, sizes: Mapping[str, int], layout: Layout, drawn: int) -> Bounding:
        bound = self.clip.bind(sizes, layout, self.clipping_norm(state))
        grid = self.grid(state, bound.dimension)
        if not drawn or not self.noise:
            return Bounding(bound, grid)
        share = self.shared_std(grid, bound.dimension) / math.sqrt(self.threshold * drawn)
        if share < LEAST_SHARE:
            raise UserError(
                f"privacy.noise {self.noise:g} in {drawn:,} shares is too little to be added in whole "
                "numbers; raise the noise, or draw smaller cohorts"
            )
        return Bounding(bound, grid, share, always=True)

    def server_std(self, grid: Grid, dimension: int, arrivals: Arrivals) -> float:
        """The shares of clients that dropped out; an empty cohort gets the noise of a full one."""
        missing = arrivals.missing / arrivals.drawn if arrivals.drawn else 1.0
        return self.shared_std(grid, dimension) * math.sqrt(missing / self.threshold)

    # --- what a user is told ----------------------------------------------------------------------------

    def describe(self, population: int, epsilon: float, worst: Profile) -> Description:
        plain = super().describe(population, epsilon, worst)
        models = Observer(
            "whoever sees every released model, but not who took part",
            epsilon,
            "Who is sampled stays secret, and the server adds the noise of those who dropped out.",
        )
        noise = (
            f"Noise: rounded Gaussians on whole numbers, made by the clients of a cohort in shares such that "
            f"{self.threshold:.0%} of them carry {self.noise:g} × the clipping norm on every sum, from "
            f"{self._source}. Uploads are masked; with fewer clients left there is no sum. A sum of rounded "
            "Gaussians has the probabilities of a rounded Gaussian mechanism, but for a factor that differs "
            "from 1 by less than 10⁻¹⁰⁰⁰."
        )
        least = self.least_members(self.published(self.noise))
        small = "" if least is None else f" of fewer than {least}"
        covered = (
            *plain.not_covered,
            "how many clients are in a cohort, and that a round was given up: each of its clients is told",
            f"another client of a cohort{small}, which knows the noise that it made itself: in a cohort of m "
            f"{self.noise:g} × √((1 − 1/m) ÷ {self.threshold:.3g}) is left against it",
        )
        if self.deployed:
            covered += ("when a client answers, and what its owner lets it tell besides (`allow.send`)",)
        else:
            covered += (
                NAMES_KEPT,
                "whoever runs clients and server on one machine, as a simulation does: they could look "
                "anywhere",
            )
        return replace(plain, noise=noise, observers=(models,), not_covered=covered)

    def against_server(self, epsilon: float | None) -> Observer:
        """The statement's second ε: that of the client that took part most often."""
        why = (
            "It sees sums of masked uploads, and who took part. The client that took part most often in this "
            "run, without amplification; neighbours: what a client sent, or zeros in its place. In cohorts "
            "beyond 128 the server must follow the protocol; in smaller ones it may also lie."
        )
        who = f"the server, with up to {self.colluding:.0%} of each cohort"
        if self.deployed:
            why += " Holds for whoever runs the SuperLink or watches the network too: they see less."
        return Observer(who, epsilon, why)
