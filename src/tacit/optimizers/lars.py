"""LARS (You, Gitman and Ginsburg 2017, arXiv:1708.03888): momentum SGD whose rate is set layer by layer.

For each parameter tensor h, with g the gradient and η_t the trust coefficient,

    r_h = η_t ‖θ_h‖ / (‖g_h‖ + λ ‖θ_h‖)          1 if ‖θ_h‖ or the denominator is zero
    b_h ← μ b_h + η r_h (g_h + λ θ_h)
    θ_h ← θ_h − b_h

The rate η is inside the momentum, as in the paper's Algorithm 1: a schedule acts on new gradients only.

>>> import torch
>>> theta = torch.tensor([3.0, 4.0])
>>> theta.grad = torch.tensor([0.0, 2e-6])
>>> Lars([theta], lr=0.1, trust_coefficient=1.0).step()
>>> theta                                              # lr · ‖θ‖ along the gradient
tensor([3.0000, 3.5000])
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit.optimizers.stepping import Closure, move_each


class Lars(Optimizer):
    """Besides the momentum, a step needs one temporary tensor of the size of the largest parameter."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
    ) -> None:
        if lr < 0 or weight_decay < 0 or trust_coefficient < 0:
            raise ValueError("lr, weight_decay and trust_coefficient must not be negative")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum}")
        settings = {
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, {"lr": lr, **settings})

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        return move_each(self, closure, self._move)

    def _move(
        self,
        theta: Tensor,
        grad: Tensor,
        lr: float,
        momentum: float,
        weight_decay: float,
        trust_coefficient: float,
    ) -> None:
        state = self.state[theta]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(theta)
        size = torch.linalg.vector_norm(theta)
        pull = torch.linalg.vector_norm(grad) + weight_decay * size
        trust = torch.where((size > 0) & (pull > 0), trust_coefficient * size / pull, 1.0)
        u = grad.add(theta, alpha=weight_decay).mul_(lr * trust)
        theta.sub_(state["momentum_buffer"].mul_(momentum).add_(u))
