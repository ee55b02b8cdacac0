"""SCAFFOLD: control variates against client drift.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh 2020, arXiv:1910.06378.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.algorithms.base import Algorithm, Round, Work
from tacit.lazy import Tensor, torch
from tacit.vector import Layout, Vectors


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """SCAFFOLD (Karimireddy et al., 2020): y −= η(g − c_i + c); c_i⁺ = c_i − c − Δ/(Kη); c += (S/N) mean(Δc).

    A client keeps c_i, the mean of its own gradients in its last round. Δ and Δc are sent and bounded
    together, because Δc reveals as much about the client as Δ does.
    """

    @property
    def keeps_state(self) -> bool:
        return True

    def init(self, theta: Tensor, layout: Layout) -> Vectors:
        return {"theta": theta, "c": torch.zeros_like(theta)}

    def message(self, state: Vectors) -> Vectors:
        return {"theta": state["theta"], "c": state["c"]}

    def uploads(self, layout: Layout) -> dict[str, int]:
        return {"delta": layout.shared, "c": layout.shared}

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta, c = msg["theta"], msg["c"]
        c_i = state.get("c", torch.zeros_like(c))
        y = work.load(theta)
        for lr in work.steps():
            g = work.gradient()
            y.sub_(g.sub_(c_i).add_(c), alpha=lr)
        delta = y - theta
        new_c_i = c_i - c - delta / work.lr_sum
        return {"delta": delta, "c": new_c_i - c_i}, {"c": new_c_i}

    def server(self, state: Vectors, mean: Vectors, round: Round) -> Vectors:
        theta = round.step(mean["delta"])
        return {"theta": theta, "c": state["c"] + round.fraction * mean["c"]}
