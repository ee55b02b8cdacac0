"""Runs with private metrics: exact numbers about clients reach no file, no tracker and no page."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest

import tacit
from conftest import blobs
from tacit.engine import InProcess, Report

CLIENT = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3, "metrics": True}
EXAMPLE = {"unit": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-3, "metrics": True}
NUMBER = re.compile(rb"[-+]?\d+\.\d+(?:[eE][-+]?\d+)?")


class Everything(tacit.Tracker):
    """A tracker that keeps whatever it is told."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.counts: list[tuple[int, int]] = []

    def clients(self, done: int, cohort: int) -> None:
        self.counts.append((done, cohort))

    def round(self, record: dict[str, Any]) -> None:
        self.records.append(record)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[list[Report]]:
    """Every round's exact reports, behind the run's back."""
    found: list[list[Report]] = []
    inner = InProcess.sum

    def sum(self: InProcess, *args: Any, **more: Any) -> Any:
        total, told = inner(self, *args, **more)
        found.append(list(told))
        return total, told

    monkeypatch.setattr(InProcess, "sum", sum)
    return found


def secrets(played: list[list[Report]]) -> list[float]:
    """Exact numbers: of each client, and the means of each round."""
    found = [value for cohort in played for r in cohort for value in (r.loss, r.norm)]
    for cohort in filter(None, played):
        found += [sum(r.loss for r in cohort) / len(cohort), sum(r.norm for r in cohort) / len(cohort)]
        found.append(sum(r.loss * r.steps for r in cohort) / sum(r.steps for r in cohort))
    return found


def leaks(folder: Path, values: list[float]) -> list[tuple[str, float]]:
    """Which of the values are somewhere in a folder: as text of nine digits or more, or as a float's bytes.

    By chance one of 200 values is as near to one of 10⁴ numbers less than once in 10⁴ tests.
    """
    found = []
    for file in (path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        told = [float(text) for text in NUMBER.findall(content) if len(text) > 9]
        for value in values:
            packed = struct.pack("<d", value) in content
            if packed or any(math.isclose(value, number, rel_tol=1e-9) for number in told):
                found.append((file.name, value))
    return found


@pytest.mark.parametrize("more", [{}, {"adaptive": {}}, {"mechanism": "blt"}])
def test_no_exact_number_of_a_client_is_anywhere(config, played, more) -> None:
    made = config(privacy={**CLIENT, **more}, data__partition={"kind": "iid", "clients": 40}, cohort=20)
    watch = Everything()
    result = tacit.run(made, "out", dataset=blobs(), trackers=[watch])
    tacit.page("out", "out/report.html")
    exact = secrets(played)
    assert len(exact) > 60 and not leaks(Path("out"), exact)
    assert not watch.counts, "how many take part is exact, too"
    for record in (*result.metrics, *watch.records):
        assert not record.keys() & {"clients", "skipped", "train_loss", "update_norm", "clipped", "examples"}
        assert record.keys() >= {"private_loss", "private_clients", "accuracy", "epsilon"}
        assert not any(math.isclose(v, e, rel_tol=1e-9) for v in record.values() for e in exact)
    text = tacit.statement("out").text()
    assert "Metrics: each round also released" in text and "they are exact" not in text
    assert "private: a noisy sum" in Path("out/report.html").read_text(encoding="utf-8")


def test_the_adversary_would_find_them_without(config, played) -> None:
    """The same search does find exact numbers where metrics are not private."""
    privacy = {name: value for name, value in CLIENT.items() if name != "metrics"}
    made = config(privacy=privacy, data__partition={"kind": "iid", "clients": 40}, cohort=20)
    result = tacit.run(made, "out", dataset=blobs())
    assert leaks(Path("out"), secrets(played))
    assert "private_loss" not in result.metrics[0] and "train_loss" in result.metrics[0]
    assert "they are exact" in tacit.statement("out").text()


def test_they_are_near_the_truth_when_many_take_part(config, played) -> None:
    """A cohort of all 240 clients: within five deviations of what was there (false alarms: < 1e-5)."""
    made = config(
        privacy={**CLIENT, "noise": 0.5, "metrics": {"share": 0.5, "loss": 4, "accuracy": True}},
        data__partition={"kind": "iid", "clients": 240},
        data__holdout=0.5,
        cohort=240,
        local={"steps": 1, "batch": 2, "lr": 0.1},
        rounds=1,
    )
    told = tacit.run(made, "out", dataset=blobs(1200)).metrics[0]
    unit = 0.5 / math.sqrt(0.5) * math.sqrt(6)
    assert told["private_clients"] == pytest.approx(240, abs=5 * unit)
    assert told["private_failed"] == pytest.approx(0, abs=5 * unit)
    loss = sum(min(r.loss, 4.0) for r in played[0]) / 240
    assert told["private_loss"] == pytest.approx(loss, abs=10 * unit * 2 / 240)
    assert 0 <= told["private_accuracy"] < 0.7


def test_they_cost_what_is_announced_and_a_simulation_tells_both(config) -> None:
    """With the same noise and seed, ε is the same with and without: the update has the more noise."""
    plain = {**CLIENT, "entropy": "seed"}
    exact = tacit.run(config(privacy={**plain, "metrics": None}), "a", dataset=blobs())
    both = tacit.run(config(privacy=plain), "b", dataset=blobs())
    assert both.last("epsilon") == exact.last("epsilon")
    assert both.metrics[0].keys() >= {"train_loss", "private_loss", "clients", "private_clients"}


def test_they_are_the_same_on_every_engine(config) -> None:
    """Sums of whole numbers, accuracy on clients' own records among them."""
    made = {
        "privacy": {**CLIENT, "entropy": "seed", "metrics": {"accuracy": True}},
        "data__holdout": 0.3,
    }
    one = tacit.run(config(**made), "a", dataset=blobs())
    two = tacit.run(config(**made, engine__workers=2), "b", dataset=blobs())
    strip = lambda run: [{k: v for k, v in r.items() if k != "seconds"} for r in run.metrics]  # noqa: E731
    assert strip(one) == strip(two) and "private_accuracy" in one.metrics[0]


def test_at_example_level_losses_are_left_out(config, played) -> None:
    plain = tacit.run(config(privacy={**EXAMPLE, "metrics": None}), "a", dataset=blobs())
    played.clear()
    private = tacit.run(config(privacy=EXAMPLE), "b", dataset=blobs())
    assert private.last("epsilon") == plain.last("epsilon"), "made of private gradients: no cost"
    assert "train_loss" in plain.metrics[0] and "train_loss" not in private.metrics[0]
    assert {"update_norm", "clients"} <= private.metrics[0].keys()
    losses = [report.loss for cohort in played for report in cohort]
    assert losses and not leaks(Path("b"), losses)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"evaluate__clients": 3, "data__holdout": 0.3}, "set privacy.metrics.accuracy"),
        ({"evaluate__split": "validation", "data__validation": 0.2}, "judge by the test set"),
        ({"privacy": {**CLIENT, "metrics": {"accuracy": True}}}, "data.holdout"),
        ({"privacy": {**EXAMPLE, "metrics": {"accuracy": True}}, "data__holdout": 0.3}, "unit: client"),
        ({"privacy": {**CLIENT, "metrics": {"share": 2}}}, "share"),
    ],
)
def test_other_ways_to_exact_numbers_are_refused(config, more, match) -> None:
    with pytest.raises(tacit.UserError, match=match):
        tacit.run(config(**{"privacy": CLIENT, **more}), "out", dataset=blobs())
    assert not Path("out/ledger.jsonl").exists()


def test_a_task_without_accuracy_says_so(config) -> None:
    made = config(privacy={**CLIENT, "metrics": {"accuracy": True}}, data__holdout=0.3)

    class NoAccuracy(type(tacit.tasks.build("classification"))):  # type: ignore[misc]
        def summarise(self, sums: Any) -> dict[str, float]:
            return {"loss": super().summarise(sums)["loss"]}

    with pytest.raises(tacit.UserError, match="the task has no accuracy"):
        tacit.run(made, "out", dataset=blobs(), task=NoAccuracy())


def test_a_round_played_again_gets_fresh_noise() -> None:
    """Of an attempt's metrics nothing can be averaged: the second has noise of its own."""
    from tacit.privacy import ClientLevel, Clip, Metrics, Poisson, Seen, Workload

    named = ClientLevel(1.0, 1e-3, Clip(0.5), Poisson(0.5), entropy="seed", metrics=Metrics())
    cohort, workload = [Seen(True, 1.0, 0.3)] * 50, Workload(100)
    first, second = (named.measure(cohort, [], {}, 3, attempt, workload) for attempt in (0, 1))
    assert first["private_clients"] != second["private_clients"]
    assert first == named.measure(cohort, [], {}, 3, 0, workload)


def test_the_plan_says_what_they_cost(config) -> None:
    import json

    from typer.testing import CliRunner

    from tacit.cli.app import app

    privacy = {"unit": "client", "clip": 0.5, "epsilon": 3.0, "delta": 1e-3}
    plain = tacit.plan(config(privacy=privacy), dataset=blobs())
    found = tacit.plan(config(privacy={**privacy, "metrics": {"share": 0.2}}), dataset=blobs())
    assert plain["metrics"] is None and plain["noise"] == found["noise"]
    told = found["metrics"]
    assert told["epsilon_without"] < found["epsilon"] <= 3.0
    assert told["update_noise"] ** -2 + told["noise"] ** -2 == pytest.approx(found["noise"] ** -2)
    ask = [
        "plan",
        "--epsilon",
        "1",
        "--rate",
        "0.05",
        "--rounds",
        "200",
        "--delta",
        "1e-3",
        "--metrics",
        "0.1",
    ]
    done = CliRunner().invoke(app, [*ask, "--json"])
    split = json.loads(done.stdout)
    assert split["update_noise"] == pytest.approx(split["noise"] / 0.9**0.5)
    assert "private metrics: together" in CliRunner().invoke(app, ask).stdout
