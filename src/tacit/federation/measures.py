"""What a record may say of a round: private metrics, and exact ones where nobody promised otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from tacit.engine import Engine, Participant, Report
from tacit.errors import UserError
from tacit.federation.tracking import Record
from tacit.privacy import Mechanism, Seen
from tacit.vector import Vectors

LOSS = "train_loss"


def seen(reports: Sequence[Report]) -> list[Seen]:
    """What the private metrics of a round are made of."""
    return [Seen(report.finite, report.loss, report.norm) for report in reports]


def own_accuracies(
    engine: Engine, mechanism: Mechanism | None, message: Vectors, participants: Sequence[Participant]
) -> list[float]:
    """The round's model on the cohort's own test records, where private metrics ask for it: at most one
    number of each client.
    """
    if mechanism is None or mechanism.metrics is None or not mechanism.metrics.accuracy:
        return []
    found = engine.evaluate_clients(message, participants)
    if any("accuracy" not in metrics for metrics in found):
        raise UserError("privacy.metrics.accuracy: the task has no accuracy; leave it out")
    return [metrics["accuracy"] for metrics in found]


def withheld(mechanism: Mechanism | None, record: Record) -> Record:
    """The exact part of a round's record, as far as it may be told.

    At client level nothing: even how many took part is a secret. At example level cohorts and sizes are
    public, norms are of private gradients, and losses are exact.
    """
    if mechanism is None or not mechanism.withholds:
        return record
    if mechanism.unit == "client":
        return {}
    return {name: value for name, value in record.items() if name != LOSS}
