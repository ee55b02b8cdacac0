"""A `pretrain` section becomes a federation of one: the same loop, checkpoints and resume.

One client holds all the records and takes one step of rate 1 a round, so what it sends is the gradient
itself, and the server's optimizer (LARS) makes the central steps. A batch is drawn afresh for each step.

>>> filled = expanded({"data": {"name": "x"}, "pretrain": {"steps": 50, "lr": 0.5, "batch": 8}})
>>> filled["rounds"], filled["local"]["steps"], filled["server"]
(50, 1, {'lr': 0.5, 'optimizer': 'lars'})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tacit.errors import UserError

FEDERATED = ("rounds", "method", "cohort", "weights", "local", "server", "privacy")
"""Sections that a federation has and a central training has not."""
EVALUATIONS = 10
"""How often a central training is tested and saved, unless it says so itself."""


def expanded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Raw config values with the sections that `pretrain` stands for; others pass as they are."""
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
