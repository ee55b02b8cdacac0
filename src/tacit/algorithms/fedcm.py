"""FedCM: each local step mixes in the server's last direction.

Xu, Wang, Wang and Yao 2021, arXiv:2106.10874.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.algorithms.base import Algorithm, Round, Work
from tacit.lazy import Tensor, torch
from tacit.vector import Layout, Vectors


@dataclass(frozen=True)
class FedCM(Algorithm):
    """FedCM (Xu et al., 2021): y −= η (α g + (1 − α) Δ_G), Δ_G = −mean(Δ)/(Kη) of the previous round."""

    alpha: float = 0.1

    @property
    def needs_steps(self) -> bool:
        return True

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        return {"theta": theta, "direction": torch.zeros_like(theta)}

    def message(self, state: Vectors) -> Vectors:
        return {"theta": state["theta"], "direction": state["direction"]}

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta, direction = msg["theta"], msg["direction"]
        y = work.load(theta)
        for lr in work.steps():
            g = work.gradient()
            y.sub_(g.mul_(self.alpha).add_(direction, alpha=1 - self.alpha), alpha=lr)
        return {"delta": y - theta}, {}

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        direction = mean["delta"] / -round.lr_sum
        return {"theta": round.step(mean["delta"]), "direction": direction}
