"""From a checked config to the objects of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tacit import models, randomness, tasks
from tacit.algorithms import Algorithm
from tacit.config.imports import PREFIX, made
from tacit.config.methods import build_algorithm
from tacit.config.records import build_augment, refuse_tokens, sized_for_tokens
from tacit.config.records import build_dataset as build_dataset
from tacit.config.schema import (
    ClassesPerClient,
    Config,
    Dirichlet,
    HeldByOwners,
    Iid,
    Natural,
    NoiseStatedOn,
)
from tacit.data import Dataset, Population, Records, Subset, partition
from tacit.data.records import Timed
from tacit.deploy import FlowerSettings, Looks, Owners, Roster
from tacit.deploy.states import RemoteStates
from tacit.engine import EngineSettings, Job, Local
from tacit.engine.local import workload
from tacit.engine.states import STATES
from tacit.engine.url_states import states_of
from tacit.errors import UserError
from tacit.federation import Settings
from tacit.federation.settings import ServerSettings
from tacit.federation.start import start_from
from tacit.models import hub
from tacit.models.lora import adapt, half_frozen, train_only
from tacit.optimizers.server import OptimizerFactory
from tacit.privacy import MECHANISMS, FixedSize, Mechanism, Poisson, Sampler, Sampling, as_sampling
from tacit.privacy.mechanisms.layered import by_layer
from tacit.tasks import Task
from tacit.vector import Layout

LANGUAGE = "language"
"""The task whose models predict the next token."""
WORDS = "token-classification"
"""The task whose models have a class for each token."""


def split_public(config: Config, dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the public records, and of the others, which clients share.

    Which ones are public is a fact about the data and not about a run: every seed sets the same ones aside,
    so a model that was pre-trained on them has seen no client's of any run. Of each class it is the same
    share. Where clients are the data's own users, whole users are set aside: a record of a protected client
    is not public.
    """
    n, share, labels = len(dataset.train), config.data.public, dataset.train.labels
    rng = randomness.generator(0, "public")
    if share and isinstance(config.data.partition, Natural) and dataset.train.users is not None:
        names, owner = np.unique(dataset.train.users, return_inverse=True)
        chosen = np.zeros(len(names), bool)
        sizes, wanted = np.bincount(owner), round(n * share)
        for user in rng.permutation(len(names)):
            if wanted <= 0:
                break
            chosen[user] = True
            wanted -= int(sizes[user])
        if chosen.all():
            raise UserError(f"data.public: {share:g} of the records takes all {len(names)} users; lower it")
        return np.flatnonzero(chosen[owner]), np.flatnonzero(~chosen[owner])
    order = rng.permutation(n)
    wanted = round(n * share)
    if wanted and labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu":
        order = order[np.argsort(_turns(labels[order]), kind="stable")]
    public, private = np.split(order, [wanted])
    return np.sort(public), np.sort(private)


def _turns(labels: NDArray[Any]) -> NDArray[np.float64]:
    """When each record's turn comes if classes are drawn from evenly: by its share of its own class.

    >>> _turns(np.array([7, 7, 3, 7, 3, 7])).tolist()
    [0.125, 0.375, 0.25, 0.625, 0.75, 0.875]
    """
    turns = np.empty(len(labels))
    for kind in np.unique(labels):
        of = np.flatnonzero(labels == kind)
        turns[of] = (np.arange(len(of)) + 0.5) / len(of)
    return turns


def split_records(config: Config, dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the public records, and of those that are trained on; `pretrain.records: public` trains
    on the public ones.
    """
    public, private = split_public(config, dataset)
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
    records = dataset.train
    if private is None:
        _, private = split_records(config, dataset)
    rng = randomness.generator(config.seed, "partition")
    kind = config.data.partition
    if isinstance(kind, HeldByOwners):
        return _owners(config, kind, dataset)
    if isinstance(kind, Iid):
        parts = partition.iid(len(private), kind.clients, rng)
    elif isinstance(kind, Dirichlet | ClassesPerClient):
        if records.labels is None:
            raise UserError(f"data.partition: {dataset.name} has no labels to split by; use iid or natural")
        labels = records.labels[private]
        if isinstance(kind, Dirichlet):
            parts = partition.dirichlet(labels, kind.clients, kind.alpha, rng)
        else:
            parts = partition.classes_per_client(labels, kind.clients, kind.classes, rng)
    else:
        if records.users is None:
            raise UserError(f"data.partition: {dataset.name} has no users; use iid, dirichlet or classes")
        parts = partition.natural(records.users[private], rng)
        if kind.clients is not None:
            parts = partition.some(parts, kind.clients, rng)
        if kind.iid == "same-sizes":
            parts = partition.reassigned(parts, rng)
        elif kind.iid == "uniform":
            parts = partition.redrawn(parts, rng)
    return Population(
        records, parts.offsets, private[parts.indices], config.data.holdout, config.data.validation
    )


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


def validation_records(population: Population, dataset: Dataset) -> Records:
    """Records to choose settings by: every client's validation split together, or else the data set's own."""
    if not population.validation and dataset.validation is not None:
        return dataset.validation
    held_out = [population.validate(client) for client in range(len(population))]
    return Subset(population.records, np.concatenate(held_out))


def build_model(config: Config, dataset: Dataset, weights: bool = True) -> nn.Module:
    """The network, with weights by the run's seed or from `model.start`; what is trained has a gradient.

    Without `weights` it has shapes and types alone, and no file of weights is read.
    """
    section = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.torch_seed(config.seed, "model"))
        model = _network(config, dataset, weights)
        if section.start is not None and weights:
            start_from(model, section.start)
        if section.lora is not None:
            adapt(model, section.lora)
        if section.frozen != "float32":
            half_frozen(model)
    refuse_tokens(model, dataset)
    if section.train is not None:
        train_only(model, section.train, adapted=section.lora is not None)
    return model


def build_base(config: Config, dataset: Dataset) -> nn.Module:
    """The network of `build_model` as it was before any adapter."""
    return build_model(
        config.model_copy(update={"model": config.model.model_copy(update={"lora": None, "train": None})}),
        dataset,
    )


def _network(config: Config, dataset: Dataset, weights: bool = True) -> nn.Module:
    section, task = config.model, dataset.task if config.task is None else config.task.name
    sizes = (dataset.shape, dataset.classes)
    if section.hub is not None:
        frozen = section.frozen if weights else "empty"
        return hub.from_hub(section.hub, *sizes, task == LANGUAGE, config.data.offline, frozen, task == WORDS)
    if section.config is not None:
        return hub.from_config(
            sized_for_tokens(section.config, dataset), *sizes, task == LANGUAGE, task == WORDS
        )
    assert section.name is not None  # the schema asks for one of the three
    if section.name.startswith(PREFIX):
        model = made(section.name, "model", section.options, shape=dataset.shape, classes=dataset.classes)
        if not isinstance(model, nn.Module):
            raise UserError(
                f"model.import: {section.name} gives a {type(model).__name__}, not a torch module"
            )
        return model
    try:
        network = models.build(section.name, *sizes, **section.options)
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{key}: {value!r}" for key, value in section.options.items())
        raise UserError(
            f"model: {section.name} cannot be built with {given or 'its defaults'} ({error})"
        ) from None
    if dataset.tokenizer is not None and not hasattr(network, "config"):  # transformers' have one
        raise UserError(
            f"model: {section.name} takes numbers or pictures, and the records of {dataset.name} are texts; "
            "take a model of texts, such as {hub: minilm}"
        )
    return network


def build_task(config: Config, dataset: Dataset) -> Task:
    """What the model is trained for."""
    if config.task is None:
        return tasks.build(dataset.task)
    if config.task.name.startswith(PREFIX):
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
    _ask_for_the_unit(config, dataset)
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
    steps, epochs, decay = section.steps, section.epochs, section.weight_decay
    return Local(batch, steps, epochs, decay, section.clip, section.seconds, section.within)


def refuse_misfits(config: Config, algorithm: Algorithm) -> None:
    """Settings that the algorithm would ignore, or that it cannot work with."""
    if algorithm.own_server_rule and config.server != ServerSettings(device=config.server.device):
        raise UserError(
            f"server: {config.method.name} has a server rule of its own; set method.lr and its other options"
        )
    privacy = config.privacy
    if (
        config.evaluate.layers
        and privacy is not None
        and privacy.unit == "client"
        and privacy.entropy == "os"
    ):
        raise UserError(
            "evaluate.layers: exact norms of protected clients' updates are outside any guarantee; leave it "
            "out, or set privacy.entropy to seed, which makes the run a simulation"
        )
    if algorithm.needs_steps and privacy is not None and privacy.unit == "client" and not config.local.steps:
        raise UserError(
            f"local.epochs: {config.method.name} uses the number of local steps, which would tell of "
            "the protected clients' sizes; set local.steps instead"
        )
    if privacy is not None and privacy.metrics is not None and privacy.entropy == "os":
        _refuse_exact(config)
    if algorithm.needs_public and not config.data.public:
        raise UserError(f"data.public: {config.method.name} needs public records; set a share such as 0.05")
    if algorithm.personal_part and config.privacy is not None and config.privacy.unit == "example":
        raise UserError(
            f"privacy.unit: {config.method.name} trains a personal part in a pass of its own, which example-"
            "level accounting does not cover; use unit: client"
        )


def _refuse_exact(config: Config) -> None:
    """Other ways to exact numbers about protected records, where private metrics were asked for."""
    assert config.privacy is not None
    if config.evaluate.clients:
        instead = ", set privacy.metrics.accuracy" if config.privacy.unit == "client" else ""
        raise UserError(
            f"evaluate.clients: with privacy.metrics nothing exact is told of clients; leave it out{instead}"
        )
    if config.evaluate.split == "validation" and config.data.validation:
        raise UserError(
            "evaluate.split: with privacy.metrics nothing exact is told of clients, and the validation "
            "records are theirs; judge by the test set"
        )


def _ask_for_the_unit(config: Config, dataset: Dataset) -> None:
    """A preset must not decide for a person whether their users or single records are protected.

    Where clients are the users and whole clients are protected, nothing weaker could have been meant.
    """
    privacy = config.privacy
    if privacy is None or not config._assumed_unit or dataset.train.users is None:
        return
    if privacy.unit == "client" and isinstance(config.data.partition, Natural):
        return
    whose = (
        "single records" if privacy.unit == "example" else "whole clients, and here a user is not a client"
    )
    raise UserError(
        f"privacy.unit: {dataset.name} has users, and {config.method.name} by itself protects {whose}; say "
        "which it shall be: `unit: client` (with data.partition: {kind: natural}, all of a user's records) "
        "or `unit: example` (each record)"
    )


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
        lr=config.local.lr,
        lr_schedule=config.local.schedule.over(config.rounds),
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
    kind = config.cohort.sampling or ("poisson" if client_level and not in_turn else "fixed")
    return FixedSize(config.cohort.size) if kind == "fixed" else Poisson(config.cohort.size / clients)


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
    assert not isinstance(section.noise, NoiseStatedOn)  # the schema has made a multiplier of it
    options: dict[str, Any] = {} if section.noise_at == "server" else {"noise_at": section.noise_at}
    if section.adaptive is not None:
        options |= asdict(section.adaptive)
    kind: str = section.unit if section.adaptive is None else "adaptive-clip"
    if section.aggregation == "secure":
        if section.unit == "example" or section.adaptive is not None or section.mechanism is not None:
            raise UserError(
                "privacy.aggregation: secure is for whole clients, with independent noise and one clipping "
                "norm; set unit: client, and leave out privacy.adaptive and privacy.mechanism"
            )
        shares = {"threshold": section.threshold, "colluding": section.colluding}
        kind, options = "secure", options | {name: v for name, v in shares.items() if v is not None}
    if section.mechanism is not None:
        if section.adaptive is not None:
            raise UserError(
                "privacy.adaptive: correlated noise of earlier rounds was sized by the clipping norm they "
                "had, so it must not move; leave out privacy.adaptive or privacy.mechanism"
            )
        given = section.mechanism.model_dump(exclude_none=True)
        kind = given.pop("kind")
        options |= given | {"rounds": config.rounds}
    if section.unit == "example" and (options or section.noise_by_layer):
        raise UserError(
            "privacy.noise_at, privacy.adaptive, privacy.mechanism and privacy.noise_by_layer are for whole "
            "clients; at example level each client noises its own gradients: leave them out, or set unit: "
            "client"
        )
    if section.noise_by_layer:
        if kind != "client":
            raise UserError(
                "privacy.noise_by_layer goes with independent noise and one clipping norm that stays; leave "
                "out privacy.adaptive, privacy.mechanism and privacy.aggregation"
            )
        layout = Layout.of(model, algorithm.personal_part)
        groups = by_layer(section.noise_by_layer, section.clip, algorithm.uploads(layout), layout)
        kind, options = "layered", options | {"factors": section.noise_by_layer, "groups": groups}
    if section.unit == "example" and config.model.frozen == "4bit":
        raise UserError(
            "model.frozen: layers of 4 bits change themselves as records pass, so they cannot be shown to "
            "keep records apart; set it to bf16, or privacy.unit to client"
        )
    if section.unit == "client" and isinstance(population, Owners):
        options["deployed"] = True
    metrics = section.metrics
    if metrics is not None and metrics.accuracy and (section.unit == "example" or not config.data.holdout):
        raise UserError(
            "privacy.metrics.accuracy: it is of whole clients on test records of their own; set unit: client "
            "and data.holdout to 0.1, or leave it out"
        )
    mechanism = MECHANISMS[kind](
        noise=1.0 if section.noise is None else section.noise,
        delta=section.delta,
        clip=section.clip,
        sampling=build_sampling(config, len(population), sampler),
        epsilon=section.epsilon,
        entropy=section.entropy,
        metrics=metrics,
        **options,
    )
    if section.noise is None:
        mechanism = mechanism.calibrated(workload(population, local, algorithm, config.seed), config.rounds)
    return mechanism
