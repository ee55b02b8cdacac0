"""The schema of a config: the sections of all rooms, and the conditions between them.

A config is checked completely before anything starts. Each section is the frozen, validated class of the room
that it configures. That class documents its keys and refuses unknown ones. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    field_validator,
)

from tacit.config.pretrain import Pretraining
from tacit.data.settings import Data
from tacit.deploy import FlowerSettings
from tacit.engine import ENGINES, AutoSettings, EngineSettings
from tacit.engine.settings import LocalTraining
from tacit.federation.settings import Checkpoints, Cohort, Evaluation, ServerSettings
from tacit.federation.trackers import known_tracker
from tacit.models.settings import Model
from tacit.privacy.settings import NoiseStatedOn, PrivacySettings
from tacit.section import Named, Section


class MethodChoice(Named):
    """A method and its options."""

    name: str = "fedavg"


def _engine_kind(value: Any) -> str | None:
    return value.get("kind", "auto") if isinstance(value, Mapping) else getattr(value, "kind", None)


KINDS: dict[str, type[Section]] = {**ENGINES, "flower": FlowerSettings}
if TYPE_CHECKING:
    EngineChoice = EngineSettings
else:
    EngineChoice = Annotated[
        reduce(or_, (Annotated[section, Tag(kind)] for kind, section in KINDS.items())),
        Discriminator(_engine_kind),
    ]
    """Where clients run: speed only. None of it can change a result, except `threads` in the last bits."""


def _folder_name(name: str) -> str:
    """The name, if it is a valid folder name on any system."""
    if re.fullmatch(r"[\w-][\w.-]*", name) is None:
        raise ValueError(
            f"a name is made of letters, digits, - and _, and dots but for the first (got {name!r})"
        )
    return name


class Config(Section):
    """A whole experiment."""

    name: Annotated[str, Field(max_length=100), AfterValidator(_folder_name)] = "run"
    """What the run's folder is called after."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of all draws but what a guarantee rests on: noise, cohorts, batches, masks (`privacy.entropy`)."""
    pretrain: Pretraining | None = None
    """Central training instead of a federation (`tacit pretrain`)."""
    rounds: Annotated[int, Field(gt=0, le=10**8)]
    """How often a cohort is drawn and the server takes a step."""
    data: Data
    task: Named | None = None
    """What the model is trained for; left out, what the data set is for."""
    model: Model
    method: MethodChoice = MethodChoice()
    cohort: Cohort
    weights: Literal["uniform", "examples"] = "uniform"
    """How clients count in the mean: equally, or by their number of examples."""
    local: LocalTraining
    server: ServerSettings = ServerSettings()
    privacy: PrivacySettings | None = None
    evaluate: Evaluation = Evaluation()
    checkpoint: Checkpoints = Checkpoints()
    engine: EngineChoice = AutoSettings()
    """Where clients run: speed only, never a result."""
    trackers: tuple[Annotated[str, AfterValidator(known_tracker)], ...] = ()
    """Who else hears of every round, each an extra; `metrics.jsonl` and the page are always written."""
    _assumed_unit: bool = PrivateAttr(False)
    """Whether the privacy unit comes from a preset, and not from the user."""

    @property
    def claimed(self) -> PrivacySettings | None:
        """The privacy settings of a run that claims a guarantee; None for a simulation, whose draws can be
        repeated.
        """
        return None if self.privacy is None or self.privacy.entropy == "seed" else self.privacy

    @field_validator("privacy")
    @classmethod
    def _noise_on_the_sum(cls, privacy: PrivacySettings | None, info: Any) -> PrivacySettings | None:
        cohort = info.data.get("cohort")
        if privacy is None or cohort is None:
            return privacy
        if privacy.unit == "example" and privacy.extrapolate:
            raise ValueError("privacy.extrapolate is about populations of clients; it needs unit: client")
        if privacy.noise_by_layer and privacy.extrapolate:
            raise ValueError("privacy.extrapolate is for the same noise everywhere; leave noise_by_layer out")
        if privacy.mechanism is not None and privacy.extrapolate:
            raise ValueError("privacy.extrapolate is for independent noise; leave privacy.mechanism out")
        if not isinstance(privacy.noise, NoiseStatedOn):
            return privacy
        if privacy.unit == "example":
            raise ValueError("at example level privacy.noise is one number, the multiplier on a batch's sum")
        return privacy.model_copy(update={"noise": privacy.noise.on_sum(cohort.size)})

    @field_validator("evaluate")
    @classmethod
    def _choices_are_free(cls, evaluate: Evaluation, info: Any) -> Evaluation:
        """Stopping, or picking a model, by test results is a choice by records that no guarantee pays for."""
        privacy = info.data.get("privacy")
        if privacy is None or privacy.entropy == "seed":
            return evaluate
        for name in ("patience", "keep_best"):
            if getattr(evaluate, name):
                raise ValueError(
                    f"evaluate.{name} chooses by looking at records, which the guarantee does not pay for; "
                    "leave it out, or set privacy.entropy: seed (a simulation, which claims nothing)"
                )
        return evaluate

    @field_validator("cohort")
    @classmethod
    def _cohort(cls, cohort: Cohort, info: Any) -> Cohort:
        partition = getattr(info.data.get("data"), "partition", None)
        clients = getattr(partition, "clients", None)
        if clients is not None and cohort.size > clients:
            raise ValueError(f"a cohort of {cohort.size} out of {clients} clients; lower cohort.size")
        return cohort
