"""A class for each token of a record: names in a text, parts of speech.

>>> logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]])
>>> batch = {"x": logits, "y": torch.tensor([[0, 0, NOTHING]])}
>>> sums = TokenClassification().evaluate(nn.Identity(), batch)
>>> TokenClassification().summarise({name: float(value) for name, value in sums.items()})["accuracy"]
0.5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit.data.records import Batch
from tacit.data.words import NOTHING
from tacit.tasks.answers import ask


@dataclass(frozen=True)
class TokenClassification:
    """Logits [B, L, C], `y` [B, L]. A record's loss is the mean over its own labelled tokens."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        y = batch["y"]
        return _each(ask(model, batch), y).sum(1) / (y != NOTHING).sum(1).clamp(min=1)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, y = ask(model, batch), batch["y"]
        return {
            "loss": _each(logits, y).sum(dtype=torch.float64),
            "correct": (logits.argmax(2) == y).sum(),
            "tokens": (y != NOTHING).sum(),
            "count": torch.tensor(len(y)),
        }

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        tokens = sums["tokens"] or float("nan")
        return {"loss": sums["loss"] / tokens, "accuracy": sums["correct"] / tokens}


def _each(logits: Tensor, y: Tensor) -> Tensor:
    flat = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=NOTHING, reduction="none")
    return flat.view(y.shape)
