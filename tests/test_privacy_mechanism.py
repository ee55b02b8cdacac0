"""The one privacy object: refusals, agreement of draw and charge, adaptive clipping, the statement."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn

from tacit.errors import UserError
from tacit.privacy import (
    Adaptive,
    Charge,
    Clip,
    FixedSize,
    FixedSizeGaussian,
    OsNoise,
    Poisson,
    PoissonGaussian,
    Privacy,
    SeededNoise,
    batch_sampling,
    epsilon,
    make_statement,
    refuse_batch_norm,
    refuse_weights,
)
from tacit.privacy.accounting import rdp_epsilon


def make(**changes: Any) -> Privacy:
    settings: dict[str, Any] = {
        "unit": "client", "noise": 1.0, "delta": 1e-5, "clip": Clip(0.5), "sampling": Poisson(0.1)
    }  # fmt: skip
    return Privacy(**settings | changes)


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"noise": 0.0, "epsilon": 1.0}, "set the noise"),
        ({"noise": -1.0}, "multiplier ≥ 0"),
        ({"noise": math.nan}, "multiplier ≥ 0"),
        ({"epsilon": 0.0}, "budget > 0"),
        ({"delta": 0.0}, "0 < δ < 1"),
        ({"clip": Clip(math.inf)}, "set a clip"),
        ({"unit": "example", "noise_at": "clients"}, "leave it out"),
        ({"unit": "example", "adaptive": Adaptive()}, "unit: client"),
        ({"unit": "example", "clip": Clip(1.0, "uniform", "normalize")}, "take clip"),
        ({"adaptive": Adaptive(count_noise=0.4)}, "raise count_noise above 0.5"),
    ],
)
def test_what_is_not_sound_cannot_be_built(changes: dict[str, Any], fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        make(**changes)


def test_bad_parts_are_refused() -> None:
    for bad in (lambda: Poisson(0.0), lambda: Poisson(1.1), lambda: FixedSize(0), lambda: Clip(0.0)):
        with pytest.raises(UserError, match="choose"):
            bad()
    with pytest.raises(UserError, match="lower the cohort"):
        FixedSize(11).draw(np.random.default_rng(0), 10)
    with pytest.raises(UserError, match="quantile"):
        Adaptive(quantile=1.0)


def test_batch_norm_is_refused_with_its_replacement() -> None:
    model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24))
    for unit in ("client", "example"):
        with pytest.raises(UserError, match=r"1 \(BatchNorm2d\).*GroupNorm\(8, 24\)"):
            refuse_batch_norm(model, unit)  # type: ignore[arg-type]
    refuse_batch_norm(nn.Sequential(nn.Conv2d(3, 24, 3), nn.GroupNorm(8, 24)), "example")


def test_weights_by_examples_are_refused_at_client_level() -> None:
    with pytest.raises(UserError, match="weighted: false"):
        refuse_weights(True, "client")
    refuse_weights(True, "example")


def test_delta_as_large_as_one_client_is_warned_about() -> None:
    assert make(delta=1e-3).warnings(population=1000)
    assert not make(delta=0.9e-3).warnings(population=1000)
    assert make(unit="example", delta=1e-2).warnings(population=10**6, records=100)


def test_draw_and_charge_cannot_disagree() -> None:
    poisson, fixed = make(sampling=Poisson(0.2)), make(sampling=FixedSize(20))
    assert poisson.charge(4, 100).parts[0].event == PoissonGaussian(poisson.sampling.rate, 1.0)  # type: ignore[union-attr]
    assert fixed.charge(4, 100).parts[0].event == FixedSizeGaussian(20, 100, 1.0)
    assert (poisson.relation, poisson.sensitivity()) == ("add-remove", 0.5)
    assert (fixed.relation, fixed.sensitivity()) == ("replace-one", 1.0)
    # At example level batches decide, not how cohorts are drawn.
    assert make(unit="example", sampling=FixedSize(20)).relation == "add-remove"
    assert make(unit="example").batch_event(1000, 16).rate == batch_sampling(1000, 16).rate == 0.016
    assert batch_sampling(10, 16).rate == 1.0


def test_example_charges_group_clients_and_count_every_query() -> None:
    privacy = make(unit="example")
    charge = privacy.charge_examples(2, [4, 9, 7], [100, 200, 100], 5, batch=10, queries=2)
    cheap, dear = PoissonGaussian(0.05, 1 / math.sqrt(2)), PoissonGaussian(0.1, 1 / math.sqrt(2))
    assert [(p.event, p.steps, p.clients) for p in charge.parts] == [(cheap, 5, (9,)), (dear, 5, (4, 7))]
    assert privacy.charge_examples(0, [1, 2], [100, 100], [3, 4], batch=10).parts[1].steps == 4
    header = privacy.header_examples(smallest=100, steps=5, batch=10, queries=2)
    assert header.costliest.event == dear


def test_two_queries_on_a_batch_are_one_of_root_two_times_the_sensitivity() -> None:
    """By integration in two dimensions: both answers together, against the charged one-dimensional event."""
    rate, noise, delta = 0.2, 1.5, 1e-3
    axis = np.linspace(-12, 14, 1201)
    x, y = np.meshgrid(axis, axis)
    q = stats.norm.pdf(x, 0, noise) * stats.norm.pdf(y, 0, noise)
    p = (1 - rate) * q + rate * stats.norm.pdf(x, 1, noise) * stats.norm.pdf(y, 1, noise)
    cell = (axis[1] - axis[0]) ** 2

    def excess(eps: float) -> float:
        return float(np.clip(p - math.exp(eps) * q, 0, None).sum() * cell) - delta

    exact = optimize.brentq(excess, 0, 10, xtol=1e-6)
    event = make(unit="example", noise=noise).batch_event(100, 20, queries=2)
    assert epsilon({event: 1}, delta).pld == pytest.approx(exact, rel=3e-3)


def test_no_noise_and_no_clip_is_the_plain_mean() -> None:
    privacy = make(noise=0.0, clip=Clip(math.inf))
    upload = {"delta": torch.tensor([3.0, -4.0])}
    assert privacy.bind({"delta": 2}).apply(upload) == 5.0
    mean = privacy.release(upload, OsNoise(), population=20)
    assert mean["delta"].tolist() == [1.5, -2.0]


def test_seeded_runs_repeat_and_secret_ones_do_not() -> None:
    seeded, secret = make(entropy="seed"), make()
    assert isinstance(seeded.source(1, 2), SeededNoise) and isinstance(secret.source(1, 2), OsNoise)
    assert seeded.coins(1, 2).integers(2**60) == seeded.coins(1, 2).integers(2**60)
    assert secret.coins(1, 2).integers(2**60) != secret.coins(1, 2).integers(2**60)


# --- adaptive clipping -----------------------------------------------------------------------------------


def test_update_and_bits_together_cost_the_announced_noise() -> None:
    """RDP of two Gaussians on one cohort adds: α/2·(1/z_Δ² + 1/(2σ_b)²) must be that of z alone."""
    rule = Adaptive(count_noise=3.0)
    update, bits = rule.update_noise(1.3), 2 * rule.count_noise
    assert update > 1.3
    spend = {PoissonGaussian(1.0, update): 1, PoissonGaussian(1.0, bits): 1}
    assert rdp_epsilon(spend, 1e-5) == pytest.approx(
        rdp_epsilon({PoissonGaussian(1.0, 1.3): 1}, 1e-5), rel=1e-9
    )
    privacy = make(noise=1.3, adaptive=rule)
    assert privacy.std(2.0) == pytest.approx(update * 2.0)
    assert privacy.charge(0, 10).parts[0].event.noise == 1.3


def test_one_client_moves_the_shifted_count_by_half() -> None:
    class Silent:
        secret = True

        def add_(self, vector: torch.Tensor, std: float) -> None: ...

    rule = Adaptive(quantile=0.5)
    base = rule.share(within=6, arrived=10, expected=10.0, noise=Silent())
    for bit in (0, 1):
        moved = rule.share(within=6 + bit, arrived=11, expected=10.0, noise=Silent())
        assert abs(moved - base) * 10.0 == pytest.approx(0.5)
    assert rule.share(0, 0, 10.0, Silent()) == 0.5  # an empty cohort says nothing


def test_the_bound_finds_the_quantile() -> None:
    """Norms spread over [0, 10]: the bound settles at their 0.8 quantile from far away on either side."""
    rng = np.random.default_rng(0)
    privacy = make(
        noise=1.0, adaptive=Adaptive(quantile=0.8, rate=0.2, count_noise=5.0), sampling=Poisson(0.1)
    )
    for start in (0.1, 100.0):
        bound, seen = start, []
        for number in range(120):
            norms = rng.uniform(0, 10, rng.binomial(1000, 0.1))
            within = int((norms <= bound).sum())
            bound = privacy.next_bound(bound, within, len(norms), 1000, SeededNoise(number))
            seen.append(bound)
        assert np.mean(seen[60:]) == pytest.approx(8.0, rel=0.1)
    assert make().next_bound(0.5, 1, 2, 10, OsNoise()) == 0.5


# --- the statement ---------------------------------------------------------------------------------------


def test_statement_for_clients() -> None:
    privacy = make(epsilon=8.0)
    entries = [Charge(0, privacy.charge(0, 1000).parts, last=9), privacy.charge(9, 1000)]
    statement = make_statement(privacy, entries, population=1000)
    exact = epsilon({PoissonGaussian(0.1, 1.0): 11}, 1e-5)
    assert (statement.epsilon, statement.epsilon_rdp) == (exact.value, exact.rdp)
    assert (statement.rounds, statement.repeated) == (11, 1)
    text = statement.text()
    for words in ("whole clients", "one client, there or not there", "δ = 1e-05", "PLD", "RDP", "11 rounds",
                  "second time after a crash", "probability 0.1", "the server: no guarantee", "Not covered",
                  "hyper-parameters", "floating-point"):  # fmt: skip
        assert words in text
    assert "Simulation" not in text
    plain = json.loads(json.dumps(statement.to_dict()))
    assert plain["unit"] == "client" and plain["observers"][1]["epsilon"] is None


def test_printed_epsilon_is_rounded_up() -> None:
    statement = make_statement(make(), [make().charge(0, 10)], population=10)
    printed = float(statement.text().split("ε = ")[1].split(",")[0])
    assert statement.epsilon <= printed <= statement.epsilon * 1.01


def test_statement_for_examples_reports_both_observers() -> None:
    privacy = make(unit="example", sampling=FixedSize(3))
    entries = [privacy.charge_examples(r, [r, 7], [100, 50], 4, batch=10) for r in range(3)]
    statement = make_statement(privacy, entries, population=10)
    worst = epsilon({PoissonGaussian(0.2, 1.0): 12}, 1e-5).value
    assert [o.epsilon for o in statement.observers] == [worst, worst] == [statement.epsilon] * 2
    assert "each upload" in statement.observers[0].who and "released models" in statement.observers[1].who
    assert "single records" in statement.text() and "12 steps at rate 0.2" in statement.text()


def test_simulations_and_noiseless_runs_claim_nothing() -> None:
    seeded = make(entropy="seed")
    assert make_statement(seeded, [seeded.charge(0, 10)], 10).text().startswith("Simulation")
    bare = make(noise=0.0)
    statement = make_statement(bare, [bare.charge(0, 10)], 10)
    assert "no differential privacy" in statement.text()
    assert json.loads(json.dumps(statement.to_dict(), allow_nan=False))["epsilon"] is None


def test_noise_from_clients_is_not_sold_as_protection_from_the_server() -> None:
    privacy = make(noise_at="clients")
    server = make_statement(privacy, [privacy.charge(0, 10)], 10).observers[1]
    assert server.epsilon is None and "secure aggregation" in server.why and "√cohort" in server.why
