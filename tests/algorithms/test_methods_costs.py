"""The costs of a method: bytes on the wire, and privacy for every gradient it computes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

import tacit
from conftest import blobs
from methods_small import EACH, STEPS, configured, play
from tacit.algorithms import Algorithm, Work
from tacit.federation.statements import LEDGER
from tacit.privacy.ledger import Charge, Ledger
from tacit.vector import Vectors

# --- traffic ----------------------------------------------------------------------------------------------


def traffic(method: str) -> tuple[float, float]:
    """Bytes up and down of a round, in models, on a network of 4 blocks and 2,404 parameters."""
    config = configured(method, {"rounds": 1, "model": {"name": "mlp", "hidden": [114]}})
    record = tacit.run(config, method, dataset=blobs(48)).metrics[0]
    parameters = 16 * 114 + 114 + 114 * 4 + 4
    assert record["bytes_up"] % record["clients"] == 0
    per_model = 4 * parameters * record["clients"]
    return record["bytes_up"] / per_model, record["bytes_down"] / per_model


def test_traffic_of_the_aggregation_variants() -> None:
    """004's Table 7: nothing, m, v, both, and block means of v are 1 : 2 : 2 : 3 : 1, both ways."""
    variants = ("agg-none", "agg-m", "agg-v", "agg-vm", "agg-mean-v")
    for measured, expected in zip(map(traffic, variants), (1, 2, 2, 3, 1), strict=True):
        assert measured == pytest.approx((expected, expected), rel=0.005)


TRAFFIC = {
    "fedavg": (1, 1), "scaffold": (2, 2), "fedcm": (1, 2), "fedadam": (1, 1), "fedlada": (2, 3),
    "fafed": (3, 3), "fedadamw": (1, 2), "fedadamw-alg3": (1, 2),
}  # fmt: skip


@pytest.mark.parametrize("method", TRAFFIC)
def test_traffic(method: str) -> None:
    assert traffic(method) == pytest.approx(TRAFFIC[method], rel=0.005)


def test_a_personal_part_is_not_sent() -> None:
    config = configured("dp2-fedsam", {"rounds": 1, "privacy.noise": 1.0})
    record = play(config).result.metrics[0]
    body = 10 * 4 + 4
    assert record["bytes_up"] == record["bytes_down"] == 4 * body * record["clients"]


# --- privacy ----------------------------------------------------------------------------------------------


def charges(method: str, overrides: dict[str, Any] | None = None) -> list[Charge]:
    config = configured(method, {"rounds": 2, "local.batch": 4, **(overrides or {})})
    return Ledger.read(play(config).result.path / LEDGER).charges


@pytest.mark.parametrize(
    ("method", "options", "steps", "noise"),
    [
        ("dp-fedavg", {}, STEPS, 1.0),
        ("dp-fedadamw", {}, STEPS, 1.0),
        ("dp-fedsam", {}, 2 * STEPS, 1.0),
        ("dp-fedsam", {"method.fresh": False}, STEPS, 1 / math.sqrt(2)),
        ("dp-fedsam", {"method.rho": 0.0}, STEPS, 1.0),
        ("dp-fafed", {}, STEPS, 1 / math.sqrt(2)),
    ],
)
def test_every_gradient_is_paid_for(method: str, options: dict[str, Any], steps: int, noise: float) -> None:
    """Each client of each round: its steps, at rate B/n, at σ or, for two gradients of a batch, σ/√2."""
    paid = charges(method, options)
    assert len(paid) == 2
    for charge in paid:
        (part,) = charge.parts
        assert part.clients == (0, 1, 2, 3)
        assert part.steps == steps
        assert part.event.rate == pytest.approx(4 / EACH)
        assert part.event.noise == pytest.approx(noise)


def test_at_client_level_sam_costs_nothing_extra() -> None:
    plain = charges("dp-fedavg-client", {"privacy.noise": 1.0, "name": "a"})
    assert [charge.parts for charge in plain] == [c.parts for c in _again("dp-fedsam-client")]


def _again(method: str) -> list[Charge]:
    played = play(configured(method, {"rounds": 2, "local.batch": 4, "privacy.noise": 1.0}), method)
    return Ledger.read(played.result.path / LEDGER).charges


@dataclass(frozen=True)
class Greedy(Algorithm):
    """Asks for more than it announces, in one of three ways."""

    way: str = "twice"
    announced: int = 1

    @property
    def queries(self) -> int:
        return self.announced

    def client(self, msg: Vectors, memory: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        y = work.load(msg["theta"])
        for lr in work.steps():
            y.sub_(work.gradient(), alpha=lr)
            if self.way == "twice":
                work.gradient()
            if self.way == "fresh":
                work.gradient(fresh=True)
        if self.way == "pass":
            for _ in work.steps():
                work.gradient()
        return {"delta": y - msg["theta"]}, {}


@pytest.mark.parametrize(
    ("way", "reason"),
    [("twice", "asks for 2 gradients of one batch but announces 1"),
     ("fresh", "more batches than its `batches` announces"),
     ("pass", "a second pass over the records is not charged")],
)  # fmt: skip
def test_a_gradient_that_nobody_pays_for_is_refused(way: str, reason: str) -> None:
    config = configured("dp-fedavg", {"rounds": 1})
    with pytest.raises(Exception, match=reason):
        play(config, algorithm=Greedy(way))


def test_what_is_announced_is_allowed_and_plain_gradients_are_free() -> None:
    paid = play(configured("dp-fedavg", {"rounds": 1}), "paid", algorithm=Greedy("twice", announced=2))
    (charge,) = Ledger.read(paid.result.path / LEDGER).charges
    assert charge.parts[0].event.noise == pytest.approx(1 / math.sqrt(2))
    for way in ("twice", "pass"):
        play(configured("fedavg", {"rounds": 1}), way, algorithm=Greedy(way))
