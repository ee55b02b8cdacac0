"""The server's model after earlier rounds of a run, as far as their checkpoints are kept."""

from __future__ import annotations

from pathlib import Path

from tacit.engine import Job
from tacit.errors import UserError
from tacit.federation.checkpoint import finished, read_round
from tacit.vector import write_buffers, write_values


def kept_rounds(run: Path) -> list[int]:
    """The rounds whose checkpoints are there, in order; refused if there is none."""
    kept = sorted(int(place.name) for place in finished(run / "checkpoint"))
    if not kept:
        raise UserError(f"{run}: no checkpoint is there yet")
    return kept


def load_round(job: Job, run: Path, round: int) -> None:
    """Put the server's model after one of `kept_rounds` into `job.model`."""
    saved = read_round(run, round).vectors
    if saved["theta"].numel() != job.layout.shared:
        raise UserError(f"{run}: its checkpoint is of another model")
    write_values(job.model, job.layout, saved["theta"])
    write_buffers(job.model, saved)
