"""Combinations that each section allows by itself but not together: refused before anything is charged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tacit.config.schema import Config
from tacit.data.settings import Natural
from tacit.errors import UserError
from tacit.federation.settings import ServerSettings
from tacit.privacy.settings import PrivacySettings

if TYPE_CHECKING:
    from tacit.algorithms import Algorithm
    from tacit.data import Dataset


def refuse_misfits(config: Config, algorithm: Algorithm) -> None:
    """Refuse settings that the algorithm would ignore, or cannot work with."""
    if algorithm.own_server_rule and config.server != ServerSettings(device=config.server.device):
        raise UserError(
            f"server: {config.method.name} has a server rule of its own; set method.lr and its other options"
        )
    privacy, claimed = config.privacy, config.claimed
    if config.evaluate.layers and claimed is not None and claimed.unit == "client":
        raise UserError(
            "evaluate.layers: exact norms of protected clients' updates are outside any guarantee; leave it "
            "out, or set privacy.entropy to seed, which makes the run a simulation"
        )
    if algorithm.needs_steps and privacy is not None and privacy.unit == "client" and not config.local.steps:
        raise UserError(
            f"local.epochs: {config.method.name} uses the number of local steps, which would tell of "
            "the protected clients' sizes; set local.steps instead"
        )
    if privacy is not None:
        _refuse_unprovable(config, privacy)
    if claimed is not None and claimed.metrics is not None:
        _refuse_exact(config)
    if algorithm.needs_public and not config.data.public:
        raise UserError(f"data.public: {config.method.name} needs public records; set a share such as 0.05")
    if algorithm.personal_part and config.privacy is not None and config.privacy.unit == "example":
        raise UserError(
            f"privacy.unit: {config.method.name} trains a personal part in a pass of its own, which example-"
            "level accounting does not cover; use unit: client"
        )


def _refuse_unprovable(config: Config, privacy: PrivacySettings) -> None:
    """Refuse settings that fit together, but not with the promised guarantee."""
    if privacy.unit == "example" and config.model.frozen == "4bit":
        raise UserError(
            "model.frozen: layers of 4 bits change themselves as records pass, so they cannot be shown to "
            "keep records apart; set it to bf16, or privacy.unit to client"
        )
    drawn = isinstance(config.data.partition, Natural) and config.data.partition.clients is not None
    if drawn and config.claimed is not None and privacy.unit == "client" and privacy.noise != 0:
        raise UserError(
            "data.partition.clients: with one user less others would be drawn, and the guarantee is that one "
            "client changes its own part alone; set data.partition.share, by which each is drawn by its name"
        )
    natural, keeps = isinstance(config.data.partition, Natural), config.data.holdout or config.data.validation
    if natural and keeps and config.claimed is not None and privacy.unit == "example" and privacy.noise != 0:
        raise UserError(
            "data.holdout: which records a client holds out follows from all that it has, so one record more "
            "would change which others train, and the guarantee is that it changes its own gradients alone; "
            "leave out data.holdout and data.validation, and give records to test on (data.test)"
        )
    if (
        privacy.metrics is not None
        and privacy.metrics.accuracy
        and (privacy.unit == "example" or not config.data.holdout)
    ):
        raise UserError(
            "privacy.metrics.accuracy: it is of whole clients on test records of their own; set unit: client "
            "and data.holdout to 0.1, or leave it out"
        )


def _refuse_exact(config: Config) -> None:
    """Refuse other paths to exact numbers about protected records, if private metrics were requested."""
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


def ask_for_the_unit(config: Config, dataset: Dataset) -> None:
    """A preset must not decide for the user whether users or single records are protected.

    If clients are the users and whole clients are protected, the user cannot have meant anything weaker.
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
