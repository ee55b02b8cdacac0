"""FAFED: adaptive steps with a variance-reduced momentum, all averaged at every round.

Wu, Huang, Hu and Huang 2023, arXiv:2212.00974.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.algorithms.base import Algorithm, Decay, Round, Work
from tacit.lazy import Tensor, torch
from tacit.vector import Layout, Vectors


@dataclass(frozen=True)
class FAFED(Algorithm):
    """FAFED (Wu et al., 2023): m = g(y_k) + (1 − a)(m − g(y_{k−1}; same batch)); y −= η m/(√v̄ + ρ).

    v = β v + (1 − β) g² is updated in every step, but the denominator stays at v̄ for the whole round; y, m
    and v are averaged at its end. A step takes two gradients of one batch, and example-level privacy charges
    for both.
    """

    a: float = 0.1
    beta: Decay = 0.999
    rho: float = 1e-3

    @property
    def queries(self) -> int:
        return 2

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        return {"theta": theta, "m": torch.zeros_like(theta), "v": torch.zeros_like(theta)}

    def message(self, state: Vectors) -> Vectors:
        return dict(state)

    def uploads(self, layout: Layout) -> dict[str, int]:
        return {"delta": layout.shared, "m": layout.shared, "v": layout.shared}

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta = msg["theta"]
        y, m, v = work.load(theta), msg["m"].clone(), msg["v"].clone()
        denominator = msg["v"].sqrt().add_(self.rho)
        before = theta.clone()
        for lr in work.steps():
            g = work.gradient().clone()
            here = y.clone()
            y.copy_(before)
            old = work.gradient()
            y.copy_(here)
            m = g + (1 - self.a) * (m - old)
            v.mul_(self.beta).addcmul_(g, g, value=1 - self.beta)
            before = here
            y.sub_(m / denominator, alpha=lr)
        return {"delta": y - theta, "m": m, "v": v}, {}

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        return {"theta": round.step(mean["delta"]), "m": mean["m"], "v": mean["v"].clamp(min=0)}
