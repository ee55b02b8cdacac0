"""FedAvg with LARS or LAMB on each client: local steps scale with the norm of the layer that they move.

LARS: You, Gitman and Ginsburg 2017, arXiv:1708.03888. LAMB: You et al. 2020, arXiv:1904.00962. In federated
learning: Pelikan, Azam, Feldman, Silovsky, Talwar, Brinton and Likhomanenko 2023, arXiv:2310.00098.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tacit import optimizers
from tacit.algorithms.base import Algorithm, Decay, Work
from tacit.lazy import torch
from tacit.vector import Vectors


@dataclass(frozen=True)
class FedLayerwise(Algorithm):
    """Local LARS (You et al., 2017) or LAMB (You et al., 2020); the optimizer state is reset every round.

    Paper 003 (Appendix G.4) names both as candidates to replace SGD on the clients. The traffic is FedAvg's,
    because moments are neither sent nor kept.
    """

    rule: Literal["lars", "lamb"] = "lamb"
    momentum: Decay = 0.9
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: float = 1e-6
    trust_coefficient: float = 1e-3

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta = msg["theta"]
        y = work.load(theta)
        layers = [torch.nn.Parameter(view, requires_grad=False) for _, view in work.layout.views(y)]
        optimizer: torch.optim.Optimizer
        if self.rule == "lamb":
            optimizer = optimizers.Lamb(layers, betas=(self.beta1, self.beta2), eps=self.eps)
        else:
            optimizer = optimizers.Lars(
                layers, momentum=self.momentum, trust_coefficient=self.trust_coefficient
            )
        for lr in work.steps():
            for layer, (_, part) in zip(layers, work.layout.views(work.gradient()), strict=True):
                layer.grad = part
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        return {"delta": y - theta}, {}
