"""LAMB (You et al. 2020, arXiv:1904.00962): Adam whose step scales with the norm of the layer it moves.

For each parameter tensor h, with m and v the moments of Adam,

    u_h = m̂_h / (√v̂_h + ξ) + λ θ_h
    θ_h ← θ_h − η · (‖θ_h‖ / ‖u_h‖) · u_h        the trust ratio; 1 if either norm is zero

The step's length does not depend on the gradient's length, so paper 003 can clip updates to almost nothing. ξ
is `eps`: 1e-6 as usual; paper 003 quotes .01 as better for federated learning. With `bias_correction=False`,
m̂ = m and v̂ = v, as printed in paper 003.

>>> import torch
>>> theta = torch.tensor([3.0, 4.0])
>>> theta.grad = torch.tensor([1e-3, 1e-3])
>>> Lamb([theta], lr=0.1, eps=0.0).step()
>>> (theta - torch.tensor([3.0, 4.0])).norm()    # lr · ‖θ‖
tensor(0.5000)
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit.optimizers.stepping import Closure, move_each


class Lamb(Optimizer):
    """Besides the two moments, a step needs one temporary tensor of the size of the largest parameter."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(f"lr, eps and weight_decay must not be negative ({lr}, {eps}, {weight_decay})")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), not {betas}")
        settings = {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, {"lr": lr, **settings})

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        return move_each(self, closure, self._move)

    def _move(
        self,
        theta: Tensor,
        grad: Tensor,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bias_correction: bool,
    ) -> None:
        state = self.state[theta]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(theta), exp_avg_sq=torch.zeros_like(theta))
        state["step"] += 1
        m, v = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = betas
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

        correct1, correct2 = (1 - b ** state["step"] if bias_correction else 1.0 for b in betas)
        u = v.sqrt().div_(sqrt(correct2)).add_(eps)
        torch.div(m, u, out=u).div_(correct1)
        if weight_decay:
            u.add_(theta, alpha=weight_decay)
        long, short = torch.linalg.vector_norm(theta), torch.linalg.vector_norm(u)
        u.mul_(torch.where((long > 0) & (short > 0), long / short, 1.0))
        theta.add_(u, alpha=-lr)
