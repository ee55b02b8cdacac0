"""The simulators that `bench/simulation.py` compares, each at its best on the same workload.

Every contender is a separate process that trains round after round. Between two rounds it asks `Turns` for
permission to continue, so the benchmark can alternate them on a machine that may be busy.

The workload: 1000 clients of 50 records, cohorts of 50, one local epoch of batches of 10, SGD. The records
are random pixels, because speed does not depend on what a picture shows.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import tacit
from tacit import models

CLIENTS, RECORDS, COHORT, BATCH, LR = 1000, 50, 50, 10, 0.05
FOREVER = 10**8
MODELS: Mapping[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "cnn": ((3, 32, 32), {}),
    "mlp": ((1, 28, 28), {"hidden": (200,)}),
}


class Turns:
    """Told how many rounds to play, a contender plays them and answers with the seconds they took."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._left = 0
        self._start = 0.0

    def begin(self) -> None:
        """Ready: wait for a turn. Leaves the program when there are no more."""
        try:
            self._left = self._pipe.recv()
        except EOFError:
            self._left = 0
        if self._left == 0:
            raise SystemExit
        self._start = time.perf_counter()

    def played(self) -> None:
        """One round is done."""
        self._left -= 1
        if self._left == 0:
            try:
                self._pipe.send(time.perf_counter() - self._start)
            except (
                OSError
            ):  # nobody listens any more; as an error it would only end this tracker, not the run
                raise SystemExit from None
            self.begin()


def build(name: str) -> nn.Module:
    shape, options = MODELS[name]
    torch.manual_seed(0)
    return models.build(name, shape, 10, **options)


def pixels(name: str, records: int = RECORDS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (CLIENTS * records, *MODELS[name][0]), np.uint8)
    return x, rng.integers(0, 10, CLIENTS * records)


def floats(name: str) -> tuple[Tensor, Tensor]:
    """The records as a model wants them, converted once: [clients, records, …]."""
    x, y = pixels(name)
    shape = MODELS[name][0]
    prepared = torch.from_numpy(x).float().div_(127.5).sub_(1).view(CLIENTS, RECORDS, *shape)
    return prepared, torch.from_numpy(y).view(CLIENTS, RECORDS)


def bare(turns: Turns, name: str) -> None:
    """What one would write by hand: one model, one thread, data ready in memory, nothing else.

    No optimizer object and no bookkeeping: this is the floor, not a framework.
    """
    torch.set_num_threads(1)
    x, y = floats(name)
    model = build(name)
    parameters = list(model.parameters())
    theta = [p.detach().clone() for p in parameters]
    rng = np.random.default_rng(0)
    turns.begin()
    while True:
        total = [torch.zeros_like(p) for p in theta]
        for client in rng.choice(CLIENTS, COHORT, replace=False):
            with torch.no_grad():
                for p, start in zip(parameters, theta, strict=True):
                    p.copy_(start)
            for rows in torch.randperm(RECORDS).split(BATCH):
                model.zero_grad()
                functional.cross_entropy(model(x[client, rows]), y[client, rows]).backward()
                with torch.no_grad():
                    for p in parameters:
                        p.sub_(p.grad, alpha=LR)
            with torch.no_grad():
                for t, p, start in zip(total, parameters, theta, strict=True):
                    t.add_(p - start)
        for start, t in zip(theta, total, strict=True):
            start.add_(t, alpha=1 / COHORT)
        turns.played()


class _Watch:
    """A tracker that takes turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        self._turns.begin()

    def clients(self, done: int, cohort: int) -> None:
        pass

    def round(self, record: Mapping[str, Any]) -> None:
        self._turns.played()

    def close(self) -> None:
        pass


def settings(name: str, workers: int, cohort: int = COHORT, rounds: int = FOREVER) -> tacit.Config:
    """The workload as a config of ours; nothing is evaluated or saved before its last round."""
    return tacit.load(
        {
            "rounds": rounds,
            "data": {"name": "random", "partition": {"kind": "iid", "clients": CLIENTS}},
            "model": name,
            "cohort": cohort,
            "local": {"epochs": 1, "batch": BATCH, "lr": LR},
            "evaluate": {"every": FOREVER},
            "checkpoint": {"every": FOREVER},
            "engine": {"workers": workers},
        }
    )


def dataset(name: str, records: int = RECORDS) -> tacit.Dataset:
    x, y = pixels(name, records)
    train = tacit.ArrayRecords(x, y, mean=0.5, std=0.5)
    test = tacit.ArrayRecords(x[:10], y[:10], mean=0.5, std=0.5)
    return tacit.Dataset("random", train, test, 10, MODELS[name][0], licence="none", origin="random")


def ours(turns: Turns, name: str, workers: int, **engine: Any) -> None:
    """Whole rounds of `tacit.run`: draw, train, sum, step, metrics. Pixels stay uint8 up to a batch."""
    with tempfile.TemporaryDirectory() as folder:
        config = settings(name, workers)
        watch = _Watch(turns)
        tacit.run(config, folder, model=build(name), dataset=dataset(name), trackers=[watch], **engine)


def ray(turns: Turns, name: str) -> None:
    """The same on two workers of a Ray cluster that is started for it, on the loopback interface only."""
    from tacit.engine import RaySettings

    ours(turns, name, workers=0, engine=RaySettings(address="local", workers=2))


class _Weigh:
    """A tracker that sums the peak memory of this process and its children after each round."""

    def __init__(self) -> None:
        self.peak = 0

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        pass

    def clients(self, done: int, cohort: int) -> None:
        pass

    def round(self, record: Mapping[str, Any]) -> None:
        self.peak = sum(_high_water(process) for process in ("self", *_descendants(os.getpid())))

    def close(self) -> None:
        pass


def _descendants(pid: int) -> Iterator[str]:
    """Children of a process, and theirs: workers are forks of a child."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield child
        yield from _descendants(int(child))


def _high_water(process: str) -> int:
    """The largest resident memory a process ever had, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def peak_memory(workers: int, cohort: int) -> int:
    """Bytes at the peak of a round of the CNN with a tenth of the records, for it to be over soon."""
    weigh = _Weigh()
    with tempfile.TemporaryDirectory() as folder:
        config = settings("cnn", workers, cohort, rounds=1)
        tacit.run(config, folder, model=build("cnn"), dataset=dataset("cnn", 5), trackers=[weigh])
    return weigh.peak


def pfl(turns: Turns, name: str) -> None:
    """pfl-research in its one-process simulation, with users' batches ready as float tensors."""
    torch.set_num_threads(1)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Watch(TrainingProcessCallback[Any]):
        def on_train_begin(self, *, model: Any) -> Metrics:
            turns.begin()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            turns.played()
            return False, Metrics()

    x, y = floats(name)
    users = [Dataset((x[client], y[client])) for client in range(CLIENTS)]
    model = build(name)
    model.loss = lambda a, b: functional.cross_entropy(model(a), b)
    model.metrics = lambda a, b: {"loss": Weighted(float(model.loss(a, b).detach()) * len(b), len(b))}
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", list(range(CLIENTS))))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=FOREVER,
            evaluation_frequency=FOREVER,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Watch()],
        send_metrics_to_platform=False,
    )


@lru_cache(maxsize=1)
def _resident(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Flower's actors live long: model and data are made once in each."""
    torch.set_num_threads(1)
    return build(name), *floats(name)


def _flower_client(name: str) -> Any:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, x, y = _resident(name)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        client = int(context.node_config["partition-id"])
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for rows in torch.randperm(RECORDS).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[client, rows]), y[client, rows]).backward()
            optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": RECORDS}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def flower(turns: Turns, name: str) -> None:
    """Flower's simulation: two Ray actors with one CPU each, on the loopback interface only."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        def between(round: int, arrays: Any) -> None:
            turns.begin() if round == 0 else turns.played()

        strategy = FedAvg(fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        try:
            strategy.start(
                grid, ArrayRecord(build(name).state_dict()), num_rounds=FOREVER, evaluate_fn=between
            )
        except SystemExit:
            return

    run_simulation(
        server,
        _flower_client(name),
        num_supernodes=CLIENTS,
        backend_config={
            "init_args": {"num_cpus": 2, "include_dashboard": False, "_node_ip_address": "127.0.0.1"},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


CONTENDERS: dict[str, Any] = {
    "bare": bare,
    "in-process": lambda turns, name: ours(turns, name, workers=0),
    "two workers": lambda turns, name: ours(turns, name, workers=2),
    "ray": ray,
    "pfl": pfl,
    "flower": flower,
}


def play(contender: str, name: str, descriptor: int) -> None:
    """The program of one contender."""
    CONTENDERS[contender](Turns(Connection(descriptor)), name)
