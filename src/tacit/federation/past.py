"""The server's model after earlier rounds of a run, as far as their checkpoints are kept."""

from __future__ import annotations

from pathlib import Path

from tacit.engine import Job
from tacit.errors import UserError
from tacit.federation.checkpoint import fill, finished, read_round


def kept_rounds(run: Path) -> list[int]:
    """The rounds whose checkpoints are there, in order; refused if there is none."""
    kept = sorted(int(place.name) for place in finished(run / "checkpoint"))
    if not kept:
        raise UserError(f"{run}: no checkpoint is there yet")
    return kept


def load_round(job: Job, run: Path, round: int) -> None:
    """Put the server's model after one of `kept_rounds` into `job.model`."""
    fill(job.model, job.layout, read_round(run, round), run)
