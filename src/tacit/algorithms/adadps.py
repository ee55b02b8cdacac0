"""AdaDPS: precondition gradients with public data before they are clipped and noised.

Li, Zaheer, Reddi and Smith 2022, arXiv:2202.05963.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.algorithms.base import Algorithm, Decay, Round, Work
from tacit.lazy import Tensor, torch
from tacit.vector import Layout, Vectors


@dataclass(frozen=True)
class AdaDPS(Algorithm):
    """AdaDPS (Li et al., 2022): y −= η (1/B)[Σ clip_C(g_j ⊙ p) + noise], p = 1/(√v + ε).

    v is a moving average (factor `beta`) of squared gradients on public records, which `data.public` in the
    config sets aside. v depends on private data only through y, so it needs no extra noise.
    """

    beta: Decay = 0.9
    eps: float = 1e-3

    @property
    def needs_steps(self) -> bool:
        return True

    @property
    def needs_public(self) -> bool:
        return True

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        return {"theta": theta, "v": torch.zeros_like(theta)}

    def message(self, state: Vectors) -> Vectors:
        return dict(state)

    def uploads(self, layout: Layout) -> dict[str, int]:
        return {"delta": layout.shared, "v": layout.shared}

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta, v = msg["theta"], msg["v"].clone()
        y = work.load(theta)
        for k, lr in enumerate(work.steps(), start=1):
            public = work.public_gradient()
            v.mul_(self.beta).addcmul_(public, public, value=1 - self.beta)
            v_hat = v / (1 - self.beta ** (work.steps_before + k))
            y.sub_(work.gradient(scale=v_hat.sqrt_().add_(self.eps).reciprocal_()), alpha=lr)
        return {"delta": y - theta, "v": v}, {}

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        return {"theta": round.step(mean["delta"]), "v": mean["v"].clamp(min=0)}
