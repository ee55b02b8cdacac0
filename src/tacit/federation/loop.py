"""The round loop: draw, train, release, step, evaluate, save."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tacit import randomness
from tacit.engine import (
    BUFFERS,
    Engine,
    EngineSettings,
    InProcessSettings,
    Job,
    Local,
    Order,
    Report,
    Tune,
    Visit,
)
from tacit.engine.states import NONE
from tacit.engine.work import public_steps
from tacit.errors import Diverged, UserError
from tacit.federation import checkpoint as checkpoints
from tacit.federation.checkpoint import Checkpoint
from tacit.federation.layers import layer_statistics, server_statistics
from tacit.federation.room import Room
from tacit.federation.spending import Spending
from tacit.federation.statements import SPENT
from tacit.federation.tracking import Guarded, JsonLines, Record, Tracker, read_metrics, troubles
from tacit.optimizers.schedules import Schedule
from tacit.optimizers.server import ServerOptimizer
from tacit.privacy import (
    Aggregation,
    Arrivals,
    Bounding,
    Charge,
    Sampling,
    Unprotected,
    refuse_batch_norm,
    refuse_weights,
)
from tacit.tasks import headline
from tacit.vector import (
    Layout,
    Vectors,
    frozen_hash,
    read_buffers,
    read_values,
    write_buffers,
    write_values,
)

OPTIMIZER, MECHANISM = "optimizer.", "mechanism."
"""Prefixes of the server optimizer's and the mechanism's vectors in a checkpoint."""


@dataclass(frozen=True)
class Settings:
    """All of a run that is not its job (the model, data and algorithm) nor its privacy."""

    rounds: int
    lr: float
    lr_schedule: Schedule
    server_optimizer: str = "sgd"
    server_lr: float = 1.0
    server_schedule: Schedule = field(default=lambda step: 1.0)
    server_options: Mapping[str, Any] = field(default_factory=dict)
    weighted: bool = False
    evaluate_every: int = 1
    evaluate_clients: int = 0
    tune: Tune | None = None
    """At every evaluation, also test each evaluated client after it has trained for itself alone."""
    checkpoint_every: int = 1
    keep_checkpoints: int = 2
    engine: EngineSettings = field(default_factory=InProcessSettings)


@dataclass(frozen=True)
class Result:
    """What a run leaves: the trained model, every round's metrics, and where it is all saved."""

    path: Path
    model: nn.Module
    metrics: list[Record]
    finished: bool
    """False when the run was interrupted; `tacit resume` goes on."""
    stopped: str | None = None
    """Why it ended before its last round, if it did."""

    @property
    def trouble(self) -> str | None:
        """A sentence, if in most rounds clients sent nothing of use."""
        return troubles(self.metrics)

    def last(self, name: str) -> float:
        """A metric's newest value."""
        return self._values(name)[-1]

    def best(self, name: str | None = None) -> float:
        """A metric's best value: the largest, or the smallest of an error; by default the headline metric."""
        metric = headline({name} if name else {key for record in self.metrics for key in record})
        if name and metric.name != name:
            return max(self._values(name))
        return metric.best(self._values(metric.name))

    def _values(self, name: str) -> list[float]:
        values = [float(record[name]) for record in self.metrics if name in record]
        if not values:
            known = sorted({key for record in self.metrics for key in record})
            raise KeyError(f"no round recorded {name!r}; there is {', '.join(known) or 'nothing'}")
        return values


@dataclass
class _Round:
    """The algorithm's view of a round on the server (`tacit.algorithms.Round`)."""

    index: int
    fraction: float
    lr: float
    steps: int | None
    optimizer: ServerOptimizer
    lr_factor: float
    theta: Tensor
    local: Local

    @property
    def travel(self) -> float:
        steps = public_steps(self.steps)
        if self.local.within is None:
            return self.lr * steps
        return self.lr * sum(self.local.factor(k, steps) for k in range(steps))

    def step(self, delta: Tensor) -> Tensor:
        if self.theta is not self.optimizer.theta:  # an algorithm that moved θ by itself before
            self.optimizer.theta.copy_(self.theta)
        self.optimizer.step(delta, self.lr_factor)
        return self.optimizer.theta


class Federation:
    """One run: its server's state, its engine and its folder."""

    def __init__(
        self,
        job: Job,
        settings: Settings,
        sampling: Sampling,
        folder: Path,
        trackers: Sequence[Tracker] = (),
        data: str = "",
        carried: Sequence[Charge] = (),
    ) -> None:
        """`sampling` draws cohorts where the job's mechanism does not; `data` and `carried` are for its
        ledger.
        """
        self.job, self.settings, self.folder = job, settings, folder
        if job.privacy is not None:
            refuse_batch_norm(job.model, job.privacy.unit)
            refuse_weights(settings.weighted, job.privacy.unit)
        self.mechanism: Aggregation = job.privacy or Unprotected(sampling)
        self.spending = Spending(job.privacy, job.workload, data, carried)
        self.layout: Layout = job.layout
        self.states = job.states
        values = read_values(job.model, self.layout)
        buffers = read_buffers(job.model)
        self._personal = values[self.layout.shared :].clone()
        self.optimizer = ServerOptimizer(
            settings.server_optimizer,
            values[: self.layout.shared].float(),
            self.layout,
            settings.server_lr,
            **settings.server_options,
        )
        self.state: Vectors = job.algorithm.init(self.optimizer.theta, self.layout)
        if buffers.numel():
            self.state[BUFFERS] = buffers
        self.versions: dict[int, str] = {}
        self.round = 0
        self.seconds = 0.0
        self.notes: list[str] = []
        self.stopped: str | None = None
        self._metrics_saved: dict[str, Any] | None = None
        self._digests: dict[int, str] = {}
        self._kept: dict[int, dict[str, str]] = {}
        """The versions of clients' states that each checkpoint on disk names, by its round."""
        self._saved = 0
        self._between_rounds = True
        self._unrecorded: Record | None = None
        self._room = Room(folder)
        self._mechanism_state = self.mechanism.init()
        self._spent: dict[str, Any] = {}
        self.trackers: list[Tracker] = [Guarded(tracker) for tracker in trackers]
        self._unsaved: set[int] = set()
        self._server_layers: dict[str, list[float]] = {}
        self._restore()

    def run(self) -> Result:
        """Train to the last round; stop early, saved, when asked to (Ctrl-C or SIGTERM)."""
        settings = self.settings
        engine = self._engine()
        try:
            # Whatever may refuse comes first: a run that is refused leaves everything as it was.
            self.spending.open(self.folder, self._spent)
            checkpoints.tidy(self.folder)
            if self.round == 0:
                self.states.clear()
            self._metrics = JsonLines(self.folder / "metrics.jsonl", self._metrics_saved)
            self.trackers.insert(0, self._metrics)
            notes = [*self.notes, *filter(None, [self._metrics.note]), *self._warnings()]
            facts = {
                "parameters": self.layout.size,
                "frozen": sum(p.numel() for p in self.job.model.parameters() if not p.requires_grad),
                "clients": len(self.job.population),
                "notes": notes,
            }
            for tracker in self.trackers:
                tracker.start(self.round, settings.rounds, facts)
            with _stop_requested() as stop:
                while self.round < settings.rounds and not stop():
                    record = self._play_round(engine)
                    if record is None:
                        if self.round == 0:
                            raise UserError(
                                "privacy.epsilon: not even one round fits into the budget; "
                                "raise the noise or the budget (`tacit plan --help` shows how)"
                            )
                        self.stopped = "the next round would exceed the privacy budget"
                        break
                    self._tell(record)
                    last = self.round == settings.rounds or stop()
                    if last or self.round % settings.checkpoint_every == 0:
                        self._save()
                if self.stopped is not None and self.round != self._saved:
                    self._save()
        except (OSError, SafetensorError) as error:
            self._save_what_is_whole()
            raise UserError(
                f"{self.folder}: cannot be written ({getattr(error, 'strerror', None) or error}); round "
                f"{self._saved} is saved: mend that, then resume"
            ) from error
        except BaseException:
            # A failure, or a second Ctrl-C: the round under way is dropped, those before it are kept.
            self._save_what_is_whole()
            raise
        finally:
            engine.close()
            self._room.give_back()
            self.spending.close()
            for tracker in self.trackers:
                tracker.close()
            # The server's model, also after an error: whoever goes on with this object must not find in it
            # what the client that was played last has learnt.
            theta, personal = self.state["theta"], self._personal
            whole = torch.cat([theta, personal]) if personal.numel() else theta
            write_values(self.job.model, self.layout, whole)
            if BUFFERS in self.state:
                write_buffers(self.job.model, self.state[BUFFERS])
        metrics = read_metrics(self.folder / "metrics.jsonl")
        finished = self.round == settings.rounds or self.stopped is not None
        return Result(self.folder, self.job.model, metrics, finished, self.stopped)

    @cached_property
    def _nominal_steps(self) -> int | None:
        """K: the local steps of a client of average size; None if that would tell of protected clients."""
        job = self.job
        if self._protects_clients and job.local.steps is None:
            return None
        return job.local.nominal_steps(
            float(np.mean(job.population.sizes)) if job.local.steps is None else 0.0
        )

    @cached_property
    def _frozen(self) -> str | None:
        """What the trained vector lies on: a checkpoint holds no frozen parameter, only this."""
        return frozen_hash(self.job.model)

    @property
    def _protects_clients(self) -> bool:
        return self.job.privacy is not None and self.job.privacy.unit == "client"

    def _warnings(self) -> list[str]:
        if self.job.privacy is None:
            return []
        return self.job.privacy.warnings(self.job.workload)

    def _engine(self) -> Engine:
        cohort = math.ceil(self.mechanism.expected(len(self.job.population)))
        return self.settings.engine.open(self.job, self._message(), cohort, self._charge_again)

    def _charge_again(self, visits: Sequence[Visit]) -> None:
        """Clients are about to be played a second time in this round, since their worker was lost.

        With named randomness they do the same again. Where what a client sends is already a release, under
        secret randomness, it would be a second one of the same data; nobody can say what became of the
        first, so it is paid for like any other, on disk before it begins.
        """
        if self.job.privacy is None or not self.mechanism.clients_release or self.job.privacy.simulated:
            return
        charge = self.mechanism.charge(self.round, np.array([v.client for v in visits]), self.job.workload)
        if not self.spending.affords(charge):
            raise UserError(
                "a worker process was lost, and to play its clients again would exceed the privacy budget; "
                f"the round was dropped, and round {self.round} is saved"
            )
        self.spending.record(charge)

    def _message(self) -> Vectors:
        message = self.job.algorithm.message(self.state)
        return {**message, BUFFERS: self.state[BUFFERS]} if BUFFERS in self.state else message

    def _play_round(self, engine: Engine) -> Record | None:
        """One round; None if the privacy budget has no room for it."""
        start = time.perf_counter()
        mechanism, spending, state = self.mechanism, self.spending, self._mechanism_state
        n, workload = self.round, self.job.workload
        # 1. Who takes part, and 2. what that costs.
        attempt = spending.attempt(n)
        cohort = mechanism.sample(n, attempt, workload)
        charge = mechanism.charge(n, cohort, workload, attempt)
        if not spending.affords(charge):
            return None
        if charge is not None:
            self._room.hold(checkpoints.size(self._vectors()))
        # 3. What goes down.
        bounding = mechanism.bounding(state, self.job.upload_sizes, self.layout, len(cohort))
        order, message = self._order(attempt, bounding), self._message()
        visits = [Visit(int(c), self.versions.get(int(c), NONE)) for c in cohort]
        # 4. Each client trains, bounds and adds. 5. The charge is on disk before anything is released:
        # before the clients start where what they send is already a release, else before the sum gets its
        # noise.
        if mechanism.clients_release:
            spending.record(charge)
        total, reports = engine.sum(order, message, visits, self._progress(len(visits)))
        if not self._protects_clients:
            # A stop is an answer too. Under a client's protection the round is played to its end: clients
            # who sent nothing of use count as zero, and the noise hides how many they were.
            self._refuse_if_none_finite(reports)
        if not mechanism.clients_release:
            spending.record(charge)
        # 6. The only way from uploads to the server, and 7. its step.
        self._between_rounds = False
        arrivals = _arrivals(reports, bounding)
        exact = self._mean_before_noise(total, bounding) if self.job.layers else None
        mean, self._mechanism_state = mechanism.release(total, arrivals, state, n, attempt, workload)
        if exact is not None and mean is not None:
            self._server_layers = server_statistics(self.layout, exact, mean["delta"])
        if mean is not None:
            self._step(mean, order.lr)
        # 8. What is kept and told.
        return self._finish_round(engine, order.lr, message, reports, start) | _clipped(reports, bounding)

    def _mean_before_noise(self, total: Vectors, bounding: Bounding | None) -> Tensor:
        """The mean bounded update, as the noise will find it (with whatever noise the clients made
        themselves).
        """
        delta, expected = total["delta"], self.mechanism.expected(len(self.job.population))
        if bounding is None or bounding.grid is None:
            return delta.float() / expected
        return bounding.grid.decoded(delta.clone(), 1 / expected)

    def _order(self, attempt: int, bounding: Bounding | None) -> Order:
        decay = self.settings.lr_schedule(self.round)
        return Order(
            self.round,
            self.settings.lr * decay,
            self._nominal_steps,
            decay,
            self.settings.weighted,
            attempt,
            bounding,
        )

    def _finish_round(
        self, engine: Engine, lr: float, message: Vectors, reports: Sequence[Report], start: float
    ) -> Record:
        settings = self.settings
        for report in reports:
            if report.state is not None:
                self.versions[report.client] = report.state
                self._unsaved.add(report.client)
        self.round += 1
        self._unrecorded = record = self._record(lr, message, reports)
        self._between_rounds = True
        if self.round % settings.evaluate_every == 0 or self.round == settings.rounds:
            record |= engine.evaluate(self._message())
            record |= self._evaluate_clients(engine, "personal", None)
            if settings.tune is not None:
                record |= self._evaluate_clients(engine, "tuned", settings.tune)
        self.seconds += time.perf_counter() - start
        return record | {"seconds": round(time.perf_counter() - start, 4)}

    def _step(self, mean: Vectors, lr: float) -> None:
        settings, job = self.settings, self.job
        view = _Round(
            index=self.round,
            fraction=self.mechanism.expected(len(job.population)) / len(job.population),
            lr=lr,
            steps=self._nominal_steps,
            optimizer=self.optimizer,
            lr_factor=settings.server_schedule(self.round),
            theta=self.state["theta"],
            local=job.local,
        )
        state = job.algorithm.server(self.state, mean, view)
        if BUFFERS in self.state:
            state[BUFFERS] = mean.get(BUFFERS, self.state[BUFFERS])
        # The mean is in the engine's memory, which the next round overwrites.
        borrowed = {vector.untyped_storage().data_ptr() for vector in mean.values()}
        self.state = {
            n: v.clone() if v.untyped_storage().data_ptr() in borrowed else v for n, v in state.items()
        }

    def _refuse_if_none_finite(self, reports: Sequence[Report]) -> None:
        if reports and not any(report.finite for report in reports):
            saved = f"round {self.round} is saved" if self.round else "no round was saved yet"
            raise Diverged(
                f"round {self.round + 1}: the updates of all {len(reports)} clients were infinite or not a "
                f"number; {saved} in {self.folder}. Lower local.lr or set local.clip, then start again"
            )

    def _record(self, lr: float, message: Vectors, reports: Sequence[Report]) -> Record:
        finite = [r for r in reports if r.finite]
        record: Record = {"round": self.round, "lr": lr, "clients": len(finite)}
        if finite:
            steps = sum(r.steps for r in finite)
            record["train_loss"] = sum(r.loss * r.steps for r in finite) / max(steps, 1)
            norms = np.array([r.norm for r in finite])
            record |= {"update_norm": float(norms.mean()), "update_norm_std": float(norms.std())}
            record["examples"] = sum(r.examples for r in finite)
            for name in finite[0].notes:
                record[name] = sum(r.notes.get(name, 0.0) for r in finite) / len(finite)
        if self.job.layers:
            record["layers"] = layer_statistics(self.layout, [r.layers for r in finite])
            record["gradient_layers"] = layer_statistics(self.layout, [r.gradient_layers for r in finite])
            record["server_layers"] = self._server_layers
        if len(finite) < len(reports):
            record["skipped"] = sorted(r.client for r in reports if not r.finite)
        record["bytes_down"] = 4 * len(reports) * sum(v.numel() for v in message.values())
        record["bytes_up"] = 4 * len(reports) * sum(self.job.upload_sizes.values())
        if "bound" in self._mechanism_state:
            record["clip"] = self._mechanism_state["bound"]
        return record | self.spending.facts(final=self.round == self.settings.rounds)

    def _evaluate_clients(self, engine: Engine, prefix: str, tune: Tune | None) -> Record:
        count = min(self.settings.evaluate_clients, len(self.job.population))
        if count == 0:
            return {}
        # The same clients every time, so that the curve shows training and not the draw.
        rng = randomness.generator(self.job.seed, "evaluated clients")
        chosen = np.sort(rng.choice(len(self.job.population), count, replace=False, shuffle=False))
        visits = [Visit(int(c), self.versions.get(int(c), NONE)) for c in chosen]
        results = engine.evaluate_clients(self._message(), visits, tune)
        names = results[0].keys() if results else ()
        return {f"{prefix}_{name}": sum(r[name] for r in results) / len(results) for name in names}

    def _progress(self, cohort: int) -> Callable[[int], None]:
        def tell(done: int) -> None:
            for tracker in self.trackers:
                tracker.clients(done, cohort)

        return tell

    def _tell(self, record: Record) -> None:
        self._unrecorded = record
        self._metrics.round(record)
        self._unrecorded = None
        for tracker in self.trackers[1:]:
            tracker.round(record)

    def _vectors(self) -> Vectors:
        """All vectors of a checkpoint."""
        tensors, _ = self.optimizer.state()
        noise, _ = checkpoints.split_vectors(self._mechanism_state)
        return (
            self.state
            | {OPTIMIZER + name: tensor for name, tensor in tensors.items()}
            | {MECHANISM + name: tensor for name, tensor in noise.items()}
        )

    def _save_what_is_whole(self) -> None:
        """Save the rounds that were finished since the last checkpoint, if nothing forbids it."""
        if not self._between_rounds or self.round == self._saved:
            return
        with suppress(OSError, SafetensorError, UserError):
            if self._unrecorded is not None:  # its evaluation failed, or its record; the round did not
                self._metrics.round({"seconds": 0.0} | self._unrecorded)
            self._save()

    def _save(self) -> None:
        _, scalars = self.optimizer.state()
        _, mechanism = checkpoints.split_vectors(self._mechanism_state)
        self.states.sync({client: self.versions[client] for client in self._unsaved})
        for client in self._unsaved:
            self._digests[client] = self.states.digest(client, self.versions[client])
        facts = {
            "belongs": checkpoints.belongings(self.folder),
            "versions": {str(client): version for client, version in self.versions.items()},
            "states": {str(client): known for client, known in self._digests.items()},
            "metrics": self._metrics.saved(),
            "optimizer": scalars,
            "seconds": self.seconds,
            "mechanism": mechanism,
            SPENT: self.spending.saved(),
            "frozen": self._frozen,
        }
        self._room.give_back()
        final = self.round == self.settings.rounds or self.stopped is not None
        self.spending.explain(self.folder, final)
        folder, saved = self.folder / "checkpoint", Checkpoint(self.round, self._vectors(), facts)
        checkpoints.save(folder, saved, self.settings.keep_checkpoints)
        self._saved = self.round
        if self._unsaved:
            self._kept[self.round] = {str(client): version for client, version in self.versions.items()}
            rounds = {int(place.name) for place in checkpoints.finished(folder)}
            if rounds <= self._kept.keys():  # one that could not be read may still need any of them
                self._kept = {round: self._kept[round] for round in rounds}
                for client in self._unsaved:
                    name, kept = str(client), self._kept.values()
                    self.states.prune(client, {versions[name] for versions in kept if name in versions})
            self._unsaved.clear()

    def _restore(self) -> None:
        def check(facts: dict[str, Any]) -> None:
            checkpoints.check_states(self.states, facts)

        saved, self.notes = checkpoints.newest(self.folder / "checkpoint", check)
        if saved is None:
            return
        checkpoints.refuse_other_files(self.folder, saved.facts)
        checkpoints.refuse_other_base(saved.facts, self._frozen, self.folder)
        optimizer, noise = (checkpoints.with_prefix(saved.vectors, p) for p in (OPTIMIZER, MECHANISM))
        state = {n: v for n, v in saved.vectors.items() if not n.startswith((OPTIMIZER, MECHANISM))}
        self.optimizer.theta.copy_(state["theta"])
        self.optimizer.load(optimizer, saved.facts["optimizer"])
        self.state = {**state, "theta": self.optimizer.theta}
        self.versions = {int(client): version for client, version in saved.facts["versions"].items()}
        self._digests = {int(client): known for client, known in saved.facts["states"].items()}
        known = checkpoints.kept_facts(self.folder / "checkpoint") if self.versions else []
        self._kept = {facts["round"]: facts["versions"] for facts in known}
        self.round, self.seconds = saved.round, float(saved.facts["seconds"])
        self._saved, self._metrics_saved = saved.round, saved.facts["metrics"]
        self._mechanism_state = {**saved.facts["mechanism"], **noise}
        self._spent = saved.facts[SPENT]


def _arrivals(reports: Sequence[Report], bounding: Bounding | None) -> Arrivals:
    """What the mechanism needs to know of the clients' reports."""
    norm = math.inf if bounding is None else bounding.bound.bound
    return Arrivals(
        drawn=len(reports),
        arrived=sum(report.finite for report in reports),
        within=sum(report.finite and report.norm <= norm for report in reports),
        weight=sum(report.weight for report in reports),
    )


def _clipped(reports: Sequence[Report], bounding: Bounding | None) -> Record:
    """The share of a round's clients whose upload was longer than the clip; for the researcher, and exact."""
    norms = [report.norm for report in reports if report.finite]
    if bounding is None or not norms:
        return {}
    return {"clipped": round(sum(norm > bounding.bound.bound for norm in norms) / len(norms), 4)}


@contextmanager
def _stop_requested() -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C or SIGTERM came; a second Ctrl-C interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["Federation", "Result", "Settings"]
