"""`client.yaml`: the settings of an owner of records, and a run's job made from them.

    name: clinic
    server: federation.example.org:8443
    data: {name: table, path: records.csv, features: [age, dose], label: outcome}
    allow: {unit: example, epsilon: 4, delta: 1e-6, methods: [dp-fedadamw], send: [examples]}

The server's settings come with its orders, as plain values. The owner decides what they may name; only the
owner knows where the records are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from tacit.config.build import build_dataset, build_job, build_population
from tacit.config.explaining import explain
from tacit.config.loading import load
from tacit.config.records import OF_ALL
from tacit.config.schema import Config
from tacit.config.yamls import located, parse
from tacit.data import Dataset
from tacit.data.identity import Identity, identify
from tacit.data.settings import Data
from tacit.data.tokens import BYTES
from tacit.deploy import Allow, alone
from tacit.deploy.client import Prepared
from tacit.deploy.folders import ADDRESS
from tacit.deploy.messages import TrainOrder
from tacit.deploy.policy import Asked, NotAllowed, Number, refuse_beyond, refuse_other_keys
from tacit.deploy.roster import NAME
from tacit.errors import UserError
from tacit.privacy import SecureSum
from tacit.reading import read_text
from tacit.section import IMPORT, Section, as_name, shaped

CLIENT = "client.yaml"
ELSEWHERE = ("backbone", "attn_implementation", "experts_implementation", "name_or_path", "checkpoint")
"""Endings of transformers config keys whose values are looked up on a hub."""


class Owner(Section):
    """The whole of `client.yaml`; paths are from its own folder."""

    name: Annotated[str, shaped(NAME, "letters, digits, dots and dashes, 60 at most")]
    server: Annotated[str, shaped(ADDRESS, "HOST:PORT")]
    """HOST:PORT of the federation's public door."""
    ca: str = "ca.crt"
    """The federation's certificate authority."""
    server_key: str = "server.pub"
    """Whose orders are carried out."""
    key: str = "key"
    state: str = "state"
    ledgers: str | None = None
    """A folder for the ledgers, the same for each federation that this owner's records take part in: one
    budget for all of them. Left out, the client's own."""
    data: dict[str, Any]
    """The records, as in a config. A rehearsal takes one `part` of a split data set."""
    part: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the split, in a rehearsal."""
    allow: Allow

    @model_validator(mode="after")
    def _split(self) -> Self:
        if (self.part is None) != ("partition" not in self.data):
            raise ValueError("data.partition and part belong together: a rehearsal with a part of a data set")
        _ = self.split
        return self

    @property
    def split(self) -> Data:
        """The owner's data section, in a rehearsal with the split."""
        return Data.model_validate({"partition": {"kind": "owners", "clients": 1}, **self.data})

    def section(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """A run's data section, pointed at this client's records. Those of an `import` come prepared."""
        own = {key: value for key, value in as_name(self.data).items() if key != "partition"}
        if str(own.get("name")).startswith(IMPORT):
            theirs = {key: value for key, value in theirs.items() if key in OF_ALL}
        return {**theirs, **own}


def read_owner(folder: Path) -> Owner:
    """The checked `client.yaml` of a folder."""
    file = folder / CLIENT
    try:
        values, lines = located(read_text(file), file)
        return Owner.model_validate(values)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"{file} cannot be read ({reason}); `tacit client init` writes one") from None
    except ValidationError as error:
        places = {key: f"{file}, line {line}" for key, line in lines.items()}
        raise UserError(explain(error, Owner, values, places, str(file))) from None


class OwnRecords:
    """An owner's records, read once for each way to prepare them."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self._read: tuple[str, Dataset, NDArray[Any]] | None = None

    def prepare(self, order: TrainOrder, folder: Path) -> Prepared:
        """The job of a run, in which only this client has records; see `tacit.deploy.client.Prepare`."""
        owner = self.owner
        try:
            plain, _ = parse(order.config)
            theirs = load(plain, presets=False)
            refuse_other_keys(plain)
        except (KeyError, TypeError, AttributeError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"the run's settings are none ({type(error).__name__})") from None
        refuse_beyond(owner.allow, asked(theirs))
        config = load({**plain, "data": owner.section(plain["data"])}, presets=False)
        dataset, own = self._records(config)
        dataset = as_looks(dataset, order)
        holdout, validation = config.data.holdout, config.data.validation
        population = alone(dataset.train, own, order.client, order.clients, holdout, validation)
        job = build_job(config, folder, dataset=dataset, population=population)
        if len(job.public):
            raise NotAllowed("no record of an owner's is public")
        return Prepared(job, self.identity(dataset, own))

    def count(self) -> int:
        """The number of training records, by the owner's settings alone."""
        _, own = self._records(self._alone())
        data = self._alone().data
        return int(alone(np.empty(len(own)), own, 0, 1, data.holdout, data.validation).sizes[0])  # type: ignore[arg-type]

    def identity(self, dataset: Dataset, own: NDArray[Any]) -> Identity:
        return identify(self.owner.data["name"], alone(dataset.train, own))

    def _records(self, config: Config) -> tuple[Dataset, NDArray[Any]]:
        name = repr((config.data, config.task, config.model.hub))
        if self._read is None or self._read[0] != name:
            dataset = build_dataset(config)
            own: NDArray[Any] = np.arange(len(dataset.train))
            if self.owner.part is not None:
                asked_for = {"seed": self.owner.seed, "data": self.owner.split}
                split = build_population(config.model_copy(update=asked_for), dataset)
                if self.owner.part >= len(split):
                    raise UserError(f"part: {self.owner.part} of {len(split)}; they are counted from 0")
                start, end = split.offsets[self.owner.part : self.owner.part + 2]
                own = split.indices[start:end]
            self._read = name, dataset, own
        return self._read[1], self._read[2]

    def _alone(self) -> Config:
        """A minimal config that can read the records."""
        return load(
            {"rounds": 1, "data": self.owner.section({"partition": {"kind": "owners", "clients": 1}}),
             "model": "logistic", "cohort": 1, "local": {"steps": 1, "batch": 1, "lr": 0.1}},
            presets=False,
        )  # fmt: skip


def asked(config: Config) -> Asked:
    """What a run asks of a client, as far as the owner's policy covers it."""
    model, privacy = config.model, config.privacy
    names = [model.hub, model.start, model.config if isinstance(model.config, str) else None]
    names += [
        name
        for name in (model.name, config.task.name if config.task else None)
        if name and name.startswith(IMPORT)
    ]
    names += [*_named(model.config)] if isinstance(model.config, Mapping) else []
    names += [config.data.tokenizer] if config.data.tokenizer != BYTES else []
    needs: list[Number] = ["examples"] if config.weights == "examples" else []
    if privacy is not None and privacy.adaptive is not None:
        needs.append("metrics")
    colluding = None
    if privacy is not None and privacy.aggregation == "secure":
        colluding = SecureSum.colluding if privacy.colluding is None else privacy.colluding
    return Asked(
        method=config.method.name,
        unit=None if privacy is None else privacy.unit,
        simulation=privacy is not None and config.claimed is None,
        names=tuple(name for name in names if name is not None),
        needs=tuple(needs),
        colluding=colluding,
    )


def _named(config: Any, key: str = "") -> Iterator[str]:
    """What a transformers config would load from elsewhere: names on a hub, such as a backbone or a kernel
    (which is code), and anything behind one of the library's own names.
    """
    if isinstance(config, Mapping):
        for name, value in config.items():
            if str(name).startswith("_"):
                yield f"model.config.{name}"
            yield from _named(value, str(name))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _named(value, key)
    elif isinstance(config, str) and (re.search(r"[/\\:@]", config) or key.endswith(ELSEWHERE)):
        yield config


def as_looks(dataset: Dataset, order: TrainOrder) -> Dataset:
    """The records in the form that the run expects. One owner's records may lack some classes, but not have
    others.
    """
    if tuple(dataset.shape) != order.shape:
        raise UserError(f"records of shape {dataset.shape} where the run's are {order.shape}")
    if dataset.classes > order.classes:
        raise UserError(f"records of {dataset.classes} classes where the run has {order.classes}")
    if dataset.label_names != order.labels:
        raise UserError(
            "its classes have other names, or another order, than the run's, so their numbers would not mean "
            "the same; use numbers from 0 as labels on all machines"
        )
    return replace(dataset, classes=order.classes)
