"""A federated run does what its pseudo-code says, on every engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tacit
from conftest import blobs
from tacit.algorithms import Algorithm, FedAvg, FedProx
from tacit.engine.states import STATES
from tacit.models import build
from tacit.vector import Layout, Vectors, read_values

pytestmark = pytest.mark.filterwarnings("error")


def weights(result: tacit.Result) -> Tensor:
    return read_values(result.model, Layout.of(result.model))


def test_one_client_one_full_batch_step_is_central_sgd(config, dataset) -> None:
    n = len(dataset.train)
    settings = config(
        data__partition={"kind": "iid", "clients": 1}, cohort=1, rounds=3,
        local={"steps": 1, "batch": n, "lr": 0.3}, engine__workers=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = build("mlp", dataset.shape, dataset.classes, hidden=[8])
    central = build("mlp", dataset.shape, dataset.classes, hidden=[8])
    central.load_state_dict(model.state_dict())
    batch = dataset.train.prepare(dataset.train.take(np.arange(n)))
    optimizer = torch.optim.SGD(central.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(central(batch["x"]), batch["y"]).backward()
        optimizer.step()
    result = tacit.run(settings, model=model, dataset=dataset)
    torch.testing.assert_close(
        weights(result), read_values(central, Layout.of(central)), rtol=1e-5, atol=1e-6
    )


def test_fedavg_is_the_mean_of_clients_trained_apart(config, dataset) -> None:
    """The engine's sum against a literal loop over clients, each trained from a fresh copy."""
    settings = config(rounds=1, cohort=12, local={"steps": 1, "batch": 1000, "lr": 0.2})
    torch.manual_seed(1)
    model = build("mlp", dataset.shape, dataset.classes, hidden=[8])
    layout = Layout.of(model)
    theta = read_values(model, layout)
    from tacit.config.build import build_population

    population = build_population(settings, dataset)
    moved = []
    for client in range(12):
        copy = build("mlp", dataset.shape, dataset.classes, hidden=[8])
        copy.load_state_dict(model.state_dict())
        batch = dataset.train.prepare(dataset.train.take(population.train(client)))
        nn.functional.cross_entropy(copy(batch["x"]), batch["y"]).backward()
        grad = torch.cat([p.grad.flatten() for p in copy.parameters()])
        moved.append(theta - 0.2 * grad)
    result = tacit.run(settings, model=model, dataset=dataset)
    torch.testing.assert_close(weights(result), torch.stack(moved).mean(0), rtol=1e-5, atol=1e-6)


def test_weights_by_examples(config) -> None:
    """Two clients of 10 and 30 records: the mean leans 1 : 3."""

    @dataclass(frozen=True)
    class Count(Algorithm):
        def client(self, msg: Vectors, memory: Vectors, work) -> tuple[Vectors, Vectors]:
            for _ in work.steps():
                pass
            return {"delta": torch.full_like(msg["theta"], float(work.examples))}, {}

    dataset = blobs(40)
    users = np.repeat([0, 1], [10, 30])
    dataset = replace(dataset, train=tacit.ArrayRecords(dataset.train.x, dataset.train.y, users=users))
    for kind, mean in (("uniform", 20.0), ("examples", (10 * 10 + 30 * 30) / 40)):
        settings = config(data__partition={"kind": "natural"}, cohort=2, rounds=1, weights=kind)
        before = build("logistic", dataset.shape, dataset.classes)
        start = read_values(before, Layout.of(before))
        result = tacit.run(settings, f"run-{kind}", model=before, dataset=dataset, algorithm=Count())
        torch.testing.assert_close(weights(result) - start, torch.full_like(start, mean))


def test_fedprox_without_a_pull_is_fedavg(config, dataset) -> None:
    settings = config()
    plain = tacit.run(settings, "a", dataset=dataset, algorithm=FedAvg())
    proximal = tacit.run(settings, "b", dataset=dataset, algorithm=FedProx(mu=0.0))
    pulled = tacit.run(settings, "c", dataset=dataset, algorithm=FedProx(mu=1.0))
    assert torch.equal(weights(plain), weights(proximal))
    assert not torch.equal(weights(plain), weights(pulled))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "batchnorm"])
def test_the_engine_does_not_matter(config, dataset, model) -> None:
    """In-process and pools of 1, 2 and 3 workers: the same model bit for bit, buffers included."""

    def network() -> nn.Module:
        torch.manual_seed(3)
        if model == "mlp":
            return build("mlp", dataset.shape, dataset.classes, hidden=[8])
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.2), nn.Flatten(), nn.Linear(16, 4)
        )

    results = []
    for workers in (0, 1, 2, 3):
        settings = config(
            engine__workers=workers, cohort=11, rounds=3, server={"optimizer": "adam", "lr": 0.01}
        )
        results.append(tacit.run(settings, f"run-{workers}", model=network(), dataset=dataset))
    for other in results[1:]:
        state = other.model.state_dict()
        for name, value in results[0].model.state_dict().items():
            if "num_batches" not in name:  # an integer that no computation here uses
                assert torch.equal(value, state[name]), name
        scores = [[r["accuracy"] for r in result.metrics] for result in (results[0], other)]
        assert scores[0] == scores[1]


@dataclass(frozen=True)
class Explodes(Algorithm):
    """A custom algorithm; the clients named in `bad` send infinities."""

    bad: tuple[int, ...] = ()
    from_round: int = 0

    def client(self, msg: Vectors, memory: Vectors, work) -> tuple[Vectors, Vectors]:
        y = work.load(msg["theta"])
        for lr in work.steps():
            y.sub_(work.gradient(), alpha=lr)
        delta = y - msg["theta"]
        if work.round >= self.from_round and len(self.bad) == 12:
            delta[0] = float("nan")
        if work.examples in self.bad:
            delta[-1] = float("inf")
        return {"delta": delta}, {}


def test_a_client_that_explodes_is_left_out_and_named(config) -> None:
    dataset = blobs(120)
    sizes = np.r_[np.full(11, 9), 21]
    users = np.repeat(np.arange(12), sizes)
    dataset = replace(dataset, train=tacit.ArrayRecords(dataset.train.x, dataset.train.y, users=users))
    settings = config(data__partition={"kind": "natural"}, cohort=12, rounds=2)
    result = tacit.run(settings, dataset=dataset, algorithm=Explodes(bad=(21,)))
    assert [r["skipped"] for r in result.metrics] == [[11], [11]]
    assert [r["clients"] for r in result.metrics] == [11, 11]
    assert torch.isfinite(weights(result)).all()


def test_when_all_explode_the_run_stops_with_its_last_good_checkpoint(config, dataset) -> None:
    algorithm = Explodes(bad=tuple(range(-12, 0)), from_round=2)
    with pytest.raises(tacit.UserError, match=r"round 3: the updates of all 5 clients .* round 2 is saved"):
        tacit.run(config(rounds=5), "run", dataset=dataset, algorithm=algorithm)
    with pytest.raises(tacit.UserError, match="pass the one it had, or start a new run"):
        tacit.resume("run", dataset=dataset, algorithm=FedAvg())
    with pytest.raises(tacit.UserError, match=r"round 3: .* round 2 is saved"):
        tacit.resume("run", dataset=dataset, algorithm=algorithm)
    assert (Path("run") / "checkpoint" / "000002").is_dir()


def test_an_error_in_a_client_says_where(config, dataset) -> None:
    @dataclass(frozen=True)
    class Broken(Algorithm):
        def client(self, msg: Vectors, memory: Vectors, work) -> tuple[Vectors, Vectors]:
            for _ in work.steps():
                raise ZeroDivisionError("my mistake")
            return {}, {}

    with pytest.raises(Exception, match=r"client \d+, round 1, step 1: ZeroDivisionError: my mistake"):
        tacit.run(config(), dataset=dataset, algorithm=Broken())


def test_an_upload_that_was_not_declared_is_refused(config, dataset) -> None:
    @dataclass(frozen=True)
    class Smuggler(FedAvg):
        def client(self, msg: Vectors, memory: Vectors, work) -> tuple[Vectors, Vectors]:
            upload, memory = super().client(msg, memory, work)
            return {**upload, "secret": torch.ones(3)}, memory

    with pytest.raises(Exception, match=r"sent .*secret.* but its uploads\(\) declares"):
        tacit.run(config(), dataset=dataset, algorithm=Smuggler())


def test_memory_follows_the_client_and_survives(config, dataset) -> None:
    """Each client counts its own visits; the counts agree with who was drawn, also after a resume."""

    @dataclass(frozen=True)
    class Counting(FedAvg):
        def client(self, msg: Vectors, memory: Vectors, work) -> tuple[Vectors, Vectors]:
            upload, _ = super().client(msg, memory, work)
            return upload, {"visits": memory.get("visits", torch.zeros(1)) + 1}

    from tacit.engine import DirectoryStates
    from tacit.federation import checkpoint

    settings = config(rounds=6)
    result = tacit.run(settings, "run", dataset=dataset, algorithm=Counting())
    saved, _ = checkpoint.newest(result.path / "checkpoint")
    store = DirectoryStates(result.path / STATES)
    visits = {int(c): store.load(int(c), v)["visits"].item() for c, v in saved.facts["versions"].items()}

    from tacit.privacy.mechanisms.plain import repeatable_cohort
    from tacit.privacy.sampling import FixedSize

    expected = np.bincount(
        np.concatenate([repeatable_cohort(FixedSize(5), 12, 0, r) for r in range(6)]), minlength=12
    )
    assert [visits.get(c, 0) for c in range(12)] == expected.tolist()
    files = list((result.path / STATES).rglob("*.safetensors"))
    assert len(files) <= 2 * len(visits), "old versions are removed"


def test_schedules_reach_the_clients(config, dataset) -> None:
    settings = config(rounds=4, local__schedule={"kind": "factor", "factor": 0.5})
    result = tacit.run(settings, dataset=dataset)
    assert [r["lr"] for r in result.metrics] == [0.1, 0.05, 0.025, 0.0125]


def test_local_clip_bounds_a_step(config, dataset) -> None:
    settings = config(rounds=1, local={"steps": 1, "batch": 1000, "lr": 1.0, "clip": 0.01}, cohort=12)
    result = tacit.run(settings, dataset=dataset)
    assert result.metrics[0]["update_norm"] == pytest.approx(0.01, rel=1e-4)


def test_personal_evaluation_uses_the_clients_own_split(config, dataset) -> None:
    settings = config(rounds=2, data__holdout=0.2, evaluate={"every": 2, "clients": 6})
    result = tacit.run(settings, dataset=dataset)
    assert "personal_accuracy" in result.metrics[-1]
    assert "personal_accuracy" not in result.metrics[0]


def test_poisson_cohorts_vary_and_an_empty_one_is_survived(config, dataset) -> None:
    result = tacit.run(config(rounds=30, cohort={"size": 1, "sampling": "poisson"}), dataset=dataset)
    sizes = [r["clients"] for r in result.metrics]
    assert 0 in sizes
    assert max(sizes) > 1


def test_learning_happens_on_real_pictures(config) -> None:
    settings = config(
        rounds=5, data__partition={"kind": "iid", "clients": 50}, model={"name": "mlp", "hidden": [64]},
        cohort=10, local={"epochs": 1, "batch": 20, "lr": 0.1},
    )  # fmt: skip
    assert tacit.run(settings).last("accuracy") > 0.65
