"""Computes what a user wants to know about a run from the settings that are known.

A `Question` holds the given settings; `answer` fills in the rest. Without a target it computes ε. With a
target, exactly one setting is missing, and it is solved for: the noise, the rounds (or participations), or
the cohort out of a population. Errors name settings in backticks.

>>> answer(Question(rate=0.05, rounds=200, delta=1e-3, target=1.0)).noise
2.02
>>> found = answer(Question(examples=1000, batch=16, local_steps=20, participations=10, noise=1, delta=1e-5))
>>> found.unit, found.times, round(found.epsilon.rdp, 2)
('example', 200, 1.85)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tacit.errors import UserError
from tacit.privacy.accountants import Epsilon, check_delta
from tacit.privacy.calibration import closed_form_noise, cost, solve_cohort, solve_noise, solve_times
from tacit.privacy.events import SampledGaussian
from tacit.privacy.sampling import FixedSize, Poisson, Sampling
from tacit.privacy.steps import batch_sampling, round_event, step_event

MOST = 10**12
"""The largest number of clients, records and so on."""
MOST_STEPS = 10**8
"""The most rounds or steps that are composed."""


@dataclass(frozen=True)
class Question:
    """The known settings of a run; unknown ones are None."""

    delta: float
    noise: float | None = None
    rate: float | None = None
    rounds: int | None = None
    target: float | None = None
    """The ε that must not be exceeded."""
    population: int | None = None
    cohort: int | None = None
    fixed: bool = False
    """Cohorts of a fixed size instead of Poisson ones."""
    examples: int | None = None
    batch: int | None = None
    local_steps: int | None = None
    participations: int | None = None
    queries: int = 1
    """Gradients computed on each batch."""

    @property
    def unit(self) -> str:
        asked = (self.examples, self.batch, self.local_steps, self.participations)
        return "example" if any(value is not None for value in asked) else "client"


@dataclass(frozen=True)
class Answer:
    """A complete question, and its ε."""

    question: Question
    """As asked, plus the setting that was solved for."""
    solved: str | None
    event: SampledGaussian
    times: int
    epsilon: Epsilon

    @property
    def unit(self) -> str:
        return self.question.unit

    @property
    def noise(self) -> float:
        assert self.question.noise is not None
        return self.question.noise

    def warnings(self) -> list[str]:
        """Settings that are allowed but probably not intended."""
        from tacit.privacy.statement import weak  # it imports all mechanisms, which a plan does not need

        q, found = self.question, weak(self.epsilon.value)
        units = q.population if q.unit == "client" else q.examples
        if units is None or q.delta < 1 / units:
            return found
        what = "clients" if q.unit == "client" else "records"
        return [f"δ = {q.delta:g} is not below 1 ÷ {units:,} {what}; choose a smaller one", *found]

    def closed_form(self) -> float:
        """The noise by the DP²-FedSAM paper's formula for this ε; for comparison only."""
        epsilon = self.question.target or self.epsilon.value
        return closed_form_noise(self.event.rate, self.times, epsilon, self.epsilon.delta)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        q = self.question
        plain: dict[str, Any] = {
            "unit": q.unit,
            "relation": self.event.relation,
            "epsilon": _shown(self.epsilon),
            "accountant": "rdp" if self.epsilon.pld is None else "pld",
            "epsilon_pld": self.epsilon.pld,
            "epsilon_rdp": self.epsilon.rdp,
            "rdp_order": self.epsilon.order,
            "delta": q.delta,
            "noise": q.noise,
            "rate": self.event.rate,
            "rounds": q.rounds if q.unit == "client" else q.participations,
            "solved_for": self.solved,
            "target_epsilon": q.target,
            "sampling": "fixed" if q.fixed else "poisson",
            "population": q.population,
            "cohort": q.cohort,
        }
        if q.unit == "example":
            plain |= {
                "examples": q.examples,
                "batch": q.batch,
                "local_steps": q.local_steps,
                "participations": q.participations,
                "queries": q.queries,
                "steps": self.times,
            }
        return plain | {"warnings": self.warnings()}


def _shown(epsilon: Epsilon) -> float:
    """ε by PLD, if it has a bound."""
    return epsilon.rdp if epsilon.pld is None else epsilon.pld


def answer(question: Question) -> Answer:
    """Solve for the missing setting, and compute ε."""
    _check(question)
    given = _with_rate(question)
    missing = _missing(given)
    if given.target is None:
        if missing:
            raise UserError(f"give {_and(missing)}; or give `target`, and one setting is solved for")
        return _answered(given, None)
    if not missing:
        raise UserError("`target`: leave out `noise`, `rounds` or `cohort` to have it solved for")
    if len(missing) > 1:
        raise UserError(f"`target` solves for one setting, and {_and(missing)} are missing; give all but one")
    return _answered(_solved(given, missing[0], given.target), missing[0])


def around(found: Answer) -> list[dict[str, float]]:
    """ε near an answer: for half to twice its noise, and a quarter to four times its length."""
    cells = []
    for stronger in (0.5, 0.7, 1.0, 1.4, 2.0):
        for longer in (0.25, 0.5, 1.0, 2.0, 4.0):
            times = max(1, round(found.times * longer))
            event = replace(found.event, noise=found.event.noise * stronger)
            epsilon = _shown(cost(event, times, found.epsilon.delta))
            cells.append({"noise": found.noise * stronger, "rounds": times, "epsilon": epsilon})
    return cells


def _solved(q: Question, missing: str, target: float) -> Question:
    if missing == "noise":
        times = _times(q)
        return replace(q, noise=solve_noise(lambda noise: [{_event(q, noise): times}], target, q.delta))
    assert q.noise is not None
    if missing == "cohort":
        noise, population = q.noise, q.population
        assert population is not None
        cohort = solve_cohort(
            lambda size: _event(replace(q, cohort=size, rate=size / population), noise),
            population,
            _times(q),
            target,
            q.delta,
        )
        return replace(q, cohort=cohort, rate=cohort / population)
    times = solve_times(_event(q, q.noise), target, q.delta)
    if missing == "rounds":
        return replace(q, rounds=times)
    assert q.local_steps is not None
    if times < q.local_steps:
        raise UserError(
            f"one participation of {q.local_steps} steps costs more than ε = {target:g} "
            f"(that allows {times} steps); raise the noise or take fewer steps"
        )
    return replace(q, participations=times // q.local_steps)


def _answered(q: Question, solved: str | None) -> Answer:
    assert q.noise is not None
    event, times = _event(q, q.noise), _times(q)
    return Answer(q, solved, event, times, cost(event, times, q.delta))


def _event(q: Question, noise: float) -> SampledGaussian:
    """The event that such a run's mechanism charges, for a round or a step."""
    if q.unit == "example":
        assert q.examples is not None and q.batch is not None
        return step_event(q.examples, q.batch, q.queries, noise)
    sampling: Sampling
    if q.fixed:
        assert q.cohort is not None
        sampling = FixedSize(q.cohort)
    else:
        assert q.rate is not None
        sampling = Poisson(q.rate)
    return round_event(sampling, q.population or 0, noise)


def _times(q: Question) -> int:
    if q.unit == "client":
        assert q.rounds is not None
        return q.rounds
    assert q.participations is not None and q.local_steps is not None
    return q.participations * q.local_steps


def _with_rate(q: Question) -> Question:
    """The question with its sampling rate, from the numbers that determine it."""
    if q.unit == "example":
        if q.examples is not None and q.batch is not None:
            return replace(q, rate=batch_sampling(q.examples, q.batch).rate)
        return q
    if q.population is not None and q.cohort is not None:
        if q.rate is not None:
            raise UserError("`rate` follows from `cohort` and `population`; give the rate or these two")
        return replace(q, rate=q.cohort / q.population)
    if q.population is not None and q.rate is not None and not q.fixed:
        return replace(q, cohort=max(1, round(q.rate * q.population)))
    return q


def _missing(q: Question) -> list[str]:
    """Unknown settings that the answer needs."""
    needed = ["noise", "rounds"]
    if q.unit == "example":
        needed = ["examples", "batch", "local_steps", "participations", "noise"]
    elif q.fixed:
        needed = ["population", "cohort", *needed]
    elif q.rate is None:
        needed = ["rate" if q.population is None else "cohort", *needed]
    names = [name for name in needed if getattr(q, name) is None]
    if q.target is not None and {*names} & {"examples", "batch", "local_steps"}:
        raise UserError(f"give {_and(names)}: at example level `noise` or `participations` is solved for")
    if q.target is not None and names == ["rate"]:
        raise UserError("give `population`, and the cohort is solved for; or leave out `noise` or `rounds`")
    return names


def _check(q: Question) -> None:
    check_delta(q.delta)
    whole = (
        "rounds",
        "population",
        "cohort",
        "examples",
        "batch",
        "local_steps",
        "participations",
        "queries",
    )
    for name in whole:
        value = getattr(q, name)
        if value is not None and value < 1:
            raise UserError(f"`{name}` {value}: give a whole number ≥ 1")
        if value is not None and value > MOST:
            raise UserError(f"`{name}` {value:g}: that is beyond {MOST:,}, and any fleet")
    times = (q.rounds or 1) * (q.participations or 1) * (q.local_steps or 1)
    if times > MOST_STEPS:
        what = "`rounds`" if q.rounds else "`participations` × `local_steps`"
        raise UserError(
            f"{what}: {times:g} is more than an accountant can add up; give at most {MOST_STEPS:,}"
        )
    for name, value in (("noise", q.noise), ("target", q.target)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"`{name}` {value:g}: give a number > 0")
    if q.rate is not None and not 0 < q.rate <= 1:
        raise UserError(f"`rate` {q.rate:g}: give a probability, 0 < rate ≤ 1")
    if q.cohort is not None and q.population is not None and q.cohort > q.population:
        raise UserError(f"`cohort` {q.cohort:,} is larger than `population` {q.population:,}")
    if q.unit == "example":
        for name in ("rate", "rounds", "population", "cohort"):
            if getattr(q, name) is not None:
                raise UserError(
                    f"`{name}` is for client level and other settings given are for example level, where the "
                    "rate is batch ÷ examples and the rounds are `participations`"
                )
        if q.fixed:
            raise UserError("`fixed`: at example level batches are Poisson; leave it out")
    elif q.queries != 1:
        raise UserError(
            "`queries` counts gradients on a batch (example level); client level pays per round only"
        )


def _and(names: list[str]) -> str:
    *most, last = [f"`{name}`" for name in names]
    return f"{', '.join(most)} and {last}" if most else last
