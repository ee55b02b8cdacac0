"""The effect of one record on a clipped sum: measured, and compared with a loop over single records."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gradients_reference import lengths, record_gradients
from tacit.errors import UserError
from tacit.gradients import Batch, ClippedGradient, Losses
from tacit.vector import Flat


@dataclass(frozen=True)
class Seen:
    refused: str | None
    """The sentence with which the model was refused."""
    error: float = 0.0
    """Distance to the loop's clipped sum, over its norm."""
    moved: float = 0.0
    """The largest ‖sum(D) − sum(D∖j)‖ ÷ C over records j."""
    obstacle: str | None = None
    """Why the slow road was taken, if it was."""


def measure(
    model: nn.Module,
    losses: Losses,
    batches: list[Batch],
    bound: float | None = None,
    micro: int | None = None,
) -> Seen:
    """Every batch against the loop, and with each of its records left out; coins are the same where possible."""  # noqa: E501
    flat = Flat(model)
    worst, moved, told = 0.0, 0.0, None
    try:
        clipped = ClippedGradient(flat, micro_batch=micro)
        for batch in batches:
            rows = record_gradients(flat, batch, losses)
            norms = lengths(rows)
            c = max(float(norms.median()), 1e-6) if bound is None else bound
            expected = (rows * (c / norms).clamp(max=1.0).nan_to_num(nan=1.0).unsqueeze(1)).sum(0)

            def total(part: Batch, c: float = c) -> torch.Tensor:
                torch.manual_seed(7)
                clipped(part, losses, c)
                return flat.grad.clone()

            whole = total(batch)
            scale = max(float(expected.norm()), c * 1e-3)
            worst = max(worst, float((whole - expected).norm()) / scale)
            size = len(norms)
            for j in range(size):
                rest = [i for i in range(size) if i != j]
                without = total({k: v[rest] for k, v in batch.items()})
                moved = max(moved, float((whole - without).norm()) / c)
            told = clipped.obstacle or told
    except UserError as refused:
        return Seen(str(refused))
    return Seen(None, worst, moved, told)


def assert_isolated(
    model: nn.Module, losses: Losses, batches: list[Batch], fast: bool | None = None, tolerance: float = 1e-5
) -> Seen:
    """Equal to the loop, and no record moves the sum by more than C; or refused with a sentence."""
    seen = measure(model, losses, batches)
    if fast is not None:
        assert seen.refused is None, seen
        assert (seen.obstacle is None) == fast, seen
    assert seen.refused is not None or (seen.error <= tolerance and seen.moved <= 1 + tolerance), seen
    return seen
