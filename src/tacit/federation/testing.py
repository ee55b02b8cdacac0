"""A model on the common test set, all together and by user; and each client's own model on its own records.

Where users of the test set are nobody's clients (in speech: the test speakers), their numbers say how evenly
a model serves people it has never met. Where they are clients whom a guarantee protects, an exact number on
each of them would be outside of it, and none is given.

>>> users = {name: {"perplexity": float(value)} for name, value in zip("abcde", (10, 20, 30, 40, 90))}
>>> spread(users, headline(users["a"]))
{'worst': 90.0, 'worst tenth': 70.0, 'worst quarter': 40.0, 'median': 30.0, 'best quarter': 20.0, \
'best tenth': 14.0, 'best': 10.0}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tacit.engine import Job, Participant, Tune
from tacit.engine.states import NONE
from tacit.engine.worker import Worker, add_sums, evaluate
from tacit.federation.checkpoint import fill, kept
from tacit.federation.evaluation import some_clients
from tacit.privacy.mechanisms.base import Unit
from tacit.tasks import Headline, headline
from tacit.vector import read_buffers

Metrics = dict[str, float]
SPREAD = {
    "worst": 0.0,
    "worst tenth": 0.1,
    "worst quarter": 0.25,
    "median": 0.5,
    "best quarter": 0.75,
    "best tenth": 0.9,
    "best": 1.0,
}
"""Shares of the users, the worst served first."""


@dataclass(frozen=True)
class Tested:
    """What a model did on a test set."""

    round: int
    """Rounds that it was trained for."""
    whole: Metrics
    """All records together."""
    users: dict[str, Metrics]
    """Each user's records, with their `count`; none where records are nobody's."""
    withheld: str | None = None
    """Why there are no users, where a guarantee forbids to tell them apart."""
    untrained: tuple[str, ...] = ()
    """The parts that clients keep to themselves: these numbers are with the initial ones."""

    @property
    def spread(self) -> dict[str, float]:
        """How the headline metric is spread over users."""
        return spread(self.users, headline(self.whole))


def spread(users: Mapping[str, Metrics], metric: Headline) -> dict[str, float]:
    """Quantiles of a metric over users, each of whom counts once; those without a number do not."""
    scores = [metric.score(own[metric.name]) for own in users.values() if metric.name in own]
    scores = [score for score in scores if np.isfinite(score)]
    if not scores:
        return {}
    found = np.quantile(scores, list(SPREAD.values()))
    return {name: metric.score(float(score)) for name, score in zip(SPREAD, found, strict=True)}


def tested(job: Job, round: int, unit: Unit | None) -> Tested:
    """Test `job.model`; `unit` is what the run's guarantee protects, if it claims one."""
    withheld = None if unit is None else _withheld(job, unit)
    untrained = job.algorithm.personal_part if round else ()
    if withheld is None:
        return Tested(round, *metrics_by_user(job), untrained=untrained)
    whole = evaluate(job.model, job, job.test, np.arange(len(job.test)))
    return Tested(round, _metrics(job, whole, len(job.test)), {}, withheld, untrained)


def _withheld(job: Job, unit: Unit) -> str | None:
    clients, judging = job.population.records.users, job.test.users
    if unit == "client" and clients is not None and judging is not None and np.isin(judging, clients).any():
        return "users of the test set are clients too, and exact numbers on each are outside the guarantee"
    return None


def load_newest(job: Job, folder: Path) -> int:
    """Put what is kept of a run into `job.model`; its round, or 0 if none is saved yet."""
    saved = kept(folder)
    if saved is None:
        return 0
    fill(job.model, job.layout, saved, folder)
    return saved.round


def metrics_by_user(job: Job) -> tuple[Metrics, dict[str, Metrics]]:
    """Metrics of `job.model` over the whole test set, and over each user's records (with their `count`).

    Where records are nobody's, there are no users to tell apart.
    """

    users = job.test.users
    if users is None:
        whole = evaluate(job.model, job, job.test, np.arange(len(job.test)))
        return _metrics(job, whole, len(job.test)), {}
    names, owner = np.unique(users, return_inverse=True)
    held = [np.flatnonzero(owner == number) for number in range(len(names))]
    sums = [evaluate(job.model, job, job.test, own) for own in held]
    found = zip(names, sums, held, strict=True)
    each = {str(name): _metrics(job, part, len(own)) for name, part, own in found}
    return _metrics(job, add_sums(sums), len(job.test)), each


def metrics_by_client(
    job: Job, folder: Path | None, count: int, tune: Tune | None = None
) -> dict[int, Metrics]:
    """Metrics of `count` clients' own models, each on its own held-out records: `job.model` with the personal
    part that the run in `folder` keeps for it.

    The clients are those that a run evaluates while it trains. With `tune`, each first trains for itself.
    """
    saved = None if folder is None else kept(folder)
    versions = {} if saved is None else saved.facts["versions"]
    worker = Worker(job)
    message = {"theta": worker.flat.shared.clone(), **read_buffers(job.model)}
    found = {}
    for client in some_clients(job, count).tolist():
        own = worker.evaluate_client(message, Participant(client, versions.get(str(client), NONE)), tune)
        if own:
            found[client] = job.task.summarise(own)
    worker.load(message)  # no client's part stays in the model
    return found


def _metrics(job: Job, sums: Metrics, count: int) -> Metrics:
    return {**job.task.summarise(sums), "count": float(count)}
