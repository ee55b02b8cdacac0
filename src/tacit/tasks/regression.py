"""Regression: squared error, judged by its root.

>>> batch = {"x": torch.tensor([[1.0], [4.0]]), "y": torch.tensor([1.0, 2.0])}
>>> sums = Regression().evaluate(nn.Identity(), batch)
>>> Regression().summarise({name: float(value) for name, value in sums.items()})
{'loss': 2.0, 'rmse': 1.4142135623730951, 'mae': 1.0}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.data.records import Batch
from tacit.errors import UserError
from tacit.tasks.answers import ask


@dataclass(frozen=True)
class Regression:
    """One number per record, or several: `y` [B] or [B, K] for the model's K outputs; means over K."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return _errors(model, batch).square().mean(1)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        errors = _errors(model, batch)
        return {
            "loss": errors.square().mean(1).sum(dtype=torch.float64),
            "absolute": errors.abs().mean(1).sum(dtype=torch.float64),
            "count": torch.tensor(len(errors)),
        }

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = sums["count"] or float("nan")
        loss = sums["loss"] / count
        return {"loss": loss, "rmse": math.sqrt(loss), "mae": sums["absolute"] / count}


def _errors(model: nn.Module, batch: Batch) -> Tensor:
    answer, y = ask(model, batch), batch["y"].float()
    y = y.view(len(y), -1)
    if answer.shape != y.shape:
        raise UserError(
            f"regression: the model gives {tuple(answer.shape[1:])} numbers for a record and the data have "
            f"{tuple(y.shape[1:])}; they must agree"
        )
    return answer - y
