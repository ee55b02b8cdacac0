"""The part of a step that all optimizers share: the loss if it is asked for, then tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

Closure = Callable[[], float]


def move_each(optimizer: Optimizer, closure: Closure | None, move: Callable[..., None]) -> float | None:
    """Call `move(theta, grad, **settings)` for each tensor with a gradient; returns what the closure
    returned.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    with torch.no_grad():
        for group in optimizer.param_groups:
            settings = {name: group[name] for name in optimizer.defaults}
            for theta in group["params"]:
                if theta.grad is not None:
                    move(theta, theta.grad, **settings)
    return loss
