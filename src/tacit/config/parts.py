"""From a checked config to the parts of a run that need no torch: algorithm, records, clients, mechanism.

A plan needs only these; `tacit.config.build` adds the network.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tacit.algorithms import Algorithm
from tacit.config.methods import build_algorithm
from tacit.config.misfits import ask_for_the_unit, refuse_misfits
from tacit.config.records import build_dataset
from tacit.config.schema import Config
from tacit.data import Dataset, Population
from tacit.data.clients import shared_out, split_public
from tacit.data.records import Timed
from tacit.data.settings import HeldByOwners
from tacit.deploy import FlowerSettings, Looks, Owners, Roster
from tacit.engine.settings import Local, workload
from tacit.errors import UserError
from tacit.privacy import Mechanism, Sampler, Sampling, Workload, as_sampling
from tacit.privacy.choosing import Uploads, chosen
from tacit.privacy.settings import CorrelatedNoise


@dataclass(frozen=True)
class RunParts:
    """The parts of a run, before there is a network."""

    algorithm: Algorithm
    dataset: Dataset
    public: NDArray[np.int64]
    """Positions of the records that belong to no client."""
    population: Population
    local: Local

    def workload(self, seed: int) -> Workload:
        """The facts about the run that decide its privacy cost."""
        return workload(self.population, self.local, self.algorithm, seed)


def build_parts(
    config: Config,
    dataset: Dataset | None = None,
    algorithm: Algorithm | None = None,
    population: Population | None = None,
) -> RunParts:
    """The parts of a run, each from the config or from the given object; refuses parts that do not fit
    together.
    """
    algorithm = algorithm or build_algorithm(config.method.name, config.method.options)
    dataset = dataset or build_dataset(config)
    public, private = split_records(config, dataset)
    population = population or build_population(config, dataset, private)
    validating = config.evaluate.split == "validation"
    if validating and not config.data.validation and dataset.validation is None:
        raise UserError("evaluate.split: no record is held out to validate on; set data.validation to 0.1")
    if config.cohort.size > len(population):
        raise UserError(f"cohort: {config.cohort.size} of {len(population)} clients; lower cohort.size")
    if config.evaluate.clients and not config.data.holdout:
        raise UserError("evaluate.clients: clients have no test split of their own; set data.holdout to 0.1")
    refuse_misfits(config, algorithm)
    ask_for_the_unit(config, dataset)
    return RunParts(algorithm, dataset, public, population, build_local(config, dataset))


def split_records(config: Config, dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the public records, and of the training records; `pretrain.records: public` trains on the
    public ones.
    """
    public, private = split_public(config.data, dataset)
    if config.pretrain is None or config.pretrain.records == "all":
        return public, private
    if not len(public):
        raise UserError("pretrain.records: no record is public; set data.public to a share such as 0.1")
    if dataset.train.users is not None:  # whether by users or by records is the later run's choice
        raise UserError(
            f"pretrain.records: {dataset.name} has users, and a run on it may set whole ones aside; this "
            "draws records. Give the public users' records as a data set of their own"
        )
    return np.empty(0, np.int64), public


def build_population(
    config: Config, dataset: Dataset, private: NDArray[np.int64] | None = None
) -> Population:
    """The clients and their records, out of the `private` records: those that are not public."""
    if isinstance(config.data.partition, HeldByOwners):
        return _owners(config, config.data.partition, dataset)
    if private is None:
        _, private = split_records(config, dataset)
    claimed = config.claimed
    apart = claimed is not None and claimed.noise != 0 and claimed.unit != "example"
    return shared_out(config.data, dataset, private, config.seed, apart)


def _owners(config: Config, kind: HeldByOwners, dataset: Dataset) -> Population:
    """The clients of a real federation, as its server knows them."""
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


def build_local(config: Config, dataset: Dataset) -> Local:
    """How a client trains. With batches by seconds, `batch` is the mean number of records in them."""
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
        _refuse_common_length(config)
        batch = max(1, round(section.seconds / max(float(np.mean(dataset.train.seconds)), 1e-3)))
    known = {field.name: getattr(section, field.name) for field in fields(section)}
    return Local(**known | {"batch": batch})


def build_privacy(
    config: Config, parts: RunParts, uploads: Uploads, sampler: Sampler | None = None
) -> Mechanism | None:
    """The guarantee, with its noise calibrated to the budget if not given; `uploads` is called only if noise
    differs by layer.
    """
    section, clients = config.privacy, len(parts.population)
    if section is None:
        return None
    sampling = build_sampling(config, clients, sampler)
    mechanism = chosen(section, sampling, config.rounds, uploads, isinstance(parts.population, Owners))
    if mechanism.forgetful_clients and parts.algorithm.keeps_state:
        raise UserError(
            f"cohort.sampling: clients of {config.method.name} keep state, which could tell who took part in "
            "earlier rounds; ε of cohorts of a fixed size is not proved for that: set it to poisson"
        )
    if section.noise is None:
        mechanism = mechanism.calibrated(parts.workload(config.seed), config.rounds)
    return mechanism


def build_sampling(config: Config, clients: int, sampler: Sampler | None = None) -> Sampling:
    """How cohorts are drawn: by the given sampler, or as the config says."""
    if sampler is not None:
        return _own_sampling(config, clients, sampler)
    client_level = config.privacy is not None and config.privacy.unit == "client"
    in_turn = config.privacy is not None and isinstance(config.privacy.mechanism, CorrelatedNoise)
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


def _refuse_common_length(config: Config) -> None:
    """Batches by seconds count records by the mean length over all clients. Under a client-level guarantee,
    nothing that a client does may depend on that.
    """
    local = config.local
    if config.claimed is None:
        return
    if local.within is not None and local.steps is None:
        raise UserError(
            "local.within: with local.seconds and local.epochs its length would follow from how long "
            "everybody's records are, which the guarantee protects; set local.steps"
        )
    if config.data.public:
        raise UserError(
            "data.public: with local.seconds its batches would follow from how long everybody's records are, "
            "which the guarantee protects; set local.batch"
        )
