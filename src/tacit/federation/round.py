"""One round: eight steps, composed here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tacit.engine import Engine, Order, Report
from tacit.errors import Diverged
from tacit.federation.layers import server_statistics
from tacit.federation.measures import own_accuracies, seen
from tacit.federation.server import Server
from tacit.federation.spending import Spending
from tacit.federation.tracking import Record
from tacit.privacy import Aggregation, Arrivals, Bounding
from tacit.vector import Vectors

Progress = Callable[[int, int], None]
"""Called with the number of clients that are done, and the number of clients in the cohort."""


@dataclass(frozen=True)
class Outcome:
    """What happened in a round. It contains exact numbers on clients, so it is only for the researcher."""

    order: Order
    message: Vectors
    reports: Sequence[Report]
    measured: Record = field(default_factory=dict)
    """Private metrics of the clients, released with the round and covered by its charge."""
    server_layers: dict[str, list[float]] = field(default_factory=dict)
    absent: int = 0
    """The number of clients that were asked and did not answer."""


def run_round(
    server: Server,
    mechanism: Aggregation,
    spending: Spending,
    engine: Engine,
    progress: Progress,
) -> Outcome | None:
    """Run the server's next round. If the privacy budget has no room for it, do nothing and return None."""
    job, n, workload = server.job, server.round, server.job.workload
    # 1. Draw the cohort, and 2. compute what the round will cost.
    attempt = spending.attempt(n)
    cohort = mechanism.sample(n, attempt, workload)
    charge = mechanism.charge(n, cohort, workload, attempt)
    if not spending.affords(charge):
        return None
    spending.make_room(charge, server.vectors)
    # 3. Prepare what the clients receive.
    bounding = mechanism.bounding(server.mechanism_state, job.upload_sizes, server.layout, len(cohort))
    order, message = server.order(attempt, bounding), server.message()
    participants = server.participants(cohort)
    tests = own_accuracies(engine, job.privacy, message, participants)
    # 4. Each client trains, bounds its upload and adds it to the sum. 5. Record the charge on disk before
    # anything is released: if what clients send is already a release, before they start; otherwise before
    # the sum gets its noise.
    if mechanism.clients_release:
        spending.record(charge, cohort)
    total, reports = engine.sum(order, message, participants, lambda done: progress(done, len(participants)))
    if not server.protects_clients:
        # A stop reveals something, too. If clients are protected the round therefore goes on to its end:
        # clients who sent nothing usable count as zero, and the noise hides how many they were.
        refuse_if_none_finite(n, reports)
    if not mechanism.clients_release:
        spending.record(charge, cohort)
    # 6. Release the noisy mean, the only way from uploads to the server, and 7. take the server's step.
    server.whole = False
    arrivals, state = _arrivals(reports, bounding, len(participants)), server.mechanism_state
    exact = _before_noise(server, mechanism, total, bounding, arrivals) if job.layers else None
    mean, server.mechanism_state = mechanism.release(total, arrivals, state, n, attempt, workload)
    measured: Record = {}
    if job.privacy is not None and job.privacy.metrics is not None:
        measured = job.privacy.measure(seen(reports), tests, state, n, attempt, workload)
    if mean is not None:
        server.step(mean, order.lr)
    # 8. Keep the round's results; the run evaluates, saves and reports them.
    server.finish(reports)
    layers: dict[str, list[float]] = {}
    if exact is not None and mean is not None:
        layers = server_statistics(server.layout, exact, mean["delta"])
    return Outcome(order, message, reports, measured, layers, len(participants) - len(reports))


def refuse_if_none_finite(round: int, reports: Sequence[Report]) -> None:
    """Refuse a round in which no client sent finite numbers."""
    if reports and not any(report.finite for report in reports):
        raise Diverged(
            f"round {round + 1}: the updates of all {len(reports)} clients were infinite or not a number"
        )


def _before_noise(
    server: Server, mechanism: Aggregation, total: Vectors, bounding: Bounding | None, arrivals: Arrivals
) -> Tensor:
    """The mean bounded update before the server's noise (with any noise that the clients added
    themselves).
    """
    delta = total["delta"]
    if bounding is None:  # an unbounded sum is divided by the weights that arrived
        return delta.float() / (arrivals.weight or 1.0)
    expected = mechanism.expected(len(server.job.population))
    if bounding.grid is None:
        return delta.float() / expected
    return bounding.grid.decoded(delta.clone(), 1 / expected)


def _arrivals(reports: Sequence[Report], bounding: Bounding | None, drawn: int) -> Arrivals:
    """What the mechanism needs to know about the clients' reports."""
    norm = math.inf if bounding is None else bounding.bound.bound
    return Arrivals(
        drawn=drawn,
        arrived=sum(report.finite for report in reports),
        within=sum(report.finite and report.norm <= norm for report in reports),
        weight=sum(report.weight for report in reports),
        missing=drawn - len(reports),
    )
