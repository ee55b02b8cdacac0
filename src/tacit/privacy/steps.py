"""One round, and one local step, as an accountant knows them: from how units are drawn to an event.

Mechanisms are charged by these very functions, and so is whoever plans a run without having one.
"""

from __future__ import annotations

import math

from tacit.errors import UserError
from tacit.privacy.events import FixedSizeGaussian, PoissonGaussian, SampledGaussian
from tacit.privacy.sampling import FixedSize, Poisson, Sampling


def round_event(sampling: Sampling, population: int, noise: float) -> SampledGaussian:
    """One round, as the accountant knows it."""
    if isinstance(sampling, Poisson):
        return PoissonGaussian(sampling.rate, noise)
    if isinstance(sampling, FixedSize):
        return FixedSizeGaussian(sampling.size, population, noise)
    return PoissonGaussian(1.0, noise)  # nothing is known of its probabilities, so nothing is gained by them


def batch_sampling(records: int, batch: int) -> Poisson:
    """How a client draws batches of `batch` expected records out of its own; for draw and charge alike."""
    if records < 1:
        raise UserError("a client without records cannot take part; leave it out of the partition")
    return Poisson(min(1.0, batch / records))


def step_event(records: int, batch: int, queries: int, noise: float) -> PoissonGaussian:
    """One local step of a client, as the accountant knows it.

    `queries` gradients on the same batch (SAM and FAFED ask for two) are one Gaussian query of √queries
    times the sensitivity: exact, also when the second gradient depends on the first one's answer.
    """
    return PoissonGaussian(batch_sampling(records, batch).rate, noise / math.sqrt(queries))
