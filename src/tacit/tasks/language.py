"""Language modelling: predict the next token of each text.

A record is one text (a message, say), and its loss is the mean over its own tokens: a long text counts no
more than a short one when gradients are clipped and averaged. Evaluation is over tokens, as is usual for
perplexity.

>>> uniform = lambda input_ids, attention_mask: torch.zeros(*input_ids.shape, 8)
>>> ids, mask = torch.tensor([[1, 2, 3, 0]]), torch.tensor([[1, 1, 1, 0]])
>>> sums = Language().evaluate(uniform, {"input_ids": ids, "attention_mask": mask})
>>> metrics = Language().summarise({name: float(value) for name, value in sums.items()})
>>> {name: round(value, 3) for name, value in metrics.items()}
{'loss': 2.079, 'perplexity': 8.0, 'bits': 3.0, 'accuracy': 0.0}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit.data.records import Batch
from tacit.tasks.answers import ask

NOTHING = -100
"""The target at a position without a next token."""


@dataclass(frozen=True)
class Language:
    """Logits [B, L, V] for `input_ids` [B, L]; position t predicts token t + 1, within the mask."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        targets = _targets(batch)
        # A text of one token has nothing to predict: its loss is 0, not 0/0.
        return _token_losses(ask(model, batch), targets).sum(1) / (targets != NOTHING).sum(1).clamp(min=1)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, targets = ask(model, batch), _targets(batch)
        return {
            "loss": _token_losses(logits, targets).sum(dtype=torch.float64),
            "correct": (logits.argmax(2) == targets).sum(),
            "tokens": (targets != NOTHING).sum(),
            "count": torch.tensor(len(targets)),
        }

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        tokens = sums["tokens"] or float("nan")
        loss = sums["loss"] / tokens
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),  # beyond that it would overflow
            "bits": loss / math.log(2),
            "accuracy": sums["correct"] / tokens,
        }


def _targets(batch: Batch) -> Tensor:
    """The token after each position, and `NOTHING` at and after the last one."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    following = torch.where(mask[:, 1:] > 0, ids[:, 1:], NOTHING)
    return functional.pad(following, (0, 1), value=NOTHING)


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Losses [B, L]. The targets are shifted, not the logits: a shifted copy of those would double the
    memory.
    """
    each = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=NOTHING, reduction="none"
    )
    return each.view(targets.shape)
