"""Decides which records are public, and which client holds which of the others, by the section `data`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit import randomness
from tacit.data import partition
from tacit.data.dataset import Dataset
from tacit.data.population import Population
from tacit.data.records import Records, Subset
from tacit.data.settings import ClassesPerClient, Data, Dirichlet, Iid, Natural
from tacit.errors import UserError


def split_public(section: Data, dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the public records, and of the others, which the clients share.

    Which records are public is a property of the data, not of a run: every seed sets the same ones aside, so
    a model that was pre-trained on them has seen no client's record of any run. Each class contributes the
    same share. If clients are the data's own users, whole users are set aside, since a record of a protected
    client is not public. Each user is drawn by its own name, so one user more or less changes nothing for the
    others; the share is then one of users, and holds on average.
    """
    n, share, labels = len(dataset.train), section.public, dataset.train.labels
    if share and isinstance(section.partition, Natural) and dataset.train.users is not None:
        names, owner = np.unique(dataset.train.users, return_inverse=True)
        chosen = partition.by_name(names, share, 0, "public")
        if chosen.all() or not chosen.any():
            taken = "all" if chosen.all() else "none"
            raise UserError(
                f"data.public: {share:g} takes {taken} of the {len(names)} users, each by its name; "
                + ("lower it" if chosen.all() else "raise it")
            )
        return np.flatnonzero(chosen[owner]), np.flatnonzero(~chosen[owner])
    rng = randomness.generator(0, "public")
    order = rng.permutation(n)
    wanted = round(n * share)
    if wanted and labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu":
        order = order[np.argsort(_turns(labels[order]), kind="stable")]
    public, private = np.split(order, [wanted])
    return np.sort(public), np.sort(private)


def _turns(labels: NDArray[Any]) -> NDArray[np.float64]:
    """A record's turn if classes are drawn evenly: its rank as a share of its own class.

    >>> _turns(np.array([7, 7, 3, 7, 3, 7])).tolist()
    [0.125, 0.375, 0.25, 0.625, 0.75, 0.875]
    """
    turns = np.empty(len(labels))
    for kind in np.unique(labels):
        of = np.flatnonzero(labels == kind)
        turns[of] = (np.arange(len(of)) + 0.5) / len(of)
    return turns


def shared_out(
    section: Data, dataset: Dataset, private: NDArray[np.int64], seed: int, apart: bool = False
) -> Population:
    """The clients and their records, out of the `private` records: those that are not public.

    With `apart`, one user's records do not affect which records of other users are held out. That is required
    where whole clients are protected.
    """
    records, kind, rng = dataset.train, section.partition, randomness.generator(seed, "partition")
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
    elif isinstance(kind, Natural):
        if records.users is None:
            raise UserError(f"data.partition: {dataset.name} has no users; use iid, dirichlet or classes")
        users = records.users[private]
        if kind.share is not None:
            names, owner = np.unique(users, return_inverse=True)
            private = private[partition.by_name(names, kind.share, seed, "drawn")[owner.reshape(-1)]]
            if not len(private):
                raise UserError(
                    f"data.partition.share: {kind.share:g} draws none of {len(names)} users; raise it"
                )
            users = records.users[private]
        parts = partition.natural_apart(users, seed) if apart else partition.natural(users, rng)
        if kind.clients is not None:
            parts = partition.some(parts, kind.clients, rng)
        if kind.iid == "same-sizes":
            parts = partition.reassigned(parts, rng)
        elif kind.iid == "uniform":
            parts = partition.redrawn(parts, rng)
    else:
        raise TypeError("records that their owners hold are shared out already")
    return Population(records, parts.offsets, private[parts.indices], section.holdout, section.validation)


def validation_records(population: Population, dataset: Dataset) -> Records:
    """Records for choosing settings: every client's validation split together, or else the data set's own."""
    if not population.validation and dataset.validation is not None:
        return dataset.validation
    held_out = [population.validate(client) for client in range(len(population))]
    return Subset(population.records, np.concatenate(held_out))
