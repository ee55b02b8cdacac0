"""Mechanisms: refusals, consistency of sampling, noise and charge, adaptive clipping, the statement."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import optimize, stats
from torch import nn

from tacit.errors import UserError
from tacit.privacy import (
    MECHANISMS,
    AdaptiveClip,
    Arrivals,
    BandedNoise,
    Bits,
    BltNoise,
    ClientLevel,
    Clip,
    ExampleLevel,
    FixedSize,
    FixedSizeGaussian,
    LayeredNoise,
    Poisson,
    PoissonGaussian,
    SecureSum,
    Workload,
    epsilon,
    make_statement,
    refuse_weights,
)
from tacit.privacy.accountants import rdp_epsilon
from tacit.privacy.choosing import chosen
from tacit.privacy.gaussian import SMALLEST_DELTA
from tacit.privacy.mechanisms import Mechanism, plain_mechanism, read_mechanism
from tacit.privacy.mechanisms.example import NUMERICAL
from tacit.privacy.settings import PrivacySettings
from tacit.privacy.steps import batch_sampling, step_event
from tacit.vector import Layout

ALARM = 1e-6
SETTINGS: dict[str, Any] = {"noise": 1.0, "delta": 1e-5, "clip": Clip(0.5), "sampling": Poisson(0.1)}
LAYOUT = Layout.of(nn.Linear(3, 2))
CROWD = Workload(population=1000)


def client(**changes: Any) -> ClientLevel:
    return ClientLevel(**SETTINGS | changes)


def example(**changes: Any) -> ExampleLevel:
    return ExampleLevel(**SETTINGS | changes)


def adaptive(**changes: Any) -> AdaptiveClip:
    return AdaptiveClip(**SETTINGS | changes)


def records(*sizes: int, batch: int = 10, steps: int = 5, queries: int = 1) -> Workload:
    return Workload(
        population=len(sizes), sizes=np.array(sizes), batch=batch, steps=lambda n: steps, queries=queries
    )


def within(values: np.ndarray, std: float) -> bool:
    """Whether zero-mean values have this standard deviation, by χ²."""
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], len(values))
    return bool(low < (values.astype(np.float64) ** 2).sum() / std**2 < high)


# --- what is not sound cannot be built --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "changes", "fix"),
    [
        (client, {"noise": 0.0, "epsilon": 1.0}, "set the noise"),
        (client, {"noise": -1.0}, "multiplier ≥ 0"),
        (client, {"noise": math.nan}, "multiplier ≥ 0"),
        (client, {"epsilon": 0.0}, "budget > 0"),
        (client, {"delta": 0.0}, "0 < δ < 1"),
        (client, {"delta": SMALLEST_DELTA / 2}, "cipher"),
        (client, {"clip": Clip(math.inf)}, "set a clip"),
        (example, {"clip": Clip(1.0, "uniform", "normalize")}, "take clip"),
        (adaptive, {"count_noise": 0.4}, r"privacy.adaptive.count_noise 0.4 .* raise it above 0.5"),
        (adaptive, {"quantile": 1.0}, "quantile"),
        (adaptive, {"clip": Clip(math.inf), "noise": 0.0}, "finite clip"),
    ],
)
def test_what_is_not_sound_cannot_be_built(make: Any, changes: dict[str, Any], fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        make(**changes)


def test_bad_parts_are_refused() -> None:
    for bad in (lambda: Poisson(0.0), lambda: Poisson(1.1), lambda: FixedSize(0), lambda: Clip(0.0)):
        with pytest.raises(UserError, match="choose"):
            bad()
    with pytest.raises(UserError, match="lower the cohort"):
        FixedSize(11).draw(Bits.secret(), 10)
    with pytest.raises(UserError, match="without records"):
        batch_sampling(0, 10)


def test_so_much_noise_that_it_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(UserError, match="lower it below"):
        client(noise=1e9).bounding({}, {"delta": 10**6}, LAYOUT, 3)
    with pytest.raises(UserError, match="too little to be added"):
        client(noise=1e-4, noise_at="clients").bounding({}, {"delta": 8}, LAYOUT, 1000)


def test_what_a_client_counts_for_itself() -> None:
    """It knows that it takes part, so its own cost is never that of a sampled one."""
    always = PoissonGaussian(1.0, 1.0)
    for mechanism in (client(), client(deployed=True), client(sampling=FixedSize(100)), adaptive()):
        assert mechanism.cost_to(3, CROWD).event == always
    secure = SecureSum(**SETTINGS, threshold=0.75, colluding=0.12)
    assert secure.cost_to(3, CROWD).event == PoissonGaussian(1.0, math.sqrt(1 - 0.12 / 0.75))
    crowd = records(40, 100)
    for number in (0, 1):
        (charged,) = example().charge(0, np.array([number]), crowd).parts
        own = example().cost_to(number, crowd)
        assert (own.event, own.steps) == (charged.event, charged.steps) and charged.clients == (number,)

    class Otherwise(ClientLevel):
        kind = "otherwise"

        def costliest(self, workload: Workload) -> Any:
            raise NotImplementedError

    with pytest.raises(UserError, match="cannot count the cost of otherwise noise"):
        Otherwise(**SETTINGS).cost_to(3, CROWD)


def test_weights_by_examples_are_refused_at_client_level() -> None:
    with pytest.raises(UserError, match="weights: uniform"):
        refuse_weights(True, "client")
    refuse_weights(True, "example")


def test_delta_as_large_as_one_client_is_warned_about() -> None:
    assert client(delta=1e-3).warnings(CROWD)
    assert not client(delta=0.9e-3).warnings(CROWD)
    assert example(delta=1e-2).warnings(records(100, 5000))


def test_every_mechanism_survives_being_written_down() -> None:
    made: list[Mechanism] = [
        client(noise_at="clients", epsilon=3.0),
        example(sampling=FixedSize(4)),
        adaptive(quantile=0.7),
    ]
    made += [
        BltNoise(1.0, 1e-5, Clip(0.5), FixedSize(4), rounds=9, buffers=3),
        BandedNoise(1.0, 1e-5, Clip(0.5), Poisson(0.1), rounds=9, bands=4),
        SecureSum(1.0, 1e-5, Clip(0.5), Poisson(0.1), threshold=0.8, colluding=0.2),
        LayeredNoise(
            1.0, 1e-5, Clip(0.5), Poisson(0.1), factors={"0": 2.0}, groups=((1.0, (("delta", 0, 8, 2.0),)),)
        ),
    ]
    assert {type(mechanism) for mechanism in made} == set(MECHANISMS.values())
    for mechanism in made:
        assert read_mechanism(json.loads(json.dumps(plain_mechanism(mechanism)))) == mechanism


# --- draw, noise and charge agree -------------------------------------------------------------------------


def test_draw_and_charge_cannot_disagree() -> None:
    poisson, fixed = client(sampling=Poisson(0.2)), client(sampling=FixedSize(20))
    crowd, cohort = Workload(population=100), np.arange(3)
    assert poisson.charge(4, cohort, crowd).parts[0].event == PoissonGaussian(0.2, 1.0)
    assert fixed.charge(4, cohort, crowd).parts[0].event == FixedSizeGaussian(20, 100, 1.0)
    assert (poisson.relation, fixed.relation) == ("add-remove", "replace-one")
    # At example level batches decide, not how cohorts are drawn.
    assert example(sampling=FixedSize(20)).relation == "add-remove"
    assert step_event(1000, 16, 1, 1.0).rate == batch_sampling(1000, 16).rate == 0.016
    assert batch_sampling(10, 16).rate == 1.0


def test_example_charges_group_clients_and_count_every_query() -> None:
    workload = records(0, 0, 0, 0, 100, 0, 0, 100, 0, 200, queries=2)
    charge = example().charge(2, np.array([4, 9, 7]), workload)
    cheap, dear = PoissonGaussian(0.05, 1 / math.sqrt(2)), PoissonGaussian(0.1, 1 / math.sqrt(2))
    assert [(p.event, p.steps, p.clients) for p in charge.parts] == [(cheap, 5, (9,)), (dear, 5, (4, 7))]
    header = example().header(records(100, 200, 150, queries=2), "data")
    assert (header.costliest.event, header.costliest.steps, header.data) == (dear, 5, "data")


def test_as_many_batches_are_drawn_as_are_charged() -> None:
    workload = records(30, batch=6, steps=4)
    part = example().charge(0, np.array([0]), workload).parts[0]
    drawn = list(example().batches(30, workload, Bits.named(1)))
    assert len(drawn) == part.steps == 4
    assert example().expected_batch(30, workload) == 6 and example().expected_batch(3, workload) == 3


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
    assert epsilon({step_event(100, 20, 2, noise): 1}, delta).pld == pytest.approx(exact, rel=3e-3)


@pytest.mark.slow
def test_calibration_asks_the_mechanism() -> None:
    for mechanism, workload in (
        (client(epsilon=2.0), CROWD),
        (client(epsilon=4.0, sampling=FixedSize(50)), CROWD),
        (example(epsilon=2.0, sampling=FixedSize(2)), records(100, 50, 400)),
    ):
        found = mechanism.calibrated(workload, rounds=7)
        worst = max(epsilon(spend, 1e-5).value for spend in found.planned(workload, 7, found.noise))
        assert 0.97 * mechanism.epsilon < worst <= mechanism.epsilon


def release(mechanism: ClientLevel, sizes: dict[str, int], uploads: list[Any], population: int = 100) -> Any:
    """A round through the mechanism's own steps: bound, sum, release."""
    bounding = mechanism.bounding(mechanism.init(), sizes, LAYOUT, len(uploads))
    dtype = torch.int64 if mechanism.sums_integers else torch.float32
    total = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}
    arrived = sum(math.isfinite(bounding.add_(upload, total, Bits.secret())) for upload in uploads)
    arrivals = Arrivals(drawn=len(uploads), arrived=arrived)
    return mechanism.release(total, arrivals, mechanism.init(), 0, 0, Workload(population))[0]


def test_no_noise_and_no_clip_is_the_plain_mean() -> None:
    mean = release(client(noise=0.0, clip=Clip(math.inf)), {"d": 2}, [{"d": torch.tensor([3.0, -4.0])}], 20)
    assert mean["d"].tolist() == [1.5, -2.0]


def test_a_release_adds_sigma_c_and_divides_by_the_expected_cohort() -> None:
    """Also for an empty cohort; and never by the number of clients that were drawn."""
    zeros = release(client(noise=2.0), {"delta": 50_000, "c": 50_000}, [], 300)
    assert within(zeros["delta"].numpy(), 2.0 * 0.5 / 30) and within(zeros["c"].numpy(), 2.0 * 0.5 / 30)
    upload = {"delta": torch.full((50_000,), 0.4 / math.sqrt(50_000))}
    mean = release(client(noise=2.0), {"delta": 50_000}, [upload] * 5, 300)
    assert within(mean["delta"].numpy() - 5 * 0.4 / math.sqrt(50_000) / 30, 2.0 * 0.5 / 30)


def test_noise_follows_the_clipping_norm_in_force() -> None:
    mechanism = adaptive(noise=2.0, count_noise=1e6)
    total = {"delta": torch.zeros(50_000, dtype=torch.int64)}
    mean, _ = mechanism.release(total, Arrivals(0, 0), {"bound": 0.01}, 0, 0, Workload(10))
    assert within(mean["delta"].numpy(), 2.0 * 0.01 / 1.0)


@pytest.mark.parametrize(("drawn", "arrived"), [(8, 8), (8, 5), (8, 0), (1, 1), (0, 0), (30, 29)])
def test_shares_and_top_up_add_up_to_the_announced_noise(drawn: int, arrived: int) -> None:
    """Whatever cohort was drawn and whoever dropped out, the release carries σC: no less, no more."""
    good, bad = {"delta": torch.zeros(40_000)}, {"delta": torch.full((40_000,), math.nan)}
    uploads = [good] * arrived + [bad] * (drawn - arrived)
    mean = release(client(noise=2.0, noise_at="clients"), {"delta": 40_000}, uploads, 10)
    assert within(mean["delta"].numpy(), 2.0 * 0.5 / 1.0)


def test_the_private_gradient_divides_by_the_expected_batch() -> None:
    """g̃ = (1/B)[Σ clip(g_j) + N(0, σ²C²)]: one C in the noise, and B whatever batch was drawn."""
    mechanism = example(noise=2.0)
    gradient = mechanism.privatize_(torch.full((50_000,), 8.0), Bits.secret(), batch=16)
    assert within(gradient.numpy() - 0.5, 2.0 * 0.5 / 16 * (1 + NUMERICAL))
    assert mechanism.std(50_000, 16) == pytest.approx(2.0 * 0.5 * (1 + NUMERICAL), rel=2e-3)
    assert example(noise=0.0).privatize_(torch.full((3,), 8.0), Bits.secret(), 16).tolist() == [0.5] * 3


@pytest.mark.parametrize("dimension", [1, 72, 10_000, 3_000_000])
def test_rounding_a_sum_is_within_the_sensitivity(dimension: int) -> None:
    """In whole numbers: two sums that differ by a vector of norm C(1 + s) differ by no more than the noise
    covers.
    """
    mechanism = example(noise=1.0)
    grid = mechanism._grid(dimension)
    units = mechanism._units(grid, dimension, 16.0)
    rng = np.random.default_rng(0)
    for _ in range(3):
        others = rng.normal(size=dimension) * 3
        one = rng.normal(size=dimension)
        one *= 0.5 * (1 + NUMERICAL) / np.linalg.norm(one)
        moved = np.rint((others + one) / grid.unit) - np.rint(others / grid.unit)
        assert np.linalg.norm(moved) <= units


def test_seeded_runs_repeat_and_secret_ones_do_not() -> None:
    seeded, secret = client(entropy="seed"), client()
    assert seeded.bits(1, 2).integer() == seeded.bits(1, 2).integer()
    assert secret.bits(1, 2).integer() != secret.bits(1, 2).integer()
    assert (seeded.simulated, secret.simulated) == (True, False)
    assert secret.sample(0, 0, Workload(1000)).tolist() != secret.sample(0, 0, Workload(1000)).tolist()
    # A round played again draws another cohort and other noise, also in a simulation.
    assert seeded.sample(0, 0, Workload(1000)).tolist() != seeded.sample(0, 1, Workload(1000)).tolist()


# --- adaptive clipping -----------------------------------------------------------------------------------


def test_update_and_bits_together_cost_the_announced_noise() -> None:
    """RDP of two Gaussians on one cohort adds: α/2·(1/z_Δ² + 1/(2σ_b)²) must be that of z alone."""
    mechanism = adaptive(noise=1.3, count_noise=3.0)
    update, bits = mechanism.sum_noise, 2 * mechanism.count_noise
    assert update > 1.3
    spend = {PoissonGaussian(1.0, update): 1, PoissonGaussian(1.0, bits): 1}
    assert rdp_epsilon(spend, 1e-5) == pytest.approx(
        rdp_epsilon({PoissonGaussian(1.0, 1.3): 1}, 1e-5), rel=1e-9
    )
    grid = mechanism.grid(mechanism.init(), 100)
    assert mechanism.std(grid) == update * grid.radius
    assert mechanism.charge(0, np.arange(2), CROWD).parts[0].event == PoissonGaussian(0.1, 1.3)


def test_one_client_moves_the_count_by_one() -> None:
    silent = adaptive(noise=0.0)
    base = silent.share(Arrivals(10, 10, within=6), 10.0, Bits.secret())
    for bit in (0, 1):
        moved = silent.share(Arrivals(11, 11, within=6 + bit), 10.0, Bits.secret())
        assert abs(moved - base) * 10.0 == pytest.approx(0.5)  # ±1 in whole numbers, halved
    assert silent.share(Arrivals(0, 0), 10.0, Bits.secret()) == 0.5  # an empty cohort says nothing
    noisy = [
        adaptive(count_noise=50.0).share(Arrivals(0, 0), 1.0, Bits.named(seed)) - 0.5 for seed in range(4000)
    ]
    assert within(np.array(noisy), 50.0)


def test_the_norm_finds_the_quantile() -> None:
    """Norms spread over [0, 10]: the norm settles at their 0.8 quantile from far away on either side."""
    rng = np.random.default_rng(0)
    for start in (0.1, 100.0):
        mechanism = adaptive(clip=Clip(start), quantile=0.8, rate=0.2, count_noise=5.0, entropy="seed")
        state, seen = mechanism.init(), []
        for number in range(120):
            norms = rng.uniform(0, 10, rng.binomial(1000, 0.1))
            arrivals = Arrivals(len(norms), len(norms), within=int((norms <= state["bound"]).sum()))
            total = {"delta": torch.zeros(1, dtype=torch.int64)}
            _, state = mechanism.release(total, arrivals, state, number, 0, CROWD)
            seen.append(state["bound"])
        assert np.mean(seen[60:]) == pytest.approx(8.0, rel=0.1)


# --- the statement ---------------------------------------------------------------------------------------


def charges(mechanism: ClientLevel, *rounds: int) -> list[Any]:
    return [mechanism.charge(r, np.arange(3), CROWD) for r in rounds]


def test_statement_for_clients() -> None:
    mechanism = client(epsilon=8.0)
    statement = make_statement(mechanism, charges(mechanism, *range(10), 9), population=1000)
    exact = epsilon({PoissonGaussian(0.1, 1.0): 11}, 1e-5)
    assert (statement.epsilon, statement.epsilon_rdp) == (exact.value, exact.rdp)
    assert (statement.rounds, statement.repeated, statement.carried) == (11, 1, 0)
    text = statement.text()
    for words in ("whole clients", "one client, there or not there", "δ = 1e-05", "PLD", "RDP", "11 rounds",
                  "second time after a crash", "probability 0.1", "the server: no guarantee", "Not covered",
                  "hyper-parameters", "released bits"):  # fmt: skip
        assert words in text
    assert "Simulation" not in text
    plain = json.loads(json.dumps(statement.to_dict()))
    assert plain["unit"] == "client" and plain["observers"][1]["epsilon"] is None


def test_printed_epsilon_is_rounded_up() -> None:
    statement = make_statement(client(), charges(client(), 0), population=10)
    printed = float(statement.text().split("ε = ")[1].split(",")[0])
    assert statement.epsilon <= printed <= statement.epsilon * 1.01


def test_statement_for_examples_reports_both_observers() -> None:
    mechanism = example(sampling=FixedSize(3))
    workload = records(*[100] * 7, 50, steps=4)
    paid = [mechanism.charge(r, np.array([r, 7]), workload) for r in range(3)]
    statement = make_statement(mechanism, paid, population=10)
    worst = epsilon({PoissonGaussian(0.2, 1.0): 12}, 1e-5).value
    assert [o.epsilon for o in statement.observers] == [worst, worst] == [statement.epsilon] * 2
    assert "each upload" in statement.observers[0].who and "released models" in statement.observers[1].who
    assert "single records" in statement.text() and "12 steps at rate 0.2" in statement.text()
    assert "measured, with a margin" in statement.text()


def test_simulations_and_noiseless_runs_claim_nothing() -> None:
    seeded = client(entropy="seed")
    assert make_statement(seeded, charges(seeded, 0), 10).text().startswith("Simulation")
    bare = client(noise=0.0)
    statement = make_statement(bare, charges(bare, 0), 10)
    assert "no differential privacy" in statement.text()
    assert json.loads(json.dumps(statement.to_dict(), allow_nan=False))["epsilon"] is None


def test_noise_from_clients_is_not_sold_as_protection_from_the_server() -> None:
    mechanism = client(noise_at="clients")
    server = make_statement(mechanism, charges(mechanism, 0), 10).observers[1]
    assert server.epsilon is None and "secure aggregation" in server.why and "√cohort" in server.why


# --- a mechanism of one's own, by its name ------------------------------------------------------------------


@dataclass(frozen=True)
class Margin(ClientLevel):
    """Adds more noise than it is charged for."""

    kind = "margin"
    margin: float = 2.0

    @property
    def sum_noise(self) -> float:
        return self.margin * super().sum_noise


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MECHANISMS, "margin", Margin)


def section(**keys: Any) -> PrivacySettings:
    given = {"unit": "client", "delta": 1e-5, "clip": 1.0, "noise": 1.5, "mechanism": "margin"} | keys
    return PrivacySettings.model_validate(given)


def made(given: PrivacySettings) -> Mechanism:
    return chosen(given, Poisson(0.1), 10, lambda: pytest.fail("no layers were asked for"), deployed=False)


def test_an_added_mechanism_is_chosen_by_its_name_with_its_options(added: None) -> None:
    plain = made(section())
    assert isinstance(plain, Margin) and (plain.noise, plain.sum_noise) == (1.5, 3.0)
    wide = made(section(mechanism={"kind": "margin", "margin": 4.0}, noise_at="clients"))
    assert isinstance(wide, Margin) and (wide.sum_noise, wide.noise_at) == (6.0, "clients")
    assert read_mechanism(plain_mechanism(wide)) == wide


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"mechanism": {"kind": "margin", "width": 4}}, r"mechanism.width: margin has no such option"),
        ({"unit": "example"}, r"margin protects units of client; set privacy.unit to client"),
        ({"adaptive": {}}, r"leave out privacy.adaptive"),
        ({"aggregation": "secure"}, r"privacy.aggregation"),
        ({"noise_by_layer": {"*": 2.0}}, r"privacy.noise_by_layer"),
    ],
)
def test_what_does_not_go_with_it_is_refused(added: None, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        made(section(**keys))


@pytest.mark.parametrize("name", ["margin", "client", "layered", "secure"])
def test_a_name_that_was_not_added_or_follows_from_other_keys_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"'{name}' is not one of blt, banded"):
        section(mechanism=name)
