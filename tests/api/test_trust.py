"""Trustworthy results: nothing changes a result or a guarantee without a message."""

from __future__ import annotations

import copy
import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tacit
from command import tacit as cli
from conftest import blobs
from tacit import tasks
from tacit.algorithms import FedAvg, FedProx
from tacit.models import build
from tacit.report import compare

CLIENT = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: cli(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def network(dataset: tacit.Dataset, hidden: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return build("mlp", dataset.shape, dataset.classes, hidden=[hidden])


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# --- the caller's model -------------------------------------------------------------------------------------


def test_the_callers_model_is_not_trained_and_two_runs_start_alike(config, dataset) -> None:
    model = network(dataset)
    before = copy.deepcopy(model)
    first = tacit.run(config(rounds=1), "a", model=model, dataset=dataset)
    second = tacit.run(config(rounds=1), "b", model=model, dataset=dataset)
    assert same(model, before), "a run must leave the caller's object as it was"
    assert not same(first.model, before)
    assert same(first.model, second.model), "the second run must not start where the first ended"


@pytest.mark.parametrize("how", ["result", "trained", "copy"])
def test_a_model_that_a_run_has_trained_brings_its_cost_along(config, dataset, how) -> None:
    result = tacit.run(config(rounds=2, privacy=CLIENT), "first", dataset=dataset)
    model = {"result": result.model, "copy": copy.deepcopy(result.model)}.get(how)
    model = tacit.trained("first", dataset=dataset) if model is None else model
    alone = tacit.run(config(rounds=2, privacy=CLIENT), "alone", dataset=dataset)
    after = tacit.run(config(rounds=2, privacy=CLIENT), "after", model=model, dataset=dataset)
    assert tacit.statement("after").carried == 2
    assert after.last("epsilon") > alone.last("epsilon")
    shutil.rmtree("first")
    with pytest.raises(tacit.UserError, match="which is gone"):
        tacit.run(config(privacy=CLIENT), "lost", model=model, dataset=dataset)


def test_a_model_trained_without_a_guarantee_is_refused_for_a_private_run(config, dataset) -> None:
    result = tacit.run(config(rounds=1), "first", dataset=dataset)
    with pytest.raises(tacit.UserError, match="without a guarantee"):
        tacit.run(config(rounds=1, privacy=CLIENT), "next", model=result.model, dataset=dataset)
    assert not Path("next").exists()


# --- what a run was given, and resuming ---------------------------------------------------------------------


@dataclass(frozen=True)
class Mine(FedAvg):
    pull: float = 0.5


def test_a_resume_with_another_algorithm_is_refused_with_what_to_pass(config, dataset, command) -> None:
    tacit.run(config(rounds=1), "run", dataset=dataset, algorithm=Mine(pull=0.25))
    again = {"dataset": dataset}
    for other, message in (
        (None, r"tacit\.resume\('run', dataset=.*, algorithm=Mine\(.*pull=0.25\)\)"),
        (Mine(pull=0.5), r"was Mine\(.*pull=0.25\).*this is Mine\(.*pull=0.5\)"),
        (FedProx(mu=1.0), r"this is FedProx\(.*mu=1.0\)"),
    ):
        with pytest.raises(tacit.UserError, match=message):
            tacit.resume("run", algorithm=other, **again)
    assert tacit.resume("run", algorithm=Mine(pull=0.25), **again).finished
    with pytest.raises(tacit.UserError, match="leave task= out"):
        tacit.resume("run", algorithm=Mine(pull=0.25), task=tasks.build("classification"), **again)
    code, _, err = command("resume", "run")
    assert code == 2 and "dataset=Dataset(name='blobs')" in err, (
        "the command line says what Python has to pass"
    )


def test_a_resume_with_code_that_changed_is_refused(config, dataset) -> None:
    def algorithm(factor: int) -> FedAvg:
        # The same name, module and options; only what it does differs.
        source = f"class Own(FedAvg):\n    def client(self, msg, memory, work):\n        {factor}\n"
        source += "        return FedAvg.client(self, msg, memory, work)\n"
        file = Path(f"own{factor}.py")
        file.write_text("from tacit.algorithms import FedAvg\n" + source)
        import importlib.util

        spec = importlib.util.spec_from_file_location(f"own{factor}", file.absolute())
        assert spec is not None and spec.loader is not None
        import sys

        module = importlib.util.module_from_spec(spec)
        sys.modules[f"own{factor}"] = module
        spec.loader.exec_module(module)
        module.Own.__module__ = f"own{factor}"
        return module.Own()

    one, other = algorithm(1), algorithm(2)
    from tacit.federation.passed import describe

    assert (
        describe(algorithm=one)["algorithm"].fingerprint != describe(algorithm=other)["algorithm"].fingerprint
    )
    tacit.run(config(rounds=1), "run", dataset=dataset, algorithm=one)
    with pytest.raises(tacit.UserError, match="pass the one it had"):
        tacit.resume("run", dataset=dataset, algorithm=other)


def test_other_layers_and_other_records_are_other_objects(config, dataset) -> None:
    tacit.run(config(rounds=1), "run", model=network(dataset), dataset=dataset)
    with pytest.raises(tacit.UserError, match="other layers"):
        tacit.resume("run", model=network(dataset, 9), dataset=dataset)
    with pytest.raises(tacit.UserError, match="other records"):
        tacit.resume("run", model=network(dataset), dataset=blobs(seed=7))
    assert tacit.resume("run", model=network(dataset), dataset=blobs()).finished


def test_a_class_is_not_an_instance(config, dataset) -> None:
    with pytest.raises(tacit.UserError, match=r"algorithm: Mine is a class; .*algorithm=Mine\(…\)"):
        tacit.run(config(), "run", dataset=dataset, algorithm=Mine)
    assert not Path("run").exists()


# --- compare ------------------------------------------------------------------------------------------------


def test_objects_with_other_options_are_not_seeds_of_each_other(config, dataset) -> None:
    for seed, algorithm in enumerate([FedProx(mu=0.1), FedProx(mu=0.5), FedAvg()]):
        tacit.run(config(rounds=1, seed=seed), f"runs/{seed}", dataset=dataset, algorithm=algorithm)
    table = compare.rows(compare.find_runs([Path("runs")]))
    assert [len(row.runs) for row in table] == [1, 1, 1]
    assert [row.label for row in table] == ["FedProx, mu 0.1", "FedProx, mu 0.5", "FedAvg, momentum 0"]


def test_models_and_data_that_were_passed_in_are_told_apart(config, dataset) -> None:
    tacit.run(config(rounds=1, seed=0), "runs/a", model=network(dataset, 8), dataset=dataset)
    tacit.run(config(rounds=1, seed=1), "runs/b", model=network(dataset, 9), dataset=dataset)
    tacit.run(config(rounds=1, seed=2), "runs/c", model=network(dataset, 8), dataset=blobs(seed=3))
    tacit.run(config(rounds=1, seed=3), "runs/d", model=network(dataset, 8), dataset=blobs())
    table = {row.runs[0].folder.name: row for row in compare.rows(compare.find_runs([Path("runs")]))}
    assert {name: len(row.runs) for name, row in table.items()} == {"a": 2, "b": 1, "c": 1}
    assert len({row.label for row in table.values()}) == 3


def test_a_run_that_a_budget_ended_is_finished(config, dataset) -> None:
    free = tacit.run(config(rounds=3, privacy=CLIENT), "free", dataset=dataset)
    budget = {**CLIENT, "epsilon": free.metrics[1]["epsilon"] + 1e-6}
    tacit.run(config(rounds=3, privacy=budget), "runs/spent", dataset=dataset)
    (run,) = compare.find_runs([Path("runs")])
    assert run.rounds_done == 2 and run.finished


# --- weak and empty guarantees ------------------------------------------------------------------------------


def test_a_loose_delta_and_a_large_epsilon_are_told_of(config, dataset) -> None:
    privacy, natural = {"unit": "client", "clip": 0.5, "noise": 0.2, "delta": 0.1}, {"kind": "natural"}
    with pytest.warns(RuntimeWarning) as said:
        tacit.run(config(rounds=2, data__partition=natural, privacy=privacy), "run", dataset=dataset)
    told = " ".join(str(warning.message) for warning in said)
    assert "not below 1 ÷ 12 clients" in told and "ε has passed 20" in told
    assert float(told.partition("such as ")[2].partition(" ")[0]) < 1 / 12, "what is advised would do"
    statement = tacit.statement("run")
    assert "not below 1 ÷ 12" in statement.text() and "bounds next to nothing" in statement.text()
    assert len(statement.to_dict()["warnings"]) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tacit.run(config(rounds=2, data__partition=natural, privacy=CLIENT), "sound", dataset=dataset)
    assert "Mind" not in tacit.statement("sound").text()


class Explodes(FedAvg):
    def client(self, msg, memory, work):
        return {"delta": torch.full_like(msg["theta"], float("inf"))}, {}


def test_a_private_run_in_which_every_client_failed_says_so(config, dataset) -> None:
    with pytest.warns(RuntimeWarning, match=r"round 1: all \d+ clients sent infinities"):
        result = tacit.run(
            config(rounds=3, cohort=12, privacy=CLIENT), "run", dataset=dataset, algorithm=Explodes()
        )  # everyone: no draw is empty
    assert result.trouble is not None and "Nothing was learnt" in result.trouble


class Nothing(nn.Module):
    """Answers with what is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1)) * float("nan")


def test_a_model_whose_answers_are_no_numbers_ends_no_run_in_silence(config, dataset) -> None:
    """At example level clipping turns its gradients into zeros, so every client seems sound."""
    example = {"unit": "example", "clip": 0.5, "noise": 2.0, "delta": 1e-3}
    result = tacit.run(config(rounds=2, privacy=example), "run", dataset=dataset, model=Nothing())
    assert result.trouble is not None and "not a number" in result.trouble


# --- the unit is the person's choice ------------------------------------------------------------------------


def test_a_preset_does_not_choose_the_unit_where_there_are_users(config, dataset) -> None:
    for method, whose in (("dp-fedavg", "single records"), ("dp-fedavg-client", "whole clients")):
        with pytest.raises(tacit.UserError, match=rf"privacy\.unit: blobs has users.*{whose}.*unit: client"):
            tacit.run(config(rounds=1, method=method), "asked", dataset=dataset)
    chosen = config(rounds=1, method="dp-fedavg", privacy__unit="example")
    assert tacit.run(chosen, "chosen", dataset=dataset).finished
    natural = config(rounds=1, method="dp-fedavg-client", data__partition={"kind": "natural"})
    assert tacit.run(natural, "natural", dataset=dataset).finished, (
        "every user is a client, and protected whole"
    )
    anonymous = replace(dataset, train=tacit.ArrayRecords(dataset.train.x, dataset.train.y))
    assert tacit.run(config(rounds=1, method="dp-fedavg"), "free", dataset=anonymous).finished
    assert tacit.resume("free", dataset=anonymous).finished


# --- trackers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["start", "clients", "round", "close"])
def test_a_failing_tracker_never_ends_a_run(config, dataset, stage) -> None:
    class Bad(tacit.Tracker):
        calls = 0

    def fail(self, *arguments: object) -> None:
        Bad.calls += 1
        raise RuntimeError("no connection")

    setattr(Bad, stage, fail)
    with pytest.warns(RuntimeWarning, match=f"tracker Bad failed in {stage}"):
        result = tacit.run(config(rounds=3), "run", dataset=dataset, trackers=[Bad()])
    assert result.finished and len(result.metrics) == 3
    assert Bad.calls == 1


def test_a_tracker_needs_only_what_it_cares_about(config, dataset) -> None:
    seen: list[int] = []

    class Ends:
        def round(self, record: dict[str, Any]) -> None:
            seen.append(record["round"])
            record.clear()

    result = tacit.run(config(rounds=2), "run", dataset=dataset, trackers=[Ends()])
    assert seen == [1, 2] and np.isfinite(result.last("accuracy"))
