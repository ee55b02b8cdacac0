"""A task: the loss of each record, and what to count when a model is judged.

Losses are per record because private training clips each record's own gradient. Evaluation returns sums, so
that batches, shards and clients add up to the same number in any grouping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from tacit.data.records import Batch


class Task(Protocol):
    """What a model is trained for."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss per record, [B]; record j's loss depends on record j alone."""
        ...

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the batch, with `count` (the number of records) among them."""
        ...

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the added-up sums; NaN when nothing was counted."""
        ...
