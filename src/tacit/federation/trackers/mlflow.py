"""MLflow: the config as parameters and every number of a round as a metric, in a run of the folder's name.

The server and the experiment are MLflow's own settings (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tacit.federation.trackers import numbers
from tacit.federation.tracking import Record, Tracker

FOLDER = "tacit.folder"
"""The tag by which a resumed run finds its own."""


class MLflow(Tracker):
    """Goes on with the same MLflow run when a run is resumed."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Metric

        self._client_of, self._metric = mlflow.MlflowClient, Metric
        self._folder, self._config = folder.resolve(), config
        self._client: Any = None
        self._id = ""

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        # Here and not above: what fails here is the server's, and never ends a run.
        self._client = self._client_of()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tacit")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        mine = self._client.search_runs([experiment], f"tags.`{FOLDER}` = '{self._folder}'", max_results=1)
        if mine:
            self._id = mine[0].info.run_id
            return
        tags = {FOLDER: str(self._folder)}
        self._id = self._client.create_run(experiment, tags=tags, run_name=self._folder.name).info.run_id
        for key, value in _flat(self._config):
            self._client.log_param(self._id, key, str(value)[:500])

    def round(self, record: Record) -> None:
        now, step = int(time.time() * 1000), int(record["round"])
        told = [self._metric(name, value, now, step) for name, value in numbers(record).items()]
        self._client.log_batch(self._id, metrics=told)

    def close(self) -> None:
        if self._id:
            self._client.set_terminated(self._id)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
