"""FedLADA: local Adam that starts from the average second moment and mixes in the global direction.

Sun, Shen, Sun, Ding and Tao 2023, arXiv:2308.00522.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.algorithms.base import Algorithm, Decay, Round, Work
from tacit.lazy import Tensor, torch
from tacit.vector import Layout, Vectors


@dataclass(frozen=True)
class FedLADA(Algorithm):
    """FedLADA (Sun et al., 2023): y −= η (α m ⊙ ϑ + (1 − α) Δ_G), ϑ = 1/(√v + ε), v started from its average.

    Clients send Δ and v, twice FedAvg's uploads; the server sends θ, v̄ and Δ_G.
    """

    alpha: float = 0.1
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: float = 1e-8

    @property
    def needs_steps(self) -> bool:
        return True

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        return {"theta": theta, "v": torch.zeros_like(theta), "direction": torch.zeros_like(theta)}

    def message(self, state: Vectors) -> Vectors:
        return dict(state)

    def uploads(self, layout: Layout) -> dict[str, int]:
        return {"delta": layout.shared, "v": layout.shared}

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta, direction = msg["theta"], msg["direction"]
        y, m, v = work.load(theta), torch.zeros_like(theta), msg["v"].clone()
        for lr in work.steps():
            g = work.gradient()
            m.lerp_(g, 1 - self.beta1)
            v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            step = m.div(v.sqrt().add_(self.eps)).mul_(self.alpha)
            y.sub_(step.add_(direction, alpha=1 - self.alpha), alpha=lr)
        return {"delta": y - theta, "v": v}, {}

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        direction = mean["delta"] / -round.lr_sum
        # Noise on a private average can make it negative; a second moment never is.
        return {"theta": round.step(mean["delta"]), "v": mean["v"].clamp(min=0), "direction": direction}
