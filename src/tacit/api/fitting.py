"""`tacit fit`: does a config fit into memory? Sizes by part, before anything large is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryDirectory

import numpy as np
import torch

from tacit import randomness
from tacit.config.build import build_job, build_model, build_settings
from tacit.config.records import build_dataset
from tacit.config.schema import Config
from tacit.data import Batch, Dataset
from tacit.engine import DirectoryStates, Job
from tacit.engine.contract import Order
from tacit.engine.device import Compute, DeviceSettings
from tacit.engine.footprint import (
    Live,
    Need,
    one_client,
    parameter_bytes,
    server_need,
    small_job,
    worker_need,
)
from tacit.engine.kinds import share
from tacit.engine.pool import slots
from tacit.errors import UserError
from tacit.federation import Settings
from tacit.federation.server import Server
from tacit.privacy import (
    Aggregation,
    Arrivals,
    ClientLevel,
    ExampleLevel,
    FixedSize,
    Unprotected,
    Workload,
)
from tacit.privacy.mechanisms.correlated import Correlated
from tacit.system import cores, memory_bytes

TRIED = 8
"""Batches that are tried; the largest counts."""


@dataclass(frozen=True)
class Fit:
    """The memory that a run needs, by place, and the memory that is available."""

    worker: Need
    server: Need
    workers: int
    compute: Compute
    device_bytes: int | None
    """Memory of each accelerator; None without one, or where torch cannot tell."""
    host_bytes: int
    advice: tuple[str, ...]
    parameters: int
    trained: int

    @property
    def host_need(self) -> int:
        """The need of all processes on the host together; they share frozen parameters."""
        each = self.worker.peak - self.worker.parts["frozen parameters"]
        return self.server.peak + (self.workers * each if self.compute.here else 0)

    @property
    def host_most(self) -> int:
        """The need, and what the C library's heap may keep between blocks in use: about as much again as the
        activations, where workers do not give memory back.
        """
        gives_back = self.compute.activation_checkpointing or not self.compute.here
        kept = 0 if gives_back else self.worker.parts["activations"]
        return self.host_need + self.workers * kept

    @property
    def fits(self) -> bool:
        there = self.device_bytes is None or self.worker.peak <= self.device_bytes
        return there and self.host_need <= self.host_bytes


def fit(config: Config, dataset: Dataset | None = None) -> Fit:
    """Estimate the memory of a config's run; nothing of its model's size is allocated.

    Activations are those of the largest of a few batches, so a longer record than these needs more.
    """
    settings = config.engine
    if not isinstance(settings, DeviceSettings):
        raise UserError("engine.kind: `fit` knows workers of this machine; leave it out, or set it to pool")
    computes = settings.computes()
    compute = computes[0]
    config = _without_search(config)
    dataset = dataset or build_dataset(config)
    with torch.device("meta"):
        empty = build_model(config, dataset, weights=False)
    with TemporaryDirectory() as folder:
        job = build_job(config, Path(folder), empty, dataset)
        small = small_job(job, DirectoryStates(Path(folder) / "small"))
        held = one_client(small, Order(0, 0.1), isinstance(job.privacy, ExampleLevel))
        tried = _batches(job, _records(job, config.rounds, config.cohort.size))
        batch = max(tried, key=lambda b: sum(t.nbytes for t in b.values()))
        asked = getattr(settings, "workers", 1)
        workers = max(1, min(share(computes), config.cohort.size) if asked == "auto" else asked)
        server = _server(config, job, small, workers)
        worker = worker_need(empty, batch, job, compute, held)
    trained, _ = parameter_bytes(empty)
    found = Fit(
        worker, server, workers, compute, _device_bytes(compute), memory_bytes(), (),
        sum(p.numel() for p in empty.parameters()), trained // 4,
    )  # fmt: skip
    return replace(found, advice=tuple(_advice(found, config, job)))


def _without_search(config: Config) -> Config:
    """The config without its noise search: that takes seconds, and memory does not depend on the noise."""
    privacy = config.privacy
    if privacy is None or privacy.noise is not None:
        return config
    return config.model_copy(
        update={"privacy": privacy.model_copy(update={"noise": 1.0, "epsilon": None, "entropy": "seed"})}
    )


def _records(job: Job, rounds: int, cohort: int) -> int:
    """The size of the largest batch to expect in the run: at example level it is random."""
    if not isinstance(job.privacy, ExampleLevel):
        return job.local.batch
    sizes = job.population.sizes
    drawn = rounds * cohort * job.workload.steps(int(np.mean(sizes)))
    batch = job.privacy.expected_batch(int(np.max(sizes)), job.workload)
    deviation = math.sqrt(batch * (1 - batch / np.max(sizes)))
    return round(batch + NormalDist().inv_cdf(1 - 1 / (drawn + 1)) * deviation)


def _batches(job: Job, count: int) -> Iterator[Batch]:
    rng = randomness.generator(job.seed, "fit")
    records = job.population.records
    size = min(count, len(records))
    for _ in range(TRIED):
        yield records.prepare(records.take(np.sort(rng.choice(len(records), size, replace=False))))


def _server(config: Config, job: Job, small: Job, workers: int) -> Need:
    layout = job.layout
    theta = torch.empty(layout.shared, device="meta")
    state = job.algorithm.init(theta, layout)
    settings = build_settings(config)
    settings = replace(settings, server=settings.server.model_copy(update={"device": "cpu"}))
    mechanism: Aggregation = small.privacy or Unprotected(FixedSize(1))
    buffers = 0
    if isinstance(mechanism, Correlated):
        # Its matrix takes a search that memory does not depend on; its noise state is added.
        buffers = 8 * sum(job.upload_sizes.values()) * 2
        mechanism = ClientLevel(1.0, mechanism.delta, mechanism.clip, FixedSize(1))
    each, held = _round(small, settings, mechanism, job.workload)
    message = job.algorithm.message(state)
    return server_need(
        job, state, message, int(4 * each * layout.shared), buffers, held, slots(job.upload_sizes) * workers
    )


def _round(small: Job, settings: Settings, mechanism: Aggregation, workload: Workload) -> tuple[float, float]:
    """Run the server of a small job for a round; returns how many vectors of the model's length its optimizer
    keeps, and how many exist at most, not counting the model and the message.
    """
    size = small.layout.shared
    with Live() as live:
        server = Server(small, settings, mechanism.init())
        total = small.empty_sums()
        mean, server.mechanism_state = mechanism.release(
            total, Arrivals(1, 1, 1, 1.0), server.mechanism_state, 0, 0, workload
        )
        assert mean is not None
        server.step(mean, 0.1)
        tensors, _ = server.optimizer.state()
        kept = sum(t.numel() for t in tensors.values())
    return kept / size, live.peak / (4 * small.layout.size)


def _device_bytes(compute: Compute) -> int | None:
    if compute.kind != "cuda":
        return None
    _, total = torch.cuda.mem_get_info(compute.device)
    return int(total)


def _advice(found: Fit, config: Config, job: Job) -> Iterator[str]:
    """What to change, the most effective first; nothing if it fits."""
    if found.fits:
        return
    need, parts = found.worker.peak, found.worker.parts
    if found.compute.here and found.workers > 1:
        yield f"engine.workers: {max(1, found.workers // 2)} holds half as many models (now {found.workers})"
    if parts["activations"] > need / 4:
        if not found.compute.activation_checkpointing:
            yield "engine.activation_checkpointing: true keeps one tensor for each layer"
        if found.compute.precision == "float32":
            yield "engine.precision: bf16 halves most activations"
        if not isinstance(job.privacy, ExampleLevel):
            yield f"local.batch: {max(1, job.local.batch // 2)} halves activations (now {job.local.batch})"
    if 4 * found.trained > need / 8 and config.model.lora is None:
        yield "model.lora: {rank: 8} trains, sends and noises a small part of it; the rest is frozen"
    if parts["frozen parameters"] > need / 4 and config.model.frozen == "float32":
        yield "model.frozen: bf16 halves the frozen parameters"
    if found.compute.here and cores() > 0 and found.workers == 1:
        yield "engine.device: an accelerator with more memory than this machine"
