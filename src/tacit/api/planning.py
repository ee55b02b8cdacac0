"""`tacit.plan`: what a config will cost; and what a run's ε would be with more clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tacit.api.folders import recorded_config
from tacit.config import Config
from tacit.config.build import build_job
from tacit.data import Dataset
from tacit.errors import UserError
from tacit.federation.passed import read_passed
from tacit.federation.statements import read_statement
from tacit.privacy import ClientLevel, LayeredNoise, Mechanism, Poisson, Sampler, Workload
from tacit.privacy.accountants import epsilon
from tacit.privacy.conventions import Scale
from tacit.privacy.events import Spend
from tacit.privacy.tuning import tuned_epsilon


def plan(
    config: Config,
    *,
    dataset: Dataset | None = None,
    sampling: Sampler | None = None,
    trials: float | None = None,
) -> dict[str, Any]:
    """What a config will cost, before it runs: the noise it will use, and ε after all its rounds.

    At client level `signal_to_noise` is the length of the mean update, were every client's as long as the
    clip and all of one direction, over the expected length of the noise on it: cohort ÷ (σ √d).

    Args:
        config: what to plan; it needs a `privacy` section.
        dataset: records of one's own, instead of the config's.
        sampling: who takes part in each round, as for `run`.
        trials: also what the best of a random number of such runs, of this mean, would cost (Papernot and
            Steinke 2022, arXiv:2110.03620).

    Returns:
        Plain values by name: `epsilon`, `delta`, `noise`, `unit`, `cohort`, `warnings`, …; `worth` is what is
        accounted where the noise differs by layer.

    Raises:
        UserError: the config has no `privacy` section, or no noise keeps its budget.
    """
    if config.privacy is None:
        raise UserError(
            "this config has no `privacy` section, so nothing is spent and nothing guaranteed; add one, or "
            "give its keys with --set"
        )
    job = build_job(config, Path(config.name), dataset=dataset, sampling=sampling)
    mechanism = job.privacy
    assert mechanism is not None
    spends = mechanism.planned(job.workload, config.rounds, mechanism.noise)
    cost = max((epsilon(spend, mechanism.delta) for spend in spends), key=lambda found: found.value)
    cohort = mechanism.expected(len(job.population))
    drowned = mechanism.noise_norm(job.layout.shared) if isinstance(mechanism, ClientLevel) else 0.0
    strength = cohort / drowned if drowned else math.inf
    return {
        "unit": mechanism.unit,
        "epsilon": cost.value,
        "delta": mechanism.delta,
        "budget": mechanism.epsilon,
        "noise": mechanism.noise,
        "worth": mechanism.worth(mechanism.noise) if isinstance(mechanism, LayeredNoise) else None,
        "rounds": config.rounds,
        "clients": len(job.population),
        "cohort": cohort,
        "sampling": "poisson" if isinstance(mechanism.sampling, Poisson) else "fixed",
        "parameters": job.layout.shared,
        "signal_to_noise": strength if mechanism.unit == "client" else None,
        "simulation": mechanism.simulated,
        "metrics": _metrics_cost(mechanism, job.workload, config.rounds),
        "tuned": None if trials is None else _tuned(spends, mechanism.delta, trials),
        "warnings": mechanism.warnings(job.workload),
    }


def _tuned(spends: Sequence[Spend], delta: float, trials: float) -> dict[str, Any]:
    return asdict(max((tuned_epsilon(spend, delta, trials) for spend in spends), key=lambda t: t.epsilon))


def _metrics_cost(mechanism: Mechanism, workload: Workload, rounds: int) -> dict[str, float] | None:
    """The noise of private metrics, and ε as it would be without them and with the same noise on updates."""
    if mechanism.metrics is None or mechanism.unit == "example":
        return None
    alone = mechanism.without_metrics()
    spends = alone.planned(workload, rounds, alone.noise)
    return {
        "share": mechanism.metrics.share,
        "noise": mechanism.metrics.noise(mechanism.noise),
        "update_noise": alone.noise,
        "epsilon_without": max(epsilon(spend, alone.delta).value for spend in spends),
    }


def extrapolations(folder: str | Path, more: Sequence[Scale] = ()) -> list[str]:
    """What ε would be with more clients, for a run so far: a line each, none of them a claim of the run."""
    folder = Path(folder)
    config = recorded_config(folder)
    privacy = config.privacy
    asked = [(Scale(s.population, s.cohort), s.rounds) for s in privacy.extrapolate] if privacy else []
    asked += [(scale, None) for scale in more]
    if privacy is None or not asked:
        return []
    own = "sampling" in (read_passed(folder) or {}) or config.cohort.sampling == "fixed"
    if privacy.unit != "client" or privacy.adaptive is not None or privacy.noise_by_layer or own:
        raise UserError(
            "an extrapolation needs client-level privacy, Poisson cohorts, a constant clip and the same "
            "noise everywhere"
        )
    noise, done = float(privacy.noise or 0.0), read_statement(folder).rounds  # type: ignore[arg-type]
    if not noise:
        return []
    lines = []
    for scale, rounds in asked:
        # A federation that goes on for longer does so in proportion while this run is under way.
        rounds = done if rounds is None else max(1, round(rounds * done / config.rounds))
        epsilon = scale.cost(noise, config.cohort.size, rounds, privacy.delta)
        lines.append(scale.text(epsilon, scale.noise(noise, config.cohort.size), rounds))
    return lines
