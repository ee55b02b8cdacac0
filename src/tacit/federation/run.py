"""A run: rounds until the last, the end of the budget or a signal; with reports, tests and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from tacit.engine import Engine, Job, Participant
from tacit.engine.secure import Secured
from tacit.errors import Diverged, UserError
from tacit.federation import checkpoint as checkpoints
from tacit.federation.checkpoint import Checkpoint
from tacit.federation.evaluation import evaluation, untrained_part
from tacit.federation.records import record_of
from tacit.federation.result import Result
from tacit.federation.round import run_round
from tacit.federation.server import Server, on_host
from tacit.federation.settings import Settings
from tacit.federation.signals import stop_requested
from tacit.federation.spending import Spending
from tacit.federation.statements import SEEN_SPENT, SPENT
from tacit.federation.stopping import Watch
from tacit.federation.tracking import (
    METRICS,
    Guarded,
    JsonLines,
    Record,
    Tracker,
    metrics_lines,
    read_metrics,
)
from tacit.privacy import (
    Aggregation,
    Charge,
    Sampling,
    SecureSum,
    Unprotected,
    refuse_weights,
)
from tacit.privacy.mechanisms.base import NO_ROUND_FITS

SPLIT_USERS = (
    "the data's users have records at several clients: a client is protected, and not all that a user has; "
    "for that set data.partition: {kind: natural}"
)


class Federation:
    """One run: its server, its engine and its folder."""

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
        """`sampling` draws cohorts if the job has no mechanism; `data` and `carried` go into the ledger."""
        self.job, self.settings, self.folder = job, settings, folder
        if job.privacy is not None:
            refuse_weights(settings.weighted, job.privacy.unit)
            if (settings.evaluate.patience or settings.evaluate.keep_best) and not job.privacy.simulated:
                raise UserError(
                    "evaluate.patience and keep_best choose by records, which no guarantee covers"
                )
        self.mechanism: Aggregation = job.privacy or Unprotected(sampling)
        self.spending = Spending(job.privacy, job.workload, folder, data, carried)
        clients = job.workload.population
        self.server = Server(job, settings, self.mechanism.init(), self.mechanism.expected(clients) / clients)
        self.trackers: list[Tracker] = [Guarded(tracker) for tracker in trackers]
        self.stopped: str | None = None
        self._watch = Watch(settings.evaluate.patience)
        self._saved = 0
        self._metrics_saved: dict[str, Any] | None = None
        self._spent: dict[str, Any] = {}
        self._unrecorded: Record | None = None
        self._watched: dict[str, Any] = {}
        self._best: dict[str, Any] = {}
        """Which of the best models on disk belongs to this run, for the next checkpoint's manifest."""
        self._notes = self._restore()
        claims = job.privacy is not None and not job.privacy.simulated and self.server.protects_clients
        if claims and job.population.splits_users:
            self._notes.append(SPLIT_USERS)
            self.spending.remarks += [SPLIT_USERS] if SPLIT_USERS not in self.spending.remarks else []

        self.note(untrained_part(job, settings.evaluate.clients) or "")

    def note(self, said: str) -> None:
        """Add a message that is shown when the run begins."""
        self._notes += [said] if said else []

    def run(self) -> Result:
        """Train to the last round. On Ctrl-C or SIGTERM, stop early and save."""
        server, settings = self.server, self.settings
        engine = self._engine()
        try:
            self._begin()
            with stop_requested() as stop:
                while server.round < settings.rounds and not stop() and self._round(engine):
                    if server.round == settings.rounds or stop() or self._due(settings.checkpoint.every):
                        self._save()
            mended = self._metrics.note is not None and server.round > 0
            if mended or (self.stopped is not None and server.round != self._saved):
                self._save()  # also if no round was run: the manifest must name the metrics that are kept
        except (OSError, SafetensorError) as error:
            self._save_what_is_whole()
            raise UserError(
                f"{self.folder}: cannot be written ({getattr(error, 'strerror', None) or error}); round "
                f"{self._saved} is saved: mend that, then resume"
            ) from error
        except BaseException as error:
            # A failure, or a second Ctrl-C: drop the current round, keep those before it.
            self._save_what_is_whole()
            if isinstance(error, Diverged):
                saved = f"round {server.round} is saved" if server.round else "no round was saved yet"
                raise Diverged(
                    f"{error}; {saved} in {self.folder}. Lower local.lr or set local.clip, then start again"
                ) from None
            raise
        finally:
            engine.close()
            self.spending.close()
            for tracker in self.trackers:
                tracker.close()
            # Also after an error: the module must not keep what the last trained client has learnt.
            server.write_model()
        metrics = read_metrics(self.folder / METRICS)
        finished = server.round >= settings.rounds or self.stopped is not None
        kept = None
        if finished and settings.evaluate.keep_best and self._watch.round:
            checkpoints.load_model(self.folder, self.job.model, self.job.algorithm.personal_part)
            kept = f"the best, {self._watch.text}"
        return Result(self.folder, self.job.model, metrics, finished, self.stopped, kept)

    def _engine(self) -> Engine:
        cohort, privacy = math.ceil(self.mechanism.expected(len(self.job.population))), self.job.privacy
        engine = self.settings.engine.open(self.job, self.server.message(), cohort, self._charge_again)
        self._hear(engine)
        if isinstance(privacy, SecureSum) and not getattr(engine, "masks", False):
            return Secured(engine, self.job, privacy)
        return engine

    def _hear(self, engine: Engine) -> None:
        """Collect what an engine reports: notes for the start, facts for each round's record, and remarks for
        the statement, where they stay true of the rounds that it ran.
        """
        self._notes += getattr(engine, "notes", ())
        self._engine_facts: Callable[[], Record] = getattr(engine, "facts", dict)
        told: Sequence[str] = getattr(engine, "remarks", ())
        self.spending.remarks += [remark for remark in told if remark not in self.spending.remarks]

    def _begin(self) -> None:
        """Prepare the run. Every check comes first, so that a refused run leaves everything unchanged."""
        job, server = self.job, self.server
        self.spending.open(self._spent)
        checkpoints.tidy(self.folder)
        if server.round == 0:
            job.states.clear()
        self._metrics = JsonLines(self.folder / METRICS, self._metrics_saved)
        self.trackers.insert(0, self._metrics)
        self._watch.recall(metrics_lines(self.folder / METRICS))
        self._watch.restore(self._watched)
        warnings = [] if job.privacy is None else job.privacy.warnings(job.workload)
        facts = {
            "parameters": server.layout.size,
            "frozen": sum(p.numel() for p in job.model.parameters() if not p.requires_grad),
            "clients": len(job.population),
            "notes": [*self._notes, *filter(None, [self._metrics.note]), *warnings],
        }
        for tracker in self.trackers:
            tracker.start(server.round, self.settings.rounds, facts)

    def _round(self, engine: Engine) -> bool:
        """Run a round, evaluate the model if it is due, and report. False if the run stops here: the budget
        is used up, or the metric has stalled.
        """
        start, server, last = time.perf_counter(), self.server, self.settings.rounds
        self.stopped = self._watch.stalled
        if self.stopped is not None:
            return False
        outcome = run_round(server, self.mechanism, self.spending, engine, self._progress)
        if outcome is None:
            if server.round == 0:
                raise UserError(NO_ROUND_FITS)
            self.stopped = (
                "the next round would exceed the privacy budget (more rounds take a new run with more noise, "
                "or a larger budget)"
            )
            return False
        record = record_of(server, outcome) | self.spending.facts(final=server.round == last)
        if not self._withholds:
            record |= self._engine_facts()
        self._unrecorded, server.whole = record, True
        if self._tests:
            record |= evaluation(server, engine)
        seconds = time.perf_counter() - start
        server.seconds += seconds
        self._tell(record | {"seconds": round(seconds, 4)})
        self._keep_best()
        return True

    @property
    def _tests(self) -> bool:
        """Whether the model is tested after the round that has just finished."""
        return self.server.round == self.settings.rounds or self._due(self.settings.evaluate.every)

    def _due(self, every: int) -> bool:
        return self.server.round % every == 0

    def _charge_again(self, participants: Sequence[Participant]) -> None:
        """Charge clients that are about to train a second time in this round, because their worker was lost.

        With named randomness they do the same again, and nothing is charged. With secret randomness, where
        what a client sends is already a release, it would be a second release of the same data. Nobody knows
        what became of the first, so the second is charged like any other, on disk before it begins.
        """
        if self.job.privacy is None or not self.mechanism.clients_release or self.job.privacy.simulated:
            return
        round, cohort = self.server.round, np.array([v.client for v in participants])
        charge = self.mechanism.charge(round, cohort, self.job.workload)
        if not self.spending.affords(charge):
            raise UserError(
                "a worker process was lost, and to repeat its clients' work would exceed the privacy budget; "
                f"the round was dropped, and round {round} is saved"
            )
        self.spending.record(charge, cohort)

    @property
    def _withholds(self) -> bool:
        privacy = self.job.privacy
        return self.server.protects_clients and privacy is not None and privacy.withholds

    def _progress(self, done: int, cohort: int) -> None:
        if self._withholds:
            return  # the number of participants is an exact number, too
        for tracker in self.trackers:
            tracker.clients(done, cohort)

    def _tell(self, record: Record) -> None:
        self._unrecorded = record
        self._note(record)
        self._unrecorded = None
        for tracker in self.trackers[1:]:
            tracker.round(record)

    def _note(self, record: Record) -> None:
        self._metrics.round(record)
        if self._tests:
            self._watch.hear(record)

    def _keep_best(self) -> None:
        """Save the model if its test was the best and it is not saved yet."""
        due = self.settings.evaluate.keep_best and self._watch.round == self.server.round > 0
        if due and self._best.get("round") != self.server.round:
            self._best = checkpoints.save_best(self.folder, self._checkpoint())

    def _save_what_is_whole(self) -> None:
        """Save the rounds that were finished since the last checkpoint, if possible."""
        if not self.server.whole or self.server.round == self._saved:
            return
        with suppress(OSError, SafetensorError, UserError):
            if self._unrecorded is not None:  # the round succeeded; its evaluation or its record failed
                self._note({"seconds": 0.0} | self._unrecorded)
            self._save()

    def _save(self) -> None:
        server, spending = self.server, self.spending
        self._keep_best()  # no checkpoint without the model that its metrics call the best
        saved = self._checkpoint()
        spending.explain(final=server.round == self.settings.rounds or self.stopped is not None)
        folder = self.folder / "checkpoint"
        checkpoints.save(folder, saved, self.settings.checkpoint.keep)
        self._saved = server.round
        server.saved({int(place.name) for place in checkpoints.finished(folder)})
        checkpoints.tidy_best(self.folder)

    def _checkpoint(self) -> Checkpoint:
        server, spending = self.server, self.spending
        facts = {
            "belongs": checkpoints.belongings(self.folder),
            "metrics": self._metrics.saved(),
            **spending.saved(),
            "remarks": spending.remarks,
            "watch": self._watch.saved(),
            **({"best": self._best} if self._best else {}),
            **server.facts(),
        }
        return Checkpoint(server.round, on_host(server.vectors()), facts)

    def _restore(self) -> list[str]:
        """Continue from the newest sound checkpoint, if there is one; returns notes about it."""

        def check(facts: dict[str, Any]) -> None:
            checkpoints.check_states(self.job.states, facts)

        saved, notes = checkpoints.newest(self.folder / "checkpoint", check)
        if saved is not None:
            checkpoints.refuse_other_files(self.folder, saved.facts)
            checkpoints.refuse_other_base(saved.facts, self.server.frozen, self.folder)
            known = checkpoints.kept_facts(self.folder / "checkpoint") if saved.facts["versions"] else []
            self.server.restore(saved, known)
            self._saved, self._metrics_saved = saved.round, saved.facts["metrics"]
            self._spent = {name: saved.facts.get(name, {}) for name in (SPENT, SEEN_SPENT)}
            self.spending.remarks = list(saved.facts.get("remarks", ()))
            self._best, self._watched = saved.facts.get("best", {}), saved.facts.get("watch", {})
        return notes
