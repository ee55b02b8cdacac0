"""Runs with secure aggregation: the same bits as without, two ledgers, dropouts, resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tacit
from tacit.config.build import build_job
from tacit.engine import InProcess, Order, Participant
from tacit.engine.secure import Secured
from tacit.errors import UserError
from tacit.federation.statements import SEEN
from tacit.federation.verify import examine
from tacit.privacy import PoissonGaussian, epsilon
from tacit.privacy.ledger import Ledger
from tacit.secure import Stage, decode
from tacit.secure.messages import Masked, Signed
from tacit.vector import Layout, read_values

SECURE: dict[str, Any] = {
    "unit": "client",
    "clip": 0.5,
    "noise": 1.0,
    "delta": 1e-3,
    "aggregation": "secure",
    "entropy": "seed",
}


def values(model: torch.nn.Module) -> torch.Tensor:
    return read_values(model, Layout.of(model))


def unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on runs add uploads up in the open."""
    monkeypatch.setattr("tacit.federation.run.Secured", lambda engine, job, mechanism: engine)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "scaffold"},
        {"method": "dp2-fedsam", "privacy": SECURE},
        {"privacy": SECURE | {"noise": 0.0}},
        {"privacy": SECURE | {"clip": {"bound": 0.5, "per": "dim"}}},
        {"cohort": {"size": 5, "sampling": "fixed"}},
    ],
    ids=lambda changes: "-".join(map(str, changes)) or "fedavg",
)
def test_masks_change_no_bit(config, dataset, monkeypatch, changes) -> None:
    settings = config(**{"rounds": 2, "privacy": SECURE} | changes)
    masked = tacit.run(settings, "masked", dataset=dataset)
    unmasked(monkeypatch)
    plain = tacit.run(settings, "plain", dataset=dataset)
    assert torch.equal(values(masked.model), values(plain.model))
    for a, b in zip(masked.metrics, plain.metrics, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }


@pytest.mark.slow
def test_processes_give_the_same_bits(config, dataset) -> None:
    one = tacit.run(config(rounds=1, privacy=SECURE), "one", dataset=dataset)
    pool = {"kind": "pool", "workers": 2}
    two = tacit.run(config(rounds=1, privacy=SECURE, engine=pool), "two", dataset=dataset)
    assert torch.equal(values(one.model), values(two.model))


def test_what_the_servers_part_hears_is_masked(config, dataset, monkeypatch) -> None:
    """Two clients' uploads, heard by the server: they look uniform, and the sum is that of the engine."""
    job = build_job(config(privacy=SECURE), Path("run"), dataset=dataset)
    inner = InProcess(job)
    bounding = job.privacy.bounding({}, job.upload_sizes, job.layout, 4)
    order = Order(0, 0.1, bounding=bounding)
    message = job.algorithm.message(job.algorithm.init(values(job.model), job.layout))
    participants = [Participant(n) for n in (1, 4, 6, 7)]
    heard: list[bytes] = []
    engine = Secured(inner, job, job.privacy)
    engine.heard = heard.append
    total, reports = engine.sum(order, message, participants)
    total = {name: vector.clone() for name, vector in total.items()}
    alone = {v.client: inner.sum(order, message, [v])[0]["delta"].numpy().copy() for v in participants}
    expected, open_reports = inner.sum(order, message, participants)
    assert torch.equal(total["delta"], expected["delta"])
    assert [r.client for r in reports] == [r.client for r in open_reports]
    messages = [decode(Signed, data) for data in heard]
    assert [m.kind for m in messages] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4
    for m in messages:
        if m.kind == 3:
            plain = alone[m.sender]
            vector = decode(Masked, m.body).vector
            bits = 8 * len(vector) / plain.size
            assert 21 < bits < 27  # 4 × 2²⁰ and noise, no more than they need
            assert plain.astype("<i8").tobytes()[:64] not in m.body
            ones = np.unpackbits(np.frombuffer(vector, np.uint8)).mean()
            assert abs(ones - 0.5) < 6 * 0.5 / np.sqrt(8 * len(vector))  # false alarm 2·10⁻⁹


def test_two_numbers_two_ledgers(config, dataset) -> None:
    result = tacit.run(config(rounds=3, privacy=SECURE | {"entropy": "os"}), "run", dataset=dataset)
    statement = tacit.statement("run")
    outside, server = statement.observers
    assert outside.epsilon == result.last("epsilon") == epsilon({PoissonGaussian(5 / 12, 1.0): 3}, 1e-3).value
    charges = Ledger.read(Path("run") / SEEN).charges
    assert [charge.round for charge in charges] == [0, 1, 2]
    times = np.bincount([c for charge in charges for part in charge.parts for c in part.clients])
    seen = {PoissonGaussian(1.0, charges[0].parts[0].event.noise): int(times.max())}
    assert server.epsilon == pytest.approx(epsilon(seen, 1e-3).value)
    assert json.loads(Path("run/statement.json").read_text())["observers"][1]["epsilon"] == server.epsilon
    assert "clients" not in (Path("run") / "ledger.jsonl").read_text()  # who took part is not in the first


def test_a_run_resumes_with_both_ledgers_and_not_without(config, dataset) -> None:
    whole = tacit.run(config(rounds=4, privacy=SECURE), "whole", dataset=dataset)
    tacit.run(config(rounds=2, privacy=SECURE), "run", dataset=dataset)
    ledger = Path("run") / SEEN
    kept = ledger.read_bytes()
    ledger.unlink()
    with pytest.raises(UserError, match="is gone"):
        tacit.resume("run", dataset=dataset, rounds=4)
    ledger.write_bytes(kept[: kept.rindex(b"\n", 0, -1) + 1])
    with pytest.raises(UserError, match="holds 1 charges where the checkpoint knows of 2"):
        tacit.resume("run", dataset=dataset, rounds=4)
    with pytest.raises(UserError, match="holds 1 charges"):
        tacit.statement("run")
    ledger.write_bytes(kept)
    resumed = tacit.resume("run", dataset=dataset, rounds=4)
    assert torch.equal(values(resumed.model), values(whole.model))
    assert len(Ledger.read(ledger).charges) == 4
    assert not any(finding.problem for finding in examine(Path("run")))
    ledger.write_bytes(kept)
    assert [finding.name for finding in examine(Path("run")) if finding.problem] == ["statement.json", SEEN]


def test_dropouts_are_left_out_and_their_noise_is_made_up_for(config, dataset, monkeypatch) -> None:
    """A quarter of each cohort leaves before its upload; the run goes on. Too many, and it stops, charged."""

    def leaving(least: int) -> Any:
        def leave(order: Order, client: int) -> Stage | None:
            return Stage.MASKED if client < least else None

        return lambda engine, job, mechanism: Secured(engine, job, mechanism, leave)

    settings = config(rounds=2, cohort=12, privacy=SECURE)
    monkeypatch.setattr("tacit.federation.run.Secured", leaving(3))
    result = tacit.run(settings, "run", dataset=dataset)
    assert all(record["clients"] == 9 for record in result.metrics)
    monkeypatch.setattr("tacit.federation.run.Secured", leaving(5))
    with pytest.raises(UserError, match="round 1: 7 of 12 clients are left where 8 must be"):
        tacit.run(settings, "torn", dataset=dataset)
    assert len(Ledger.read(Path("torn/ledger.jsonl")).charges) == 1


def test_an_empty_cohort_is_noise_like_any_other(config, dataset) -> None:
    """Cohorts of 4, 0, 1 and 0 clients who learn nothing: four times the same noise, to 5 standard errors."""
    privacy = SECURE | {"noise": 2.0}
    settings = config(rounds=4, cohort=1, privacy=privacy, seed=3, local__lr=1e-30, model__hidden=[64])
    before = values(build_job(settings, Path("before"), dataset=dataset).model).clone()
    result = tacit.run(settings, "run", dataset=dataset)
    assert [record["clients"] for record in result.metrics] == [4, 0, 1, 0]
    moved = (values(result.model) - before).double()
    expected = math.sqrt(4) * 2.0 * 0.5 / math.sqrt(2 / 3)
    assert abs(moved.std().item() / expected - 1) < 5 / math.sqrt(2 * moved.numel())
    assert len(Ledger.read(Path("run") / SEEN).charges) == 4


@pytest.mark.parametrize(
    ("privacy", "fix"),
    [
        ({"unit": "example"}, "for whole clients"),
        ({"adaptive": {}}, "leave out privacy.adaptive"),
        ({"mechanism": "blt"}, "leave out privacy.adaptive and privacy.mechanism"),
        ({"noise_at": "clients"}, "leave it out"),
        ({"threshold": 0.55}, "threshold above 0.55"),
        ({"threshold": 0.4}, "threshold"),
        ({"aggregation": "plain", "threshold": 0.7}, "aggregation: secure"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_charged(config, dataset, privacy, fix) -> None:
    with pytest.raises(UserError, match=fix):
        tacit.run(config(privacy=SECURE | privacy), "run", dataset=dataset)
    assert not list(Path().glob("run/ledger*"))
