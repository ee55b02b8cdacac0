"""Client level: whole clients are protected, and the sum of their uploads is the private query.

Unit: one client with all its data. Each round draws a cohort. Each client's upload is bounded to norm C and
rounded to the grid, and the integers are summed. The server adds a rounded Gaussian and divides by the
constant expected cohort size. Sensitivity: 2ᵇ grid units under add-or-remove-one (Poisson cohorts), twice
that under replace-one (fixed-size cohorts). The noise has standard deviation z·2ᵇ units.
`tacit.privacy.grid` and `tacit.privacy.gaussian` explain why the accountant's ε is that of the released bits.

>>> import numpy as np
>>> from tacit.privacy import Clip, Poisson
>>> mechanism = ClientLevel(noise=1.0, delta=1e-5, clip=Clip(0.5), sampling=Poisson(0.1))
>>> mechanism.charge(3, np.array([4, 17]), Workload(population=100)).parts
(Part(event=PoissonGaussian(rate=0.1, noise=1.0), steps=1, clients=None),)

Noise in shares (`noise_at: clients`). Each client adds a rounded Gaussian of variance (zΔ)²/m, where m is the
size of the drawn cohort and Δ = 2ᵇ + √d/2. The server adds the shares of clients that dropped out. A sum of
rounded Gaussians is as good as one rounded Gaussian, and Δ allows for the number of shares:
`tacit.privacy.shares` has the theorem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from tacit.errors import UserError
from tacit.privacy.bits import Bits, Ids
from tacit.privacy.bounding import Bounding
from tacit.privacy.events import PoissonGaussian, Relation, Spend
from tacit.privacy.gaussian import add_rounded_gaussian_
from tacit.privacy.grid import Grid
from tacit.privacy.ledger import Charge, Header, Part
from tacit.privacy.mechanisms.base import (
    COHORT,
    METRICS,
    NAMES_KEPT,
    RELEASE,
    Arrivals,
    Description,
    Mechanism,
    Observer,
    State,
    Unit,
    Workload,
)
from tacit.privacy.mechanisms.plain import repeatable_cohort
from tacit.privacy.metrics import Seen
from tacit.privacy.sampling import FixedSize, OwnSampling
from tacit.privacy.settings import NoiseAt
from tacit.privacy.shares import LEAST_SHARE, lengthened
from tacit.privacy.steps import round_event
from tacit.privacy.totals import Profile
from tacit.vector import Layout, Vectors


@dataclass(frozen=True)
class ClientLevel(Mechanism):
    """Independent noise on each round's sum."""

    noise_at: NoiseAt = "server"
    """Who adds the noise: the server, in one draw, or each client of the cohort, in shares."""
    deployed: bool = False
    """Clients are real machines, so anyone who watches the network sees who takes part."""

    unit: ClassVar[Unit] = "client"
    kind: ClassVar[str] = "client"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clients_release and isinstance(self.sampling, OwnSampling):
            raise UserError(
                "sampling: a scheme of one's own goes with noise that the server makes; leave out "
                "privacy.noise_at and privacy.aggregation, or sampling="
            )

    @property
    def relation(self) -> Relation:
        return "replace-one" if isinstance(self.sampling, FixedSize) else "add-remove"

    @property
    def clients_release(self) -> bool:
        return self.noise_at == "clients"

    @property
    def sums_integers(self) -> bool:
        """Whether uploads are summed as integers; without noise nothing is claimed, and floats suffice."""
        return self.noise > 0

    def sample(self, round: int, attempt: int, workload: Workload) -> Ids:
        if isinstance(self.sampling, OwnSampling):
            return repeatable_cohort(self.sampling, workload.population, workload.seed, round)
        return self.sampling.draw(self.bits(workload.seed, round, attempt, COHORT), workload.population)

    def charge(self, round: int, cohort: Ids, workload: Workload, attempt: int = 0) -> Charge:
        return Charge(round, (self.costliest(workload),))

    def costliest(self, workload: Workload) -> Part:
        return Part(round_event(self.sampling, workload.population, self.published(self.noise)))

    def published(self, noise: float) -> float:
        """The least noise multiplier of a released sum, where `noise` is the configured one."""
        return noise

    def cost_to(self, client: int, workload: Workload) -> Part:
        """The cost without amplification, because a client knows that it takes part."""
        if type(self).costliest is not ClientLevel.costliest:  # other accounting must override this, too
            return super().cost_to(client, workload)
        return Part(PoissonGaussian(1.0, self.noise if self.seen_noise is None else self.seen_noise))

    def planned(self, workload: Workload, rounds: int, noise: float) -> Sequence[Spend]:
        return [{round_event(self.sampling, workload.population, self.published(noise)): rounds}]

    def init(self) -> State:
        return {}

    def clipping_norm(self, state: State) -> float:
        """The current clipping norm C."""
        return self.clip.bound

    @property
    def sum_noise(self) -> float:
        """The multiplier of the noise on the sum of uploads. With the metrics it costs as much as `noise`."""
        return self.noise if self.metrics is None else self.metrics.rest(self.noise)

    def bounding(self, state: State, sizes: Mapping[str, int], layout: Layout, drawn: int) -> Bounding:
        bound = self.clip.bind(sizes, layout, self.clipping_norm(state))
        if not self.sums_integers:
            return Bounding(bound)
        grid = self.grid(state, bound.dimension)
        if self.noise_at == "server" or not drawn:
            return Bounding(bound, grid)
        share = self.shared_std(grid, bound.dimension) / math.sqrt(drawn)
        if share < LEAST_SHARE:
            raise UserError(
                f"privacy.noise_at: noise {self.noise:g} in {drawn:,} shares is too little to be added in "
                "whole numbers; raise the noise, or let the server make it"
            )
        return Bounding(bound, grid, share)

    def grid(self, state: State, dimension: int) -> Grid:
        """The grid for uploads with this many coordinates in total."""
        return Grid.fit(self.clipping_norm(state), dimension, self.sum_noise)

    def std(self, grid: Grid) -> float:
        """Standard deviation of the noise on a sum, in the grid's units."""
        return self.sum_noise * grid.radius

    def shared_std(self, grid: Grid, dimension: int) -> float:
        """The same for noise in shares, for a sum with this many coordinates."""
        return self.std(grid) * lengthened(grid.radius, dimension) / grid.radius

    def release(
        self, total: Vectors, arrivals: Arrivals, state: State, round: int, attempt: int, workload: Workload
    ) -> tuple[Vectors, State]:
        """Add noise to the sum and divide it by the constant expected cohort size. An empty cohort gets the
        same noise.
        """
        expected = self.expected(workload.population)
        if not self.sums_integers:
            return {name: vector.div_(expected) for name, vector in total.items()}, state
        dimension = sum(vector.numel() for vector in total.values())
        grid = self.grid(state, dimension)
        bits = self.bits(workload.seed, round, attempt, RELEASE)
        self.add_noise_(total, self.server_std(grid, dimension, arrivals), grid, bits)
        return {name: grid.decoded(vector, 1 / expected) for name, vector in total.items()}, state

    def server_std(self, grid: Grid, dimension: int, arrivals: Arrivals) -> float:
        """The noise that the server adds, in grid units. With noise in shares it adds the shares of clients
        that were drawn and did not arrive; for an empty cohort it adds all of it.
        """
        if self.noise_at == "server":
            return self.std(grid)
        missing = 1 - arrivals.arrived / arrivals.drawn if arrivals.drawn else 1.0
        return self.shared_std(grid, dimension) * math.sqrt(missing)

    def add_noise_(self, total: Vectors, std: float, grid: Grid, bits: Bits) -> None:
        """Add noise with this standard deviation, in grid units, to every coordinate of a sum, in place."""
        for vector in total.values():
            add_rounded_gaussian_(vector, std, bits)

    def noise_norm(self, dimension: int) -> float:
        """The approximate norm of the noise on a sum with this many coordinates, in clipping norms."""
        return self.sum_noise * math.sqrt(dimension)

    def measure(
        self,
        cohort: Sequence[Seen],
        tests: Sequence[float],
        state: State,
        round: int,
        attempt: int,
        workload: Workload,
    ) -> dict[str, float]:
        if self.metrics is None:
            return {}
        bits = self.bits(workload.seed, round, attempt, METRICS)
        expected = self.expected(workload.population)
        return self.metrics.release(cohort, tests, self.clipping_norm(state), expected, self.noise, bits)

    # --- what a user is told ----------------------------------------------------------------------------

    def without_metrics(self) -> Self:
        return (
            self if self.metrics is None else replace(self, metrics=None, noise=self.metrics.rest(self.noise))
        )

    def warnings(self, workload: Workload) -> list[str]:
        return self._loose_delta(workload.population, "clients")

    def describe(self, population: int, epsilon: float, worst: Profile) -> Description:
        own = isinstance(self.sampling, OwnSampling)
        neighbours = (
            "; nothing is claimed for it, and it must not have looked at what is protected. Neighbours: what "
            "a client sent, or zeros in its place"
        )
        maker = "the server"
        if self.noise_at == "clients":
            maker = (
                "the clients of the cohort in equal shares, topped up by the server for those who dropped out"
            )
        covered = [*self._not_covered]
        covered.append(
            "how many clients there are: the sampling rate is made from it, so it counts as public"
        )
        covered.append("a person who is several clients: protection weakens with their number")
        if self.noise_at == "clients":
            covered.append("how many clients are in a cohort: each is told, to size its share of the noise")
            covered.append(
                "another client of a cohort of m, which knows the noise that it made itself: against it the "
                f"noise is {self.noise:g} × √(1 − 1/m)"
            )
        if self.deployed:
            covered.append(NAMES_KEPT)
        return Description(
            sampling=f"Sampling: {self._cohort(population)}{neighbours if own else ''}.",
            clipping=f"Clipping: a client's upload to norm {self.clip.bound:g}, {self.clip.how}.",
            noise=(
                f"Noise: a rounded Gaussian on whole numbers, {self.sum_noise:g} × the clipping norm on each "
                f"sum, made by {maker}, from {self._source}. The accountant's ε is that of the released "
                "bits: each client's upload is rounded to a grid and checked against its bound in whole "
                "numbers, sums are exact, and adding a rounded Gaussian to a whole number is "
                "post-processing of the Gaussian mechanism."
            ),
            observers=self._observers(epsilon),
            not_covered=tuple(covered),
            metrics=self._measured,
        )

    @property
    def _measured(self) -> str:
        if self.metrics is None:
            return ""
        return (
            f"{self.metrics.describe(self.noise)} They take {self.metrics.share:.3g} of a round's 1/noise²: "
            f"with the update they cost what noise {self.noise:g} would."
        )

    @property
    def seen_noise(self) -> float | None:
        """The noise multiplier that holds against an adversary who knows that the client takes part; None if
        nobody knows.
        """
        return self.noise if self.deployed else None

    def seen_header(self, data: str) -> Header | None:
        if self.seen_noise is None:
            return None
        return Header(
            self.unit, self.delta, Part(PoissonGaussian(1.0, self.seen_noise)), data, self.simulated
        )

    def seen_by_server(self, round: int, cohort: Ids) -> Charge | None:
        """What a round costs its participants, against an adversary who knows that they take part."""
        if self.seen_noise is None:
            return None
        event = PoissonGaussian(1.0, self.seen_noise)
        return Charge(round, (Part(event, 1, tuple(int(client) for client in cohort)),))

    def against_server(self, epsilon: float | None) -> Observer | None:
        if not self.deployed:
            return None
        why = (
            "They see who takes part, so nothing is gained by secret sampling: the client that was drawn "
            "most often. Neighbours: what a client sent, or zeros in its place."
        )
        return Observer("whoever watches the network, and sees every released model", epsilon, why)

    def _observers(self, epsilon: float) -> tuple[Observer, ...]:
        models = Observer(
            "whoever sees every released model, but not who took part",
            epsilon,
            "Who is sampled stays secret.",
        )
        if isinstance(self.sampling, OwnSampling):
            who = "whoever sees every released model, and who took part when"
            models = Observer(who, epsilon, "Nothing about sampling is secret.")
        if self.noise_at == "server":
            return models, Observer(
                "the server", None, "It sees uploads before the noise and must be trusted."
            )
        why = (
            "Only under secure aggregation is each upload hidden from it. Even then it knows who took part, "
            "so this ε, which counts on secret sampling, is not claimed against it; one upload alone "
            "carries only noise ÷ √cohort."
        )
        return models, Observer("the server", None, why)
