"""The engine that distributes clients over the machines of a Ray cluster.

Each worker is a Ray actor with one resident model (`tacit.engine.ray_worker`). The job is pickled once; its
large buffers, and each round's message, are put into Ray's object store once and reach every machine once.
Shards are sent in order, two to a worker, and added in order, so the sum is the in-process engine's bit for
bit, provided that the processors are the same. Short shards, of clients that take milliseconds, are sent
several in a bundle, because Ray needs milliseconds for each task; their sums come back side by side.

Machines may leave and join
---------------------------
Ray itself never repeats a task here: work that is repeated under a guarantee may have to be paid for again,
so `before_replay` is called first. A lost worker is killed, in case it is only unreachable. Its shards go to
the front of the queue, for the remaining workers, and a new worker is requested in the background. Whatever a
lost worker may still write goes to a version of client state that nobody will name. If a shard is lost three
times, or there is no worker for ten minutes, the run ends with a one-line error, with every earlier round
saved. With `workers: auto` there are as many workers as the cluster has room for, also when it grows.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tacit.engine.contract import (
    SHARD,
    SHARDS,
    Order,
    Participant,
    Progress,
    Replay,
    Report,
    Tune,
    free,
    ignore,
    shards,
)
from tacit.engine.device import DeviceSettings
from tacit.engine.ray_cluster import Cluster, import_ray, one_line
from tacit.engine.ray_fitness import Facts, other_results, unfit
from tacit.engine.ray_job import SentJob, Token
from tacit.engine.ray_settings import Patience, RaySettings
from tacit.engine.ray_worker import AVX2, Arrays, Carried, RayWorker
from tacit.engine.states import NONE, DirectoryStates
from tacit.engine.url_states import UrlStates
from tacit.engine.worker import Job
from tacit.errors import ClientError, UserError
from tacit.system import cores
from tacit.vector import Vectors

QUEUE = 2
"""Tasks a worker holds at once, so that it never waits for its next one."""
AHEAD = 4
"""Shards per worker that may be running or waiting to be added, counted from the next one to add."""
BUNDLE, SHORT = 1 << 23, 0.04
"""The largest bundle of shards, in bytes of sums and in seconds of work: the cost of losing a worker."""
SERVER = "all machines of the Ray cluster, and whoever administers it, count as the server"


@dataclass
class _Task:
    turn: int
    index: int
    kind: str
    shards: list[list[Participant]]
    rest: tuple[Any, ...] = ()
    losses: int = 0

    @property
    def participants(self) -> list[Participant]:
        return [participant for shard in self.shards for participant in shard]


@dataclass
class _Actor:
    handle: Any
    pending: Any
    """The answer that must arrive before the worker is usable; None once it is."""
    number: int
    node: str = "a machine that did not answer"
    facts: Mapping[str, Any] | None = None
    carried: bool = False
    run: Any = None
    """The call that gives it a task."""
    tasks: deque[tuple[_Task, Any, Any]] = field(default_factory=deque)
    """Tasks sent and not yet answered, with the references to answer and sum; the first one is running."""
    since: float = 0.0


class Ray:
    """Workers on a Ray cluster. Start it once a run; close it at the end."""

    def __init__(
        self,
        job: Job,
        message: Vectors,
        cohort: int,
        settings: RaySettings | None = None,
        before_replay: Replay = free,
        patience: Patience | None = None,
    ) -> None:
        """`message` is an example of the messages to come: its names and lengths are fixed for the run."""
        self._settings, self._patience = settings or RaySettings(), patience or Patience()
        self._job, self._before_replay = job, before_replay
        self._cohort = max(cohort, 1)
        self._total = job.empty_sums()
        self._message_size = sum(vector.numel() * vector.element_size() for vector in message.values())
        self._actors: list[_Actor] = []
        device = self._settings.model_dump(include=set(DeviceSettings.model_fields))
        self._device = DeviceSettings(**device)
        self._born = self._lost = self._replayed = self._failures = 0
        self._turn = 0
        self._first: Facts | None = None
        self._excluded: set[str] = set()
        self._longest: dict[str, float] = {}
        self._waiting: list[int] = []
        self._settled = False
        self._token: Token | None = None
        self._sent: SentJob | None = None
        self._seconds = (0.0, 0.0)
        self._client = np.inf
        self._met = self._looked = self._woke = time.monotonic()
        self._wanted = 1
        self.notes: list[str] = []
        """Notes for the user who starts the run."""
        self.remarks: tuple[str, ...] = ()
        """Remarks for the privacy statement."""
        self._ray = import_ray()
        self._cluster = Cluster(self._ray)
        self._errors: type[Exception] = self._ray.exceptions.RayError
        try:
            self._sent = SentJob(job)
            here, conf = self._workers_here(), self._settings
            self._cluster.open(conf.address, here * conf.threads, here * conf.gpus, self._store_size())
            if not self._cluster.started:
                self.remarks = (SERVER,)
            self._class = self._ray.remote(RayWorker)
            if self._settings.state != "carried" and isinstance(job.states, DirectoryStates):
                self._token = Token(job.states.root)
            self._top_up()
            self._settle()
        except self._errors as error:
            self.close()
            raise UserError(f"engine: the Ray cluster failed ({one_line(error)})") from None
        except BaseException:
            self.close()
            raise

    # --- the job --------------------------------------------------------------------------------------------

    def _workers_here(self) -> int:
        """How many workers a cluster has that is started for this run."""
        if self._settings.workers != "auto":
            return self._settings.workers
        return max(1, min(cores() // self._settings.threads, self._cohort))

    def _store_size(self) -> int:
        """Bytes of the object store of a cluster started for this run: all that lies there at once."""
        sums = sum(total.numel() * total.element_size() for total in self._total.values())
        held = AHEAD * self._workers_here() + 2
        assert self._sent is not None
        return 2 * self._sent.size + 4 * self._message_size + held * (2 * sums + BUNDLE) + (128 << 20)

    # --- the engine's contract ------------------------------------------------------------------------------

    def sum(
        self, order: Order, message: Vectors, participants: Sequence[Participant], progress: Progress = ignore
    ) -> tuple[Vectors, list[Report]]:
        begin = time.monotonic()
        totals: Arrays = {}
        for name, total in self._total.items():
            totals[name] = total.zero_().numpy()
        reports: list[Report] = []
        parts = shards(participants, self._job.population.sizes)
        tasks = [
            _Task(self._turn + 1, i, "sum", part, (order,)) for i, part in enumerate(self._bundles(parts))
        ]
        for answer, sums in self._in_order(message, tasks):
            for name, out in totals.items():
                for shard in sums[name]:
                    np.add(out, shard, out=out)
            reports += answer
            progress(len(reports))
        self._seconds = time.monotonic() - begin, sum(report.seconds for report in reports)
        self._client = self._seconds[1] / len(reports) if reports else np.inf
        return self._total, reports

    def _bundles(self, parts: list[list[Participant]]) -> list[list[list[Participant]]]:
        """Bundle neighbouring shards: as many as are short, judged by the round before, while every worker
        still gets two bundles.
        """
        if not parts:
            return []
        size = sum(total.numel() * total.element_size() for total in self._total.values())
        live = max(1, sum(actor.pending is None for actor in self._actors))
        short = SHORT / (self._client * len(parts[0]) + 1e-9)
        most = min(short, BUNDLE / max(size, 1), len(parts) / (2 * live))
        count = max(1, int(most))
        return [parts[start : start + count] for start in range(0, len(parts), count)]

    def evaluate(self, message: Vectors) -> dict[str, float]:
        tasks = [_Task(self._turn + 1, i, "evaluate", [], (i,)) for i in range(self._job.chunks)]
        return self._job.summarise([answer for answer, _ in self._in_order(message, tasks)])

    def evaluate_clients(
        self, message: Vectors, participants: Sequence[Participant], tune: Tune | None = None
    ) -> list[dict[str, float]]:
        tasks = [
            _Task(self._turn + 1, i, "client", [[participant]], (tune,))
            for i, participant in enumerate(participants)
        ]
        parts = [answer for answer, _ in self._in_order(message, tasks)]
        return [self._job.task.summarise(part) for part in parts if part]

    def facts(self) -> dict[str, float]:
        """Plain values for a round's record."""
        wall, busy = self._seconds
        live = sum(actor.pending is None for actor in self._actors)
        return {
            "workers": live,
            "workers_lost": self._lost,
            "shards_replayed": self._replayed,
            "workers_busy": round(busy / (wall * live), 3) if wall and live else 0.0,
        }

    def close(self) -> None:
        for actor in self._actors:
            self._kill(actor)
        self._actors, self._first = [], None
        if self._sent is not None:
            self._sent.forget()
        self._cluster.close()
        if self._token is not None:
            self._token.remove()
            self._token = None

    # --- tasks ----------------------------------------------------------------------------------------------

    def _in_order(self, message: Vectors, tasks: list[_Task]) -> Iterator[tuple[Any, Arrays]]:
        """Each task's answer and sum, in the order of the tasks, whichever worker did it."""
        self._turn += 1
        sent = self._ray.put({name: v.detach().cpu().numpy() for name, v in message.items()})
        self._waiting = list(range(len(tasks)))  # a heap: lost tasks come first again
        done: dict[int, tuple[Any, Arrays]] = {}
        added = 0
        while added < len(tasks):
            try:
                self._hand_out(tasks, sent, added)
                done.update(self._answers())
                self._look_after()
            except self._errors as error:
                raise UserError(
                    f"engine: the Ray cluster failed ({one_line(error)}); mend that, then `tacit resume`"
                ) from None
            while added in done:
                yield done.pop(added)
                added += 1

    def _answers(self) -> dict[int, tuple[Any, Arrays]]:
        """Wait for something to happen; return the answers that arrived, by task."""
        found = {}
        for actor in self._ready():
            if actor.pending is not None:
                self._admit(actor)
            elif (received := self._received(actor)) is not None:
                task, answer, sums = received
                if task.turn == self._turn:  # otherwise it belongs to a call that an error ended
                    found[task.index] = answer, sums
        return found

    def _hand_out(self, tasks: list[_Task], sent: Any, added: int) -> None:
        live = [actor for actor in self._actors if actor.pending is None]
        limit = added + AHEAD * max(len(live), 1)
        for depth in range(QUEUE):  # everyone has one before anyone has two
            for actor in live:
                if len(actor.tasks) <= depth and self._waiting and self._waiting[0] < limit:
                    self._give(actor, tasks[heapq.heappop(self._waiting)], sent)

    def _give(self, actor: _Actor, task: _Task, sent: Any) -> None:
        if not actor.tasks:
            actor.since = time.monotonic()
        states = self._states_of(task.participants) if actor.carried else {}
        rest = (*task.rest, task.shards) if task.kind == "sum" else (*task.participants, *task.rest)
        answer, sums = actor.run.remote(task.turn, sent, task.kind, states, *rest)
        actor.tasks.append((task, answer, sums))

    def _states_of(self, participants: Sequence[Participant]) -> Carried:
        load = self._job.states.load
        return {
            participant.client: {
                participant.state: {
                    n: v.numpy() for n, v in load(participant.client, participant.state).items()
                }
            }
            for participant in participants
            if participant.state != NONE
        }

    def _ready(self) -> list[_Actor]:
        """Wait for workers that have answered, are lost, or have joined."""
        owed = {a.pending if a.pending is not None else a.tasks[0][2]: a for a in self._owing()}
        if not owed:
            time.sleep(0.1)
            return []
        # Wait for the sum, not for the answer: this already transfers the sum to this machine.
        ready, _ = self._ray.wait(list(owed), num_returns=1, timeout=1.0)
        return [owed[ref] for ref in ready]

    def _owing(self) -> list[_Actor]:
        return [actor for actor in self._actors if actor.pending is not None or actor.tasks]

    def _received(self, actor: _Actor) -> tuple[_Task, Any, Arrays] | None:
        """A worker's answer; None if it cannot be had and the worker was given up."""
        task, answer, sums = actor.tasks[0]
        try:
            (kind, told), arrays = self._ray.get([answer, sums], timeout=self._patience.least)
        except self._errors as error:
            self._lose(actor, one_line(error))
            return None
        if kind == "lost":
            self._lose(actor, told)
            return None
        actor.tasks.popleft()
        now = time.monotonic()
        self._longest[task.kind] = max(self._longest.get(task.kind, 0.0), now - actor.since)
        actor.since = now
        if task.turn == self._turn:
            self._raise(kind, told)
        elif kind != "answer":
            return None
        plain, made = told
        for client, versions in made.items():
            for version, state in versions.items():
                vectors = {name: torch.from_numpy(v.copy()) for name, v in state.items()}
                self._job.states.save(client, version, vectors)
        return task, plain, arrays

    @staticmethod
    def _raise(kind: str, told: Any) -> None:
        if kind == "refused":
            raise UserError(told)
        if kind == "error":
            raise ClientError(told)

    # --- workers --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for the first worker, and briefly for the others, so that unfit workers are refused before the
        run begins.
        """
        while True:
            self._answers()
            self._look_after()
            live = [actor for actor in self._actors if actor.pending is None]
            if live and len(live) == len(self._actors):
                break
            if live and time.monotonic() - live[0].since > self._patience.settle:
                break
        self._settled = True

    def _top_up(self) -> None:
        """Request workers until there are as many as wanted; they join when the cluster has them."""
        self._looked = time.monotonic()
        wanted = self._settings.workers
        self._wanted = wanted if wanted != "auto" else self._room()
        idle = [actor for actor in self._actors if actor.pending is not None and actor.facts is None]
        for actor in idle[: max(len(self._actors) - self._wanted, 0)]:  # their machine has left
            self._kill(actor)
            self._actors.remove(actor)
        while len(self._actors) < self._wanted:
            self._actors.append(self._create())

    def _room(self) -> int:
        """How many workers the cluster's machines have room for, but no more than there are shards."""
        settings, room = self._settings, 0
        for node in self._ray.nodes():
            if node["Alive"] and node["NodeID"] not in self._excluded:
                by_cpu = int(node["Resources"].get("CPU", 0)) // settings.threads
                by_gpu = int(node["Resources"].get("GPU", 0) / settings.gpus) if settings.gpus else by_cpu
                room += min(by_cpu, by_gpu)
        return max(1, min(room, self._cohort, max(SHARDS, self._cohort // SHARD)))

    def _create(self) -> _Actor:
        settings = self._settings
        pinned = {name: str(settings.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        options: dict[str, Any] = {
            "num_cpus": settings.threads,
            "num_gpus": settings.gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": pinned | (AVX2 if settings.isa == "avx2" else {})},
        }
        if self._excluded:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(self._excluded))})"}
        handle = self._class.options(**options).remote(settings.threads)
        self._born += 1
        token = None if self._token is None else str(self._token.path)
        return _Actor(handle, handle.ready.remote(token), self._born, since=time.monotonic())

    def _admit(self, actor: _Actor) -> None:
        """A worker has reported its facts, or that it has the job."""
        try:
            told = self._ray.get(actor.pending, timeout=self._patience.least)
        except self._errors as error:
            self._fail_to_start(actor, one_line(error))
            return
        if actor.facts is None:
            actor.facts, actor.node = told, told["host"]
            if self._accepts(actor):
                by_url = isinstance(self._job.states, UrlStates)
                actor.carried = not (by_url or self._sees(actor))
                assert self._sent is not None
                job = self._sent.put(self._ray)
                actor.pending = actor.handle.start.remote(self._device, actor.carried, *job)
            return
        kind, why = told
        if kind == "lost":
            self._fail_to_start(actor, why)
            return
        self._raise(kind, why)
        actor.pending, actor.run = None, actor.handle.run.options(num_returns=2)
        self._failures, actor.since = 0, time.monotonic()

    def _accepts(self, actor: _Actor) -> bool:
        """Whether a worker may have the job. An unfit one is refused at the start of a run, and skipped
        later.
        """
        assert actor.facts is not None
        why = unfit(actor.facts, self._first, self._settings, self._sees(actor))
        if why is None:
            differ = other_results(actor.facts, self._first)
            if differ is not None and differ not in self.notes:
                self.notes.append(differ)
            self._first = self._first or actor.facts
            return True
        if not self._settled:
            raise UserError(why)
        self._excluded.add(actor.facts["node"])
        self._kill(actor)
        self._actors.remove(actor)
        self.notes.append(f"not used: {why}")
        self._top_up()
        return False

    def _sees(self, actor: _Actor) -> bool:
        assert actor.facts is not None
        return self._token is not None and self._token.seen(actor.facts["seen"])

    def _fail_to_start(self, actor: _Actor, why: str) -> None:
        self._kill(actor)
        self._actors.remove(actor)
        self._failures += 1
        if self._failures >= self._patience.losses:
            raise UserError(
                f"engine: workers cannot start on the Ray cluster ({why}); mend that, then resume"
            )
        self._top_up()

    def _look_after(self) -> None:
        """Give up workers that hang, request missing ones, and raise if none is left."""
        now = time.monotonic()
        if now - self._woke > 10.0:  # this process itself was stopped for a while, or did other work
            self._met = now
            for actor in self._actors:
                actor.since = now
        self._woke = now
        for actor in list(self._actors):
            if actor.tasks and now - actor.since > self._deadline(actor.tasks[0][0].kind):
                self._lose(actor, "took far longer than any before")
        if any(actor.pending is None for actor in self._actors):
            self._met = now
        elif now - self._met > self._patience.nobody:
            passed_over = f" ({self.notes[-1]})" if self._excluded else ""
            raise UserError(
                f"engine: no worker of the Ray cluster was to be had for {self._patience.nobody:g} seconds"
                f"{passed_over}; see `ray status`, then `tacit resume`, here or on another cluster"
            )
        if now - self._looked > self._patience.look:
            self._top_up()

    def _deadline(self, kind: str) -> float:
        """Seconds that a task of this kind may take; there is no limit before the first one has finished."""
        known = self._longest.get(kind)
        return np.inf if known is None else max(self._patience.least, self._patience.times * known)

    def _lose(self, actor: _Actor, why: str) -> None:
        """Give a worker up. Anything that it was given may have been done, even if no answer came."""
        self._kill(actor)
        self._actors.remove(actor)
        self._lost += 1
        tasks = [task for task, _, _ in actor.tasks if task.turn == self._turn]
        if tasks:
            tasks[0].losses += 1
            if tasks[0].losses >= self._patience.losses:
                raise UserError(
                    f"engine: a shard was lost {tasks[0].losses} times, the last time on {actor.node} "
                    f"({why}); try a smaller batch or larger machines, then `tacit resume`"
                )
        again = [participant for task in tasks if task.kind == "sum" for participant in task.participants]
        if again:
            self._before_replay(again)
        for task in tasks:
            if task.kind == "sum":
                task.shards = [
                    [participant._replace(replay=participant.replay + 1) for participant in shard]
                    for shard in task.shards
                ]
                self._replayed += len(task.shards)
            heapq.heappush(self._waiting, task.index)
        self._top_up()

    def _kill(self, actor: _Actor) -> None:
        with suppress(Exception):  # the worker, or Ray itself, has already ended
            self._ray.kill(actor.handle, no_restart=True)
