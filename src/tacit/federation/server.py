"""The server's side of a run: its state, which checkpoints hold, its message and its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.engine import Job, Local, Order, Participant, Report
from tacit.engine.device import devices
from tacit.engine.states import NONE
from tacit.engine.work import public_steps
from tacit.errors import UserError
from tacit.federation import checkpoint as checkpoints
from tacit.federation.checkpoint import Checkpoint
from tacit.federation.settings import Settings
from tacit.optimizers.server import ServerOptimizer
from tacit.privacy import Bounding, Ids
from tacit.privacy.mechanisms.base import State
from tacit.vector import (
    Vectors,
    buffers_in,
    frozen_hash,
    read_buffers,
    read_values,
    write_buffers,
    write_values,
)

OPTIMIZER, MECHANISM = "optimizer.", "mechanism."
"""Prefixes of the server optimizer's and the mechanism's vectors in a checkpoint."""


@dataclass
class _Round:
    """The algorithm's view of a round on the server (`tacit.algorithms.Round`)."""

    index: int
    fraction: float
    lr: float
    steps: int | None
    optimizer: ServerOptimizer
    theta: Tensor
    local: Local

    @property
    def lr_sum(self) -> float:
        steps = public_steps(self.steps)
        if self.local.within is None:
            return self.lr * steps
        return self.lr * sum(self.local.factor(k, steps) for k in range(steps))

    def step(self, delta: Tensor) -> Tensor:
        if self.theta is not self.optimizer.theta:  # the algorithm moved θ by itself before
            self.optimizer.theta.copy_(self.theta)
        self.optimizer.step(delta, self.index)
        return self.optimizer.theta


def on_host(vectors: Vectors) -> Vectors:
    """The vectors in the host's memory, where files and engines expect them."""
    return {name: vector.cpu() for name, vector in vectors.items()}


class Server:
    """The algorithm's state, the optimizer, the mechanism's state, and which client state counts."""

    def __init__(self, job: Job, settings: Settings, mechanism_state: State, fraction: float = 1.0) -> None:
        self.job, self.settings, self.layout = job, settings, job.layout
        self.mechanism_state, self.fraction = mechanism_state, fraction
        self._device = devices(settings.server.device, "server.device")[0]
        self._local_schedule = job.local.schedule.over(settings.rounds)
        values = read_values(job.model, self.layout)
        self._personal = values[self.layout.shared :].clone()
        self.optimizer = ServerOptimizer(
            settings.optimizer or settings.server.optimizer,
            values[: self.layout.shared].float().to(self._device),
            self.layout,
            settings.server.lr,
            settings.server.schedule.over(settings.rounds),
            **settings.server.options,
        )
        state = self._sound(job.algorithm.init(self.optimizer.theta, self.layout), "init")
        self.state: Vectors = self._there({**state, **read_buffers(job.model)})
        self.round = 0
        self.seconds = 0.0
        self.whole = True
        """False during a round's step: the state at that time must not be saved."""
        self.versions: dict[int, str] = {}
        """For each client with a state, the version that counts."""
        self._digests: dict[int, str] = {}
        self._unsaved: set[int] = set()
        self._kept: dict[int, dict[int, str]] = {}
        """The versions that each checkpoint on disk names, by its round."""

    @property
    def protects_clients(self) -> bool:
        return self.job.privacy is not None and self.job.privacy.unit == "client"

    @cached_property
    def nominal_steps(self) -> int | None:
        """K: the local steps of a client of average size; None if K would reveal protected clients' sizes."""
        job = self.job
        if self.protects_clients and job.local.steps is None:
            return None
        return job.local.nominal_steps(
            float(np.mean(job.population.sizes)) if job.local.steps is None else 0.0
        )

    @cached_property
    def frozen(self) -> str | None:
        """A hash of the frozen parameters: a checkpoint holds this instead of the parameters."""
        return frozen_hash(self.job.model)

    def message(self) -> Vectors:
        """What the clients receive, in the host's memory."""
        return on_host({**self.job.algorithm.message(self.state), **buffers_in(self.state)})

    def _sound(self, state: Any, method: str) -> Vectors:
        """A state as the algorithm's own code gives it: vectors by name, one of them the model."""
        theta = state.get("theta") if isinstance(state, Mapping) else None
        if not isinstance(theta, Tensor) or theta.shape != (self.layout.shared,):
            shape = f"of shape {list(theta.shape)}" if isinstance(theta, Tensor) else "that is no vector"
            what = f"a 'theta' {shape}" if isinstance(state, Mapping) and "theta" in state else "no 'theta'"
            raise UserError(
                f"algorithm: {type(self.job.algorithm).__name__}.{method} returns {what}; the server's state "
                f"is vectors by name, and 'theta' is the model, {self.layout.shared} numbers"
            )
        for name, vector in state.items():
            if not isinstance(vector, Tensor):
                raise UserError(
                    f"algorithm: {type(self.job.algorithm).__name__}.{method} returns {name!r} as a "
                    f"{type(vector).__name__}; the server's state is vectors by name"
                )
        return dict(state)

    def _there(self, vectors: Vectors) -> Vectors:
        return {name: vector.to(self._device) for name, vector in vectors.items()}

    def order(self, attempt: int, bounding: Bounding | None) -> Order:
        """What the clients must do in this round."""
        decay = self._local_schedule(self.round)
        lr, weighted = self.job.local.lr * decay, self.settings.weighted
        return Order(self.round, lr, self.nominal_steps, decay, weighted, attempt, bounding)

    def participants(self, clients: Ids) -> list[Participant]:
        """Clients, each with the version of its state that counts."""
        return [Participant(int(c), self.versions.get(int(c), NONE)) for c in clients]

    def step(self, mean: Vectors, lr: float) -> None:
        """The algorithm's server step: from the mean of the uploads to its next state."""
        mean = self._there(mean)
        view = _Round(
            index=self.round,
            fraction=self.fraction,
            lr=lr,
            steps=self.nominal_steps,
            optimizer=self.optimizer,
            theta=self.state["theta"],
            local=self.job.local,
        )
        state = self._sound(self.job.algorithm.server(self.state, mean, view), "server")
        state = {**state, **buffers_in(self.state), **buffers_in(mean)}
        # The mean is in the engine's memory, which the next round overwrites.
        borrowed = {vector.untyped_storage().data_ptr() for vector in mean.values()}
        self.state = {
            n: v.clone() if v.untyped_storage().data_ptr() in borrowed else v for n, v in state.items()
        }

    def finish(self, reports: Sequence[Report]) -> None:
        """The round is done: from now on its clients' new states count."""
        for report in reports:
            if report.state is not None:
                self.versions[report.client] = report.state
                self._unsaved.add(report.client)
        self.round += 1

    def write_model(self) -> None:
        """Write the server's model into the module, over that of the client that was trained in it last."""
        theta, personal = self.state["theta"].cpu(), self._personal
        whole = torch.cat([theta, personal]) if personal.numel() else theta
        write_values(self.job.model, self.layout, whole)
        write_buffers(self.job.model, self.state)

    def vectors(self) -> Vectors:
        """All vectors of a checkpoint, on whichever device they are."""
        tensors, _ = self.optimizer.state()
        noise, _ = checkpoints.split_vectors(self.mechanism_state)
        return (
            self.state
            | {OPTIMIZER + name: tensor for name, tensor in tensors.items()}
            | {MECHANISM + name: tensor for name, tensor in noise.items()}
        )

    def facts(self) -> dict[str, Any]:
        """All plain values of a checkpoint. After this call, the client states that they name are on disk."""
        _, scalars = self.optimizer.state()
        _, mechanism = checkpoints.split_vectors(self.mechanism_state)
        states = self.job.states
        states.sync({client: self.versions[client] for client in self._unsaved})
        for client in self._unsaved:
            self._digests[client] = states.digest(client, self.versions[client])
        return {
            "versions": {str(client): version for client, version in self.versions.items()},
            "states": {str(client): known for client, known in self._digests.items()},
            "optimizer": scalars,
            "seconds": self.seconds,
            "mechanism": mechanism,
            "frozen": self.frozen,
        }

    def saved(self, rounds: set[int]) -> None:
        """A checkpoint was written: delete client states that none on disk (of these `rounds`) names."""
        if not self._unsaved:
            return
        self._kept[self.round] = dict(self.versions)
        if rounds <= self._kept.keys():  # an unreadable checkpoint may still need any of them
            self._kept = {round: self._kept[round] for round in rounds}
            for client in self._unsaved:
                named = {versions[client] for versions in self._kept.values() if client in versions}
                self.job.states.prune(client, named)
        self._unsaved.clear()

    def restore(self, saved: Checkpoint, known: Sequence[Mapping[str, Any]]) -> None:
        """Continue from a checkpoint; `known` has the facts of all readable checkpoints on disk."""
        self._kept = {
            facts["round"]: {int(client): version for client, version in facts["versions"].items()}
            for facts in known
        }
        optimizer, noise = (checkpoints.with_prefix(saved.vectors, p) for p in (OPTIMIZER, MECHANISM))
        state = {n: v for n, v in saved.vectors.items() if not n.startswith((OPTIMIZER, MECHANISM))}
        self.optimizer.theta.copy_(state["theta"])
        self.optimizer.load(optimizer, saved.facts["optimizer"])
        self.state = {**self._there(state), "theta": self.optimizer.theta}
        self.versions = {int(client): version for client, version in saved.facts["versions"].items()}
        self._digests = {int(client): known for client, known in saved.facts["states"].items()}
        self.round, self.seconds = saved.round, float(saved.facts["seconds"])
        self.mechanism_state = {**saved.facts["mechanism"], **noise}
