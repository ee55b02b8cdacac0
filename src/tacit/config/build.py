"""From a checked config to the objects of a run."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from tacit import data, models, randomness
from tacit.algorithms import Algorithm
from tacit.config.methods import build_algorithm
from tacit.config.schema import ClassesPerClient, Config, Dirichlet, Iid, build_schedule
from tacit.data import Dataset, Population, partition
from tacit.engine import Job, Local
from tacit.errors import UserError
from tacit.federation import PlainRelease, Release, Settings
from tacit.privacy.sampling import FixedSize, Poisson
from tacit.tasks import Classification, Task


def build_dataset(config: Config) -> Dataset:
    """The records, fetched if need be."""
    return data.load(
        config.data.name, path=config.data.path, offline=config.data.offline, size=config.data.size
    )


def build_population(config: Config, dataset: Dataset) -> Population:
    """The clients and what each one holds."""
    records = dataset.train
    rng = randomness.generator(config.seed, "partition")
    kind = config.data.partition
    if isinstance(kind, Iid):
        parts = partition.iid(len(records), kind.clients, rng)
    elif isinstance(kind, Dirichlet | ClassesPerClient):
        if records.labels is None:
            raise UserError(f"data.partition: {dataset.name} has no labels to split by; use iid or natural")
        if isinstance(kind, Dirichlet):
            parts = partition.dirichlet(records.labels, kind.clients, kind.alpha, rng)
        else:
            parts = partition.classes_per_client(records.labels, kind.clients, kind.classes, rng)
    else:
        if records.users is None:
            raise UserError(f"data.partition: {dataset.name} has no users; use iid, dirichlet or classes")
        parts = partition.natural(records.users, rng)
    return Population(records, parts.offsets, parts.indices, config.data.holdout)


def build_model(config: Config, dataset: Dataset) -> nn.Module:
    """The network, initialised by the run's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.torch_seed(config.seed, "model"))
        return models.build(config.model.name, dataset.shape, dataset.classes, **config.model.options)


def build_job(
    config: Config,
    folder: Path,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    algorithm: Algorithm | None = None,
    task: Task | None = None,
) -> Job:
    """What the workers need; any part can be given as an object instead of by name."""
    algorithm = algorithm or build_algorithm(config.method.name, config.method.options)
    dataset = dataset or build_dataset(config)
    population = build_population(config, dataset)
    if config.cohort.size > len(population):
        raise UserError(f"cohort: {config.cohort.size} of {len(population)} clients; lower cohort.size")
    if config.evaluate.clients and not config.data.holdout:
        raise UserError("evaluate.clients: clients have no test split of their own; set data.holdout to 0.1")
    local = config.local
    return Job(
        model=model or build_model(config, dataset),
        task=task or Classification(),
        population=population,
        test=dataset.test,
        algorithm=algorithm,
        local=Local(local.batch, local.steps, local.epochs, local.clip),
        seed=config.seed,
        memory=folder / "memory",
        evaluation_batch=config.evaluate.batch,
    )


def build_settings(config: Config) -> Settings:
    """Everything else of the run."""
    return Settings(
        rounds=config.rounds,
        lr=config.local.lr,
        lr_schedule=build_schedule(config.local.schedule, config.rounds),
        server_optimizer=config.server.optimizer,
        server_lr=config.server.lr,
        server_schedule=build_schedule(config.server.schedule, config.rounds),
        server_options=config.server.options,
        weighted=config.weights == "examples",
        evaluate_every=config.evaluate.every,
        evaluate_clients=config.evaluate.clients,
        checkpoint_every=config.checkpoint.every,
        keep_checkpoints=config.checkpoint.keep,
        workers=_workers(config),
        threads=config.engine.threads,
    )


def _workers(config: Config) -> int:
    if config.engine.workers != "auto":
        return config.engine.workers
    workers = min(len(os.sched_getaffinity(0)), config.cohort.size)
    return 0 if workers == 1 else workers


def build_release(config: Config, population: Population) -> Release:
    """How cohorts are drawn and uploads let through."""
    size, clients = config.cohort.size, len(population)
    sampling = FixedSize(size) if config.cohort.sampling == "fixed" else Poisson(size / clients)
    return PlainRelease(sampling, clients, config.seed)
