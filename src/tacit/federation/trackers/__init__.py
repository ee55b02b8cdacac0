"""Trackers by name, for `trackers: [tensorboard, wandb, mlflow]`: one file each, imported when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tacit.errors import UserError
from tacit.federation.tracking import Tracker

TRACKERS = {
    "tensorboard": "TensorBoard",
    "wandb": "WeightsAndBiases",
    "mlflow": "MLflow",
}
"""The class of each; its module here has the tracker's name, and so has the extra that installs it."""


def known_tracker(name: str) -> str:
    """The name, if it is a tracker's."""
    if name not in TRACKERS:
        raise ValueError(f"{name!r} is not one of {', '.join(TRACKERS)}")
    return name


def open_tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    """A tracker for the run in `folder`, which has this config. Refused if its library is not installed."""
    kind = getattr(import_module(f"{__name__}.{name}"), TRACKERS[name])
    try:
        tracker: Tracker = kind(folder, config)
    except ImportError:
        raise UserError(f"trackers: {name} is not installed; pip install 'tacit[{name}]'") from None
    return tracker


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What of a record is a number, without its round."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "round"
    }
