"""The AdamW family: Local Adam, Local AdamW, FedAdamW, DP-FedAdamW, and the variants between them.

FedAdamW: Liu, Shang, Liu, Tian, Liu, Liu, Zhu and Lin 2025, arXiv:2510.27486. Its private version is
DP-FedAdamW, by the same group (CVPR 2026).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tacit.algorithms.base import Algorithm, Decay, Round, Work
from tacit.lazy import Tensor, torch
from tacit.vector import Layout, Vectors
from tacit.vector.blocks import Blocks, Kind, blocks

Aggregate = Literal["none", "m", "v", "vm", "mean-v"]


@dataclass(frozen=True)
class FedAdamW(Algorithm):
    """FedAdamW (Algorithm 2) and its relatives: y −= η (m̂/(√v̂ + ε) + α Δ_G + λ y).

    - `aggregate`: which moments start from their average instead of zero. "none" is Local AdamW; "m", "v"
      and "vm" send them whole; "mean-v" sends one number a block (FedAdamW).
    - `alpha` weighs Δ_G = −mean(Δ)/(Kη) of the previous round (γ in DP-FedAdamW); with 0 no Δ_G is sent down.
    - `blocks`: which partition (`tacit.vector.blocks`); B = min(`max_blocks`, ⌊d/`min_block`⌋) bounds it.
    - `decoupled`: λ outside the gradient (AdamW) or inside (Adam with L2).
    - `debias` (DP-FedAdamW): the denominator is √max(v̂ − φ, floor·φ) + ε, φ = (σC/B)² the variance that
      privacy adds to each coordinate. Where noise dominates, v̂ − φ is negative for about half the
      coordinates, hence the floor. The raw v is aggregated; otherwise φ would be subtracted twice.

    A moment that starts from zero each round is corrected by (1 − β^k). A moment that continues from its
    average is corrected by (1 − β^t), with t over all rounds.

    "m" alone needs an interpretation, because paper 004 prints no rule for it (Table 7). With a v that starts
    from zero, an old m is divided by the first gradient, which may be almost zero: this gave steps of up to
    90 η, and a model at chance. But m̂ is a mean of about the last w = 1/(1 − β1) gradients, and their second
    moment is at least m̂². So v starts as if all those w gradients had been m̂, at the age w. This costs no
    traffic, and by Jensen's inequality no first step is longer than about η, as in Adam itself.
    """

    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True
    aggregate: Aggregate = "mean-v"
    alpha: float = 0.5
    debias: bool = False
    floor: float = 0.1
    blocks: Kind = "architecture"
    max_blocks: int = 0
    min_block: int = 1

    @property
    def needs_steps(self) -> bool:
        return bool(self.alpha) or self.aggregate != "none"

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        state = {"theta": theta}
        if self.alpha:
            state["direction"] = torch.zeros_like(theta)
        return state | {name: torch.zeros(size) for name, size in self._moments(layout).items()}

    def message(self, state: Vectors) -> Vectors:
        return dict(state)

    def uploads(self, layout: Layout) -> dict[str, int]:
        return {"delta": layout.shared, **self._moments(layout)}

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta, direction = msg["theta"], msg.get("direction")
        y, m, v = work.load(theta), self._start(msg, "m", work.layout), self._start(msg, "v", work.layout)
        v_age = work.steps_before if "v" in msg else self._implied_(v, m, work) if "m" in msg else 0
        m_age = work.steps_before if "m" in msg else 0
        for k, lr in enumerate(work.steps(), start=1):
            g = work.gradient()
            if self.weight_decay and not self.decoupled:
                g.add_(y, alpha=self.weight_decay)
            m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
            v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            m_hat_scale = 1 / (1 - self.beta1 ** (m_age + k))
            step = m.div(self._denominator(v, v_age + k, work)).mul_(m_hat_scale)
            if direction is not None:
                step.add_(direction, alpha=self.alpha)
            if self.weight_decay and self.decoupled:
                step.add_(y, alpha=self.weight_decay)
            y.sub_(step, alpha=lr)
        upload = {"delta": y - theta}
        for name in self._moments(work.layout):
            moment = m if name == "m" else v
            upload[name] = self._blocks(work.layout).mean(moment) if self.aggregate == "mean-v" else moment
        return upload, {}

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        new = {"theta": round.step(mean["delta"])}
        if "direction" in state:
            new["direction"] = mean["delta"] / -round.lr_sum
        for name in state.keys() - new.keys():
            # Noise on an average can make a second moment negative, which it never is.
            new[name] = mean[name].clamp(min=0) if name == "v" else mean[name]
        return {name: new[name] for name in state}

    def _moments(self, layout: Layout) -> dict[str, int]:
        match self.aggregate:
            case "none":
                return {}
            case "mean-v":
                return {"v": len(self._blocks(layout))}
            case names:
                return dict.fromkeys(names, layout.shared)

    def _blocks(self, layout: Layout) -> Blocks:
        return blocks(layout, self.blocks, self.max_blocks, self.min_block)

    def _start(self, msg: Vectors, name: str, layout: Layout) -> Tensor:
        if name not in msg:
            return torch.zeros_like(msg["theta"])
        return self._blocks(layout).spread(msg[name]) if self.aggregate == "mean-v" else msg[name].clone()

    def _implied_(self, v: Tensor, m: Tensor, work: Work) -> int:
        """Fill v with the second moment that an averaged m implies; returns its age in steps."""
        if work.steps_before == 0:
            return 0
        age = round(1 / (1 - self.beta1))
        m_hat = m / (1 - self.beta1**work.steps_before)
        torch.mul(m_hat, m_hat, out=v).mul_(1 - self.beta2**age)
        return age

    def _denominator(self, v: Tensor, age: int, work: Work) -> Tensor:
        v_hat = v / (1 - self.beta2**age)
        if self.debias and work.noise_variance:
            least = self.floor * work.noise_variance
            v_hat.sub_(work.noise_variance)
            work.note("floored_share", float((v_hat < least).float().mean()))
            v_hat.clamp_(min=least)
        return v_hat.sqrt_().add_(self.eps)


@dataclass(frozen=True)
class FedAdamWTheory(Algorithm):
    """FedAdamW as in its proof (Algorithm 3): y −= η (α g ⊙ ϑ + (1 − α) Δ_G); θ −= γ Δ_G.

    β1 = 0 and λ = 0. Here α weighs the gradient, as in the paper. ϑ = 1/(√v̂ + ε), and v continues from its
    block means. `gamma` is in units of the summed learning rate Kη, so γ = 1 gives θ += mean(Δ).
    """

    alpha: float = 0.5
    beta2: Decay = 0.999
    eps: float = 1e-8
    gamma: float = 1.0
    blocks: Kind = "architecture"
    max_blocks: int = 0
    min_block: int = 1

    @property
    def needs_steps(self) -> bool:
        return True

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        size = len(self._blocks(layout))
        return {"theta": theta, "direction": torch.zeros_like(theta), "v": torch.zeros(size)}

    def message(self, state: Vectors) -> Vectors:
        return dict(state)

    def uploads(self, layout: Layout) -> dict[str, int]:
        return {"delta": layout.shared, "v": len(self._blocks(layout))}

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta, direction = msg["theta"], msg["direction"]
        parts = self._blocks(work.layout)
        y, v = work.load(theta), parts.spread(msg["v"])
        for k, lr in enumerate(work.steps(), start=1):
            g = work.gradient()
            v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            correction = math.sqrt(1 - self.beta2 ** (work.steps_before + k))
            step = g.div_(v.sqrt().div_(correction).add_(self.eps)).mul_(self.alpha)
            y.sub_(step.add_(direction, alpha=1 - self.alpha), alpha=lr)
        return {"delta": y - theta, "v": parts.mean(v)}, {}

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        theta = round.step(mean["delta"] * self.gamma)
        return {"theta": theta, "direction": mean["delta"] / -round.lr_sum, "v": mean["v"].clamp(min=0)}

    def _blocks(self, layout: Layout) -> Blocks:
        return blocks(layout, self.blocks, self.max_blocks, self.min_block)
