"""The audit: its bounds hold, sound mechanisms pass, and every defect that we plant is caught.

Audits draw fresh entropy, so any assertion about one may fail by chance, in less than 1e-6 of all runs: by
theorem where nothing may be refuted (`SURE`), by the spread of simulated audits where something must be.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tacit.errors import UserError
from tacit.privacy import (
    Arrivals,
    BandedNoise,
    Bits,
    BltNoise,
    Bounding,
    ClientLevel,
    Clip,
    ExampleLevel,
    FixedSize,
    Mechanism,
    Poisson,
    Workload,
)
from tacit.privacy.audit import (
    against_curve,
    from_canaries,
    from_one_run,
    from_rates,
    from_scores,
    p_value,
)
from tacit.privacy.games import STATE, audit_mechanism
from tacit.vector import Vectors

DELTA = 1e-3
SURE = 1 - 1e-7
"""So much confidence that a sound mechanism is never refuted here."""


def client(
    kind: type[ClientLevel] = ClientLevel, noise: float = 2.0, rate: float = 1.0, **more: Any
) -> ClientLevel:
    return kind(noise, DELTA, Clip(0.5), Poisson(rate), **more)


# --- the bounds ------------------------------------------------------------------------------------------


def test_bounds_hold_as_often_as_they_say() -> None:
    """Randomized response is exactly ε-private: 2,000 audits of it, and no more false alarms than 5 % allow.

    P(more than 150 of 2,000 | 5 %) < 1e-6.
    """
    rng = np.random.default_rng(0)
    keep = 1 / (1 + math.exp(-1.0))
    alarms = {"rates": 0, "one run": 0}
    for _ in range(2000):
        inside = rng.random(1000) < 0.5
        said = np.where(rng.random(1000) < keep, inside, ~inside)
        true, false = int((said & inside).sum()), int((said & ~inside).sum())
        shown = from_rates(true, int(inside.sum()), false, int((~inside).sum()), 0.0, 0.95)
        alarms["rates"] += shown > 1.0
        alarms["one run"] += p_value(1000, 1000, int((said == inside).sum()), 1.0, 0.0) <= 0.05
    assert alarms["rates"] <= 150 and alarms["one run"] <= 150
    assert alarms["one run"] >= 50, "and the test is not vacuous: this one is nearly exact"


@pytest.mark.slow
def test_choosing_an_attack_is_paid_for() -> None:
    """Fifty attacks of pure noise: the best of them is chosen by one half and shows nothing on the other."""
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(200):
        inside = rng.random(400) < 0.5
        scores = {str(k): rng.normal(size=400) for k in range(50)}
        alarms += from_scores(inside, scores, 0.0, 0.95)[0] > 0
    assert alarms <= 25  # P(more than 25 of 200 | 5 %) = 9e-6


def test_the_one_run_p_value_is_that_of_its_theorem() -> None:
    """Against its definition, summed term by term; with δ = 0 it is a binomial tail."""
    from scipy.stats import binom

    for m, r, v, eps, delta in [
        (100, 40, 35, 1.0, 1e-3),
        (1000, 100, 90, 0.5, 1e-5),
        (10, 10, 10, 2.0, 0.01),
    ]:
        q = math.exp(eps) / (1 + math.exp(eps))
        pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
        beta = sum(pmf[v:])
        alpha = max(sum(pmf[v - i : v]) / i for i in range(1, v + 1))
        assert p_value(m, r, v, eps, delta) == pytest.approx(min(1.0, beta + 2 * m * delta * alpha))
        assert p_value(m, r, v, eps, 0.0) == pytest.approx(binom.sf(v - 1, r, q))
    found = from_one_run(1000, 200, 190, 1e-5, 0.95)
    assert p_value(1000, 200, 190, found, 1e-5) == pytest.approx(0.05, rel=1e-6)
    assert from_one_run(1000, 200, 100, 1e-5, 0.95) == 0.0


def test_perfect_guesses_show_much_and_no_guesses_nothing() -> None:
    rng = np.random.default_rng(2)
    inside = rng.random(1000) < 0.5
    assert from_canaries(inside, inside.astype(float), 1e-5, 0.95)[0] > 4
    assert from_canaries(inside, rng.normal(size=1000), 1e-5, 0.95)[0] < 0.7
    assert from_scores(inside, {"": np.full(1000, np.nan)}, 1e-5, 0.95)[0] == 0.0
    assert not against_curve(inside, {"": np.full(1000, np.nan)}, {0.1: 0.0}, 0.95).refuted
    assert from_scores(inside, {"": inside.astype(float)}, 1e-5, 0.95)[0] > 4
    assert from_scores(inside, {"": -inside.astype(float)}, 1e-5, 0.95)[0] > 4


@pytest.mark.slow
def test_the_curve_is_refuted_no_more_often_than_it_says() -> None:
    """A Gaussian on its very curve, with eight δ, three attacks and all thresholds to choose from: 500
    audits, and no more false alarms than 5 % allow (P(more than 50 of 500 | 5 %) = 2e-6). With noise of four
    fifths it is refuted nearly always.
    """
    from tacit.privacy import PoissonGaussian, epsilon
    from tacit.privacy.games import DELTAS

    rng = np.random.default_rng(3)
    curve = {delta: epsilon({PoissonGaussian(1.0, 1.0): 1}, delta).value for delta in DELTAS}
    refuted = {1.0: 0, 0.8: 0}
    for noise, count in ((1.0, 500), (0.8, 40)):
        for _ in range(count):
            inside = rng.random(6000) < 0.5
            noises = rng.normal(scale=noise, size=(3, 6000))
            scores = {"seen": inside + noises[0], "other": noises[1], "twice": inside + 3 * noises[2]}
            refuted[noise] += against_curve(inside, scores, curve, 0.95).refuted
    assert refuted[1.0] <= 50 and refuted[0.8] >= 36


def test_masked_trials_are_left_out_and_odd_ones_are_not() -> None:
    """Where a tenth of the trials is told apart, and which is known: nothing is lost by leaving out the
    rest.
    """
    rng = np.random.default_rng(4)
    inside, known = rng.random(4000) < 0.5, rng.random(4000) < 0.1
    scores = np.where(known, inside + 0.5 * rng.normal(size=4000), rng.normal(size=4000))
    diluted = from_scores(inside, {"": scores}, 0.01, 0.95)[0]
    alone = from_scores(inside, {"": np.ma.masked_array(scores, ~known)}, 0.01, 0.95)[0]
    assert alone > diluted + 1
    odd = np.where(inside, np.nan, 0.0)  # a mechanism that breaks when somebody is there
    assert from_scores(inside, {"": odd}, 0.01, 0.95)[0] > 2


# --- sound mechanisms ------------------------------------------------------------------------------------

SOUND: list[Callable[[], Mechanism]] = [
    lambda: client(rate=0.3),
    lambda: ExampleLevel(1.0, DELTA, Clip(0.5), Poisson(1.0)),
    lambda: replace(client(rate=0.5), clip=Clip(0.5, "uniform")),
    lambda: ExampleLevel(2.0, DELTA, Clip(0.5, "dim"), Poisson(1.0)),
    lambda: ClientLevel(2.0, DELTA, Clip(0.5), FixedSize(64)),
    lambda: BltNoise(2.0, DELTA, Clip(0.5), FixedSize(64), rounds=4),
    lambda: BandedNoise(1.0, DELTA, Clip(0.5), Poisson(0.1), rounds=4, bands=2),
    lambda: client(noise_at="clients", noise=8.0, rate=0.05),
]


@pytest.mark.slow
def test_sound_mechanisms_are_not_refuted_200_times() -> None:
    """200 audits with fresh entropy each: the false alarms are counted. At 95 % confidence there are at most
    10 on average; P(more than 28 of 200 | 5 %) = 3e-7.
    """
    alarms = [
        audit
        for make, _ in zip(itertools.cycle(SOUND), range(200), strict=False)
        if (audit := audit_mechanism(make(), trials=256, population=256)).refuted
    ]
    assert len(alarms) <= 28, alarms


@pytest.mark.slow
def test_the_audit_sees_most_of_what_is_there() -> None:
    """Not vacuous: even so sure, two fifths of a sound mechanism's ε are shown (100 simulated audits: 0.66 ±
    0.05 of it, five deviations more).
    """
    mechanism = ExampleLevel(1.0, 0.1, Clip(0.5), Poisson(1.0))
    found = audit_mechanism(mechanism, trials=32_768, confidence=SURE, rate=1.0)
    assert 0.4 * found.claimed < found.lower <= found.claimed
    assert found.curve is not None and found.curve.lower <= found.curve.claimed
    assert "not refuted" in found.text() and found.to_dict()["refuted"] is False


def test_a_simulation_is_audited_as_what_it_simulates_and_no_noise_is_refused() -> None:
    assert not audit_mechanism(client(entropy="seed", rate=0.3), 512, SURE).refuted
    with pytest.raises(UserError, match="nothing to audit"):
        audit_mechanism(client(noise=0.0))


# --- sabotage --------------------------------------------------------------------------------------------


class HalfTheNoise(ClientLevel):
    def std(self, grid: Any) -> float:
        return super().std(grid) / 2


class HalfTheNoiseOnRecords(ExampleLevel):
    def _units(self, grid: Any, dimension: int, batch: float) -> float:
        return super()._units(grid, dimension, batch) / 2


class OneLayerUnclipped(ClientLevel):
    def bounding(self, *args: Any) -> Bounding:
        made = super().bounding(*args)
        return Escaping(made.bound, made.grid, made.share)


@dataclass(frozen=True)
class Escaping(Bounding):
    """The second half of the update is added as it came."""

    def add_(self, upload: Vectors, into: Vectors, bits: Bits | None = None) -> float:
        assert self.grid is not None
        half = upload["delta"].numel() // 2
        first = {
            **upload,
            "delta": torch.cat([upload["delta"][:half], torch.zeros(upload["delta"].numel() - half)]),
        }
        norm = super().add_(first, into, bits)
        into["delta"][half:] += (upload["delta"][half:].double() / self.grid.unit).nan_to_num(0, 0, 0).long()
        return norm


class DrawnDivisor(ClientLevel):
    def release(
        self, total: Vectors, arrivals: Arrivals, state: Any, round: int, attempt: int, workload: Workload
    ) -> Any:
        mean, state = super().release(total, arrivals, state, round, attempt, workload)
        factor = self.expected(workload.population) / max(1, arrivals.drawn)
        return {name: vector * factor for name, vector in mean.items()}, state


class NamedCohorts(ClientLevel):
    def sample(self, round: int, attempt: int, workload: Workload) -> Any:
        return self.sampling.draw(Bits.named(workload.seed, round, attempt), workload.population)


class SameNoise(ClientLevel):
    def bits(self, *name: int) -> Bits:
        return Bits.named(1) if name[-1] == 2 else super().bits(*name)


class SameNoiseForAttempts(ClientLevel):
    def bits(self, *name: int) -> Bits:
        return Bits.named(*name[:2]) if name[-1] == 2 else super().bits(*name)


class NoiseByTime(ClientLevel):
    def bits(self, *name: int) -> Bits:
        return Bits.named(int(time.time() * 1e6)) if name[-1] == 2 else super().bits(*name)


class NoiseBySeedOfTorch(ClientLevel):
    def bits(self, *name: int) -> Bits:
        return Bits.named(int(torch.randint(2**60, ()))) if name[-1] == 2 else super().bits(*name)


class StateWithoutNoise(ClientLevel):
    def release(
        self, total: Vectors, arrivals: Arrivals, state: Any, round: int, attempt: int, workload: Workload
    ) -> Any:
        grid = self.grid(state, sum(v.numel() for v in total.values()))
        exact = {
            name: grid.decoded(v.clone(), 1 / self.expected(workload.population)) for name, v in total.items()
        }
        mean, state = super().release(total, arrivals, state, round, attempt, workload)
        return mean | {name: v for name, v in exact.items() if name == STATE}, state


class RecordNoiseTwice(ExampleLevel):
    def privatize_(self, gradients: torch.Tensor, bits: Bits, batch: float) -> torch.Tensor:
        return super().privatize_(gradients, Bits.named(3), batch)


class NamedBatches(ExampleLevel):
    def bits(self, *name: int) -> Bits:
        return super().bits(*name) if name[-1] else Bits.named(*name)


SABOTAGE: list[tuple[Mechanism, int, str, float]] = [
    (client(HalfTheNoise, noise=1.0), 6144, "", 1.0),
    (HalfTheNoiseOnRecords(2.0, DELTA, Clip(0.5), Poisson(1.0)), 16_384, "", 1.0),
    (client(OneLayerUnclipped), 1024, "", 1.0),
    (client(DrawnDivisor, rate=0.8), 1024, "how strong", 1.0),
    (client(NamedCohorts, noise=0.5, rate=0.1), 10_000, "second draw", 1.0),
    (NamedBatches(0.5, DELTA, Clip(0.5), Poisson(1.0)), 10_000, "second draw", 0.1),
    (client(SameNoise), 1024, "minus", 1.0),
    (client(SameNoiseForAttempts), 1024, "minus", 1.0),
    (client(NoiseByTime), 1024, "minus a repetition", 1.0),
    (client(NoiseBySeedOfTorch), 1024, "minus a repetition", 1.0),
    (client(StateWithoutNoise), 1024, "second upload", 1.0),
    (RecordNoiseTwice(2.0, DELTA, Clip(0.5), Poisson(1.0)), 1024, "minus", 1.0),
]


@pytest.mark.parametrize(
    ("mechanism", "trials", "attack", "rate"),
    [
        pytest.param(*row, marks=pytest.mark.slow if row[1] > 1024 else (), id=type(row[0]).__name__)
        for row in SABOTAGE
    ],
)
def test_sabotage_is_caught(mechanism: Mechanism, trials: int, attack: str, rate: float) -> None:
    """At the first try, at the noise that a run would have. What is shown exceeds the claim by five or more
    of the deviations that 150 simulated audits have, so that one in a million goes unseen at most.
    """
    found = audit_mechanism(mechanism, trials=trials, population=256, rate=rate)
    assert found.refuted and found.curve is not None, found.text()
    assert attack in found.curve.attack
    assert "REFUTED" in found.text() and found.to_dict()["curve"]["lower"] == found.curve.lower
