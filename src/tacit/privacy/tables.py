"""Many questions at once: a plan for every value of one or two settings, and the effect of dropouts.

>>> cells = table(Question(delta=1e-5, rate=0.01, rounds=100), {"noise": [1.0, 2.0]})
>>> [round(cell["epsilon"], 2) for cell in cells]
[0.72, 0.19]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tacit.errors import UserError
from tacit.privacy.answers import Question, answer
from tacit.privacy.conventions import to_sum

TURNS = ("blt", "banded")
"""Without sampling: clients take turns, and noise is correlated."""
SAMPLINGS = ("poisson", "fixed", *TURNS)
MOST_CELLS = 200
"""The most cells of a table: each is an accountant's answer, which takes up to a second."""


def table(
    question: Question,
    axes: Mapping[str, Sequence[Any]],
    stated: str = "sum",
    dimension: int | None = None,
) -> list[dict[str, Any]]:
    """A plan for every combination of `axes`; the question gives the other settings.

    `axes`: one or two of population, cohort, rounds, noise, epsilon and sampling, each with its values.

    `stated`: the convention of the noise multiplier (`tacit.privacy.conventions`).

    A cell has the settings, including the one that was solved for; `epsilon`; `error`, the root mean square
    over rounds of the noise in a coordinate of the sum of all rounds so far, divided by the cohort, for a
    clipping norm of 1; with a `dimension` also `signal_to_noise`, of the mean update; and `why`, if there is
    no such plan.
    """
    if len(axes) > 2:
        raise UserError(
            f"a table goes along two settings, and {', '.join(axes)} are lists; shorten some to one value"
        )
    count = math.prod(len(values) for values in axes.values())
    if count > MOST_CELLS:
        raise UserError(f"a table of {count:,} plans would take long; ask for at most {MOST_CELLS}")
    if question.unit == "example":
        raise UserError("lists are for client level; at example level ask for one plan at a time")
    return [
        _cell(question, dict(zip(axes, values, strict=True)), stated, dimension)
        for values in product(*axes.values())
    ]


def _cell(question: Question, at: dict[str, Any], stated: str, dimension: int | None) -> dict[str, Any]:
    sampling = at.get("sampling", "fixed" if question.fixed else "poisson")
    given = {("target" if k == "epsilon" else k): v for k, v in at.items() if k != "sampling"}
    q = replace(question, **given, fixed=sampling == "fixed")
    cell: dict[str, Any] = {"sampling": sampling, "population": q.population, "cohort": q.cohort}
    cell |= {"rounds": q.rounds, "noise": q.noise, "delta": q.delta, "epsilon": None, "error": None}
    cell |= {"target": q.target, "signal_to_noise": None, "why": ""}
    try:
        if q.noise is not None and stated != "sum":
            if q.cohort is None:
                raise UserError(
                    f"`stated` {stated}: give `cohort` too, the expected number of clients a round"
                )
            q = replace(q, noise=to_sum(q.noise, stated, q.cohort))
        if sampling in TURNS:
            return cell | _in_turns(q, sampling)
        found = answer(q)
    except UserError as error:
        return cell | {"why": str(error)}
    q = found.question
    cell |= {"cohort": q.cohort, "rounds": found.times, "noise": found.noise, "epsilon": found.epsilon.value}
    if q.cohort is not None:
        cell["error"] = found.noise * math.sqrt((found.times + 1) / 2) / q.cohort
        if dimension is not None:
            cell["signal_to_noise"] = signal_to_noise(found.noise, q.cohort, dimension)
    return cell


def _in_turns(q: Question, kind: str) -> dict[str, Any]:
    from tacit.privacy.fleets import in_turns  # it needs torch, for matrices

    if (
        q.population is None
        or q.cohort is None
        or q.rounds is None
        or (q.noise is None) == (q.target is None)
    ):
        raise UserError(
            f"`sampling` {kind}: give `population`, `cohort` and `rounds`, and `noise` or `target`"
        )
    return in_turns(kind, q.population, q.cohort, q.rounds, q.delta, q.noise, q.target)


def signal_to_noise(noise: float, cohort: float, dimension: int) -> float:
    """Signal to noise of the mean update: cohort ÷ (σ √d). The signal is the update's length if every
    client's update were as long as the clip and all had one direction; the noise is its expected length. The
    clip is in both, and cancels.
    """
    return cohort / (noise * math.sqrt(dimension))


@dataclass(frozen=True)
class Share:
    """Who makes the noise if a share of the drawn devices drop out. All numbers are multiples of the clipping
    norm.
    """

    who: str
    client: float
    """The standard deviation of what each device adds to its own upload."""
    server: float
    """What the server adds to the sum after it knows who is missing."""
    published: float
    """The noise on what is published."""
    signal: float
    """Signal to noise of the mean, relative to that of the same noise with nobody missing."""
    trust: str


def shares(noise: float, cohort: float, dropout: float) -> list[Share]:
    """The noise that is needed if a share `dropout` of a cohort of m drop out after they were drawn.

    The guarantee needs noise z on every sum. Noise from the server is there whoever drops out. If devices
    make it in shares of z/√m, the dropouts take z√p with them. Then either the server adds that, or each
    share is z/√((1 − p)m) from the start, which covers a dropout of p and no more. Under secure aggregation,
    shares are of the latter size, and the server adds the missing ones, so the published sum has noise z/√(1
    − p) whoever came. With fewer than (1 − p)m devices there is no sum (`privacy.threshold`).

    Sums are divided by the expected cohort, so the signal is smaller by a factor of 1 − p in every case.

    >>> [round(share.client, 3) for share in shares(2.0, 100, 0.2)]
    [0.0, 0.2, 0.224, 0.224]
    """
    if not 0 <= dropout < 1:
        raise UserError(f"`dropout` {dropout:g}: give the share of drawn devices that vanish, such as 0.2")
    stay = 1 - dropout
    if stay * cohort < 1:
        raise UserError(f"`dropout` {dropout:g} of a cohort of {cohort:g} leaves nobody; draw more")
    each, larger = noise / math.sqrt(cohort), noise / math.sqrt(stay * cohort)
    missing = noise * math.sqrt(dropout)
    full = noise / math.sqrt(stay)
    found = [
        Share("the server", 0.0, noise, noise, stay, "the server, which sees every update"),
        Share("devices, topped up", each, missing, noise, stay, "the server, which adds the rest"),
        Share("devices, in excess", larger, 0.0, noise, stay, "no more of them vanishing"),
    ]
    if stay > 0.5:  # otherwise no threshold is safe
        lost, adds = stay * math.sqrt(stay), full * math.sqrt(dropout)
        found.append(
            Share("secure aggregation", larger, adds, full, lost, "enough of them staying, few colluding")
        )
    return found
