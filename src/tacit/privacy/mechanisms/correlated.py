"""Client level with correlated noise: what the matrix mechanisms (`blt`, `banded`) share.

Unit: one client with all its uploads, present or absent (absent: all of them are zero; the number of clients
is public). A public draw divides clients into b groups, and round t takes the clients of group t mod b. A
client's participations are therefore b rounds apart, which a fleet can guarantee without secret sampling.
No amplification is claimed. `tacit.privacy.matrices` has the matrix, its sensitivity and its error.

Exact in integers
-----------------
x_t is the round's exact sum on the grid, in integers; one client moves it by at most 2ᵇ units. The noise is
made on a grid that is 2ᶠ times finer: z_t is a rounded Gaussian in fine units. With n_s, the noise on the
sums of earlier rounds, the round's noise is

    n_t = ⌊(z_t − a_t)/2ᶠ + ½⌋,     a_t ≈ 2ᶠ Σ_{k≥1} c_k n_{t−k},     released: w_t = x_t + n_t.

All of these are integers. For an adversary who has seen w_0, …, w_{t−1}, each candidate x fixes
n_s = w_s − x_s, so

    w_t = ⌊(2ᶠx_t − a_t + round(g))/2ᶠ + ½⌋ = a function of μ_t + g,     μ_t = 2ᶠx_t − a_t(w − x),

where g is the real Gaussian: μ_t is an integer, so μ_t + round(g) = round(μ_t + g). The program's release is
therefore post-processing of Gaussian queries μ_t + g_t that depend on earlier answers. Where a_t is exact
(`banded`), μ_t(x) − μ_t(x′) = 2ᶠ(C(x − x′))_t, whatever was released: this is the accountant's query. Where
a_t is rounded (`blt`) by at most r = `Matrix.drift`, the difference is off by at most 2r in each of d
coordinates, and by Minkowski's inequality the lengths over T rounds by at most 2r√(dT) in all. The noise is
larger by that amount.

It costs nothing that answers may depend on earlier ones (Denisov et al. 2022, theorem 2.1). Suppose
Σ‖Δ_t‖² ≤ S² for every history, with Δ_t = μ_t(x) − μ_t(x′). Then the privacy loss
Σ⟨g_t, Δ_t⟩/σ² + ‖Δ_t‖²/2σ² is distributed as for a Gaussian: Σ⟨g_t, u_t⟩, with u_t known before g_t and
Σ‖u_t‖² padded to the constant S², is N(0, S²σ²), because its characteristic function is a product of
conditional ones.

A round that is repeated after a crash gets fresh z and the saved n of the rounds before it. What the
interrupted round released is one more row of a query, at most as long as the longest row, and is charged as
that.

The noise of earlier rounds must stay secret for ever. It is in the run's checkpoints, so these must not be
shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np

from tacit import randomness
from tacit.errors import UserError
from tacit.lazy import Tensor, torch
from tacit.privacy.bits import Bits, Ids
from tacit.privacy.events import MatrixRow, Relation, Spend
from tacit.privacy.gaussian import STRETCH, add_rounded_gaussian_
from tacit.privacy.grid import Grid
from tacit.privacy.ledger import Charge, Part
from tacit.privacy.matrices import PRECISION, Floats, Matrix, largest_row, row_squares
from tacit.privacy.mechanisms.base import RELEASE, Arrivals, Description, NotDue, State, Workload
from tacit.privacy.mechanisms.client import ClientLevel
from tacit.privacy.sampling import FixedSize, OwnSampling
from tacit.privacy.totals import Profile
from tacit.vector import Vectors

MATRIX = "matrix"
"""The state: the numbers of the matrix and, for each upload, the noise of earlier rounds."""
_HALF = 1 << (PRECISION - 1)


@dataclass(frozen=True)
class Correlated(ClientLevel):
    """A matrix mechanism over `rounds` rounds. Subclasses choose the matrix."""

    rounds: int = 1
    """The number of rounds that the matrix is made for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_at != "server":
            raise UserError(
                "privacy.noise_at: correlated noise is remembered from round to round, which only the "
                "server can; leave it out"
            )
        if isinstance(self.sampling, OwnSampling):
            raise UserError(
                "sampling: correlated noise is made for clients that take part at known distances; leave "
                "privacy.mechanism out, or sampling="
            )
        if self.rounds < 1:
            raise UserError(f"correlated noise over {self.rounds} rounds: choose at least 1")

    @property
    def relation(self) -> Relation:
        return "add-remove"

    def matrix(self, population: int) -> Matrix:
        """C for a fleet with this many clients."""
        raise NotImplementedError

    # --- who takes part ---------------------------------------------------------------------------------

    def separation(self, population: int) -> int:
        """b: rounds from one participation of a client to its next."""
        assert isinstance(self.sampling, FixedSize)
        self.sampling.expected(population)
        return population // self.sampling.size

    def group(self, round: int, workload: Workload) -> Ids:
        """The clients that may take part in a round; public."""
        groups = self.separation(workload.population)
        return np.sort(_order(workload.seed, workload.population)[round % groups :: groups])

    def sample(self, round: int, attempt: int, workload: Workload) -> Ids:
        return self.group(round, workload)

    def expected(self, population: int) -> float:
        """The average number of clients in a group: the constant divisor."""
        return population / self.separation(population)

    # --- what it costs ----------------------------------------------------------------------------------

    def cost_to(self, client: int, workload: Workload) -> Part:
        """The cost of all rounds of the run together, for a client that is never asked before its turn."""
        ((event, _),) = self.planned(workload, self.rounds, self.noise)[0].items()
        return Part(event)

    def due(self, client: int, round: int, before: Sequence[int], workload: Workload) -> tuple[Part, ...]:
        """The first round pays for all later rounds, which are at least b rounds apart. A repeated round pays
        for the longest row.
        """
        apart = self.separation(workload.population)
        if round >= self.rounds or client not in self.group(round, workload):
            raise NotDue(f"it is not this client's turn: it takes part once in {apart:,} rounds")
        if not before:
            return super().due(client, round, before, workload)
        if round == before[-1]:
            return (self.costliest(workload),)
        if round < before[-1] + apart:
            raise NotDue(
                f"round {round + 1} comes {round - before[-1]} rounds after the last one here, and the run "
                f"promises {apart:,}"
            )
        return ()

    def charge(self, round: int, cohort: Ids, workload: Workload, attempt: int = 0) -> Charge:
        """What this round adds to the squared sensitivity of all rounds before it; this may be nothing (with
        fewer bands than groups). For a repeated round, the largest possible row.
        """
        if round >= self.rounds:
            raise UserError(f"the matrix of the correlated noise was made for {self.rounds} rounds, not more")
        if attempt:
            return Charge(round, (self.costliest(workload),))
        square = float(self._charged(workload)[round])
        return Charge(round, (Part(MatrixRow(self.noise, square)),) if square else ())

    def costliest(self, workload: Workload) -> Part:
        n = workload.population
        longest = largest_row(self.matrix(n), self.rounds, self.separation(n))
        return Part(MatrixRow(self.noise, longest + self.measured))

    def planned(self, workload: Workload, rounds: int, noise: float) -> Sequence[Spend]:
        return [{MatrixRow(noise, math.fsum(self._charged(workload)[:rounds])): 1}]

    @property
    def sum_noise(self) -> float:
        """The configured noise: here metrics are charged in addition to the rows."""
        return self.noise

    @property
    def measured(self) -> float:
        """What a participation's metrics add to the squared sensitivity: their noise is independent, with
        multiplier `noise`/√share.
        """
        return 0.0 if self.metrics is None else self.metrics.share

    def _charged(self, workload: Workload) -> Floats:
        """What each round adds to a client's squared sensitivity: its row, and metrics when a turn begins.

        Nobody takes part twice in a turn, so after T rounds everyone has paid for ⌈T/b⌉ participations.
        """
        squares: Floats = self._squares(workload).copy()
        squares[:: self.separation(workload.population)] += self.measured
        return squares

    def _squares(self, workload: Workload) -> Floats:
        n = workload.population
        return row_squares(self.matrix(n), self.rounds, self.separation(n))

    # --- noise ------------------------------------------------------------------------------------------

    def grid(self, state: State, dimension: int) -> Grid:
        """A grid that is coarse enough for sampling noise 2ᶠ times finer."""
        return Grid.fit(self.clipping_norm(state), dimension, self.sum_noise * 2**PRECISION)

    def fine_std(self, grid: Grid, dimension: int, workload: Workload) -> float:
        """Standard deviation of z in fine units: `noise` × the sensitivity to one client, with rounding.

        Rows of length row_s·2ᵇ⁺ᶠ + e, e = 2r√d, have a joint length ≤ 2ᵇ⁺ᶠ·V_T + e√T, V_T² = Σ_{s<T} v_s².
        For every T up to the last round, that is at most V_T times the length that is returned here.
        """
        sensitivity = float(grid.radius << PRECISION)
        drift = self.matrix(workload.population).drift
        if drift:
            together = np.sqrt(np.cumsum(self._squares(workload)))
            stretch = float(np.max(np.sqrt(np.arange(1, self.rounds + 1)) / together))
            sensitivity += 2 * drift * (math.isqrt(dimension) + 1) * stretch
        return self.noise * sensitivity

    def release(
        self, total: Vectors, arrivals: Arrivals, state: State, round: int, attempt: int, workload: Workload
    ) -> tuple[Vectors, State]:
        """Add this round's correlated noise to the sum and divide it by the constant expected cohort size."""
        if not self.sums_integers:
            return super().release(total, arrivals, state, round, attempt, workload)
        dimension = sum(vector.numel() for vector in total.values())
        grid, matrix = self.grid(state, dimension), self.matrix(workload.population)
        std, expected = self.fine_std(grid, dimension, workload), self.expected(workload.population)
        bits = self.bits(workload.seed, round, attempt, RELEASE)
        mean: Vectors = {}
        following: State = {MATRIX: torch.tensor(matrix.numbers, dtype=torch.float64)}
        self._refuse_other(state, following[MATRIX], round)
        for name, vector in total.items():
            before = state.get(name)
            if before is None:
                before = torch.zeros(matrix.buffers, vector.numel(), dtype=torch.int64)
            following[name] = torch.empty_like(before)
            for start in range(0, vector.numel(), STRETCH):
                part = slice(start, start + STRETCH)
                noise = self._noise(matrix, before[:, part], std, bits)
                vector[part].add_(noise)
                following[name][:, part] = matrix.advance(before[:, part], noise)
            mean[name] = grid.decoded(vector, 1 / expected)
        return mean, following

    @staticmethod
    def _noise(matrix: Matrix, buffers: Tensor, std: float, bits: Bits) -> Tensor:
        """n_t = ⌊(z_t − a_t)/2ᶠ + ½⌋."""
        fine = torch.zeros(buffers.shape[1], dtype=torch.int64)
        add_rounded_gaussian_(fine, std, bits)
        return fine.sub_(matrix.offset(buffers)).add_(_HALF) >> PRECISION

    @staticmethod
    def _refuse_other(state: State, matrix: Tensor, round: int) -> None:
        """Refuse a state that belongs to another matrix, or to other rounds than those before this one."""
        if not state:
            if round:
                raise UserError(
                    f"round {round + 1}: the noise of the rounds before it is not in the checkpoint, so "
                    "noise that is correlated with it cannot be made; start a new run"
                )
        elif not torch.equal(state[MATRIX], matrix):
            raise UserError(
                "the checkpoint's correlated noise was made with another matrix (another number of rounds or "
                "clients, or another version of the optimizer that found it); start a new run"
            )

    # --- what a user is told ----------------------------------------------------------------------------

    @property
    def seen_noise(self) -> None:
        """None: ε does not rely on sampling, so knowing who took part reveals no more."""
        return

    def against_server(self, epsilon: float | None) -> None:
        return

    def without_metrics(self) -> Self:
        return replace(self, metrics=None)

    def describe(self, population: int, epsilon: float, worst: Profile) -> Description:
        plain = super().describe(population, epsilon, worst)
        groups = self.separation(population)
        sampled = (
            f"Sampling: none that is claimed. {population:,} clients in {groups:,} groups, by a public draw; "
            f"each round takes the next group, so a client takes part once in {groups:,} rounds. "
            "Neighbours: what a client sends, or zeros in its place"
        )
        covered = "the noise of past rounds: checkpoints hold it, and whoever sees one sees through it"
        secret = replace(plain.observers[0], who="whoever sees every released model, and who took part when")
        return replace(
            plain,
            sampling=f"{sampled}.",
            noise=f"{self._how_correlated(population)} {plain.noise}",
            observers=(replace(secret, why="Nothing about sampling is secret."), *plain.observers[1:]),
            not_covered=(*plain.not_covered, covered),
        )

    @property
    def _measured(self) -> str:
        if self.metrics is None:
            return ""
        return (
            f"{self.metrics.describe(self.noise)} Each participation pays for them: {self.measured:.3g} on "
            "its squared sensitivity."
        )

    def _how_correlated(self, population: int) -> str:
        raise NotImplementedError


@lru_cache(maxsize=4)
def _order(seed: int, population: int) -> Ids:
    return randomness.generator(seed, "groups").permutation(population).astype(np.int64)
