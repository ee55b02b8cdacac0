"""Attacks the noise through its bits; the attacker knows everything except one unit.

Ordinary float32 normals are Box–Muller transforms of 24-bit uniforms: in each block of 16 numbers, those at j
and j + 8 satisfy r² = −2 ln(k·2⁻²⁴) for a whole number k. An attacker who knows the rest of a sum computes k
with the unit and without it; k is whole only in the true case. The first test shows that this attack works.
The others show that against a run it is no better than a coin.

False alarms: 60 guesses of a fair coin are right 11 to 49 times, except 2 times in 10 million.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tacit
from conftest import blobs
from tacit.algorithms import FedAvg
from tacit.config.build import build_job
from tacit.gradients import ClippedGradient
from tacit.privacy import Bits, ClientLevel, Clip, Poisson
from tacit.privacy.gaussian import add_rounded_gaussian_

TRIALS, FEWEST, MOST = 60, 11, 49
NOISE, C = 20.0, 1.0


def off_lattice(noise: Tensor) -> float:
    """How far from whole the k of the largest pairs are, on average: 0.25 for noise of no such structure."""
    whole = noise.double()[: noise.numel() // 16 * 16].view(-1, 2, 8)
    squares = whole[:, 0].square() + whole[:, 1].square()
    k = 2.0**24 * torch.exp(-squares[squares > 12] / 2)
    return float((k - k.round()).abs().mean())


def off_grid(noise: Tensor, unit: float) -> float:
    """How far from whole numbers of a unit the noise is: another trace that a sum could leave."""
    whole = noise.double() / unit
    return float((whole - whole.round()).abs().mean())


def guess(released: Tensor, without: Tensor, unit: Tensor, std: float, step: float) -> list[bool]:
    """Whether the unit is in the sum, by each of the attacks."""
    absent, present = (released.double() - base.double() for base in (without, without + unit))
    return [
        off_lattice(present / std) < off_lattice(absent / std),
        off_grid(present, step) < off_grid(absent, step),
    ]


def direction(size: int) -> Tensor:
    vector = torch.randn(size, generator=torch.Generator().manual_seed(1))
    return vector / vector.norm() * C * 0.999


def test_the_attack_peels_ordinary_normals_off() -> None:
    """Also in the sum's last bits: float32 noise added to float32 sums, as is usual."""
    size = 64_000
    unit, others = direction(size), 3 * direction(size).roll(7)
    right = 0
    for trial in range(20):
        there = bool(trial % 3)
        total = (others + unit if there else others).clone()
        noise = torch.empty(size).normal_(generator=torch.Generator().manual_seed(trial))
        right += guess(total + NOISE * C * noise, others, unit, NOISE * C, 1.0)[0] == there
    assert right == 20


@dataclass(frozen=True)
class Watched(FedAvg):
    """Client 0 sends a vector in those rounds where its coin says so, the others nothing; means are kept."""

    calls: ClassVar[list[int]] = []
    coins: ClassVar[list[bool]] = []
    means: ClassVar[list[Tensor]] = []

    def client(self, msg: Any, memory: Any, work: Any) -> Any:
        first = len(self.calls) % 12 == 0
        self.calls.append(work.round)
        delta = torch.zeros_like(msg["theta"])
        if first and self.coins[work.round]:
            delta += direction(delta.numel())
        return {"delta": delta}, {}

    def server(self, state: Any, mean: Any, round: Any) -> Any:
        self.means.append(mean["delta"].clone())
        return super().server(state, mean, round)


@dataclass(frozen=True)
class Recorded(FedAvg):
    """FedAvg whose released means are kept."""

    def server(self, state: Any, mean: Any, round: Any) -> Any:
        Watched.means.append(mean["delta"].clone())
        return super().server(state, mean, round)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["server", "clients"])
def test_a_client_cannot_be_told_by_the_noises_bits(config, dataset, where: str) -> None:
    Watched.calls.clear()
    Watched.means.clear()
    Watched.coins[:] = np.random.default_rng().random(TRIALS) < 0.5
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4000, bias=False))
    privacy = {"unit": "client", "clip": C, "noise": NOISE, "delta": 1e-5, "noise_at": where}
    settings = config(rounds=TRIALS, cohort=12, privacy=privacy, evaluate__every=1000, checkpoint__every=1000)
    tacit.run(settings, model=model, dataset=dataset, algorithm=Watched())
    mechanism = build_job(settings, Path("other"), dataset=dataset).privacy
    assert isinstance(mechanism, ClientLevel)
    step = mechanism.grid({}, 64_000).unit
    unit = direction(64_000)
    right = np.zeros(2, int)
    for coin, mean in zip(Watched.coins, Watched.means, strict=True):
        right += np.array(guess(mean * 12, torch.zeros(64_000), unit, NOISE * C, step)) == coin
    assert all(FEWEST <= count <= MOST for count in right), right


@pytest.mark.slow
def test_a_record_cannot_be_told_by_the_noises_bits(config) -> None:
    """One client, every record in every batch; record 0 is a picture or a blank that has no gradient.

    The first layer of a linear model on blanks has a gradient of zero, so the sum is known but for record 0.
    """
    base = blobs(32)
    right, picture = np.zeros(2, int), base.train.x[0].copy()
    coins = np.random.default_rng().random(TRIALS) < 0.5
    for trial, coin in enumerate(coins):
        Watched.means.clear()
        x = np.zeros_like(base.train.x)
        x[0] = picture if coin else 0
        records = tacit.ArrayRecords(x, base.train.y)
        data = tacit.Dataset("blanks", records, base.test, 4, (1, 4, 4))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4000, bias=False))
        clipped = ClippedGradient(deepcopy(model))
        one = {"x": torch.from_numpy(picture)[None], "y": torch.from_numpy(base.train.y[:1])}
        clipped(one, lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"], reduction="none"), C)
        unit = clipped.flat.grad.clone()
        assert float(unit.norm()) > 0.5 * C
        settings = config(
            rounds=1, cohort=1, local={"steps": 1, "batch": 32, "lr": 1.0}, evaluate__every=1000,
            data__partition={"kind": "iid", "clients": 1},
            privacy={"unit": "example", "clip": C, "noise": NOISE, "delta": 1e-5},
        )  # fmt: skip
        tacit.run(settings, f"run-{trial}", model=model, dataset=data, algorithm=Recorded())
        mechanism = build_job(settings, Path("other"), dataset=data).privacy
        grid = mechanism._grid(64_000)
        std = mechanism.std(64_000, 32.0)
        gradient = -Watched.means[0] * 32
        right += np.array(guess(gradient, torch.zeros(64_000), unit, std, grid.unit)) == bool(coin)
    assert all(FEWEST <= count <= MOST for count in right), right


# --- whole numbers ----------------------------------------------------------------------------------------


def test_the_sum_of_whole_numbers_hides_a_unit_in_every_bit() -> None:
    """Before anything is decoded: each bit of the noised whole numbers is as often set with the unit as
    without, and the low bits are fair. 2 × 20 comparisons, false alarms 1e-8 each.
    """
    size = 40_000
    mechanism = ClientLevel(noise=50.0, delta=1e-5, clip=Clip(C), sampling=Poisson(0.5))
    bounding = mechanism.bounding({}, {"delta": size}, None, 1)  # type: ignore[arg-type]
    released = []
    for there in (False, True):
        total = {"delta": torch.zeros(size, dtype=torch.int64)}
        if there:
            bounding.add_({"delta": direction(size)}, total)
        add_rounded_gaussian_(total["delta"], mechanism.std(bounding.grid), Bits.secret())
        released.append(total["delta"].numpy())
    for bit in range(20):
        ones = [int((whole >> bit & 1).sum()) for whole in released]
        for count in ones:
            assert abs(count - size / 2) < 5.8 * np.sqrt(size / 4), (bit, ones)


def test_totals_do_not_depend_on_order_or_workers(config, dataset) -> None:
    """Under a guarantee, sums are exact: 1, 2 and 3 workers give the same model to the last bit."""
    privacy = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3, "entropy": "seed"}
    models = []
    for workers in (0, 2, 3):
        result = tacit.run(
            config(rounds=3, cohort=9, privacy=privacy, engine__workers=workers),
            f"w{workers}",
            dataset=dataset,
        )
        models.append(torch.cat([p.detach().flatten() for p in result.model.parameters()]))
    assert torch.equal(models[0], models[1]) and torch.equal(models[0], models[2])


def test_uploads_add_up_to_the_same_whole_numbers_in_any_order() -> None:
    rng = torch.Generator().manual_seed(0)
    mechanism = ClientLevel(noise=1.0, delta=1e-5, clip=Clip(C), sampling=Poisson(0.5))
    bounding = mechanism.bounding({}, {"delta": 5000}, None, 1)  # type: ignore[arg-type]
    uploads = [{"delta": torch.randn(5000, generator=rng) * 10.0**power} for power in range(-6, 6)]
    totals = []
    for order in (range(12), reversed(range(12)), np.random.default_rng(0).permutation(12)):
        total = {"delta": torch.zeros(5000, dtype=torch.int64)}
        for number in order:
            bounding.add_(uploads[number], total)
        totals.append(total["delta"])
    assert torch.equal(totals[0], totals[1]) and torch.equal(totals[0], totals[2])
