"""FedAvg: each client takes some local SGD steps, and the server averages the updates.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas 2017, arXiv:1602.05629.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.algorithms.base import Algorithm, Decay, Work
from tacit.lazy import torch
from tacit.vector import Vectors


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """FedAvg (McMahan et al., 2017): y −= η g; θ += mean(y − θ).

    With `momentum` β the local step is heavy-ball, u = β u + g; y −= η u, with u = 0 at the start of a round.
    """

    momentum: Decay = 0.0

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta = msg["theta"]
        y = work.load(theta)
        u = torch.zeros_like(y) if self.momentum else None
        for lr in work.steps():
            if u is None:
                work.descend(lr)  # y −= η g, without storing the gradient vector
            else:
                y.sub_(u.mul_(self.momentum).add_(work.gradient()), alpha=lr)
        return {"delta": y - theta}, {}
