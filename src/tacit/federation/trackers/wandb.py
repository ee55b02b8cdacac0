"""Weights & Biases: the config and every number of a round, in a run of the folder's name.

Project, entity, server and offline mode are W&B's own settings (`WANDB_PROJECT`, `WANDB_MODE=offline`, …).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from tacit.federation.trackers import numbers
from tacit.federation.tracking import Record, Tracker


class WeightsAndBiases(Tracker):
    """Goes on with the same W&B run when a run is resumed."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._library, self._folder, self._config = wandb, folder, config
        self._run: Any = None

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        # Here and not above: what fails here is the network's, and never ends a run.
        place = self._folder.resolve()
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", "tacit"),
            name=place.name,
            id=sha256(str(place).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(place),
            config=dict(self._config),
        )

    def round(self, record: Record) -> None:
        self._run.log(numbers(record), step=int(record["round"]))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
