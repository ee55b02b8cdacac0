"""What an algorithm lets a client send, receive and keep, measured on one client of a small network."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from tacit.algorithms import Algorithm
from tacit.data import ArrayRecords, Population
from tacit.engine import DirectoryStates, InProcess, Job, Local, Order, Participant
from tacit.engine.states import NONE
from tacit.models.vit import vit
from tacit.tasks import Classification
from tacit.vector import read_values


class ClientTraffic(TypedDict):
    """One client in one round, in multiples of the model's parameters."""

    up: float
    down: float
    keeps: dict[str, float]


def measure(algorithms: Mapping[str, Algorithm]) -> dict[str, ClientTraffic]:
    """Let each algorithm train one client of a small vision transformer."""
    rng = np.random.default_rng(0)
    records = ArrayRecords(rng.normal(size=(8, 1, 8, 8)).astype(np.float32), rng.integers(0, 4, 8))
    population = Population(records, np.array([0, 8]), np.arange(8))
    found: dict[str, ClientTraffic] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, algorithm in algorithms.items():
            torch.manual_seed(0)
            model = vit((1, 8, 8), 4, patch=4, width=48, depth=1, heads=2)
            states = DirectoryStates(Path(folder) / name)
            local = Local(lr=0.1, batch=4, steps=1)
            job = Job(
                model, Classification(), population, records, algorithm, local, 0, states, public=np.arange(4)
            )
            engine = InProcess(job)
            size = job.layout.size
            message = algorithm.message(
                algorithm.init(read_values(model, job.layout)[: job.layout.shared], job.layout)
            )
            total, reports = engine.sum(Order(0, 0.1), message, [Participant(0)])
            kept = states.load(0, reports[0].state or NONE)
            engine.close()
            found[name] = {
                "up": sum(v.numel() for v in total.values()) / size,
                "down": sum(v.numel() for v in message.values()) / size,
                "keeps": {k: v.numel() / size for k, v in kept.items()},
            }
    return found
