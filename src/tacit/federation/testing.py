"""A model on the common test set, all together and by user; and each client's own model on its own records.

Users of the test set are nobody's clients (in speech: the test speakers), so their numbers say how evenly a
model serves people it has never met.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tacit.engine import Job, Participant, Tune
from tacit.engine.states import NONE
from tacit.engine.worker import Worker, add_sums, evaluate
from tacit.federation.checkpoint import kept, load_model
from tacit.federation.evaluation import some_clients
from tacit.vector import read_buffers

Metrics = dict[str, float]


def load_newest(job: Job, folder: Path) -> int:
    """Put what is kept of a run into `job.model`; its round, or 0 if none is saved yet."""
    saved = kept(folder)
    if saved is None:
        return 0
    load_model(folder, job.model, job.algorithm.personal_part)
    return saved.round


def metrics_by_user(job: Job) -> tuple[Metrics, dict[str, Metrics]]:
    """Metrics of `job.model` over the whole test set, and over each user's records (with their `count`).

    Where records are nobody's, there are no users to tell apart.
    """

    def metrics(part: Metrics) -> Metrics:
        return {**job.task.summarise(part), "count": part["count"]}

    users = job.test.users
    if users is None:
        return metrics(evaluate(job.model, job, job.test, np.arange(len(job.test)))), {}
    names, owner = np.unique(users, return_inverse=True)
    sums = [
        evaluate(job.model, job, job.test, np.flatnonzero(owner == number)) for number in range(len(names))
    ]
    each = {str(name): metrics(part) for name, part in zip(names, sums, strict=True)}
    return metrics(add_sums(sums)), each


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
