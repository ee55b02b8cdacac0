"""From a checked config to the objects of a run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from tacit import randomness, tasks
from tacit.algorithms import Algorithm
from tacit.config.imports import made
from tacit.config.methods import build_algorithm
from tacit.config.misfits import ask_for_the_unit, refuse_misfits
from tacit.config.networks import build_base as build_base
from tacit.config.networks import build_model as build_model
from tacit.config.records import build_augment
from tacit.config.records import build_dataset as build_dataset
from tacit.config.schema import Config
from tacit.data import Dataset, Population, Records, Subset
from tacit.data.clients import shared_out, split_public, validation_records
from tacit.data.records import Timed
from tacit.data.settings import HeldByOwners
from tacit.deploy import FlowerSettings, Looks, Owners, Roster
from tacit.deploy.states import RemoteStates
from tacit.engine import EngineSettings, Job, Local
from tacit.engine.local import workload
from tacit.engine.states import STATES
from tacit.engine.url_states import states_of
from tacit.errors import UserError
from tacit.federation import Settings
from tacit.optimizers.server import OptimizerFactory
from tacit.privacy import Mechanism, Sampler, Sampling, as_sampling
from tacit.privacy.choosing import chosen
from tacit.section import IMPORT
from tacit.tasks import Task
from tacit.vector import Layout


def split_records(config: Config, dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the public records, and of those that are trained on; `pretrain.records: public` trains
    on the public ones.
    """
    public, private = split_public(config.data, dataset)
    if config.pretrain is None or config.pretrain.records == "all":
        return public, private
    if not len(public):
        raise UserError("pretrain.records: no record is public; set data.public to a share such as 0.1")
    if dataset.train.users is not None:  # by users, or by records: that is up to the run that comes after
        raise UserError(
            f"pretrain.records: {dataset.name} has users, and a run on it may set whole ones aside; this "
            "draws records. Give the public users' records as a data set of their own"
        )
    return np.empty(0, np.int64), public


def build_population(
    config: Config, dataset: Dataset, private: NDArray[np.int64] | None = None
) -> Population:
    """The clients and what each one holds, out of the `private` records: those that are not public."""
    if isinstance(config.data.partition, HeldByOwners):
        return _owners(config, config.data.partition, dataset)
    if private is None:
        _, private = split_records(config, dataset)
    return shared_out(config.data, dataset, private, config.seed)


def _owners(config: Config, kind: HeldByOwners, dataset: Dataset) -> Population:
    """The clients of a federation of real ones, as its server knows them."""
    if not isinstance(config.engine, FlowerSettings):
        raise UserError(
            "data.partition: owners have their records on their own machines; reach them with engine: "
            "{kind: flower, federation: DIR}"
        )
    if config.data.holdout or config.data.validation or config.evaluate.clients:
        raise UserError(
            "data.holdout, data.validation and evaluate.clients are about clients' own records, which stay "
            "with their owners; leave them out"
        )
    roster = Roster.read(Path(config.engine.federation).expanduser()).first(kind.clients)
    return Owners(roster, Looks(dataset.shape, dataset.classes, dataset.label_names))


def build_task(config: Config, dataset: Dataset) -> Task:
    """What the model is trained for."""
    if config.task is None:
        return tasks.build(dataset.task)
    if config.task.name.startswith(IMPORT):
        task: Task = made(config.task.name, "task", config.task.options)
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
    """What the workers need; any part can be given as an object instead of by name."""
    algorithm = algorithm or build_algorithm(config.method.name, config.method.options)
    dataset = dataset or build_dataset(config)
    public, private = split_records(config, dataset)
    population = population or build_population(config, dataset, private)
    states = states_of(folder, getattr(engine or config.engine, "states_url", None))
    if isinstance(population, Owners):
        states = RemoteStates(folder / STATES)
    validating = config.evaluate.split == "validation"
    if validating and not config.data.validation and dataset.validation is None:
        raise UserError("evaluate.split: no record is held out to validate on; set data.validation to 0.1")
    if config.cohort.size > len(population):
        raise UserError(f"cohort: {config.cohort.size} of {len(population)} clients; lower cohort.size")
    if config.evaluate.clients and not config.data.holdout:
        raise UserError("evaluate.clients: clients have no test split of their own; set data.holdout to 0.1")
    refuse_misfits(config, algorithm)
    ask_for_the_unit(config, dataset)
    local = build_local(config, dataset)
    model = model or build_model(config, dataset)
    return Job(
        model=model,
        task=task or build_task(config, dataset),
        population=population,
        test=_some(validation_records(population, dataset) if validating else dataset.test, config),
        validating=validating,
        algorithm=algorithm,
        local=local,
        seed=config.seed,
        states=states,
        evaluation_batch=config.evaluate.batch,
        layers=config.evaluate.layers,
        privacy=build_privacy(config, population, algorithm, local, model, sampling),
        public=public,
        probe=build_probe(config, population),
        augment=build_augment(config, dataset),
    )


def _some(records: Records, config: Config) -> Records:
    """The records that judge the model: all of them, or as many as `evaluate.records` says."""
    wanted = config.evaluate.records
    if wanted is None or wanted >= len(records):
        return records
    rng = randomness.generator(config.seed, "judging records")
    return Subset(records, np.sort(rng.choice(len(records), wanted, replace=False)))


def build_probe(config: Config, population: Population) -> NDArray[np.int64]:
    """Training records of all clients together, drawn once for the run."""
    if not config.evaluate.train:
        return np.empty(0, np.int64)
    if config.privacy is not None and config.privacy.entropy == "os":
        raise UserError(
            "evaluate.train: an exact loss on protected records is outside any guarantee; leave it out, or "
            "set privacy.entropy to seed, which makes the run a simulation"
        )
    held = np.concatenate([population.train(client) for client in range(len(population))]).astype(np.int64)
    rng = randomness.generator(config.seed, "probe")
    return np.sort(rng.choice(held, min(config.evaluate.train, len(held)), replace=False))


def build_local(config: Config, dataset: Dataset) -> Local:
    """How a client trains; with batches by seconds, `batch` is what they come to on average."""
    section, batch = config.local, config.local.batch
    if batch is None:
        assert section.seconds is not None  # the schema asks for one of the two
        if not isinstance(dataset.train, Timed):
            raise UserError(f"local.seconds: the records of {dataset.name} have no length; set local.batch")
        if config.privacy is not None and config.privacy.unit == "example":
            raise UserError(
                "local.seconds: at example level batches are Poisson samples of records, however "
                "long it is; set local.batch"
            )
        batch = max(1, round(section.seconds / max(float(np.mean(dataset.train.seconds)), 1e-3)))
    known = {field.name: getattr(section, field.name) for field in fields(section)}
    return Local(**known | {"batch": batch})


def build_settings(
    config: Config,
    algorithm: Algorithm | None = None,
    engine: EngineSettings | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Settings:
    """Everything else of the run; the engine or the server's optimizer may be given as an object."""
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


def build_sampling(config: Config, clients: int, sampler: Sampler | None = None) -> Sampling:
    """How cohorts are drawn: by the sampler, if one is given, or as the config says."""
    if sampler is not None:
        return _own_sampling(config, clients, sampler)
    client_level = config.privacy is not None and config.privacy.unit == "client"
    in_turn = config.privacy is not None and config.privacy.mechanism is not None
    return config.cohort.drawn(clients, "poisson" if client_level and not in_turn else "fixed")


def _own_sampling(config: Config, clients: int, sampler: Sampler) -> Sampling:
    sampling = as_sampling(sampler)
    if config.cohort.sampling is not None:
        raise UserError("cohort.sampling: the run was given a sampling as an object; leave one of them out")
    if config.privacy is not None and config.privacy.extrapolate:
        raise UserError("privacy.extrapolate is for Poisson cohorts by the config; leave sampling= out")
    expected = sampling.expected(clients)
    if round(expected) != config.cohort.size:
        raise UserError(
            f"cohort.size: {config.cohort.size}, but the sampling that was given expects {expected:g} "
            f"clients in a round; set it to {round(expected)}"
        )
    return sampling


def build_privacy(
    config: Config,
    population: Population,
    algorithm: Algorithm,
    local: Local,
    model: nn.Module,
    sampler: Sampler | None = None,
) -> Mechanism | None:
    """The guarantee, with its noise found for the budget if it is not given."""
    section = config.privacy
    if section is None:
        return None

    def uploads() -> tuple[dict[str, int], Layout]:
        layout = Layout.of(model, algorithm.personal_part)
        return algorithm.uploads(layout), layout

    sampling = build_sampling(config, len(population), sampler)
    mechanism = chosen(section, sampling, config.rounds, uploads, isinstance(population, Owners))
    if section.noise is None:
        mechanism = mechanism.calibrated(workload(population, local, algorithm, config.seed), config.rounds)
    return mechanism
