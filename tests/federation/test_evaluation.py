"""What a run measures besides the test set: clients' fine-tuning, the server's train loss, lost clients."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import tacit
from command import GOOD
from command import tacit as command
from conftest import blobs
from methods_small import configured, halves, play, small
from tacit.config.build import build_job, build_probe
from tacit.errors import UserError
from tacit.federation.stopping import Watch
from tacit.privacy.sampling import Poisson
from tacit.report import compare
from tacit.report.progress import LiveProgress
from tacit.tasks import Classification, headline
from tacit.tasks.headline import KEPT

OWN = {"data.holdout": 0.25, "evaluate.clients": 4, "rounds": 3, "local.batch": 3}


def test_fine_tuning_is_measured_at_every_evaluation_and_changes_no_training() -> None:
    plain = play(configured("fedavg", OWN), "plain")
    tuned = play(configured("fedavg", OWN | {"evaluate.tune": {"epochs": 3, "lr": 0.5}}), "tuned")
    assert torch.equal(plain.theta, tuned.theta), "nothing of it is sent"
    for before, after in zip(plain.result.metrics, tuned.result.metrics, strict=True):
        assert after["personal_loss"] == before["personal_loss"]
        assert after["tuned_loss"] != after["personal_loss"]
    again = play(
        configured("fedavg", OWN | {"evaluate.tune": {"epochs": 3, "lr": 0.5, "momentum": 0.9}}), "more"
    )
    assert again.result.last("tuned_loss") != tuned.result.last("tuned_loss")


def test_one_run_is_two_rows_of_a_table() -> None:
    play(configured("fedavg", OWN | {"evaluate.tune": {"epochs": 3, "lr": 0.5}}), "run")
    rows = compare.rows(compare.find_runs([Path("run")]))
    assert [row.label for row in rows] == ["fedavg", "fedavg, tuned"]
    metric = compare.judged_by(rows)
    own = [row.own(metric) for row in rows]
    recorded = rows[0].runs[0].metrics[-1]
    assert [o.mean for o in own if o] == [recorded["personal_accuracy"], recorded["tuned_accuracy"]]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_servers_train_loss_is_its_models_loss_on_training_records(workers: int) -> None:
    config = configured("fedsam", {"evaluate.train": 20, "engine.workers": workers, "rounds": 2})
    played = play(config, "run")
    from methods_small import small

    dataset = small()
    model = halves()
    from tacit.config.build import build_population

    chosen = build_probe(config, build_population(config, dataset))
    assert len(set(chosen.tolist())) == 20
    for number in (1, 2):
        vector = played.state(number)["theta"]
        nn.utils.vector_to_parameters(vector, model.parameters())
        batch = dataset.train.prepare(dataset.train.take(chosen))
        expected = Classification().losses(model, batch).mean().item()
        record = played.result.metrics[number - 1]
        assert record["server_train_loss"] == pytest.approx(expected, rel=1e-5)
        assert record["server_train_loss"] != record["train_loss"]


class Rightness:
    """A task of one's own that counts nothing but what is right, and has no loss among its metrics."""

    def losses(self, model, batch):
        return Classification().losses(model, batch)

    def evaluate(self, model, batch):
        right = (model(batch["x"]).argmax(1) == batch["y"]).float()
        return {"right": right.sum(), "asked": torch.tensor(len(right))}

    def summarise(self, sums):
        return {"rightness": sums["right"] / sums["asked"]}


def test_a_train_loss_of_a_task_without_one_is_refused_before_training() -> None:
    with pytest.raises(
        UserError, match=r"evaluate.train: Rightness has no loss among its metrics \(rightness"
    ):
        tacit.run(configured("fedavg", {"evaluate.train": 20}), "run", dataset=small(), task=Rightness())
    assert not Path("run").exists()
    tacit.run(configured("fedavg", {"rounds": 1}), "run", dataset=small(), task=Rightness())


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"rightness": torch.tensor(1.0)}, "gives 'rightness' as a Tensor; make it a number, such as float"),
        ({"epsilon": 0.1}, "names a metric 'epsilon', which is no name or one of a round's own"),
        ([0.5], "summarise returns a list; give a number by each name"),
    ],
)
def test_metrics_that_no_record_can_hold_are_refused_before_training(metrics, told) -> None:
    """Else the first round would be charged and lost; a metric called epsilon would stand for ε."""
    task = Rightness()
    task.summarise = lambda sums: metrics
    with pytest.raises(UserError, match=told):
        tacit.run(configured("fedavg", {"rounds": 1}), "run", dataset=small(), task=task)
    assert not Path("run").exists()


def test_a_task_that_counts_in_its_own_way_is_tested_by_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"{__name__}:blobs"
    config = tacit.load(
        {
            "rounds": 1,
            "data": {"import": data, "partition": "natural"},
            "model": "logistic",
            "task": {"import": f"{__name__}:Rightness"},
            "cohort": 3,
            "local": {"steps": 1, "batch": 5, "lr": 0.1},
            "engine": {"workers": 0},
        }
    )
    tacit.run(config, "run")
    found = tacit.test("run")
    assert found.whole.keys() == {"rightness", "count"} and found.whole["count"] == 120
    assert len(found.users) == 12 and all(own["count"] == 10 for own in found.users.values())
    assert found.spread == {}, "it is judged by no metric that is known"
    code, out, err = command("test", "run", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, err) == (0, "") and "rightness" in out and "users:" not in out


def test_an_exact_train_loss_of_protected_records_is_refused() -> None:
    config = configured("dp-fedavg", {"evaluate.train": 20})
    play(config, "simulation")
    assert config.privacy is not None
    claimed = config.model_copy(update={"privacy": config.privacy.model_copy(update={"entropy": "os"})})
    with pytest.raises(UserError, match=r"evaluate\.train: an exact loss on protected records"):
        play(claimed, "claim")


def test_deviation_of_update_norms_over_clients() -> None:
    result = play(configured("fedavg"), "run").result
    first = result.metrics[0]
    assert 0 < first["update_norm_std"] < first["update_norm"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_run_that_loses_most_of_its_clients_says_so(
    form: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under a client's protection it goes on to its end; who started it must hear of it, then and at the
    end.
    """
    file = tmp_path / "lost.yaml"
    private = "privacy: {unit: client, clip: 0.2, noise: 1.0, delta: 1.0e-3}\n"
    file.write_text(GOOD.replace("cohort: 4", "cohort: 40") + private)  # everyone: no draw is empty
    losses = Classification.losses
    monkeypatch.setattr(Classification, "losses", lambda *given: losses(*given) * float("nan"))
    code, out, err = command("run", file, "--out", "r", *form, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1, "nothing was learnt"
    said = " ".join((out + err).split())
    assert "round 1: all" in said and "clients sent infinities" in said
    assert form or ("Nothing was learnt" in said and "Lower local.lr" in said)
    metrics = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    assert all(len(m["skipped"]) > m["clients"] for m in metrics)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_run_that_draws_nobody_says_so(
    form: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Poisson, "draw", lambda self, bits, population: np.empty(0, np.int64))
    file = tmp_path / "nobody.yaml"
    file.write_text(GOOD + "privacy: {unit: client, clip: 0.2, noise: 1.0, delta: 1.0e-3}\n")
    code, out, err = command("run", file, "--out", "r", *form, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1, "nothing was learnt"
    assert "chance drew no client in any round" in " ".join((out + err).split())


def test_glue_metrics_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    for classes, n in product((2, 3), (1, 17, 200)):
        y, logits = rng.integers(0, classes, n), rng.normal(size=(n, classes)).astype(np.float32)
        said = logits.argmax(1)
        task = Classification(("matthews", "f1"))
        parts = np.array_split(np.arange(n), 3)
        sums: dict[str, float] = {}
        for part in parts:
            batch = {"x": torch.from_numpy(logits[part]), "y": torch.from_numpy(y[part])}
            for name, value in task.evaluate(nn.Identity(), batch).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        found = task.summarise(sums)
        # The correlation of the indicator matrices of answers and truths, summed over the classes.
        a, b = np.eye(classes)[said], np.eye(classes)[y]
        cov = [(u - u.mean(0)) * (v - v.mean(0)) for u, v in ((a, b), (a, a), (b, b))]
        xy, xx, yy = (c.sum() for c in cov)
        assert found["matthews"] == pytest.approx(xy / np.sqrt(xx * yy) if xx * yy > 0 else 0.0, abs=1e-9)
        each = []
        for k in range(classes):
            tp, fp, fn = (
                ((said == k) & (y == k)).sum(),
                ((said == k) & (y != k)).sum(),
                ((said != k) & (y == k)).sum(),
            )
            each.append(2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 0.0)
        assert found["f1"] == pytest.approx(each[1] if classes == 2 else np.mean(each))


def test_a_run_may_be_judged_by_matthews_correlation() -> None:
    config = tacit.load(
        {
            "rounds": 1,
            "data": {"name": "blobs", "partition": {"kind": "iid", "clients": 3}},
            "model": "logistic",
            "task": {"name": "classification", "metrics": ["matthews", "f1"]},
            "cohort": 3,
            "local": {"epochs": 1, "batch": 5, "lr": 0.1},
        }
    )
    result = tacit.run(config, "run", dataset=blobs(60, classes=2))
    assert -1 <= result.best() == result.last("matthews") <= 1
    with pytest.raises(UserError, match="there is no 'mathews'"):
        Classification(("mathews",))


def test_a_model_may_be_judged_by_some_records_always_the_same(tmp_path: Path) -> None:
    data = blobs(80)

    def judges(**more: int) -> list[bytes]:
        job = build_job(configured("fedavg", {**more}), tmp_path, dataset=data)
        return [row.numpy().tobytes() for row in job.test.take(np.arange(len(job.test)))["x"]]

    everyone = judges()
    some = judges(**{"evaluate.records": 7})
    assert len(some) == len(set(some)) == 7
    assert set(some) < set(everyone)
    assert some == judges(**{"evaluate.records": 7}), "a resume is judged by the same"
    assert some != judges(**{"evaluate.records": 7, "seed": 77})
    assert judges(**{"evaluate.records": 1000}) == everyone


@pytest.mark.parametrize("method", ["fedavg", "centaur"])
def test_clients_tested_after_a_run_are_those_of_its_last_evaluation(method: str) -> None:
    """From the checkpoint and the kept personal parts alone, bit for bit; who was never drawn has none."""
    more = {"model": {"name": "mlp", "hidden": [8]}, "evaluate.tune": {"epochs": 2, "lr": 0.2}, "cohort": 1}
    last = tacit.run(configured(method, OWN | more), "run", dataset=small()).metrics[-1]
    round, found = tacit.test_clients("run", 99, dataset=small())
    assert round == last["round"] == 3 and found.keys() == {"personal", "tuned"}
    for kind, each in found.items():
        assert len(each) == 4
        for name in ("accuracy", "loss"):
            assert sum(own[name] for own in each.values()) / 4 == last[f"{kind}_{name}"]
    fewer = tacit.test_clients("run", 2, dataset=small())[1]["tuned"]
    assert len(fewer) == 2 and fewer.items() <= found["tuned"].items()


def test_clients_without_records_of_their_own_cannot_be_tested() -> None:
    tacit.run(configured("fedavg", {"model": "logistic"}), "run", dataset=small())
    with pytest.raises(UserError, match="no test split of their own"):
        tacit.test_clients("run", 2, dataset=small())


def told(trackers: list[Any]) -> list[str]:
    return [note for tracker in trackers for note in tracker.notes if "nobody trains" in note]


class Listener(tacit.Tracker):
    """Remembers the notes of a run."""

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        self.notes = facts["notes"]


def test_a_run_whose_clients_keep_a_part_is_judged_by_their_own_models() -> None:
    heard = Listener()
    best = {"evaluate.keep_best": True, "privacy": None}
    result = play(configured("centaur", OWN | best), "own", trackers=[heard]).result
    assert told([heard]) == []
    assert headline(result.metrics[-1]).name == "personal_accuracy"
    assert result.best() == max(record["personal_accuracy"] for record in result.metrics)
    assert result.kept is not None and "personal accuracy" in result.kept
    table = compare.rows(compare.find_runs([result.path]))
    assert compare.judged_by(table).name == "personal_accuracy" and not compare.untrained(table)
    plain = play(configured("fedavg", OWN), "fedavg").result
    assert headline(plain.metrics[-1]).name == "accuracy", "what all of them train is judged on the test set"
    play(configured("fedavg"), "without")
    mixed = compare.rows(compare.find_runs([result.path, Path("without")]))
    assert compare.judged_by(mixed).name == "accuracy" and compare.untrained(mixed)


def test_a_number_with_a_part_that_nobody_trains_is_told_to_be_one() -> None:
    heard = Listener()
    result = play(configured("centaur"), "plain", trackers=[heard]).result
    (note,) = told([heard])
    assert "clients keep head" in note and "data.holdout: 0.1 and evaluate.clients: 100" in note
    table = compare.rows(compare.find_runs([result.path]))
    assert compare.judged_by(table).name == "accuracy" and compare.untrained(table)
    play(configured("fedavg"), "fedavg", trackers=[heard])
    assert told([heard]) == []


def test_the_progress_and_the_card_tell_of_clients_own_models() -> None:
    screen = Console(file=io.StringIO(), width=200)
    result = play(configured("centaur", OWN), "own", trackers=[LiveProgress(screen)]).result
    shown = f"personal accuracy {result.last('personal_accuracy'):.1%}"
    assert isinstance(screen.file, io.StringIO) and shown in screen.file.getvalue()
    assert f" {result.last('accuracy'):.1%}" not in screen.file.getvalue().replace(shown, "")
    tacit.export(result.path, Path("exported"), model=halves(), dataset=small())
    card = (Path("exported") / "README.md").read_text()
    assert f"{shown} on clients' own test records" in card and "Each client trained head for itself" in card
    without = play(configured("centaur"), "plain").result
    tacit.export(without.path, Path("exported-plain"), model=halves(), dataset=small())
    card = (Path("exported-plain") / "README.md").read_text()
    assert "which nobody trained, and which that number is with" in card


def test_a_card_tells_no_exact_number_of_protected_clients_own_records() -> None:
    config = configured("centaur", OWN)
    assert config.privacy is not None
    claimed = config.model_copy(update={"privacy": config.privacy.model_copy(update={"entropy": "os"})})
    result = play(claimed, "claimed").result
    tacit.export(result.path, Path("exported"), model=halves(), dataset=small())
    card = (Path("exported") / "README.md").read_text()
    assert "which that number is with" in card and "clients' own test records" not in card


def test_the_best_so_far_of_clients_own_models_survives_a_checkpoint() -> None:
    watch, later = Watch(), Watch()
    watch.hear({"round": 1, "accuracy": 0.9, "personal_accuracy": 0.5, KEPT: 3})
    later.restore(watch.saved())
    assert not later.hear({"round": 2, "accuracy": 0.95, "personal_accuracy": 0.4, KEPT: 3})
    assert later.hear({"round": 3, "accuracy": 0.1, "personal_accuracy": 0.6, KEPT: 3})
