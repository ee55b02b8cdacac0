"""DP²-FedSAM and CENTAUR: a shared body, and a head that never leaves its client.

DP²-FedSAM: Zhang, Guo and Gong 2024, arXiv:2409.13645, which compares it with CENTAUR (Shen et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.algorithms.base import Algorithm, Decay, Work
from tacit.algorithms.fedsam import sharpness_aware
from tacit.lazy import torch
from tacit.vector import Vectors


@dataclass(frozen=True)
class DP2FedSAM(Algorithm):
    """DP²-FedSAM: first SGD on the personal head h with the body φ fixed, then SAM on φ with h fixed.

    Only the update of φ is sent, so only that is bounded and noised; the client keeps h. `rho` = 0 gives
    CENTAUR. Each part has the config's number of local steps or epochs, unless `head_epochs` (τ_h) or
    `body_epochs` (τ_φ) sets it. `head_lr` follows the local schedule.
    """

    rho: float = 0.1
    head_lr: float = 0.005
    momentum: Decay = 0.0
    personal: tuple[str, ...] = ("head",)
    head_epochs: int = 0
    body_epochs: int = 0

    @property
    def personal_part(self) -> tuple[str, ...]:
        return self.personal

    @property
    def queries(self) -> int:
        return 2

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        phi, h = work.load(msg["theta"]), work.load_personal(state)
        u = torch.zeros_like(h)
        for _ in work.steps(self.head_epochs or None):
            u.mul_(self.momentum).add_(work.personal_gradient())
            h.sub_(u, alpha=self.head_lr * work.decay)
        u = torch.zeros_like(phi)
        for lr in work.steps(self.body_epochs or None):
            u.mul_(self.momentum).add_(sharpness_aware(phi, work, self.rho))
            phi.sub_(u, alpha=lr)
        return {"delta": phi - msg["theta"]}, {"personal": h.clone()}
