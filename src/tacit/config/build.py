"""From a checked config to the objects of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from tacit import randomness, tasks
from tacit.algorithms import Algorithm
from tacit.config.imports import made
from tacit.config.networks import build_base as build_base
from tacit.config.networks import build_model as build_model
from tacit.config.parts import build_parts, build_privacy
from tacit.config.parts import build_population as build_population
from tacit.config.parts import build_sampling as build_sampling
from tacit.config.records import build_augment
from tacit.config.records import build_dataset as build_dataset
from tacit.config.schema import Config
from tacit.data import Dataset, Population, Records, Subset
from tacit.data.clients import validation_records
from tacit.deploy import Owners
from tacit.deploy.states import RemoteStates
from tacit.engine import EngineSettings, Job
from tacit.engine.states import STATES
from tacit.engine.url_states import states_of
from tacit.errors import UserError
from tacit.federation import Settings
from tacit.optimizers.server import OptimizerFactory
from tacit.privacy import Sampler
from tacit.section import IMPORT
from tacit.tasks import Task
from tacit.tasks.base import refuse_no_task
from tacit.vector import Layout


def build_task(config: Config, dataset: Dataset) -> Task:
    """The task that the model is trained for."""
    if config.task is None:
        return tasks.build(dataset.task)
    if config.task.name.startswith(IMPORT):
        task: Task = made(config.task.name, "task", config.task.options)
        refuse_no_task(task, "task.import")
        return task
    return tasks.build(config.task.name, **config.task.options)


def build_job(
    config: Config,
    folder: Path,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    algorithm: Algorithm | None = None,
    task: Task | None = None,
    population: Population | None = None,
    sampling: Sampler | None = None,
    engine: EngineSettings | None = None,
) -> Job:
    """The job for the workers; any part can be given as an object instead of by name."""
    parts = build_parts(config, dataset, algorithm, population)
    algorithm, dataset, population = parts.algorithm, parts.dataset, parts.population
    states = states_of(folder, getattr(engine or config.engine, "states_url", None))
    if isinstance(population, Owners):
        states = RemoteStates(folder / STATES)
    validating = config.evaluate.split == "validation"
    network = model or build_model(config, dataset)
    return Job(
        model=network,
        task=task or build_task(config, dataset),
        population=population,
        test=_some(validation_records(population, dataset) if validating else dataset.test, config),
        validating=validating,
        algorithm=algorithm,
        local=parts.local,
        seed=config.seed,
        states=states,
        evaluation_batch=config.evaluate.batch,
        layers=config.evaluate.layers,
        privacy=build_privacy(config, parts, lambda: uploads(parts.algorithm, network), sampling),
        public=parts.public,
        probe=build_probe(config, population),
        augment=build_augment(config, dataset),
    )


def uploads(algorithm: Algorithm, model: nn.Module) -> tuple[dict[str, int], Layout]:
    """Names and lengths of what a client sends, and the layout of the parameters."""
    layout = Layout.of(model, algorithm.personal_part)
    return algorithm.uploads(layout), layout


def _some(records: Records, config: Config) -> Records:
    """The records for evaluation: all of them, or as many as `evaluate.records` says."""
    wanted = config.evaluate.records
    if wanted is None or wanted >= len(records):
        return records
    rng = randomness.generator(config.seed, "judging records")
    return Subset(records, np.sort(rng.choice(len(records), wanted, replace=False)))


def build_probe(config: Config, population: Population) -> NDArray[np.int64]:
    """Training records from all clients together, drawn once per run."""
    if not config.evaluate.train:
        return np.empty(0, np.int64)
    if config.claimed is not None:
        raise UserError(
            "evaluate.train: an exact loss on protected records is outside any guarantee; leave it out, or "
            "set privacy.entropy to seed, which makes the run a simulation"
        )
    held = np.concatenate([population.train(client) for client in range(len(population))]).astype(np.int64)
    rng = randomness.generator(config.seed, "probe")
    return np.sort(rng.choice(held, min(config.evaluate.train, len(held)), replace=False))


def build_settings(
    config: Config,
    algorithm: Algorithm | None = None,
    engine: EngineSettings | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Settings:
    """The run's other settings; the engine and the server's optimizer may be given as objects."""
    if optimizer is not None and algorithm is not None and algorithm.own_server_rule:
        raise UserError(
            f"optimizer: {type(algorithm).__name__} has a server rule of its own and would not use it; "
            "leave it out"
        )
    if optimizer is not None and (config.server.optimizer != "sgd" or config.server.options):
        raise UserError(
            "server: the run was given an optimizer as an object; leave out server.optimizer and its options "
            "(server.lr and server.schedule stay), or give it as functools.partial(CLASS, OPTIONS)"
        )
    return Settings(
        rounds=config.rounds,
        server=config.server,
        optimizer=optimizer,
        weighted=config.weights == "examples",
        evaluate=config.evaluate,
        checkpoint=config.checkpoint,
        engine=config.engine if engine is None else engine,
    )
