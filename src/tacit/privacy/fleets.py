"""Compares mechanisms for a fleet: the same clients, rounds and budget under each kind of noise.

The noise in a model is its sum over rounds. `error` is the root mean square, over rounds, of the noise in
that sum, divided by the cohort: the deviation of one coordinate, for a clipping norm of 1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from tacit.errors import UserError
from tacit.privacy.accountants import epsilon as spent
from tacit.privacy.clipping import Clip
from tacit.privacy.matrices import spread
from tacit.privacy.mechanisms.banded import BandedNoise
from tacit.privacy.mechanisms.base import Workload
from tacit.privacy.mechanisms.blt import BltNoise
from tacit.privacy.mechanisms.correlated import Correlated
from tacit.privacy.sampling import FixedSize, Poisson, Sampling


@dataclass(frozen=True)
class Suited:
    """One mechanism, with the least noise that stays within the budget."""

    kind: str
    secret_sampling: bool
    """Whether the guarantee requires that nobody knows who took part."""
    noise: float
    """The multiplier of z."""
    buffers: int
    """Vectors of the model's length that the server stores between rounds."""
    error: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_mechanisms(
    population: int, cohort: int, rounds: int, epsilon: float, delta: float, kinds: Collection[str]
) -> list[Suited]:
    """Independent noise and these `kinds`, for the same fleet and budget: first with clients in turn, then
    with Poisson cohorts.
    """
    if not 1 <= cohort <= population:
        raise UserError(f"`cohort` {cohort:,} of `population` {population:,} cannot be drawn")

    def turns(kind: type[Correlated], **options: Any) -> Suited:
        return fitted(kind, FixedSize(cohort), **options)

    def fitted(kind: type[Correlated], sampling: Sampling, **options: Any) -> Suited:
        made = kind(1.0, delta, Clip(1.0), sampling, epsilon, rounds=rounds, **options)
        made = made.calibrated(Workload(population), rounds)
        matrix = made.matrix(population)
        return Suited(
            kind=made.kind if matrix.buffers else "independent",  # one band is the identity matrix
            secret_sampling=isinstance(sampling, Poisson),
            noise=made.noise,
            buffers=matrix.buffers,
            error=made.noise * spread(matrix, rounds) / made.expected(population),
        )

    in_turn = [kind for kind in (BltNoise, BandedNoise) if kind.kind in kinds]
    found = [turns(BandedNoise, bands=1), *(turns(kind) for kind in in_turn)]
    sampling = Poisson(cohort / population)
    independent = fitted(BandedNoise, sampling, bands=1)
    best, bands = independent, 2
    while BandedNoise.kind in kinds and bands <= min(population // cohort, rounds):
        wider = fitted(BandedNoise, sampling, bands=bands)
        if wider.error >= best.error:
            break
        best, bands = wider, 2 * bands
    return found + ([independent] if best is independent else [independent, best])


def in_turns(
    kind: str,
    population: int,
    cohort: int,
    rounds: int,
    delta: float,
    noise: float | None,
    epsilon: float | None,
) -> dict[str, Any]:
    """A plan without sampling: clients take turns, under correlated noise of this kind. Computes ε for given
    noise, or the least noise for given ε, and the error that the model gets from it.
    """
    if not 1 <= cohort <= population:
        raise UserError(f"`cohort` {cohort:,} of `population` {population:,} cannot be drawn")
    made: Correlated = {made.kind: made for made in (BltNoise, BandedNoise)}[kind](
        noise or 1.0, delta, Clip(1.0), FixedSize(cohort), epsilon, rounds=rounds
    )
    if noise is None:
        made = made.calibrated(Workload(population), rounds)
    spends = made.planned(Workload(population), rounds, made.noise)
    return {
        "noise": made.noise,
        "epsilon": max(spent(spend, delta).value for spend in spends),
        "error": made.noise * spread(made.matrix(population), rounds) / made.expected(population),
    }
