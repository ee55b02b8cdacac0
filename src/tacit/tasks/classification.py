"""Classification: cross-entropy, and the share of right answers.

>>> import torch
>>> batch = {"x": torch.tensor([[0.0, 1.0], [2.0, 0.0]]), "y": torch.tensor([1, 1])}
>>> sums = Classification().evaluate(nn.Identity(), batch)
>>> round(Classification().summarise({name: float(v) for name, v in sums.items()})["accuracy"], 2)
0.5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit.data.records import Batch
from tacit.tasks.answers import ask


@dataclass(frozen=True)
class Classification:
    """One class per record: `y` [B] for the model's answer on `x`, or on `input_ids` and `attention_mask`."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(ask(model, batch), batch["y"], reduction="none")

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, y = ask(model, batch), batch["y"]
        # Sums in float64: a million float32 losses added up lose digits that differ with the batch size.
        loss = functional.cross_entropy(logits, y, reduction="none").sum(dtype=torch.float64)
        correct = (logits.argmax(dim=1) == y).sum()
        return {"loss": loss, "correct": correct, "count": torch.tensor(len(y))}

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = sums["count"] or float("nan")
        return {"loss": sums["loss"] / count, "accuracy": sums["correct"] / count}
