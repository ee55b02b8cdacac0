"""How good the server's model is, and each client's own, every so many rounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tacit import randomness
from tacit.engine import Engine, Job, Tune
from tacit.federation.server import Server
from tacit.federation.tracking import Record
from tacit.tasks.headline import KEPT


def evaluation(server: Server, engine: Engine) -> Record:
    """Metrics on the common test set and, where the settings ask for them, of clients' own models."""
    tune = server.settings.evaluate.tune
    found: Record = engine.evaluate(server.message()) | _clients(server, engine, "personal", None)
    if kept := server.layout.size - server.layout.shared:
        found[KEPT] = kept
    return found if tune is None else found | _clients(server, engine, "tuned", tune)


def untrained_part(job: Job, clients: int) -> str | None:
    """A word where parameters that nobody trains judge a run; `clients` are tested by themselves."""
    metrics = None if job.privacy is None else job.privacy.metrics
    if not job.algorithm.personal_part or clients or (metrics is not None and metrics.accuracy):
        return None
    private = job.privacy is not None and job.privacy.withholds
    keys = "privacy.metrics.accuracy: true" if private else "evaluate.clients: 100"
    return (
        f"clients keep {', '.join(job.algorithm.personal_part)} to themselves: numbers on the common test "
        "set are with the initial one, which nobody trains; for clients' own models set data.holdout: "
        f"0.1 and {keys}"
    )


def some_clients(job: Job, count: int) -> NDArray[np.int64]:
    """So many clients; the same ones every time, so that a curve shows training and not the draw."""
    rng = randomness.generator(job.seed, "evaluated clients")
    chosen = rng.choice(len(job.population), min(count, len(job.population)), replace=False, shuffle=False)
    return np.sort(chosen)


def _clients(server: Server, engine: Engine, prefix: str, tune: Tune | None) -> Record:
    job = server.job
    count = min(server.settings.evaluate.clients, len(job.population))
    if count == 0:
        return {}
    chosen = some_clients(job, count)
    results = engine.evaluate_clients(server.message(), server.participants(chosen), tune)
    names = results[0].keys() if results else ()
    return {f"{prefix}_{name}": sum(r[name] for r in results) / len(results) for name in names}
