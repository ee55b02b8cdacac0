"""Classification: cross-entropy loss, and accuracy.

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
from tacit.errors import UserError
from tacit.tasks.answers import ask


@dataclass(frozen=True)
class Classification:
    """One class per record: `y` [B] is the target for the model's output on `x`, or on `input_ids` and
    `attention_mask`.

    `metrics` adds `matthews` (Matthews' correlation, GLUE's metric for CoLA; Gorodkin's, 2004, for more than
    two classes) and `f1` (of class 1 if there are two classes, as in GLUE for QQP and MRPC; otherwise the
    mean over classes).
    """

    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", tuple(self.metrics))
        for name in self.metrics:
            if name not in ("matthews", "f1"):
                raise UserError(f"task.metrics: there is no {name!r}; choose from matthews and f1")

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(ask(model, batch), batch["y"], reduction="none")

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, y = ask(model, batch), batch["y"]
        # Sums in float64: adding up a million float32 losses loses digits that depend on the batch size.
        loss = functional.cross_entropy(logits, y, reduction="none").sum(dtype=torch.float64)
        correct = (logits.argmax(dim=1) == y).sum()
        sums = {"loss": loss, "correct": correct, "count": torch.tensor(len(y))}
        if self.metrics:
            said, classes = logits.argmax(dim=1), logits.shape[1]
            for name, chosen in (("said", said), ("true", y), ("right", y[said == y])):
                counts = torch.bincount(chosen, minlength=classes)
                sums |= {f"{name}_{k}": counts[k] for k in range(classes)}
        return sums

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = sums["count"] or float("nan")
        found = {"loss": sums["loss"] / count, "accuracy": sums["correct"] / count}
        if self.metrics and sums["count"]:
            classes = sum(name.startswith("said_") for name in sums)
            said, true, right = (
                [sums[f"{n}_{k}"] for k in range(classes)] for n in ("said", "true", "right")
            )
            if "matthews" in self.metrics:
                found["matthews"] = _matthews(sums["count"], said, true, right)
            if "f1" in self.metrics:
                found["f1"] = _f1(said, true, right)
        return found


def _matthews(count: float, said: list[float], true: list[float], right: list[float]) -> float:
    """(c·s − Σ p_k t_k) / √((s² − Σ p_k²)(s² − Σ t_k²)); 0 if there is only one answer or only one class."""
    covariance = sum(right) * count - sum(p * t for p, t in zip(said, true, strict=True))
    spread = (count**2 - sum(p * p for p in said)) * (count**2 - sum(t * t for t in true))
    return covariance / spread**0.5 if spread > 0 else 0.0


def _f1(said: list[float], true: list[float], right: list[float]) -> float:
    """2·right/(said + true) of class 1, or the mean over more than two classes."""
    each = [2 * r / (p + t) if p + t else 0.0 for p, t, r in zip(said, true, right, strict=True)]
    return each[1] if len(each) == 2 else sum(each) / len(each)
