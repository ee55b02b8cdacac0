"""Autograd's engine, called without the checks in Python that `torch.autograd.grad` wraps around it.

For a perceptron on batches of ten they are a sixth of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
"""Not documented by torch; where a release has no such thing, the documented functions do the same."""


def grad(losses: Tensor, weights: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The gradient of Σ_j weights[j]·losses[j] for each of `inputs`; None for one that has no part in it."""
    if _ENGINE is None:
        return torch.autograd.grad(losses, inputs, weights, allow_unused=True)
    found: tuple[Tensor | None, ...] = _ENGINE.run_backward(
        (losses,), (weights,), False, False, inputs, allow_unreachable=True, accumulate_grad=False
    )
    return found


def backward(losses: Tensor, weights: Tensor) -> None:
    """Add the gradient of Σ_j weights[j]·losses[j] to the `.grad` of every parameter in it."""
    if _ENGINE is None:
        losses.backward(weights)  # type: ignore[no-untyped-call]
        return
    _ENGINE.run_backward(
        (losses,), (weights,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
