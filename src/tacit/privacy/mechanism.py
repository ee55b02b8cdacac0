"""`Privacy`: the one object that says what is protected, and how.

It holds the unit, the sampling, the clipping rule and the noise, and yields both what the run does
(the draw, the bound, the release) and what the accountant is told (the charge), so the two cannot
disagree. What is not sound cannot be built: the error names the fix.

>>> privacy = Privacy("client", noise=1.0, delta=1e-5, clip=Clip(0.5), sampling=Poisson(0.1))
>>> privacy.relation, privacy.sensitivity()
('add-remove', 0.5)
>>> privacy.charge(3, population=100).parts
(Part(event=PoissonGaussian(rate=0.1, noise=1.0), steps=1, clients=None),)
>>> import torch
>>> total = {"delta": torch.zeros(4)}      # what the cohort's bounded uploads add up to
>>> mean = privacy.release(total, SeededNoise(1), population=100)     # N(0, (1.0 · 0.5)²) ÷ 10 each

Units
-----
`client`: the sum of a cohort's bounded uploads is the private query. Neighbours differ in a whole client.

`example`: every gradient of a client is a private query on a Poisson batch of its own records
(`privatize_`); uploads are post-processing of these and need no further noise. Neighbours differ in one
record of one client. How cohorts are drawn carries no part of this guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from tacit.errors import UserError
from tacit.privacy.accounting import check_delta
from tacit.privacy.adaptive import Adaptive
from tacit.privacy.clipping import Bound, Clip
from tacit.privacy.events import Event, FixedSizeGaussian, PoissonGaussian, Relation
from tacit.privacy.ledger import Charge, Header, Part
from tacit.privacy.noise import Noise, OsNoise, SeededNoise
from tacit.privacy.sampling import Poisson, Sampling, secret_rng
from tacit.vector import Layout, Vectors

Unit = Literal["client", "example"]
NoiseAt = Literal["server", "clients"]
Entropy = Literal["os", "seed"]


@dataclass(frozen=True)
class Privacy:
    """Unit, sampling, clipping, noise and δ of a run. See the module for what each unit means."""

    unit: Unit
    noise: float
    """Noise multiplier: the noise's standard deviation ÷ the clipping bound, on the sum."""
    delta: float
    clip: Clip
    sampling: Sampling
    """How cohorts are drawn from the population of clients."""
    epsilon: float | None = None
    """The budget: no round is played that would take ε beyond it."""
    noise_at: NoiseAt = "server"
    """At client level: one draw on the server, or a share from each client of the cohort."""
    entropy: Entropy = "os"
    """Where coins and noise come from; "seed" makes the run a repeatable simulation without a claim."""
    adaptive: Adaptive | None = None

    def __post_init__(self) -> None:
        check_delta(self.delta)
        if not 0 <= self.noise < math.inf:
            raise UserError(f"privacy.noise {self.noise}: choose a multiplier ≥ 0, such as 1.0")
        if self.noise > 0 and math.isinf(self.clip.bound):
            raise UserError("privacy.clip is infinite, so no noise is enough; set a clip, or noise to 0")
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise UserError(f"privacy.epsilon {self.epsilon}: choose a budget > 0, or leave it out for none")
        if self.epsilon is not None and self.noise == 0:
            raise UserError(
                "privacy.noise is 0 and privacy.epsilon sets a budget, which not one round can keep; "
                "set the noise (`tacit plan --epsilon …` finds it) or drop the budget"
            )
        if self.unit == "example" and self.clip.mode == "normalize":
            raise UserError(
                "privacy.clip.mode normalize is for clients' updates; records' gradients take clip"
            )
        if self.unit == "example" and self.noise_at == "clients":
            raise UserError(
                "privacy.noise_at: at example level each client noises its own gradients; leave it out"
            )
        if self.adaptive is not None:
            if self.unit == "example":
                raise UserError("privacy.adaptive follows norms of clients' updates; it needs unit: client")
            if math.isinf(self.clip.bound):
                raise UserError("privacy.adaptive needs a finite clip to start from, such as 1.0")
            self.adaptive.update_noise(self.noise)

    # --- what is claimed --------------------------------------------------------------------------------

    @property
    def relation(self) -> Relation:
        """Which data sets are neighbours. At example level batches are Poisson, whatever draws cohorts."""
        if self.unit == "example" or isinstance(self.sampling, Poisson):
            return "add-remove"
        return "replace-one"

    @property
    def simulated(self) -> bool:
        """Seeded coins and noise can be repeated by whoever knows the seed, so nothing is claimed."""
        return self.entropy == "seed"

    def sensitivity(self, bound: float | None = None) -> float:
        """How far one unit can move the un-noised sum under the neighbouring relation."""
        c = self.clip.bound if bound is None else bound
        return c if self.relation == "add-remove" else 2 * c

    def event(self, population: int) -> Event:
        """One round at client level, as the accountant knows it."""
        if isinstance(self.sampling, Poisson):
            return PoissonGaussian(self.sampling.rate, self.noise)
        return FixedSizeGaussian(self.sampling.size, population, self.noise)

    def batch_event(self, examples: int, batch: int, queries: int = 1) -> PoissonGaussian:
        """One local step at example level on a client of `examples` records.

        `queries` gradients on the same batch (SAM and FAFED ask for two) are one Gaussian query of √queries
        times the sensitivity: exact, also when the second gradient depends on the first one's answer.
        """
        return PoissonGaussian(batch_sampling(examples, batch).rate, self.noise / math.sqrt(queries))

    def warnings(self, population: int, records: int | None = None) -> list[str]:
        """What is allowed but probably not meant. `records`: of the smallest client, at example level."""
        units, what = (population, "clients") if self.unit == "client" else (records, "records of a client")
        if units is not None and self.delta >= 1 / units:
            return [
                f"δ = {self.delta:g} is not below 1 ÷ {units:,} {what}: publishing one of them at random "
                f"would pass; choose δ below {1 / units:.1g}"
            ]
        return []

    # --- what the run does ------------------------------------------------------------------------------

    def coins(self, *name: int) -> np.random.Generator:
        """The generator for a draw: secret, or named by numbers such as (seed, round) in a simulation."""
        return np.random.default_rng(name) if self.simulated else secret_rng()

    def source(self, *name: int) -> Noise:
        """The noise for a release: secret, or named by numbers such as (seed, round) in a simulation."""
        return SeededNoise(*name) if self.simulated else OsNoise()

    def bind(
        self, sizes: Mapping[str, int], layout: Layout | None = None, bound: float | None = None
    ) -> Bound:
        """The clipping rule for the uploads of a round; `bound` is the one in force if it is adaptive."""
        return self.clip.bind(sizes, layout, bound)

    def std(self, bound: float | None = None) -> float:
        """Standard deviation of the noise on a sum, for the bound in force."""
        noise = self.noise if self.adaptive is None else self.adaptive.update_noise(self.noise)
        # 0 × ∞ means "no noise, no clip": a plain run in the private loop.
        return noise * (self.clip.bound if bound is None else bound) if noise else 0.0

    def release(
        self,
        total: Vectors,
        noise: Noise,
        population: int,
        bound: float | None = None,
        drawn: int = 0,
        arrived: int = 0,
    ) -> Vectors:
        """Client level: noise `total` in place and divide by the constant expected cohort.

        `total` sums the bounded uploads of a cohort; an empty cohort's is zeros and gets the same noise. With
        noise in shares, `drawn` clients were told to add one and `arrived` of them are in the sum (`share_`);
        the server adds what the others took away. The charge must be on disk before this is called.
        """
        missing = 1.0
        if self.noise_at == "clients" and drawn:
            missing = 1 - arrived / drawn
        std = self.std(bound) * math.sqrt(missing)
        expected = self.sampling.expected(population)
        for vector in total.values():
            noise.add_(vector, std)
            vector.div_(expected)
        return total

    def share_(self, upload: Vectors, noise: Noise, drawn: int, bound: float | None = None) -> None:
        """A client's share of the noise, N(0, (σC)²/drawn), added to its bounded upload in place.

        Sized for the cohort that was drawn, not the expected one: a smaller cohort must not mean less noise.
        """
        for vector in upload.values():
            noise.add_(vector, self.std(bound) / math.sqrt(drawn))

    def next_bound(self, bound: float, within: int, arrived: int, population: int, noise: Noise) -> float:
        """Adaptive clipping: the next bound, when `within` of `arrived` clients had a norm ≤ `bound`."""
        if self.adaptive is None:
            return bound
        expected = self.sampling.expected(population)
        return self.adaptive.moved(bound, self.adaptive.share(within, arrived, expected, noise))

    def privatize_(self, gradients: Tensor, noise: Noise, batch: float) -> Tensor:
        """Example level: the private gradient g̃ = (1/B)[Σ clip_C(g_j) + N(0, σ²C² I)], in place.

        `gradients` is the sum of clipped gradients over a Poisson batch (zeros if it was empty), and B the
        constant expected batch size, never the drawn one.
        """
        noise.add_(gradients, self.std())
        return gradients.div_(batch)

    # --- what the accountant is told --------------------------------------------------------------------

    def charge(self, round: int, population: int) -> Charge:
        """What a round costs at client level."""
        return Charge(round, (Part(self.event(population)),))

    def charge_examples(
        self,
        round: int,
        clients: Sequence[int],
        examples: Sequence[int],
        steps: int | Sequence[int],
        batch: int,
        queries: int = 1,
    ) -> Charge:
        """What a round costs at example level: each client of the cohort, its records and local steps."""
        each = [steps] * len(clients) if isinstance(steps, int) else steps
        payers: dict[tuple[Event, int], list[int]] = {}
        for client, size, count in zip(clients, examples, each, strict=True):
            key = self.batch_event(int(size), batch, queries), int(count)
            payers.setdefault(key, []).append(int(client))
        parts = [Part(event, count, tuple(ids)) for (event, count), ids in sorted(payers.items())]
        return Charge(round, tuple(parts))

    def header(self, population: int) -> Header:
        """The first line of a client-level run's ledger."""
        return Header(self.unit, self.delta, Part(self.event(population)))

    def header_examples(self, smallest: int, steps: int, batch: int, queries: int = 1) -> Header:
        """The same at example level: the smallest client's records, and the most steps a client makes."""
        return Header(self.unit, self.delta, Part(self.batch_event(smallest, batch, queries), steps))


def batch_sampling(examples: int, batch: int) -> Poisson:
    """How a client draws batches of `batch` expected records out of `examples`; for draw and charge alike."""
    if examples < 1:
        raise UserError("a client without records cannot take part; leave it out of the partition")
    return Poisson(min(1.0, batch / examples))
