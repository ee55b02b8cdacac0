"""FedProx: FedAvg with a pull towards the server's model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith 2020, arXiv:1812.06127.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.algorithms.base import Algorithm, Work
from tacit.vector import Vectors


@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedProx (Li et al., 2020): y −= η (g + μ (y − θ)); θ += mean(y − θ)."""

    mu: float = 0.01

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta = msg["theta"]
        y = work.load(theta)
        for lr in work.steps():
            g = work.gradient()
            if self.mu:
                g.add_(y - theta, alpha=self.mu)
            y.sub_(g, alpha=lr)
        return {"delta": y - theta}, {}
