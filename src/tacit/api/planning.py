"""`tacit.plan`: what a config will cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tacit.config import Config
from tacit.config.loading import refuse_no_config
from tacit.config.parts import build_parts, build_privacy
from tacit.data import Dataset
from tacit.errors import UserError
from tacit.privacy import (
    ClientLevel,
    ExampleLevel,
    FixedSize,
    LayeredNoise,
    Mechanism,
    Poisson,
    Sampler,
    Workload,
)
from tacit.privacy.accountants import epsilon
from tacit.privacy.events import Spend
from tacit.privacy.mechanisms.base import NO_ROUND_FITS
from tacit.privacy.mechanisms.correlated import Correlated
from tacit.privacy.tuning import tuned_epsilon

if TYPE_CHECKING:
    from tacit.vector import Layout


def plan(
    config: Config,
    *,
    dataset: Dataset | None = None,
    sampling: Sampler | None = None,
    trials: float | None = None,
) -> dict[str, Any]:
    """Plan a config before it runs: the noise that it will use, and ε after all its rounds.

    At client level `signal_to_noise` is cohort ÷ (σ √d): the norm of the mean update, if every client's had
    the full clipping norm and the same direction, over the expected norm of the noise on it.

    Args:
        config: what to plan; it needs a `privacy` section.
        dataset: your own records, instead of the config's.
        sampling: your own cohort sampler, as for `run`.
        trials: also compute the cost of keeping the best of a random number of such runs, with this mean
            (Papernot and Steinke 2022, arXiv:2110.03620).

    Returns:
        Plain values by name: `epsilon`, `delta`, `noise`, `unit`, `cohort`, `warnings`, …. Where the noise
        differs by layer, `worth` is the noise multiplier that is accounted for. `sampling` is `poisson`,
        `fixed`, `in turn` (correlated noise) or `own` (a sampler that was given). At example level `worst`
        has the `records`, the sampling `rate` and the `steps` of the client with the largest ε.

    Raises:
        UserError: the config has no `privacy` section, no noise keeps its budget, or the network has a layer
            that a run under this guarantee refuses.
    """
    plan = RunPlan(config, dataset, sampling, trials)
    return plan.costs | plan.signal


class RunPlan:
    """A config's plan in two parts: its privacy cost, which needs no torch, and its signal-to-noise ratio."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset | None = None,
        sampling: Sampler | None = None,
        trials: float | None = None,
    ) -> None:
        """As `plan`."""
        refuse_no_config(config)
        if config.privacy is None:
            raise UserError(
                "this config has no `privacy` section, so nothing is spent and nothing guaranteed; add one, "
                "or give its keys with --set"
            )
        self._config, self._trials = config, trials
        self._parts = build_parts(config, dataset)
        mechanism = build_privacy(config, self._parts, self._uploads, sampling)
        assert mechanism is not None
        self._mechanism = mechanism

    def _uploads(self) -> tuple[Mapping[str, int], Layout]:
        from tacit.config.build import build_model, uploads
        from tacit.gradients.modules import refuse_modules

        model = build_model(self._config, self._parts.dataset, weights=False)
        assert self._config.privacy is not None
        refuse_modules(model, examples=self._config.privacy.unit == "example")  # as the run itself would
        return uploads(self._parts.algorithm, model)

    @cached_property
    def costs(self) -> dict[str, Any]:
        """All but `signal`."""
        mechanism, rounds, clients = self._mechanism, self._config.rounds, len(self._parts.population)
        workload = self._parts.workload(self._config.seed)
        spends = mechanism.planned(workload, rounds, mechanism.noise)
        found = [(epsilon(spend, mechanism.delta), spend) for spend in spends]
        cost, worst = max(found, key=lambda pair: pair[0].value)
        return {
            "unit": mechanism.unit,
            "epsilon": cost.value,
            "delta": mechanism.delta,
            "budget": mechanism.epsilon,
            "noise": mechanism.noise,
            "worth": mechanism.worth(mechanism.noise) if isinstance(mechanism, LayeredNoise) else None,
            "rounds": rounds,
            "clients": clients,
            "cohort": mechanism.expected(clients),
            "sampling": _sampling(mechanism),
            "worst": _worst_client(mechanism, workload, rounds, worst),
            "simulation": mechanism.simulated,
            "metrics": _metrics_cost(mechanism, workload, rounds),
            "tuned": None if self._trials is None else _tuned(spends, mechanism.delta, self._trials),
            "warnings": [*self._over_budget(workload, cost.value), *mechanism.warnings(workload)],
        }

    def _over_budget(self, workload: Workload, cost: float) -> list[str]:
        """What happens to a run whose given noise is not enough for all of its rounds."""
        mechanism, rounds = self._mechanism, self._config.rounds
        if mechanism.epsilon is None or cost <= mechanism.epsilon:
            return []
        fits = mechanism.most_rounds(workload, rounds)
        room = f"the budget has room for {fits:,} of {rounds:,} rounds, and the run ends there"
        return [room if fits else NO_ROUND_FITS]

    @cached_property
    def signal(self) -> dict[str, Any]:
        """The number of parameters that are sent and, at client level, the signal-to-noise ratio."""
        _, layout = self._uploads()
        mechanism, strength = self._mechanism, None
        if isinstance(mechanism, ClientLevel):
            drowned = mechanism.noise_norm(layout.shared)
            strength = mechanism.expected(len(self._parts.population)) / drowned if drowned else math.inf
        return {"parameters": layout.shared, "signal_to_noise": strength}


def _sampling(mechanism: Mechanism) -> str:
    """How cohorts are drawn."""
    known = {Poisson: "poisson", FixedSize: "in turn" if isinstance(mechanism, Correlated) else "fixed"}
    return known.get(type(mechanism.sampling), "own")


def _worst_client(
    mechanism: Mechanism, workload: Workload, rounds: int, spend: Spend
) -> dict[str, float] | None:
    """At example level, the client whose ε the plan reports: its records are drawn most often, or in the most
    steps.
    """
    if not isinstance(mechanism, ExampleLevel):
        return None
    clients = mechanism.planned_clients(workload, rounds, mechanism.noise)
    worst = next(client for client in clients if {client.event: client.steps} == spend)
    return {"records": worst.records, "rate": worst.event.rate, "steps": worst.steps}


def _tuned(spends: Sequence[Spend], delta: float, trials: float) -> dict[str, Any]:
    return asdict(max((tuned_epsilon(spend, delta, trials) for spend in spends), key=lambda t: t.epsilon))


def _metrics_cost(mechanism: Mechanism, workload: Workload, rounds: int) -> dict[str, float] | None:
    """The noise of private metrics, and what ε would be without them, with the same noise on updates."""
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
