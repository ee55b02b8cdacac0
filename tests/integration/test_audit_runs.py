"""Audits of single runs: sound runs stay below their claim, broken ones do not, and training is not changed.

Runs use fresh entropy. At `SURE` confidence a sound run is refuted once in ten million times;
`bench/audits.py` counts how often that happens at 95 %.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tacit
from conftest import blobs
from tacit.api.auditing import audit
from tacit.cli.app import app
from tacit.federation.canaries import RecordCanaries, WatchedClients
from tacit.privacy import ClientLevel, Clip, ExampleLevel, FixedSize, Poisson, Workload
from tacit.privacy.gaussian import for_each_stretch
from tacit.vector import Layout

SURE = 1 - 1e-7
CLIENT = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-5}
EXAMPLE = {"unit": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-5}


@pytest.fixture
def fleet(config) -> Any:
    """400 clients with two records each, or 8 with 150."""

    def make(privacy: dict[str, Any], **more: Any) -> tacit.config.Config:
        clients = 400 if privacy["unit"] == "client" else 8
        settings = {
            "rounds": 5,
            "cohort": clients // 2,
            "data__partition": {"kind": "iid", "clients": clients},
            "local": {"steps": 2, "batch": 50, "lr": 0.1},
        }
        return config(privacy=privacy, **settings | more)

    return make


@pytest.mark.parametrize(
    ("privacy", "more"),
    [
        (CLIENT, {}),
        (CLIENT, {"cohort": {"size": 100, "sampling": "fixed"}}),
        ({**CLIENT, "entropy": "seed"}, {"evaluate": {"keep_best": True, "train": 5, "patience": 9}}),
        ({**CLIENT, "mechanism": "blt"}, {}),
        ({**CLIENT, "adaptive": {}}, {}),
        ({**CLIENT, "clip": {"bound": 0.5, "per": "dim"}}, {"method": "scaffold"}),
        (EXAMPLE, {}),
        (EXAMPLE, {"method": "fedsam"}),
    ],
)
def test_sound_runs_are_not_refuted(fleet, privacy, more) -> None:
    """And canaries are seen: the means of those there and those not there are six deviations apart."""
    count = 200 if privacy["unit"] == "client" else 300
    report = audit(fleet(privacy, **more), count, trials=512, confidence=SURE, dataset=blobs(1200))
    assert not report.refuted, report.text()
    assert report.run is not None and report.run.trials >= 150
    assert report.scores is not None and report.inside is not None
    told = report.scores[report.inside].mean() - report.scores[~report.inside].mean()
    assert told > 0 or privacy.get("mechanism") or more.get("cohort"), "canaries are seen, if not well enough"
    assert not list(Path().iterdir()), "the run is thrown away"


def test_too_little_noise_on_clients_is_caught(fleet, monkeypatch) -> None:
    std = ClientLevel.std
    monkeypatch.setattr(ClientLevel, "std", lambda self, grid: std(self, grid) / 30)
    report = audit(fleet({**CLIENT, "noise": 6.0}), canaries=200, trials=512, dataset=blobs(1200))
    assert report.run is not None and report.run.refuted, report.text()


def test_too_little_noise_on_records_is_caught(fleet, monkeypatch) -> None:
    import tacit.privacy.mechanisms.example as example

    less = lambda count, std, bits, use: for_each_stretch(count, std / 20, bits, use)  # noqa: E731
    monkeypatch.setattr(example, "for_each_stretch", less)
    report = audit(fleet({**EXAMPLE, "noise": 2.0}), canaries=300, trials=512, dataset=blobs(1200))
    assert report.run is not None and report.run.refuted, report.text()


def test_canaries_are_drawn_bounded_and_counted_like_everybody() -> None:
    """In whole numbers: a canary that is drawn and in moves the sum by the clip, others by nothing."""
    mechanism = ClientLevel(1e-6, 1e-3, Clip(0.5), Poisson(0.5))
    workload = Workload(100)
    watched = WatchedClients(mechanism, workload, 50)
    layout = Layout.of(tacit_model())
    cohort = watched.sample(0, 0, workload)
    assert not np.isin(cohort, watched.ids).any()
    drawn = watched._drawn
    bounding = watched.bounding({}, {"delta": layout.shared}, layout, len(cohort))
    import torch

    from tacit.privacy import Arrivals

    total = {"delta": torch.zeros(layout.shared, dtype=torch.int64)}
    mean, _ = watched.release(total, Arrivals(len(cohort), len(cohort)), {}, 0, 0, workload)
    scores = watched.scores(workload)
    assert bounding.grid is not None
    np.testing.assert_allclose(scores, np.isin(np.arange(50), drawn), atol=2e-3)
    assert float(mean["delta"].norm()) * 50 == pytest.approx(0.5 * np.sqrt(len(drawn)), rel=1e-2)
    assert watched.inside[drawn].all()


def tacit_model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 4))


def test_records_canaries_belong_to_those_who_pay_most_and_stay_within_the_clip() -> None:
    layout = Layout.of(tacit_model())
    workload = Workload(4, sizes=np.array([300, 30, 300, 60]), batch=10)
    for per in ("global", "dim"):
        mechanism = ExampleLevel(1.0, 1e-3, Clip(0.5, per), FixedSize(4))  # type: ignore[arg-type]
        watch = RecordCanaries(mechanism, workload, layout, rounds=2, canaries=40)
        assert list(watch.positions) == [1, 3, 0] and len(watch.inside) == 40
        assert all(len(p) <= workload.sizes[c] // 3 for c, p in watch.positions.items())
        assert all(float(v.norm()) <= 0.5 * (1 + 1e-6) for v in watch.values)


def test_the_command_prints_text_json_and_a_picture(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "rounds: 2\ndata: {name: fashion-mnist-slice, partition: {kind: iid, clients: 500}}\n"
        "model: {name: mlp, hidden: [8]}\ncohort: 50\nlocal: {steps: 1, batch: 5, lr: 0.1}\n"
        "privacy: {unit: client, clip: 0.5, noise: 2, delta: 1.0e-4}\n"
    )
    runner, sure = CliRunner(), ["--confidence", str(SURE)]
    done = runner.invoke(
        app, ["audit", "a.yaml", "--json", "--trials", "512", "--canaries", "50", "--picture", "a.png", *sure]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["refuted"] is False and found["run"]["trials"] == 50 and Path("a.png").stat().st_size > 5000
    fast = runner.invoke(app, ["audit", "a.yaml", "--fast", "--trials", "512", *sure])
    assert fast.exit_code == 0 and "with 99.99999 % confidence" in " ".join(fast.stdout.split())
    with pytest.raises(tacit.UserError, match="nothing to audit"):
        runner.invoke(
            app, ["audit", "a.yaml", "--set", "privacy=null"], standalone_mode=False, catch_exceptions=False
        )
