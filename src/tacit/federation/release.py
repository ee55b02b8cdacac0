"""The only door from clients' uploads to the server's state.

A `Release` draws the cohort, says what its clients must do to their uploads, and turns the sum of the
uploads into the mean that the algorithm's server part sees. Everything the server learns of the clients
passes here, and under a guarantee it is charged to the ledger first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tacit import randomness
from tacit.engine import Job, Order, Report
from tacit.errors import UserError
from tacit.federation.statements import LEDGER, write_statement
from tacit.privacy.checks import refuse_batch_norm, refuse_weights
from tacit.privacy.ledger import Charge, Header, Ledger
from tacit.privacy.mechanism import Privacy
from tacit.privacy.sampling import Sampling
from tacit.vector import Vectors

COHORT, RELEASE, QUANTILE = 1, 2, 3
"""Purposes of seeded draws in a simulation."""


class Release(Protocol):
    """How cohorts are drawn and uploads are let through."""

    @property
    def expected(self) -> float:
        """Expected number of clients in a cohort."""

    def draw(self, round: int) -> NDArray[np.int64] | None:
        """The clients of a round; None if the budget has no room for it."""

    def prepare(self, order: Order, cohort: NDArray[np.int64]) -> Order:
        """Complete a round's order with what clients must do before they send anything."""

    def mean(self, order: Order, total: Vectors, reports: Sequence[Report]) -> Vectors | None:
        """The mean upload, in `total`'s own memory; None when there is nothing to release."""

    def facts(self) -> dict[str, Any]:
        """Plain values for the round's record."""

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""

    def explain(self, folder: Path) -> None:
        """Write down what is guaranteed so far, if anything is."""

    def open(self, folder: Path, state: Mapping[str, Any]) -> None:
        """The run begins, or goes on from a checkpoint's `state`."""

    def close(self) -> None:
        """The run has ended."""


@dataclass(frozen=True)
class PlainRelease:
    """No guarantee: a seeded cohort, and the weighted mean of whoever answered."""

    sampling: Sampling
    population: int
    seed: int

    @property
    def expected(self) -> float:
        return self.sampling.expected(self.population)

    def draw(self, round: int) -> NDArray[np.int64] | None:
        return seeded_cohort(self.sampling, self.population, self.seed, round)

    def prepare(self, order: Order, cohort: NDArray[np.int64]) -> Order:
        return order

    def mean(self, order: Order, total: Vectors, reports: Sequence[Report]) -> Vectors | None:
        return weighted_mean(total, reports)

    def facts(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def explain(self, folder: Path) -> None:
        pass

    def open(self, folder: Path, state: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class PrivateRelease:
    """A guarantee: the cohort's draw and the ledger's charge come from one `Privacy` object.

    Client level: the sum is charged, then noised, then divided by the expected cohort.
    Example level: gradients are noised inside the clients, and each client sends what it made of them; so
    the round is charged before any client starts, and the mean is post-processing.
    """

    def __init__(self, privacy: Privacy, job: Job, weighted: bool) -> None:
        refuse_batch_norm(job.model, privacy.unit)
        refuse_weights(weighted, privacy.unit)
        if job.privacy != privacy:
            raise UserError("the job's privacy is not the release's, so clients would not do what is charged")
        self.privacy, self._job = privacy, job
        self._sizes = job.population.sizes
        self._population = len(job.population)
        self._seed = job.seed
        self.bound = privacy.clip.bound
        self.ledger: Ledger | None = None
        self._attempts: dict[int, int] = {}

    @property
    def expected(self) -> float:
        return self.privacy.sampling.expected(self._population)

    @property
    def header(self) -> Header:
        """The ledger's first line."""
        if self.privacy.unit == "client":
            return self.privacy.header(self._population)
        job = self._job
        smallest, largest = int(self._sizes.min()), int(self._sizes.max())
        steps = job.local.nominal_steps(largest) * job.algorithm.batches
        return self.privacy.header_examples(smallest, steps, job.local.batch, job.algorithm.queries)

    def open(self, folder: Path, state: Mapping[str, Any]) -> None:
        self.bound = float(state.get("bound", self.privacy.clip.bound))
        saved = int(state.get("charges", 0))
        if saved and not (folder / LEDGER).exists():
            raise UserError(f"{folder / LEDGER} is gone, and with it what was spent; restore it, then resume")
        self.ledger = Ledger.open(folder / LEDGER, self.header)
        if self._charges < saved:
            self.close()
            raise UserError(
                f"{folder / LEDGER} holds {self._charges} charges where the checkpoint knows of {saved}; "
                "restore the newest one, then resume"
            )
        for entry in self.ledger.entries:
            for round in range(entry.round, entry.round + entry.times):
                self._attempts[round] = self._attempts.get(round, 0) + 1

    def draw(self, round: int) -> NDArray[np.int64] | None:
        privacy = self.privacy
        if privacy.unit == "example":
            # No part of the guarantee: the cohorts of an example-level run are named, and known in advance.
            cohort = seeded_cohort(privacy.sampling, self._population, self._seed, round)
        else:
            coins = privacy.coins(self._seed, round, self._attempts.get(round, 0), COHORT)
            cohort = privacy.sampling.draw(coins, self._population)
        charge = self._charge(round, cohort)
        if privacy.epsilon is not None and self._open_ledger.would_exceed(charge, privacy.epsilon):
            return None
        return cohort

    def prepare(self, order: Order, cohort: NDArray[np.int64]) -> Order:
        refuse_weights(order.weighted, self.privacy.unit)
        order = replace(order, attempt=self._attempts.get(order.round, 0))
        if self.privacy.noise_at == "clients":
            order = replace(order, drawn=len(cohort))  # only they need it: who took part is a secret
        if self.privacy.unit == "client":
            order = replace(
                order, bound=self.privacy.bind(self._job.upload_sizes, self._job.layout, self.bound)
            )
        if self._leaves_clients_noised:
            self._spend(order.round, cohort)
        return order

    def mean(self, order: Order, total: Vectors, reports: Sequence[Report]) -> Vectors | None:
        privacy = self.privacy
        if privacy.unit == "example":
            return weighted_mean(total, reports)
        if not self._leaves_clients_noised:
            self._spend(order.round, np.array([r.client for r in reports]))
        arrived = sum(report.finite for report in reports)
        name = (self._seed, order.round, order.attempt)
        mean = privacy.release(
            total, privacy.source(*name, RELEASE), self._population, self.bound, order.drawn, arrived
        )
        within = sum(report.finite and report.norm <= self.bound for report in reports)
        self.bound = privacy.next_bound(
            self.bound, within, arrived, self._population, privacy.source(*name, QUANTILE)
        )
        return mean

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"epsilon": self._open_ledger.epsilon().value, "delta": self.privacy.delta}
        if self.privacy.adaptive is not None:
            facts["clip"] = self.bound
        return facts

    def state(self) -> dict[str, Any]:
        return {"bound": self.bound, "charges": self._charges}

    def explain(self, folder: Path) -> None:
        write_statement(folder, self.privacy, self._open_ledger.entries, self._population)

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    @property
    def _charges(self) -> int:
        return sum(entry.times for entry in self._open_ledger.entries)

    @property
    def _leaves_clients_noised(self) -> bool:
        """Whether what a client sends is already its release, so that the charge must come before it."""
        return self.privacy.unit == "example" or self.privacy.noise_at == "clients"

    @property
    def _open_ledger(self) -> Ledger:
        if self.ledger is None:
            raise UserError("the ledger is not open; call open() before the first round")
        return self.ledger

    def _charge(self, round: int, cohort: NDArray[np.int64]) -> Charge:
        if self.privacy.unit == "client":
            return self.privacy.charge(round, self._population)
        job = self._job
        examples = [int(self._sizes[client]) for client in cohort]
        steps = [job.local.nominal_steps(n) * job.algorithm.batches for n in examples]
        clients = [int(client) for client in cohort]
        return self.privacy.charge_examples(
            round, clients, examples, steps, job.local.batch, job.algorithm.queries
        )

    def _spend(self, round: int, cohort: NDArray[np.int64]) -> None:
        self._open_ledger.charge(self._charge(round, cohort))
        self._attempts[round] = self._attempts.get(round, 0) + 1


def seeded_cohort(sampling: Sampling, population: int, seed: int, round: int) -> NDArray[np.int64]:
    """A round's cohort, repeatable."""
    return sampling.draw(randomness.generator(seed, "cohort", round), population)


def participations(sampling: Sampling, population: int, seed: int, rounds: int) -> NDArray[np.int64]:
    """How often each client will play in a run whose cohorts are seeded."""
    plays = np.zeros(population, np.int64)
    for round in range(rounds):
        plays[seeded_cohort(sampling, population, seed, round)] += 1
    return plays


def weighted_mean(total: Vectors, reports: Sequence[Report]) -> Vectors | None:
    """The sum divided, in place, by the weights in it; None if there are none."""
    weight = sum(report.weight for report in reports)
    return {name: vector.div_(weight) for name, vector in total.items()} if weight else None
