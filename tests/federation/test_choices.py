"""Early stopping, keeping the best model, changing a resumed run, other trackers, and refused runs."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import tacit
from command import GOOD
from command import tacit as run_command
from tacit.federation.stopping import Watch
from tacit.federation.tracking import read_metrics


def config(**settings: Any) -> tacit.config.Config:
    small = {
        "rounds": 6, "cohort.size": 2, "local.steps": 1, "data.partition.clients": 20, "evaluate.records": 50,
    }  # fmt: skip
    return tacit.load("c.yaml", {**small, **settings})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(GOOD, encoding="utf-8")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: run_command(*arguments, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Tests whose accuracy is as told, whatever the model."""
    values: list[float] = []
    monkeypatch.setattr(
        "tacit.federation.run.evaluation", lambda server, engine: {"accuracy": values[server.round - 1]}
    )
    return values


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_a_run_stops_when_it_no_longer_improves_and_keeps_the_best(scripted: list[float]) -> None:
    scripted += [0.2, 0.5, 0.4, 0.5, 0.9, 0.9]
    best = tacit.run(config(rounds=2), "two").model
    result = tacit.run(config(**{"evaluate.patience": 2, "evaluate.keep_best": True}), "run")
    assert result.finished and len(result.metrics) == 4
    assert (
        result.stopped == "accuracy has not improved for 2 tests: the best, accuracy 50.0%, was after round 2"
    )
    assert result.kept == "the best, accuracy 50.0%, was after round 2"
    assert torch.equal(flat(result.model), flat(best))
    assert torch.equal(flat(tacit.trained("run")), flat(best)), "and so has whoever asks later"
    assert tacit.test("run").round == 2
    again = tacit.resume("run")
    assert again.stopped == result.stopped and len(again.metrics) == 4, "it has stopped, and stays so"
    longer = tacit.resume("run", overrides={"evaluate.patience": None})
    assert len(longer.metrics) == 6 and longer.kept == "the best, accuracy 90.0%, was after round 5"


def test_a_resume_remembers_the_tests_before_it(scripted: list[float]) -> None:
    scripted += [0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    settings = {"evaluate.patience": 4, "evaluate.keep_best": True}
    tacit.run(config(rounds=2, **settings), "run")
    result = tacit.resume("run", rounds=6)
    assert len(result.metrics) == 5 and "was after round 1" in str(result.kept)


def test_one_test_is_told_as_one() -> None:
    watch = Watch(patience=1)
    assert watch.hear({"round": 1, "accuracy": 0.5}) and not watch.hear({"round": 2, "accuracy": 0.5})
    assert str(watch.stalled).startswith("accuracy has not improved for 1 test: the best, accuracy 50.0%")


def test_what_is_no_number_is_never_the_best() -> None:
    watch = Watch(patience=1)
    assert not watch.hear({"round": 1, "accuracy": float("nan")})
    assert watch.stalled and watch.hear({"round": 2, "accuracy": 0.1}) and not watch.stalled
    assert not watch.hear({"round": 3, "train_loss": 0.1}) and not watch.stalled, "not a test"
    error = Watch()
    assert [error.hear({"round": n, "wer": w}) for n, w in [(1, 0.5), (2, 0.6), (3, 0.4)]] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("key", ["evaluate.patience=2", "evaluate.keep_best=true"])
def test_choosing_under_a_guarantee_is_refused(key: str, command) -> None:
    private = ["privacy.unit=client", "privacy.delta=1e-3", "privacy.clip=1", "privacy.noise=1"]
    sets = [part for setting in (*private, key) for part in ("--set", setting)]
    code, _out, err = command("run", "c.yaml", *sets)
    assert (code, len(err.splitlines())) == (2, 1) and "the guarantee does not pay for" in err
    simulated = [*sets, "--set", "privacy.entropy=seed", "--set", "evaluate.records=50", "--json"]
    assert command("run", "c.yaml", *simulated)[0] == 0


def test_a_resume_changes_what_may_change_and_nothing_else(command) -> None:
    tacit.run(config(rounds=2), "run")
    before = Path("run/config.yaml").read_text(encoding="utf-8")
    for key in ("local.lr=1", "seed=3", "evaluate.split=validation", "data.name=mnist", "round=3"):
        code, _, err = command("resume", "run", "--set", key)
        assert code == 2 and len(err.splitlines()) == 1
        assert f"--set {key.partition('=')[0]}: a run is one experiment" in err and "rounds, engine" in err
    assert Path("run/config.yaml").read_text(encoding="utf-8") == before
    longer = ["--set", "rounds=3", "--set", "checkpoint.every=5", "--set", "evaluate.every=3"]
    assert command("resume", "run", *longer, "--json")[0] == 0
    changed = Path("run/config.yaml").read_text(encoding="utf-8").splitlines()
    differ = [(a, b) for a, b in zip(before.splitlines(), changed, strict=True) if a != b and a[0] != "#"]
    assert differ == [("rounds: 2", "rounds: 3")], "how it is computed is not recorded"
    assert len(read_metrics(Path("run/metrics.jsonl"))) == 3
    assert command("verify", "run")[0] == 0


# --- trackers -------------------------------------------------------------------------------------------


class FakeWandb(types.ModuleType):
    def __init__(self, fails: str = "") -> None:
        super().__init__("wandb")
        self.told: list[Any] = []
        self.fails = fails

    def init(self, **given: Any) -> FakeWandb:
        if self.fails == "init":
            raise ConnectionError("no network")
        self.told.append(given)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.fails == "log":
            raise ValueError("quota")
        self.told.append((step, numbers))

    def finish(self) -> None:
        self.told.append("finished")


def test_weights_and_biases_hears_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tacit.run(config(rounds=2, trackers=["wandb"]), "run")
    start, one, two, end = fake.told
    assert start["config"]["rounds"] == 2 and start["name"] == "run" and end == "finished"
    assert (one[0], two[0]) == (1, 2) and two[1]["accuracy"] == read_metrics(Path("run/metrics.jsonl"))[1][
        "accuracy"
    ]
    tacit.resume("run", rounds=3)
    assert fake.told[4]["id"] == start["id"] and fake.told[5][0] == 3, "a resumed run goes on in its own"


@pytest.mark.parametrize("fails", ["init", "log"])
def test_a_tracker_that_fails_never_ends_a_run(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails))
    with pytest.warns(RuntimeWarning, match="WeightsAndBiases failed"):
        assert tacit.run(config(rounds=2, trackers=["wandb"]), "run").finished


def test_mlflow_hears_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    made = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            assert name == "tacit"

        def create_experiment(self, name: str) -> str:
            return "e1"

        def search_runs(self, experiments: list[str], query: str, max_results: int) -> list[Any]:
            return [made] if told else []

        def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
            return made

        def log_param(self, run: str, key: str, value: str) -> None:
            told.append((key, value))

        def log_batch(self, run: str, metrics: list[Any]) -> None:
            told.append({name: value for name, value, _, step in metrics} | {"step": metrics[0][3]})

        def set_terminated(self, run: str) -> None:
            told.append(run)

    fake, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    fake.MlflowClient, entities.Metric = Client, lambda *parts: parts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    result = tacit.run(config(rounds=2, trackers=["mlflow"]), "run")
    assert ("rounds", "2") in told and told[-1] == "r1"
    assert told[-2]["accuracy"] == result.last("accuracy") and told[-2]["step"] == 2
    tacit.resume("run", rounds=3)
    assert told[-2]["step"] == 3 and [t for t in told if t == ("rounds", "3")] == []


def test_a_tracker_that_is_not_installed_is_refused_and_leaves_nothing(command, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = command("run", "c.yaml", "--set", "trackers=[wandb]")
    assert (code, err) == (2, "tacit: trackers: wandb is not installed; pip install 'tacit[wandb]'\n")
    assert not list(Path("runs").iterdir())


# --- refused before it began ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        "engine.device=cuda:93",
        "engine={kind: pool, workers: 2, device: [cuda:93]}",
        "engine={kind: flower, federation: nowhere}",
        "engine={kind: ray, address: nowhere}",
    ],
)
def test_a_run_refused_for_where_it_would_compute_leaves_no_folder(setting: str, command) -> None:
    code, _out, err = command("run", "c.yaml", "--set", setting)
    assert code == 2 and len(err.splitlines()) == 1
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
    code, *_ = command("run", "c.yaml", "--set", setting, "--out", "mine")
    assert code == 2 and not Path("mine").exists()


def test_a_refused_run_leaves_what_was_there(command) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine", encoding="utf-8")
    assert command("run", "c.yaml", "--set", "engine.device=cuda:93", "--out", "mine")[0] == 2
    assert [file.name for file in Path("mine").iterdir() if file.name != "lock"] == ["notes.txt"]
