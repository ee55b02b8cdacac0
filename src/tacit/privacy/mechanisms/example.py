"""Example level: single records are protected, and every gradient of a client is a private query.

Unit: one record of one client, present or absent. A client draws Poisson batches of its own records, clips
each record's gradient to norm C, sums them, and adds noise; what it sends is post-processing. Its records
pay for each of its own steps, at its own rate B/n; the statement reports the worst client. The sampling of
clients is no part of this guarantee.

>>> from tacit.privacy import Clip, Poisson
>>> step_event(records=1000, batch=16, queries=1, noise=1.0)
PoissonGaussian(rate=0.016, noise=1.0)

From real numbers to bits
-------------------------
Gradients are summed in float32 by whatever kernels a batch's shape selects. So here the sums are rounded to
the grid, not the contributions. With d coordinates, a clipping norm of C and a grid unit u:

- *proved*: rounding two sums to whole units moves their difference by at most √d units;
- *proved*: given that difference in units, adding a rounded Gaussian is post-processing of the Gaussian
  mechanism;
- *measured*: the float32 sums of two batches that differ in one record differ by at most C(1 + s). Over the
  models of the tests (perceptrons, convolutions, transformers; batches up to 512) the excess was below
  2e-6; s is 2⁻⁹, a margin of a thousand, and grows with the batch beyond 512 records. A record built to
  exploit the rounding of its own norm gains 2⁻¹¹ of that, which is proved
  (`tacit.gradients.records.at_least`);
- *fixed, and measured on one kind of processor*: a record on a kink of its network. For a different number of
  records, kernels round a record's numbers differently. Where a ReLU's input is 0 except for its last bits,
  that turns a gradient on or off: records built for this moved a sum of four by 4.8 C, and one of 32 by 32 C.
  Products, functions of single numbers and sums over a leading axis are therefore padded until one kernel
  computes everything (`tacit.gradients.steady`), and no record is alone in a convolution where others are
  computed together. The rest is not covered: sums over axes on both sides of the record axis, convolutions on
  several threads or in groups, fused attention, recurrent layers, what `torch.func` computes, and other
  devices.

Rounding and arithmetic are part of the sensitivity. The noise has standard deviation z·(C/u·(1 + s) + √d)
units, so z is the right number for the accountant. `tacit.gradients` ensures that a record's clipped gradient
depends on no other record.

Two observers
-------------
An observer of each upload knows when a client took part. A record therefore pays for each participation of
its client, without amplification by the sampling of clients. An observer of only the released models sees
less, so the same ε holds by post-processing. Does a smaller ε hold for them? Two arguments for it fail in
general. The sampling of clients amplifies only if a round *without* the client looks like a round *with* it
but without the record; these two differ by a whole client's upload, which example-level noise does not hide.
The noise of the other clients helps only where the upload is linear in it, so not after several local steps.
Hence the same ε is reported for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tacit.errors import UserError
from tacit.lazy import Tensor, torch
from tacit.privacy.ahead import Drawn
from tacit.privacy.bits import Bits, Ids
from tacit.privacy.bounding import Bounding
from tacit.privacy.clipping import Clip
from tacit.privacy.events import PoissonGaussian, Relation, Spend
from tacit.privacy.gaussian import for_each_stretch, rounded_gaussian
from tacit.privacy.grid import Grid
from tacit.privacy.ledger import Charge, Part
from tacit.privacy.mechanisms.base import (
    Arrivals,
    Description,
    Mechanism,
    Observer,
    State,
    Unit,
    Workload,
)
from tacit.privacy.mechanisms.plain import repeatable_cohort, weighted_mean
from tacit.privacy.steps import batch_sampling, step_event
from tacit.privacy.totals import Profile
from tacit.vector import Layout, Vectors

NUMERICAL = 2.0**-9
"""s: how far, relative to C, float32 arithmetic may let a record move a sum beyond its clipped gradient."""
MEASURED_BATCH = 512
"""The largest batch size for which that was measured."""
LEAST_CLIP = 1e-10
"""Below this clip, coordinates whose squares underflow in float32 could together be longer than it."""
FEW, LARGE = 1 << 17, 1 << 22
"""Coordinates that the CPU, and any other device, rounds and noises at a time, in float64."""


@dataclass(frozen=True)
class PlannedClient:
    """What a client with this many records will have paid: `steps` times `event`."""

    records: int
    event: PoissonGaussian
    steps: int


@dataclass(frozen=True)
class ExampleLevel(Mechanism):
    """Private gradients inside each client; see the module."""

    unit: ClassVar[Unit] = "example"
    kind: ClassVar[str] = "example"
    clients_release: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip.mode == "normalize":
            raise UserError(
                "privacy.clip.mode normalize is for clients' updates; records' gradients take clip"
            )
        if self.clip.bound < LEAST_CLIP:
            raise UserError(
                f"privacy.clip {self.clip.bound:g}: squares of numbers so small vanish in float32, so no "
                f"gradient's length is known to that; choose at least {LEAST_CLIP:g}"
            )

    @property
    def relation(self) -> Relation:
        return "add-remove"

    @property
    def sums_integers(self) -> bool:
        return False

    def sample(self, round: int, attempt: int, workload: Workload) -> Ids:
        return repeatable_cohort(self.sampling, workload.population, workload.seed, round)

    def charge(self, round: int, cohort: Ids, workload: Workload, attempt: int = 0) -> Charge:
        """Each client of the cohort pays for its own steps at its own rate; clients with equal costs share a
        part.
        """
        payers: dict[tuple[PoissonGaussian, int], list[int]] = {}
        for client in cohort:
            records = int(workload.sizes[client])
            key = self._step(records, workload, self.noise), workload.steps(records)
            payers.setdefault(key, []).append(int(client))
        ordered = sorted(payers.items(), key=lambda item: (item[0][0].key, item[0][1]))
        return Charge(round, tuple(Part(event, steps, tuple(ids)) for (event, steps), ids in ordered))

    def costliest(self, workload: Workload) -> Part:
        smallest, largest = int(workload.sizes.min()), int(workload.sizes.max())
        return Part(self._step(smallest, workload, self.noise), workload.steps(largest))

    def cost_to(self, client: int, workload: Workload) -> Part:
        records = int(workload.sizes[client])
        return Part(self._step(records, workload, self.noise), workload.steps(records))

    def planned(self, workload: Workload, rounds: int, noise: float) -> Sequence[Spend]:
        return [{client.event: client.steps} for client in self.planned_clients(workload, rounds, noise)]

    def planned_clients(self, workload: Workload, rounds: int, noise: float) -> Sequence[PlannedClient]:
        """What clients will have paid after `rounds`: one client of each kind that may have the largest ε."""
        times = np.zeros(workload.population, np.int64)
        for round in range(rounds):
            times[self.sample(round, 0, workload)] += 1
        drawn = {(int(n), int(p)) for p, n in zip(times, workload.sizes, strict=True) if p}
        totals = {
            (self._step(records, workload, noise), often * workload.steps(records)): records
            for records, often in sorted(drawn, reverse=True)
        }
        return [
            PlannedClient(records, event, steps)
            for (event, steps), records in totals.items()
            if not any(
                (e, s) != (event, steps) and e.dominates(event) and s >= steps for e, s in totals
            )
        ]  # fmt: skip

    @staticmethod
    def _step(records: int, workload: Workload, noise: float) -> PoissonGaussian:
        return step_event(records, workload.batch, workload.queries, noise)

    def init(self) -> State:
        return {}

    def bounding(self, state: State, sizes: Mapping[str, int], layout: Layout, drawn: int) -> Bounding | None:
        return None

    def release(
        self, total: Vectors, arrivals: Arrivals, state: State, round: int, attempt: int, workload: Workload
    ) -> tuple[Vectors | None, State]:
        """The weighted mean of the uploads: post-processing of the clients' private gradients."""
        return weighted_mean(total, arrivals), state

    # --- inside a client --------------------------------------------------------------------------------

    def queries(self, records: int, workload: Workload, *name: int) -> ClientQueries:
        """The private queries of a client with this many records in a round. In a simulation `name` seeds
        them.
        """
        return ClientQueries(self, workload, records, self.bits(*name, 0), self.bits(*name, 1))

    def batches(self, records: int, workload: Workload, bits: Bits) -> Iterator[Ids]:
        """Positions of each batch's records among the client's own; as many batches as are charged.

        The size of a batch is random, and an empty batch is a step like any other.
        """
        sampling = batch_sampling(records, workload.batch)
        return (sampling.draw(bits, records) for _ in range(workload.steps(records)))

    def expected_batch(self, records: int, workload: Workload) -> float:
        """The constant divisor B: the batch size, or the number of records if the client has fewer."""
        return batch_sampling(records, workload.batch).expected(records)

    def std(self, dimension: int, batch: float) -> float:
        """Standard deviation of the noise on a sum of clipped gradients, in the gradients' own units."""
        if not self.noise:
            return 0.0
        grid = self._grid(dimension)
        return self._units(grid, dimension, batch) * grid.unit

    def _grid(self, dimension: int) -> Grid:
        return Grid.fit(self.clip.bound, dimension, self.noise)

    def _units(self, grid: Grid, dimension: int, batch: float) -> float:
        slack = NUMERICAL * max(1.0, batch / MEASURED_BATCH)
        sensitivity = grid.radius * (1 + slack) + math.isqrt(dimension) + 1
        return self.noise * sensitivity

    def ahead(self, dimension: int, bits: Bits, batch: float, elsewhere: bool) -> Bits | Drawn:
        """The argument for `privatize_`: noise that is being drawn from now on, or the bits to draw it from
        later. `elsewhere`: gradients are computed on another device, so the host is idle.
        """
        if not self.noise or not elsewhere:
            return bits
        return Drawn(dimension, self._units(self._grid(dimension), dimension, batch), bits)

    def privatize_(self, gradients: Tensor, bits: Bits | Drawn, batch: float) -> Tensor:
        """The private gradient g̃ = (1/B)[Σ clip_C(g_j) + N(0, σ²C² I)], in place.

        `gradients` is the float32 sum of clipped gradients over a Poisson batch (zeros if it was empty),
        and B the constant expected batch size, never the drawn one. Sensitivity and noise: see the module.
        """
        if not self.noise:
            return gradients.div_(batch)
        dimension = gradients.numel()
        grid = self._grid(dimension)
        std, unit = self._units(grid, dimension, batch), grid.unit
        if gradients.device.type != "cpu":
            draws = (
                bits.take(dimension, std)
                if isinstance(bits, Drawn)
                else rounded_gaussian(dimension, std, bits)
            )
            # Not every device has float64; for those without it the noise is added on the host.
            where = gradients.cpu() if gradients.device.type == "mps" else gradients
            _noise_(where, torch.from_numpy(draws).to(where.device), unit, batch, LARGE)
            return gradients if where is gradients else gradients.copy_(where)

        def add(start: int, draws: NDArray[np.int64]) -> None:
            stretch = gradients[start : start + len(draws)]
            _noise_(stretch, torch.from_numpy(draws), unit, batch, FEW)

        if isinstance(bits, Drawn):
            bits.for_each_stretch(dimension, std, add)
        else:
            for_each_stretch(dimension, std, bits, add)
        return gradients

    # --- what a user is told ----------------------------------------------------------------------------

    def warnings(self, workload: Workload) -> list[str]:
        return self._loose_delta(int(workload.sizes.min()), "records of a client")

    def describe(self, population: int, epsilon: float, worst: Profile) -> Description:
        steps = ", ".join(
            f"{count:,} steps at rate {getattr(event, 'rate', 1.0):.3g}" for event, count in worst
        )
        return Description(
            sampling=(
                f"Sampling: Poisson batches inside each client; worst client: {steps or 'none yet'} "
                f"(cohort: {self._cohort(population)})."
            ),
            clipping=f"Clipping: a record's gradient to norm {self.clip.bound:g}, {self.clip.how}.",
            noise=(
                f"Noise: a rounded Gaussian on whole numbers, {self.noise:g} × the sensitivity of every sum "
                f"of a batch's gradients, made by each client, from {self._source}. The sensitivity is the "
                f"clipping norm, and {NUMERICAL:.1%} for float32 arithmetic (measured, with a margin of a "
                "thousand) and the rounding of sums to the grid (proved); given it, the accountant's ε is "
                "that of the released bits."
            ),
            observers=(
                Observer(
                    "whoever sees each upload", epsilon, "The worst client; no help from client sampling."
                ),
                Observer(
                    "whoever sees only the released models",
                    epsilon,
                    "The same bound: they see less, and no smaller one is proved.",
                ),
            ),
            not_covered=(
                *self._not_covered,
                "how many records a client has, and which clients took part: both count as public",
                "a person with several records: protection weakens with their number",
                "records on a kink of the network to the last bit, such as a ReLU's input that rounds to "
                "just above or below 0, where a device rounds a record's numbers in another way beside other "
                "records: on one thread of a CPU with AVX2 or AVX-512, where it was measured, products, "
                "convolutions, activations, and sums over axes on one side of the records' do not; sums over "
                "axes on both sides, convolutions on several threads or in groups, fused attention, einsum, "
                "recurrent layers, models computed record by record, and other devices may",
                "a single text where data.pack joined texts: an example is what it joined, and one text less "
                "moves its neighbours to other examples",
                "what a model draws for records other than by dropout, bernoulli, uniform, normal_ and "
                "exponential_ on the CPU: these masks are the cipher's, others torch's own generator's, "
                "which has a fresh secret state in each step",
            ),
            metrics=""
            if self.metrics is None
            else (
                "Metrics: what is told of a round (norms of uploads, which of them were not finite, what a "
                "method notes) is made of private gradients, and costs nothing more. Losses are exact, and "
                "not told."
            ),
        )


def _noise_(sums: Tensor, draws: Tensor, unit: float, batch: float, few: int) -> None:
    """sums ← (⌊sums ÷ unit⌉ + draws) · unit ÷ batch, in float64, and so only `few` coordinates at a time."""
    for part, noise in zip(torch.split(sums, few), torch.split(draws, few), strict=True):
        part.copy_(part.double().div_(unit).round_().add_(noise).mul_(unit / batch))


@dataclass(frozen=True)
class ClientQueries:
    """A client's steps of one round: the records of each step's batch, and the noise on its gradients.

    Exactly what was charged for a client with this many records, with random bits for this round only.
    """

    mechanism: ExampleLevel
    workload: Workload
    records: int
    sampling: Bits
    noise: Bits

    @property
    def clip(self) -> Clip:
        return self.mechanism.clip

    @cached_property
    def expected_batch(self) -> float:
        return self.mechanism.expected_batch(self.records, self.workload)

    def variance(self, dimension: int) -> float:
        """The variance of the noise in each coordinate of a private gradient."""
        return (self.mechanism.std(dimension, self.expected_batch) / self.expected_batch) ** 2

    def batches(self) -> Iterator[Ids]:
        """See `ExampleLevel.batches`."""
        return self.mechanism.batches(self.records, self.workload, self.sampling)

    def ahead(self, gradients: Tensor) -> Bits | Drawn:
        """See `ExampleLevel.ahead`; for a sum that will stand in `gradients`."""
        elsewhere = gradients.device.type != "cpu"
        return self.mechanism.ahead(gradients.numel(), self.noise, self.expected_batch, elsewhere)

    def privatize_(self, gradients: Tensor, noise: Bits | Drawn) -> Tensor:
        """See `ExampleLevel.privatize_`."""
        return self.mechanism.privatize_(gradients, noise, self.expected_batch)
