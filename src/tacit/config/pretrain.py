"""A `pretrain` section becomes a federation with one client: the same loop, checkpoints and resume.

One client holds all the records and takes one step of rate 1 a round. What it sends is therefore the gradient
itself, and the server's optimizer (LARS) takes the central steps. Each step draws a new batch.

>>> filled = expanded({"data": {"name": "x"}, "pretrain": {"steps": 50, "lr": 0.5, "batch": 8}})
>>> filled["rounds"], filled["local"]["steps"], filled["server"]
(50, 1, {'lr': 0.5, 'optimizer': 'lars'})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from tacit.errors import UserError
from tacit.optimizers.schedules import AnySchedule, Constant
from tacit.section import Open

FEDERATED = ("rounds", "method", "cohort", "weights", "local", "server", "privacy")
"""Sections that a federation has and central training does not."""
EVALUATIONS = 10
"""How often central training is evaluated and saved, unless it says otherwise."""


class Pretraining(Open):
    """Central training of a seed model, on data that needs no protection: no clients, no rounds.

    It is a federation of one client that takes one step a round, so the server's optimizer sees gradients;
    `expanded` fills the other sections from this one. Other keys are the optimizer's options.
    """

    steps: PositiveInt
    """Steps of the optimizer in all."""
    lr: PositiveFloat
    batch: PositiveInt | None = None
    """Records in a batch."""
    seconds: PositiveFloat | None = None
    """Seconds of sound in a batch, instead of a number of records."""
    records: Literal["all", "public"] = "all"
    """`public`: those alone that `data.public` sets aside, which are then no client's in a run that does so
    too.
    """
    optimizer: str = "lars"
    clip: PositiveFloat | None = 1.0
    """Largest norm of a step's gradient."""
    schedule: AnySchedule = Constant()


def expanded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Raw config values with the sections that `pretrain` stands for; values without `pretrain` are
    unchanged.
    """
    section = values.get("pretrain")
    if not isinstance(section, Mapping):
        return dict(values)
    for name in FEDERATED:
        if name in values:
            raise UserError(f"{name}: with `pretrain` there are no clients and no rounds; leave `{name}` out")
    data = dict(values.get("data") or {})
    if "partition" in data:
        raise UserError("data.partition: with `pretrain` all records are in one place; leave it out")
    local = {key: section[key] for key in ("batch", "seconds") if section.get(key) is not None}
    server = {
        key: value
        for key, value in section.items()
        if key not in ("steps", "records", "clip", "batch", "seconds")
    }
    steps = section.get("steps")
    seldom = max(1, steps // EVALUATIONS) if isinstance(steps, int) else 1
    return {
        **values,
        "rounds": steps,
        "data": {**data, "partition": {"kind": "iid", "clients": 1}},
        "cohort": 1,
        "local": {"steps": 1, "lr": 1.0, "clip": section.get("clip", 1.0), **local},
        "server": {**server, "optimizer": section.get("optimizer", "lars")},
        "evaluate": {"every": seldom, **(values.get("evaluate") or {})},
        "checkpoint": {"every": seldom, **(values.get("checkpoint") or {})},
    }
