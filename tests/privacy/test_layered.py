"""Noise by layer: its charge by an independent formula, by brute force and by an adversary; its scale by
statistics; refusals; and one run from config to statement.
"""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tacit
from tacit.api.fitting import fit
from tacit.errors import UserError
from tacit.privacy import ClientLevel, Clip, FixedSize, Grid, Poisson, PoissonGaussian, Workload, epsilon
from tacit.privacy.audit import from_scores
from tacit.privacy.clipping import Mode, Per
from tacit.privacy.events import Event, FixedSizeGaussian
from tacit.privacy.games import audit_mechanism
from tacit.privacy.mechanisms import layered, plain_mechanism, read_mechanism
from tacit.privacy.mechanisms.base import Arrivals
from tacit.privacy.mechanisms.layered import LayeredNoise, by_layer
from tacit.privacy.metrics import Metrics
from tacit.vector import Layout

D = {"0": 10, "1": 3, "2": 8}
"""Three layers: 4 × 2 + 2, 2 + 1 and 4 + 4 parameters."""
LAYOUT = Layout.of(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1), nn.Linear(1, 4)))
SIZES = {"delta": LAYOUT.shared}
RULES: list[tuple[Per, Mode]] = list(product(("global", "uniform", "dim"), ("clip", "normalize")))  # type: ignore[arg-type]
ALL = Workload(population=100)


def made(
    factors: dict[str, float],
    clip: Clip,
    noise: float = 1.0,
    layout: Layout = LAYOUT,
    sizes: dict[str, int] | None = None,
    **more: Any,
) -> LayeredNoise:
    sizes = sizes or {"delta": layout.shared}
    more = {"sampling": Poisson(1.0)} | more
    return LayeredNoise(
        noise, 1e-5, clip, factors=factors, groups=by_layer(factors, clip, sizes, layout), **more
    )


def told(mechanism: ClientLevel) -> Event:
    return mechanism.costliest(ALL).event


# --- the charge -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per", "mode"), RULES)
@pytest.mark.parametrize("factors", [{"1": 0.5}, {"0": 0.5, "2": 3.0}, {"1": 2.0, "*": 0.25}, {"*": 2.0}])
def test_the_charge_is_that_of_the_formula(per: Per, mode: Mode, factors: dict[str, float]) -> None:
    """Σ_h C_h²/(f_h·z·C)² = 1/z'² where each layer has its bound; else all of C where the noise is least."""
    f = {h: factors.get(h, factors.get("*", 1.0)) for h in D}
    square = {"uniform": dict.fromkeys(D, 1 / 3), "dim": {h: D[h] / 21 for h in D}}.get(per)
    if square is None or mode == "normalize":
        expected = 1.7 * min(f.values())
    else:
        expected = 1.7 / math.sqrt(sum(square[h] / f[h] ** 2 for h in D))
    event = told(made(factors, Clip(0.3, per, mode), noise=1.7))
    assert isinstance(event, PoissonGaussian)
    assert event.noise == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("per", "mode"), RULES)
def test_one_factor_everywhere_is_another_multiplier(per: Per, mode: Mode) -> None:
    plain = ClientLevel(0.6, 1e-5, Clip(0.3, per, mode), FixedSize(5))
    by_factor = told(made({"*": 2.0}, Clip(0.3, per, mode), noise=0.3, sampling=FixedSize(5)))
    assert isinstance(by_factor, FixedSizeGaussian)
    assert by_factor.noise == pytest.approx(told(plain).noise, rel=1e-12)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("per", "mode"), RULES)
@pytest.mark.parametrize("shapes", [((6, 1), (1, 5)), ((3000, 1), (1, 1)), ((1, 1), (2000, 2))])
def test_no_upload_moves_the_sum_by_more(
    per: Per, mode: Mode, shapes: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brute force on two layers: uploads through the real bound and grid, divided by the noise that is really
    asked of the sampler, are never longer than 1/z' of the charge; the best direction comes close to it.
    """
    layout = Layout.of(nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in shapes)))
    first = math.prod(shapes[0])
    asked = torch.zeros(layout.shared, dtype=torch.float64)

    def record(part: torch.Tensor, std: float, bits: object) -> None:
        start = (part.data_ptr() - base) // 8
        asked[start : start + part.numel()] = std

    monkeypatch.setattr(layered, "add_rounded_gaussian_", record)
    rng = np.random.default_rng(0)
    for factors in ({"0": 0.1}, {"1": 0.1}, {"0": 0.7, "1": 1.3}):
        mechanism = made(factors, Clip(0.3, per, mode), noise=0.8, layout=layout)
        bounding = mechanism.bounding({}, {"delta": layout.shared}, layout, 1)
        total = {"delta": torch.zeros(layout.shared, dtype=torch.int64)}
        base = total["delta"].data_ptr()
        mechanism.release(total, Arrivals(1, 1), {}, 0, 0, ALL)
        assert bool((asked > 0).all())
        event = told(mechanism)
        assert isinstance(event, PoissonGaussian)
        longest = 0.0
        for split in np.linspace(0, 1, 21):
            for shape in ("even", "one", "random"):
                x = torch.zeros(layout.shared)
                for part, size in ((slice(0, first), split), (slice(first, None), 1 - split)):
                    d = x[part].numel()
                    direction = {
                        "even": np.ones(d), "one": np.eye(1, d)[0], "random": rng.normal(size=d)
                    }[shape]  # fmt: skip
                    x[part] = torch.from_numpy(size * direction / np.linalg.norm(direction)).float()
                for length in (0.2999999, 0.3, 50.0):
                    into = {"delta": torch.zeros(layout.shared, dtype=torch.int64)}
                    bounding.add_({"delta": x * length / x.norm()}, into)
                    moved = float((into["delta"].double() / asked).norm())
                    assert moved <= 1 / event.noise
                    longest = max(longest, moved)
        assert longest > 0.995 / event.noise


def test_rounding_is_paid_for_where_it_lengthens_most() -> None:
    """A wide layer with little noise: rounding adds √d/2 units to it, which the grid's own margin, made for
    the whole, does not cover by itself.
    """
    layout = Layout.of(nn.Sequential(nn.Linear(10_000, 1, bias=False), nn.Linear(1, 1, bias=False)))
    mechanism = made({"0": 0.05}, Clip(1.0, "uniform"), layout=layout)
    grid = mechanism.grid({}, layout.shared)
    units = [1.0 / math.sqrt(2) / grid.unit + math.sqrt(d) / 2 for d in (10_000, 1)]
    needed = math.hypot(units[0] / 0.05, units[1])
    assert needed > mechanism.worst * grid.radius  # so nominal noise would be a hair too little
    assert needed <= mechanism.worst * grid.radius * mechanism.stretched(grid)
    assert 1 < mechanism.stretched(grid) < 1 + 1e-3


def test_a_group_longer_than_its_own_bound_is_not_added() -> None:
    """The whole is within C, and one layer is not within its own."""
    rule = Clip(1.0, "uniform")
    bound = rule.bind(SIZES, LAYOUT)
    grid = Grid.fit(1.0, LAYOUT.shared, 1.0)
    upload = {"delta": torch.zeros(LAYOUT.shared)}
    upload["delta"][0] = 0.9
    object.__setattr__(bound, "scales", lambda uploads: (0.9, [1.0] * 3))
    with pytest.raises(ArithmeticError, match="longer than its bound"):
        bound.add_rounded_(upload, grid, {"delta": torch.zeros(LAYOUT.shared, dtype=torch.int64)})


# --- the noise ------------------------------------------------------------------------------------------


def test_each_layer_has_the_noise_that_is_stated() -> None:
    """Three layers of 40,000 parameters. A sample's deviation is off by 1/√(2n) of itself, a correlation by
    1/√n: six of them, twice in a thousand million each. A layer with factor 0 is what was sent.
    """
    n, expected = 40_000, 100.0
    layout = Layout.of(nn.Sequential(*(nn.Linear(n, 1, bias=False) for _ in range(3))))
    mechanism = made({"0": 0.25, "1": 0.0}, Clip(0.5, "dim"), noise=1.6, layout=layout, entropy="seed")
    mean, _ = mechanism.release(
        {"delta": torch.zeros(3 * n, dtype=torch.int64)}, Arrivals(0, 0), {}, 0, 0, ALL
    )
    quarter, none, whole = mean["delta"].double().view(3, n) * expected
    assert float(quarter.std()) == pytest.approx(0.25 * 1.6 * 0.5, rel=6 / math.sqrt(2 * n))
    assert float(whole.std()) == pytest.approx(1.6 * 0.5, rel=6 / math.sqrt(2 * n))
    assert not none.any()
    assert abs(float(torch.corrcoef(torch.stack([quarter, whole]))[0, 1])) < 6 / math.sqrt(n)


@pytest.mark.parametrize(("per", "mode"), [("global", "clip"), ("uniform", "clip"), ("uniform", "normalize")])
def test_an_adversary_along_the_least_noisy_direction(per: Per, mode: Mode) -> None:
    """Many canaries at once, each with a coordinate of its own in two layers, weigh them by the noise there.

    What they find stays below what is charged (wrong once in 10⁷). Their scores lie as far apart as those
    of the Gaussian mechanism that is charged (six standard errors, twice in a thousand million): no closer,
    so the attack is the best there is, and far further than with the nominal noise everywhere.
    """
    canaries, trials = 200, 40
    layout = Layout.of(nn.Sequential(*(nn.Linear(canaries, 1, bias=False) for _ in range(2))))
    mechanism = made({"0": 0.25}, Clip(1.0, per, mode), noise=2.0, layout=layout)
    bounding = mechanism.bounding({}, {"delta": layout.shared}, layout, canaries)
    both = per == "uniform" and mode == "clip"
    rng = np.random.default_rng()
    coins, scores = [], []
    for trial in range(trials):
        inside = rng.random(canaries) < 0.5
        total = {"delta": torch.zeros(layout.shared, dtype=torch.int64)}
        for canary in np.flatnonzero(inside):
            upload = torch.zeros(layout.shared)
            upload[canary] = 1e3 if both else 1.0 - 1e-6
            upload[canaries + canary] = 1e3 if both else 0.0
            bounding.add_({"delta": upload}, total)
        mean, _ = mechanism.release(total, Arrivals(canaries, canaries), {}, 0, trial, ALL)
        least, most = mean["delta"].double().numpy().reshape(2, canaries)
        coins.append(inside)
        scores.append(least / 0.25**2 + most * both)
    there, seen = np.concatenate(coins), np.concatenate(scores)
    event = told(mechanism)
    assert isinstance(event, PoissonGaussian)
    found, _ = from_scores(there, {"": seen}, 0.05, 1 - 1e-7)
    assert found < epsilon({event: 1}, 0.05).value
    apart = (seen[there].mean() - seen[~there].mean()) / seen[~there].std()
    error = math.sqrt((4 + apart**2) / len(seen))
    assert apart == pytest.approx(1 / event.noise, abs=6 * error)
    assert apart > 1 / mechanism.noise + 12 * error


# --- what is refused, and what is kept ------------------------------------------------------------------


def test_a_layer_without_noise_is_for_runs_that_claim_nothing() -> None:
    for more in ({}, {"entropy": "seed", "epsilon": 3.0}):
        with pytest.raises(UserError, match="hides nothing"):
            made({"1": 0.0}, Clip(1.0, "dim"), **more)
    assert told(made({"1": 0.0}, Clip(1.0, "dim"), entropy="seed")) == PoissonGaussian(1.0, 0.0)


def test_refusals_name_the_fix() -> None:
    clip = Clip(1.0, "dim")
    with pytest.raises(UserError, match="no layer matches 'mlp'; there are 0, 1, 2"):
        made({"mlp": 0.5}, clip)
    with pytest.raises(UserError, match="leave it out with real clients"):
        made({"1": 0.5}, clip, noise_at="clients")
    with pytest.raises(UserError, match=r"privacy\.metrics"):
        made({"1": 0.5}, clip, metrics=Metrics())
    with pytest.raises(UserError, match="≥ 0"):
        made({"1": -0.5}, clip)


@pytest.mark.parametrize("per", ["global", "dim"])
def test_the_audit_has_layers_of_its_own_and_sees_a_nominal_charge(
    per: Per, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sound is not refuted (once in 10⁷). Charged as if the noise were everywhere what it is at
    most, 2, the same releases refute it: canaries lie five standard deviations and more apart on a layer.
    """
    mechanism = made({"1": 0.05}, Clip(1.0, per), noise=2.0)
    assert not audit_mechanism(mechanism, trials=1024, confidence=1 - 1e-7).refuted
    monkeypatch.setattr(LayeredNoise, "worth", lambda self, noise: noise)
    assert audit_mechanism(mechanism, trials=1024, confidence=1 - 1e-7).refuted


def test_weights_of_a_model_s_layers_do_not_keep_a_clip_from_its_trial() -> None:
    mechanism = ClientLevel(0.5, 1e-3, Clip(0.5, "dim", weights={"*.mlp.*": 2.0}), Poisson(1.0))
    assert not audit_mechanism(mechanism, trials=512, confidence=1 - 1e-7).refuted


def test_other_layers_than_it_was_made_for_are_refused() -> None:
    mechanism = made({"1": 0.5}, Clip(1.0, "dim"))
    other = Layout.of(nn.Sequential(nn.Linear(2, 4), nn.Linear(1, 2), nn.Linear(4, 1)))
    with pytest.raises(ValueError, match="other layers"):
        mechanism.bounding({}, {"delta": other.shared}, other, 1)


def test_it_is_read_back_from_a_file() -> None:
    mechanism = made({"1": 0.5}, Clip(1.0, "dim"), sizes={"delta": LAYOUT.shared, "c": 3})
    again = read_mechanism(json.loads(json.dumps(plain_mechanism(mechanism))))
    assert again == mechanism
    assert told(again) == told(mechanism)  # type: ignore[arg-type]


# --- a run ----------------------------------------------------------------------------------------------


SMALL = {
    "rounds": 3, "cohort": 20, "engine.workers": 0, "method": "fedavg", "server": {"lr": 1.0},
    "local": {"steps": 1, "batch": 5, "lr": 0.05}, "privacy.clip": {"bound": 0.3, "per": "uniform"},
    "privacy.noise": 1.0, "privacy.epsilon": None, "privacy.noise_by_layer": {"net.0": 0.5},
}  # fmt: skip
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def config(**more: Any) -> Any:
    return tacit.load(QUICKSTART, SMALL | {key.replace("__", "."): v for key, v in more.items()})


def layer_names() -> list[str]:
    return list(Layout.of(tacit.models.build("mlp", (1, 28, 28), 10, hidden=[64])).layers)


def test_a_run_charges_what_it_does(tmp_path: Path) -> None:
    first, *_ = layer_names()
    result = tacit.run(config(privacy__noise_by_layer={first: 0.5}), tmp_path / "run")
    said = tacit.statement(result.path)
    worth = 1 / math.sqrt(0.5 / 0.25 + 0.5)
    expected = epsilon({PoissonGaussian(0.02, worth): 3}, 1e-4).value
    assert said.epsilon == pytest.approx(expected, rel=1e-9) == result.last("epsilon")
    assert f"0.5 times that on {first}" in said.noise
    assert f"worth {worth:.4g} everywhere" in said.noise


@pytest.mark.slow
def test_noise_is_found_for_a_budget_of_the_whole() -> None:
    first, *_ = layer_names()
    asked = {"privacy__noise": None, "privacy__epsilon": 2.0, "rounds": 40}
    plain = tacit.plan(config(**asked, privacy__noise_by_layer={}))
    by_layer = tacit.plan(config(**asked, privacy__noise_by_layer={first: 0.5}))
    assert 1.9 < plain["epsilon"] <= 2 and 1.9 < by_layer["epsilon"] <= 2
    assert by_layer["noise"] == pytest.approx(plain["noise"] * math.sqrt(2.5), rel=0.01)
    assert by_layer["worth"] == pytest.approx(plain["noise"], rel=0.01) and plain["worth"] is None


def test_noise_on_one_layer_alone_claims_nothing(tmp_path: Path) -> None:
    first, *_ = layer_names()
    only = {first: 1.0, "*": 0.0}
    with pytest.raises(UserError, match="hides nothing"):
        tacit.run(config(privacy__noise_by_layer=only), tmp_path / "refused")
    result = tacit.run(config(privacy__noise_by_layer=only, privacy__entropy="seed"), tmp_path / "run")
    said = tacit.statement(result.path)
    assert math.isinf(said.epsilon)
    assert "no differential privacy: what it releases, or a part of it, has no noise" in said.text()
    assert "so no guarantee holds" in said.noise


def test_fitting_asks_nothing_of_names() -> None:
    """It measures a network of its own, whose layers have other names than the patterns."""
    first, *_ = layer_names()
    plain = fit(config(privacy__noise_by_layer={})).worker
    assert fit(config(privacy__noise_by_layer={first: 0.5})).worker == plain
    weighted = config(privacy__noise_by_layer={}, privacy__clip__weights={first: 2.0})
    assert fit(weighted).worker == plain


@pytest.mark.parametrize(
    "more",
    [
        {"privacy__adaptive": {}},
        {"privacy__aggregation": "secure"},
        {"privacy__mechanism": "blt"},
        {"privacy__unit": "example"},
        {"privacy__extrapolate": [{"population": 100_000, "cohort": 2000}]},
    ],
)
def test_it_goes_with_independent_noise_of_whole_clients_alone(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="noise_by_layer"):
        tacit.run(config(**more, privacy__noise_by_layer={"*": 0.5}), tmp_path / "run")
