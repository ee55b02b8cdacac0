"""ε against printed values, exact formulas and independent bounds."""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import optimize, special, stats

from tacit.errors import UserError
from tacit.privacy import Charge, FixedSizeGaussian, Header, Ledger, Part, PoissonGaussian, epsilon
from tacit.privacy.accountants import exceeds, pld_epsilon, rdp_epsilon
from tacit.privacy.accountants.rdp import _ORDERS as RDP_ORDERS
from tacit.privacy.accountants.rdp import _rdp as rdp_divergences
from tacit.privacy.calibration import solve_cohort
from tacit.privacy.events import EVENTS, Event, MatrixRow, Relation, plain_event, read_event
from tacit.privacy.events import event as register


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "printed"),
    [
        (1.536, 0.029465, 2006, "6.5"),
        (0.6144, 0.0029465, 2034, "7.2"),
        (0.6144, 0.00029465, 3390, "3.7"),
    ],
)
def test_speech_paper_rdp(noise: float, rate: float, rounds: int, printed: str) -> None:
    """RDP at δ = 1e-9, to the digits of the speech paper's tables."""
    assert f"{rdp_epsilon({PoissonGaussian(rate, noise): rounds}, 1e-9):.1f}" == printed


@pytest.mark.parametrize(
    ("noise", "low", "high"), [(2.048, 4.4, 4.5), (5.12, 1.55, 1.6), (1.024, 12.55, 12.65)]
)
def test_speech_paper_ranges(noise: float, low: float, high: float) -> None:
    found = rdp_epsilon({PoissonGaussian(0.029465, noise): 2006}, 1e-9)
    assert low - 0.005 <= found <= high + 0.005


def test_speech_paper_pld_is_smaller() -> None:
    assert f"{epsilon({PoissonGaussian(0.0029465, 0.6144): 2034}, 1e-9).value:.1f}" == "6.3"


@pytest.mark.parametrize(
    ("noise", "rounds", "delta"),
    [(math.sqrt(1000), 1000, 1e-10), (10.066052053634072, 1513, 4.942684349644513e-11)],
)
def test_the_rounding_of_transforms_never_understates(noise: float, rounds: int, delta: float) -> None:
    """Where nearly everyone is drawn the Gaussian mechanism's own ε is the true one, to ten digits."""
    mu = math.sqrt(rounds) / noise

    def excess(e: float) -> float:
        return float(stats.norm.cdf(mu / 2 - e / mu) - math.exp(e) * stats.norm.cdf(-mu / 2 - e / mu)) - delta

    true = float(optimize.brentq(excess, mu**2 / 2, mu**2 / 2 + 10 * mu, xtol=1e-12))
    found = epsilon({PoissonGaussian(1 - 1e-12, noise): rounds}, delta)
    assert found.pld is not None and true <= found.value < true * 1.01


def test_so_many_events_that_transforms_cannot_be_trusted_are_for_renyi_alone() -> None:
    assert epsilon({PoissonGaussian(0.001, 1.0): 1_000_000}, 1e-10).pld is None
    assert epsilon({PoissonGaussian(0.001, 1.0): 1_000_000}, 1e-6).pld is not None


@pytest.mark.parametrize(
    ("records", "batch", "steps", "queries", "expected"),
    [
        (1000, 16, 200, 1, 1.85),
        (1000, 16, 2000, 1, 4.79),
        (1000, 50, 3000, 1, 22.8),
        (1000, 16, 200, 2, 4.65),
    ],
)
def test_example_level_values(records: int, batch: int, steps: int, queries: int, expected: float) -> None:
    event = PoissonGaussian(batch / records, 1 / math.sqrt(queries))
    assert rdp_epsilon({event: steps}, 1e-5) == pytest.approx(expected, rel=3e-3)


def test_second_batch_is_cheaper_than_asking_twice() -> None:
    assert rdp_epsilon({PoissonGaussian(0.016, 1.0): 400}, 1e-5) == pytest.approx(2.31, abs=0.005)


def exact_delta(eps: float, rate: float, noise: float, shift: float = 1.0) -> float:
    """δ of one sampled Gaussian by direct integration of the two densities, the worse direction."""
    x = np.linspace(-40 * noise, shift + 40 * noise, 400_001)
    q = stats.norm.pdf(x, 0, noise)
    p = (1 - rate) * q + rate * stats.norm.pdf(x, shift, noise)
    forward, backward = (np.clip(a - math.exp(eps) * b, 0, None) for a, b in ((p, q), (q, p)))
    return float(max(np.trapezoid(forward, x), np.trapezoid(backward, x)))


def exact_epsilon(delta: float, rate: float, noise: float, shift: float = 1.0) -> float:
    return float(optimize.brentq(lambda e: exact_delta(e, rate, noise, shift) - delta, 0, 60, xtol=1e-9))


@pytest.mark.parametrize(("rate", "noise", "delta"), [(1.0, 1.0, 1e-5), (0.1, 0.7, 1e-5), (0.02, 2.0, 1e-6)])
def test_one_round_is_exact(rate: float, noise: float, delta: float) -> None:
    found, exact = epsilon({PoissonGaussian(rate, noise): 1}, delta), exact_epsilon(delta, rate, noise)
    assert found.pld is not None
    assert exact - 1e-6 <= found.pld <= exact * 1.002 + 1e-4
    assert found.rdp >= exact


def test_many_unsampled_rounds_are_one_gaussian() -> None:
    found = epsilon({PoissonGaussian(1.0, 10.0): 100}, 1e-5)
    assert found.pld == pytest.approx(exact_epsilon(1e-5, 1.0, 1.0), rel=2e-3)


CASES = [
    (0.029465, 1.536, 2006, 1e-9),
    pytest.param(0.01, 0.8, 500, 1e-6, marks=pytest.mark.slow),
    (0.2, 4.0, 1000, 1e-5),
    (0.001, 1.0, 20_000, 1e-6),
    (0.5, 1.0, 10, 1e-7),
]


@pytest.mark.parametrize(("rate", "noise", "times", "delta"), CASES)
def test_pld_lies_between_an_optimistic_bound_and_rdp(
    rate: float, noise: float, times: int, delta: float
) -> None:
    """Our grid is chosen for speed: it must stay above the truth, and close to it."""
    optimistic = (
        pld.from_gaussian_mechanism(
            noise,
            sampling_prob=rate,
            pessimistic_estimate=False,
            use_connect_dots=False,
            value_discretization_interval=5e-5 if rate < 0.5 else 1e-3,
        )
        .self_compose(times)
        .get_epsilon_for_delta(delta)
    )
    spend = {PoissonGaussian(rate, noise): times}
    found = epsilon(spend, delta)
    assert found.pld is not None
    assert optimistic <= found.pld <= found.rdp * 1.001
    assert found.pld <= pld_epsilon(spend, delta, rough=True) * (1 + 1e-9)
    reference = pld.from_gaussian_mechanism(noise, sampling_prob=rate).self_compose(times)
    assert found.pld <= reference.get_epsilon_for_delta(delta) * 1.005


def test_a_ledger_of_several_kinds_adds_up() -> None:
    """Half the rounds under an all but equal event cost what all of them under one event do."""
    one = epsilon({PoissonGaussian(0.05, 1.2): 400}, 1e-6)
    two = epsilon({PoissonGaussian(0.05, 1.2): 200, PoissonGaussian(0.05, 1.2 + 1e-9): 200}, 1e-6)
    assert two.pld == pytest.approx(one.pld, rel=2e-3)
    assert two.rdp == pytest.approx(one.rdp, rel=1e-6)


@pytest.mark.parametrize("noise", [1.0, 3.0])
def test_fixed_size_bound_covers_the_exact_loss_of_a_replacement(noise: float) -> None:
    """One round, one client replaced: the sum moves by up to 2C, with probability size/population."""
    event = FixedSizeGaussian(50, 1000, noise)
    found = epsilon({event: 1}, 1e-6)
    assert found.pld is None and found.value == found.rdp
    assert found.rdp >= exact_epsilon(1e-6, event.rate, noise, shift=2.0)


def test_fixed_size_without_sampling_is_a_gaussian_of_twice_the_sensitivity() -> None:
    found = epsilon({FixedSizeGaussian(10, 10, 4.0): 1}, 1e-5)
    assert found.rdp == pytest.approx(rdp_epsilon({PoissonGaussian(1.0, 2.0): 1}, 1e-5), rel=0.03)


def test_a_larger_cohort_of_a_fixed_size_never_costs_less() -> None:
    """The bound for samples is loose near full participation: 39 of 40 was told to cost twice all 40."""
    spent = [epsilon({FixedSizeGaussian(size, 40, 14.5): 100}, 1e-3).value for size in range(1, 41)]
    assert spent == sorted(spent)
    most = solve_cohort(lambda size: FixedSizeGaussian(size, 40, 40.0), 40, 100, 2.0, 1e-3)
    assert most == 40, "which all 40 keep as well"


@pytest.mark.parametrize("others", list(itertools.product([-1.0, 1.0], repeat=3)))
@pytest.mark.parametrize(("size", "noise"), [(1, 1.0), (2, 1.0), (3, 0.7), (3, 3.0), (4, 1.0)])
def test_divergences_of_fixed_size_cohorts_cover_the_mixtures(
    others: tuple[float, ...], size: int, noise: float
) -> None:
    """Brute force: four clients, all subsets, one client's 1 replaced by −1, integrated numerically."""
    x = np.linspace(-80.0, 80.0, 40_001)  # orders of 20 weigh what is 38 away

    def log_density(own: float) -> np.ndarray:
        sums = [sum(subset) for subset in itertools.combinations((own, *others), size)]
        return special.logsumexp([stats.norm.logpdf(x, s, noise) for s in sums], axis=0) - math.log(len(sums))

    p, q = log_density(1.0), log_density(-1.0)
    told = rdp_divergences(FixedSizeGaussian(size, 4, noise))
    for order in (1.5, 2.0, 5.0, 20.0):
        weighed = special.logsumexp(order * p + (1 - order) * q) + math.log(x[1] - x[0])
        exact, bound = weighed / (order - 1), told[list(RDP_ORDERS).index(order)]
        assert exact <= bound + 1e-9
        assert size < 4 or exact == pytest.approx(bound), "with everybody it is the bound itself"


def test_epsilon_is_monotone() -> None:
    base = {"rate": 0.02, "noise": 1.0}
    spent = pld_epsilon({PoissonGaussian(**base): 300}, 1e-5)
    assert pld_epsilon({PoissonGaussian(**base | {"rate": 0.022}): 300}, 1e-5) > spent
    assert pld_epsilon({PoissonGaussian(**base | {"noise": 0.95}): 300}, 1e-5) > spent
    assert pld_epsilon({PoissonGaussian(**base): 330}, 1e-5) > spent
    assert pld_epsilon({PoissonGaussian(**base): 300}, 1e-6) > spent


@pytest.mark.parametrize(("rate", "noise"), [(1e-5, 1e5), (1e-3, 1e6), (0.05, 1e7)])
def test_rounding_never_makes_an_event_free(rate: float, noise: float) -> None:
    """Divergences too small for floating point come out negative; dp_accounting would then answer ε = 0.

    Here δ is below the total variation distance (0.4·rate/noise), so the true ε is above 0.
    """
    delta = 0.1 * rate / noise
    assert rdp_epsilon({PoissonGaussian(rate, noise): 1}, delta) > 0


def test_exceeds_agrees_with_epsilon() -> None:
    spend = {PoissonGaussian(0.05, 1.2): 400}
    found = epsilon(spend, 1e-6)
    assert found.pld is not None and found.pld < found.rdp
    assert exceeds(spend, found.pld * 0.999, 1e-6)
    assert not exceeds(spend, found.pld * 1.001, 1e-6)
    assert not exceeds(spend, found.rdp, 1e-6)


def test_no_noise_costs_everything_and_nothing_costs_nothing() -> None:
    assert epsilon({PoissonGaussian(0.1, 0.0): 1}, 1e-5).value == math.inf
    assert epsilon({FixedSizeGaussian(1, 10, 0.0): 1}, 1e-5).value == math.inf
    assert epsilon({}, 1e-5).value == 0


def test_relations_do_not_mix_and_delta_is_a_probability() -> None:
    with pytest.raises(UserError, match="one sampling"):
        epsilon({PoissonGaussian(0.1, 1.0): 1, FixedSizeGaussian(1, 10, 1.0): 1}, 1e-5)
    for delta in (0.0, 1.0, -1.0):
        with pytest.raises(UserError, match="not a probability"):
            epsilon({PoissonGaussian(0.1, 1.0): 1}, delta)


def test_tiny_delta_falls_back_to_rdp() -> None:
    found = epsilon({PoissonGaussian(0.1, 1.0): 10}, 1e-13)
    assert found.pld is None and found.value == found.rdp


# --- events of every kind ---------------------------------------------------------------------------------


ONE_OF_EACH: list[Event] = [PoissonGaussian(0.1, 1.0), FixedSizeGaussian(3, 40, 1.5), MatrixRow(4.0, 2.0)]


def test_every_event_survives_being_written_down_and_somebody_knows_its_cost() -> None:
    assert {event.kind for event in ONE_OF_EACH} == set(EVENTS), "a new kind of event belongs here too"
    for event in ONE_OF_EACH:
        plain = json.loads(json.dumps(plain_event(event)))
        assert plain["kind"] == event.kind and read_event(plain) == event
        assert 0 < epsilon({event: 3}, 1e-5).value < math.inf


def test_an_event_that_no_accountant_knows_survives_a_ledger_and_is_refused(tmp_path: Path) -> None:
    """A mechanism of one's own may add a kind of event; nobody guesses what it costs."""

    @dataclass(frozen=True)
    class Whisper(Event):
        volume: float
        times: int
        kind: ClassVar[str] = "whisper"
        relation: ClassVar[Relation] = "add-remove"

    register(Whisper)
    try:
        part = Part(Whisper(0.5, 3), 2)
        with Ledger.open(tmp_path / "ledger.jsonl", Header("client", 1e-5, part, data="people")) as ledger:
            ledger.charge(Charge(0, (part,)))
            with pytest.raises(UserError, match="whisper"):
                ledger.epsilon()
        contents = Ledger.read(tmp_path / "ledger.jsonl")
        assert contents.charges[0].parts == (part,)
        with pytest.raises(UserError, match="whisper"):
            epsilon({Whisper(0.5, 3): 1, PoissonGaussian(0.1, 1.0): 1}, 1e-5)
    finally:
        del EVENTS["whisper"]
    with pytest.raises(UserError, match="line 1"):
        Ledger.read(tmp_path / "ledger.jsonl")
