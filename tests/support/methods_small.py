"""A federation small enough for hand calculation: four clients of twelve records, two layers, no randomness.

A batch is all of a client's records and a cohort is all clients, unless a test says otherwise. The results of
a run are read from its saved files: the server's vectors of every round, and the clients' states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tacit
from conftest import blobs
from methods_reference import CLASSES, FIRST, Array, Problem
from tacit.config.build import build_job
from tacit.config.methods import METHODS
from tacit.config.schema import Config
from tacit.data import Dataset
from tacit.engine import DirectoryStates
from tacit.engine.states import NONE, STATES
from tacit.federation import checkpoint
from tacit.privacy import Bits, ExampleLevel, FixedSize, Grid
from tacit.privacy.gaussian import rounded_gaussian
from tacit.privacy.mechanisms.base import COHORT, RELEASE
from tacit.privacy.mechanisms.plain import repeatable_cohort

CLIENTS, EACH, PUBLIC, STEPS, SEED = 4, 12, 8, 3, 5


class Halves(nn.Module):
    """Softmax regression in two layers side by side, one for each half of a record."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FIRST, CLASSES)
        self.head = nn.Linear(16 - FIRST, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = self.body(x[:, :FIRST]) + self.head(x[:, FIRST:])
        return logits


def halves(seed: int = 1) -> Halves:
    torch.manual_seed(seed)
    return Halves()


def small(public: bool = False) -> Dataset:
    return blobs(CLIENTS * EACH + PUBLIC * public, classes=CLASSES, seed=3)


def configured(method: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """A method's preset on the small federation; η halves every round, so that using the wrong η shows."""
    # FAFED's first round divides by ρ alone (v̄ = 0), so its η is a hundred times smaller than the others'.
    lr = 0.001 if "fafed" in method else 0.1
    values: dict[str, Any] = {
        "seed": SEED,
        "rounds": 2,
        "data": {"name": "blobs", "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 1.0}},
        "model": "logistic",
        "method": method,
        "cohort": CLIENTS,
        "local": {"steps": STEPS, "batch": EACH, "lr": lr, "schedule": {"kind": "factor", "factor": 0.5}},
        "checkpoint": {"keep": 10},
        "engine": {"workers": 0},
    }
    if "min_block" in METHODS[method].options:
        values["method"] = {
            "name": method,
            "min_block": 1,
        }  # 72 parameters are fewer than one of the paper's blocks
    if method == "adadps":
        values["data"]["public"] = PUBLIC / (CLIENTS * EACH + PUBLIC)
    config = tacit.load(values, overrides or {})
    if config.privacy is None:
        return config
    config = tacit.load(values, {**(overrides or {}), "privacy.unit": config.privacy.unit})
    assert config.privacy is not None
    return config.model_copy(update={"privacy": config.privacy.model_copy(update={"entropy": "seed"})})


@dataclass(frozen=True)
class Played:
    """A run and all that it saved."""

    result: tacit.Result

    def state(self, round: int) -> dict[str, Tensor]:
        """The server's vectors after a round (counted from 1)."""
        return load_file(self.result.path / "checkpoint" / f"{round:06d}" / "state.safetensors")

    @property
    def theta(self) -> Tensor:
        return self.state(len(self.result.metrics))["theta"]

    def memory(self) -> dict[int, dict[str, Tensor]]:
        """Each client's state after the last round."""
        return memories(self.result.path)


def memories(folder: Path) -> dict[int, dict[str, Tensor]]:
    saved, _ = checkpoint.newest(folder / "checkpoint")
    assert saved is not None
    store = DirectoryStates(folder / STATES)
    return {c: store.load(c, saved.facts["versions"].get(str(c), NONE)) for c in range(CLIENTS)}


def play(config: Config, folder: str = "run", **parts: Any) -> Played:
    dataset = parts.pop("dataset", None) or small(public=config.data.public > 0)
    model = parts.pop("model", None) or halves()
    return Played(tacit.run(config, folder, model=model, dataset=dataset, **parts))


BODY = FIRST * CLASSES + CLASSES
"""Parameters of the first layer."""


def problem(config: Config, sent: int = 16 * CLASSES + 2 * CLASSES) -> Problem:
    """The same federation for the transcriptions, with the same noise; `sent`: length of an upload."""
    dataset = small(public=config.data.public > 0)
    job = build_job(config, Path("unused"), halves(), dataset)
    population, public = job.population, job.public
    x, y = dataset.train.x.reshape(len(dataset.train), -1).astype(np.float64), dataset.train.y
    cohorts = [list(range(CLIENTS))] * config.rounds
    if config.cohort.size < CLIENTS:
        cohorts = [drawn(config, r) for r in range(config.rounds)]
    plain = Problem(
        data=[(x[population.train(i)], y[population.train(i)]) for i in range(CLIENTS)],
        theta=start(),
        steps=STEPS,
        lr=[config.local.lr * 0.5**r for r in range(config.rounds)],
        cohorts=cohorts,
        public=(x[public], y[public]) if len(public) else None,
        local_clip=config.local.clip or np.inf,
        decay=config.local.weight_decay,
    )
    privacy = config.privacy
    if privacy is None:
        return plain
    c = privacy.clip.bound
    size = len(plain.theta)
    if privacy.unit == "example":
        assert isinstance(job.privacy, ExampleLevel)
        std = job.privacy.std(size, EACH)
        grid = Grid.fit(c, size, privacy.noise) if privacy.noise else Grid(1, 1.0)
        return replace(
            plain,
            example_bounds=bounds(c, privacy.clip.per, size),
            example_noise=lambda r, i: noises(std, grid, size, SEED, r, 0, i, 1),
            noise_variance=(std / EACH) ** 2,
        )
    whole = sum(job.upload_sizes.values())
    grid = Grid.fit(c, whole, privacy.noise) if privacy.noise else Grid(1, 1.0)
    std = privacy.noise * grid.radius * grid.unit if privacy.noise else 0.0
    return replace(
        plain,
        client_bounds=c if privacy.clip.per == "global" else lambda _: bounds(c, privacy.clip.per, size),
        client_noise=lambda r: noises(std, grid, sent, SEED, r, 0, RELEASE),
    )


def drawn(config: Config, round: int) -> list[int]:
    """A round's cohort of fixed size: by name, or by the coins of a client-level release."""
    sampling = FixedSize(config.cohort.size)
    if config.privacy is not None and config.privacy.unit == "client":
        return sampling.draw(Bits.named(SEED, round, 0, COHORT), CLIENTS).tolist()
    return repeatable_cohort(sampling, CLIENTS, SEED, round).tolist()


def start() -> Array:
    return np.concatenate([p.detach().double().numpy().ravel() for p in halves().parameters()])


def noises(std: float, grid: Grid, size: int, *name: int) -> Iterator[Array]:
    """σC·N(0, I) in whole units, one vector after another from one named stream."""
    bits = Bits.named(*name)
    while True:
        yield rounded_gaussian(size, std / grid.unit, bits) * grid.unit if std else np.zeros(size)


def bounds(c: float, per: str, size: int) -> list[tuple[slice, float]]:
    """C whole; or a bound for each layer, equal or growing with its dimension."""
    if per == "global":
        return [(slice(0, size), c)]
    shares = (0.5, 0.5) if per == "uniform" else (BODY / size, 1 - BODY / size)
    return [(slice(0, BODY), c * shares[0] ** 0.5), (slice(BODY, size), c * shares[1] ** 0.5)]
