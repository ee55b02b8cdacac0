"""A task: the loss of each record, and what evaluation counts.

Losses are per record because private training clips each record's own gradient. Evaluation returns sums, so
batches, shards and clients add up to the same number in any grouping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from tacit.data.records import Batch
from tacit.errors import UserError


class Task(Protocol):
    """What a model is trained for."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each example.

        Args:
            model: the module that is trained.
            batch: named tensors with the examples along dimension 0.

        Returns:
            A vector with one loss per example. The loss of example j must depend on example j alone, or
            clipping it bounds nothing.
        """
        ...

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over a batch, from which `summarise` makes metrics.

        Args:
            model: the module, in evaluation mode.
            batch: named tensors with the examples along dimension 0.

        Returns:
            Sums by name.
        """
        ...

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics from sums that were added up over batches.

        Args:
            sums: the sums by name.

        Returns:
            Metrics by name; NaN when nothing was counted. Any names are allowed; some have a use. The
            headline metric of a run is the first of `tacit.tasks.headline.HEADLINES` that is there (`loss` is
            the last); `evaluate.train` needs a `loss`, and `privacy.metrics.accuracy` an `accuracy`.
        """
        ...


def refuse_no_task(thing: Any, where: str = "task") -> None:
    """Refuse an object that lacks one of a task's methods; `where` names where it was given."""
    lacking = [
        name for name in ("losses", "evaluate", "summarise") if not callable(getattr(thing, name, None))
    ]
    if lacking:
        raise UserError(
            f"{where}: this {type(thing).__name__} has no {', '.join(lacking)}; give an object that has what "
            "tacit.Task has, or name a task in the config"
        )
