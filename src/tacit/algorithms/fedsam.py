"""FedSAM: FedAvg with sharpness-aware local steps.

Qu, Li, Duan, Liu, Tang and Lu 2022, arXiv:2206.02618; on private updates (DP-FedSAM) Shi et al. 2023,
arXiv:2303.11242.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.algorithms.base import Algorithm, Decay, Work
from tacit.lazy import Tensor, torch
from tacit.vector import Vectors


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """FedSAM (Qu et al., 2022): p = ρ g/‖g‖; y −= η (g(y + p) + λ y).

    Weight decay is not part of the sharpness-aware loss (Foret et al. 2021, arXiv:2010.01412, Eq. 1). A step
    takes two gradients, and example-level privacy charges for both. On one batch the step is charged at σ/√2.
    With a `fresh` batch for the second it is charged as two steps at σ, which is much cheaper.
    """

    rho: float = 0.05
    momentum: Decay = 0.0
    fresh: bool = False

    @property
    def queries(self) -> int:
        return 2 if self.rho and not self.fresh else 1

    @property
    def batches(self) -> int:
        return 2 if self.rho and self.fresh else 1

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta = msg["theta"]
        y = work.load(theta)
        u = torch.zeros_like(y) if self.momentum else None
        for lr in work.steps():
            g = sharpness_aware(y, work, self.rho, self.fresh)
            if u is not None:
                g = u.mul_(self.momentum).add_(g)
            y.sub_(g, alpha=lr)
        return {"delta": y - theta}, {}


def sharpness_aware(y: Tensor, work: Work, rho: float, fresh: bool = False) -> Tensor:
    """The gradient at the worst point within `rho` of y, to first order; y itself is unchanged."""
    if rho == 0:
        return work.gradient()
    g = work.gradient(with_decay=False)
    here = y.clone()
    # Also after a zero gradient, which does not move y: a step always draws the batches that it announced.
    y.add_(g, alpha=rho / max(float(torch.linalg.vector_norm(g)), 1e-12))
    g = work.gradient(fresh, with_decay=False)
    y.copy_(here)  # y − p would leave rounding errors
    return g.add_(y, alpha=work.weight_decay) if work.weight_decay else g
