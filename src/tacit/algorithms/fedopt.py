"""FedOpt: the clients of FedAvg with an adaptive server optimizer.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan 2021, arXiv:2003.00295.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tacit.algorithms.base import Decay, Round
from tacit.algorithms.fedavg import FedAvg
from tacit.lazy import Tensor, torch
from tacit.vector import Layout, Vectors


@dataclass(frozen=True)
class FedOpt(FedAvg):
    """FedAdam, FedYogi, FedAdaGrad (Reddi et al., 2021): m = β1 m + (1−β1) Δ̄; θ += η_g m/(√v + τ).

    v is updated with Δ̄² as in Adam, Yogi or AdaGrad, without bias correction. `lr` is η_g.
    """

    rule: Literal["adam", "yogi", "adagrad"] = "adam"
    lr: float = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: float = 1e-3

    @property
    def own_server_rule(self) -> bool:
        return True

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        return {"theta": theta, "m": torch.zeros_like(theta), "v": torch.zeros_like(theta)}

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        delta, v = mean["delta"], state["v"]
        square = delta.square()
        if self.rule == "adam":
            v = self.beta2 * v + (1 - self.beta2) * square
        elif self.rule == "yogi":
            v = v - (1 - self.beta2) * square * torch.sign(v - square)
        else:
            v = v + square
        m = self.beta1 * state["m"] + (1 - self.beta1) * delta
        return {"theta": state["theta"] + self.lr * m / (v.sqrt() + self.tau), "m": m, "v": v}
