"""An audit of a config: the mechanism by itself, and one run with canaries, compared with the claim.

import tacit

report = tacit.audit(tacit.load("quickstart.yaml"), canaries=200)
print(report.text())
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tacit.config.build import build_job, build_sampling, build_settings
from tacit.config.schema import Config
from tacit.data import Dataset
from tacit.data.identity import identify
from tacit.engine import InProcessSettings
from tacit.errors import UserError
from tacit.federation import Federation, Tracker
from tacit.federation.canaries import RecordCanaries, WatchedClients, WatchedExamples
from tacit.privacy import ClientLevel, ExampleLevel
from tacit.privacy.audit import Audit, AuditReport, from_canaries, gaussian_estimate
from tacit.privacy.games import audit_mechanism


def audit(
    config: Config,
    canaries: int = 200,
    trials: int = 20_000,
    confidence: float = 0.95,
    *,
    run: bool = True,
    dataset: Dataset | None = None,
    trackers: Sequence[Tracker] = (),
) -> AuditReport:
    """Try to refute the claim of a config: audit the mechanism alone, and one run with canaries in it.

    The run uses one process and fresh entropy, and is discarded afterwards: some of its clients (or records)
    are canaries, so its model is of no other use. A simulation is audited as the run that it simulates.
    Canaries in one run and the bound on ε: Steinke, Nasr and Jagielski 2023, arXiv:2305.08846; canaries of
    clients in federated learning: Andrew et al. 2024, arXiv:2302.03098.

    Args:
        config: a config that claims a guarantee.
        canaries: the number of clients, or records, whose presence a fair coin decides.
        trials: releases of the mechanism alone.
        confidence: of the reported lower bounds on ε.
        run: also audit a whole run; otherwise only the mechanism.
        dataset: your own records, instead of the config's.
        trackers: objects that are called in every round of that run.

    Returns:
        Claims and lower bounds. A bound above its claim is a bug, or, with probability at most
        1 − confidence, bad luck.

    Raises:
        UserError: the config claims nothing.
    """
    if config.privacy is None:
        raise UserError("privacy: the config claims nothing, so there is nothing to audit")
    config = config.model_copy(
        update={
            "privacy": config.privacy.model_copy(update={"entropy": "os"}),
            "engine": InProcessSettings(),
            "evaluate": config.evaluate.model_copy(
                update={
                    "every": config.rounds,
                    "clients": 0,
                    "tune": None,
                    "layers": False,
                    "train": 0,
                    "patience": None,
                    "keep_best": False,
                }
            ),
            "checkpoint": config.checkpoint.model_copy(update={"every": config.rounds}),
            "trackers": (),
        }
    )
    with tempfile.TemporaryDirectory(prefix="tacit-audit-") as place:
        folder = Path(place) / "run"
        job = build_job(config, folder, dataset=dataset)
        mechanism = job.privacy
        assert mechanism is not None
        clients, rate = job.workload.population, 0.5
        if isinstance(mechanism, ExampleLevel):
            rate = min(1.0, job.workload.batch / max(1, int(job.workload.sizes.min())))
        alone = audit_mechanism(mechanism, trials, confidence, clients, rate)
        if not run:
            return AuditReport(alone, None)
        start = time.perf_counter()
        folder.mkdir(parents=True)
        watched: WatchedClients | RecordCanaries
        if isinstance(mechanism, ExampleLevel):
            watched = RecordCanaries(mechanism, job.workload, job.layout, config.rounds, canaries)
            job = replace(job, privacy=WatchedExamples.of(mechanism, watched))
        else:
            assert isinstance(mechanism, ClientLevel)
            watched = WatchedClients(mechanism, job.workload, min(canaries, clients // 2, job.layout.shared))
        sampling, data = build_sampling(config, clients), identify(config.data.name, job.population)
        federation = Federation(job, build_settings(config), sampling, folder, trackers, data.fingerprint)
        if isinstance(watched, WatchedClients):
            federation.mechanism = watched
        result = federation.run()
        scores = watched.scores(job.workload) if isinstance(watched, WatchedClients) else watched.scores
    lower, guesses = from_canaries(watched.inside, scores, mechanism.delta, confidence)
    units = "clients" if mechanism.unit == "client" else "records"
    found = Audit(
        what=f"{len(result.metrics)} rounds, {units} as canaries",
        claimed=result.last("epsilon"),
        lower=lower,
        delta=mechanism.delta,
        confidence=confidence,
        trials=len(scores),
        attack=f"{guesses} guesses from all that was released",
        seconds=time.perf_counter() - start,
        estimate=gaussian_estimate(watched.inside, scores, mechanism.delta),
    )
    return AuditReport(alone, found, watched.inside, scores)
