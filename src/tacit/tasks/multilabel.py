"""Several labels at once: yes or no for each, judged by F1 over all of them.

>>> batch = {"x": torch.tensor([[5.0, -5.0], [5.0, 5.0]]), "y": torch.tensor([[1.0, 0.0], [1.0, 0.0]])}
>>> sums = MultiLabel().evaluate(nn.Identity(), batch)
>>> metrics = MultiLabel().summarise({name: float(value) for name, value in sums.items()})
>>> round(metrics["f1"], 2), metrics["exact"]
(0.8, 0.5)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit.data.records import Batch
from tacit.errors import UserError
from tacit.tasks.answers import ask


@dataclass(frozen=True)
class MultiLabel:
    """`y` [B, K] of zeros and ones; logits [B, K]. A record's loss is its mean cross-entropy over labels."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        logits, y = _answers(model, batch)
        return functional.binary_cross_entropy_with_logits(logits, y, reduction="none").mean(1)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, y = _answers(model, batch)
        each = functional.binary_cross_entropy_with_logits(logits, y, reduction="none").mean(1)
        said, true = logits > 0, y > 0.5
        return {
            "loss": each.sum(dtype=torch.float64),
            "hits": (said & true).sum(),
            "said": said.sum(),
            "true": true.sum(),
            "exact": (said == true).all(1).sum(),
            "count": torch.tensor(len(y)),
        }

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = sums["count"] or float("nan")
        named = sums["said"] + sums["true"]
        f1 = 2 * sums["hits"] / named if named else float("nan")
        return {"loss": sums["loss"] / count, "f1": f1, "exact": sums["exact"] / count}


def _answers(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    logits, y = ask(model, batch), batch["y"].float()
    if logits.shape != y.shape:
        raise UserError(
            f"multi-label: the model gives {tuple(logits.shape[1:])} answers for a record and the data have "
            f"{tuple(y.shape[1:])} labels; they must agree"
        )
    return logits, y
