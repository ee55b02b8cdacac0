"""The runs of a sweep, scheduled: many runs, side by side.

As many runs go on at once as there are cores, each in a process with one thread. Finished runs are never run
again and interrupted ones go on, so the same command continues a sweep that was stopped.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Protocol

from tacit import api, config
from tacit.config.sweep import Point, Sweep, slug, without_seed
from tacit.engine import AutoSettings, PoolSettings
from tacit.errors import Diverged, UserError
from tacit.federation import read_metrics
from tacit.federation.checkpoint import CONFIG
from tacit.federation.files import write_atomically
from tacit.federation.lock import LOCK, locked
from tacit.federation.tracking import METRICS
from tacit.reading import read_bytes
from tacit.report.compare import differences
from tacit.system import cores
from tacit.tasks import headline

DIVERGED = "diverged"
"""Left in the folder of a run that came to no end: it is not tried again, and its rate not chosen."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    folder: Path
    point: Point
    rounds: int

    def finished(self) -> bool:
        return (self.folder / "finished").exists() or self.diverged()

    def diverged(self) -> bool:
        return (self.folder / DIVERGED).exists()

    def rounds_done(self) -> int:
        try:
            return self.rounds if self.finished() else read_bytes(self.folder / METRICS).count(b"\n")
        except OSError:
            return 0


class SweepWatch(Protocol):
    """Whoever shows how a sweep goes."""

    def start(self, title: str, runs: int, rounds: int) -> None:
        """So many runs with so many rounds in all are to be run."""
        return

    def progress(self, runs: int, rounds: int) -> None:
        """So many are done; called several times a second."""
        return

    def end(self) -> None:
        """They are all done, or something went wrong."""
        return


def run_sweep(
    sweep: Sweep, folder: Path, jobs: int | None = None, watch: SweepWatch | None = None
) -> list[SweepRun]:
    """Tune, then run every point in a folder of its own under `folder`; the runs, in order.

    One process at a time: a second one is refused, in one line, before it has changed anything.

    Args:
        sweep: from `tacit.config.sweep.read_sweep`.
        folder: where the runs are; those that are there already are not run again, or go on.
        jobs: runs at once; one for each core if not given.
        watch: hears of the progress.

    Raises:
        UserError: a run failed, one in the folder has other settings, or the folder is of other things.
    """
    _refuse_strangers(folder)  # before a lock is left among them
    with locked(folder, create=True):
        return _run_sweep(sweep, folder, jobs or cores(), watch or _Nobody())


def _run_sweep(sweep: Sweep, folder: Path, jobs: int, watch: SweepWatch) -> list[SweepRun]:
    points = sweep.points
    tuning: dict[str, list[SweepRun]] = {}
    keys: dict[str, list[str]] = {}
    for point in points:
        candidates = sweep.candidates(point)
        if candidates:
            name = slug(without_seed(point))
            keys[name] = list(sweep.family(point).tune)
            tuning[name] = [
                SweepRun(folder / "tuning" / slug(c), c, sweep.config(c).rounds) for c in candidates
            ]
    if tuning:
        everything = {task.folder: task for tasks in tuning.values() for task in tasks}
        _run_all(sweep, list(everything.values()), watch, "tuning", jobs)
        chosen = {name: _best(tasks, keys[name]) for name, tasks in tuning.items()}
        write_atomically(folder / "tuned.json", json.dumps(chosen, indent=1) + "\n")
        points = [{**p, **chosen.get(slug(without_seed(p)), {})} for p in points]
    tasks = [SweepRun(folder / slug(p), p, sweep.config(p).rounds) for p in points]
    _run_all(sweep, tasks, watch, "runs", jobs)
    return tasks


def _refuse_strangers(folder: Path) -> None:
    """A folder of other things, such as records, or of a single run is no place for a sweep."""
    try:
        found = {file.name for file in folder.iterdir()}
    except OSError:  # it is not there, or whoever locks it says what is wrong with it
        return
    if CONFIG in found:
        raise UserError(f"{folder} holds a run, and a sweep is many; choose another folder with --out")
    known = LOCK in found or any((folder / name / CONFIG).exists() for name in found)
    if found and not known:
        raise UserError(f"{folder} is not empty, and holds no sweep; choose another folder with --out")


class _Nobody(SweepWatch):
    """Nobody watches."""


def _best(tasks: Sequence[SweepRun], keys: Sequence[str]) -> Point:
    """The tuned values of the run that ended best on the validation records."""
    tasks = [task for task in tasks if not task.diverged()]
    if not tasks:
        raise UserError(f"sweep.tune: all values of {', '.join(keys)} diverge; try lower ones")

    def score(task: SweepRun) -> float:
        last = read_metrics(task.folder / METRICS)[-1:]
        for record in last:
            metric = headline(record)
            for name in (f"tuned_{metric.name}", f"personal_{metric.name}", metric.name):
                if name in record and not math.isnan(record[name]):
                    return metric.score(float(record[name]))
        return float("-inf")

    best = max(tasks, key=score)
    return {key: best.point[key] for key in keys}


def _refuse_other_settings(sweep: Sweep, tasks: Sequence[SweepRun]) -> None:
    """A folder that holds runs of other settings must not pass for the runs that are asked for."""
    for task in tasks:
        if not (task.folder / CONFIG).exists():
            continue
        there = config.load(task.folder / CONFIG, presets=False).model_dump(mode="json")
        here = sweep.config(task.point).model_dump(mode="json")
        if here["privacy"] and here["privacy"]["noise"] is None and there["privacy"]:
            there["privacy"]["noise"] = None  # it was found for the budget, which is compared
        changed = differences(there, here)
        if changed:
            raise UserError(
                f"{task.folder} was run with other settings ({', '.join(changed)}); "
                "choose another folder with --out, or remove this one"
            )


def _run_all(sweep: Sweep, tasks: Sequence[SweepRun], watch: SweepWatch, title: str, jobs: int) -> None:
    _refuse_other_settings(sweep, tasks)
    waiting = [task for task in tasks if not task.finished()]
    if not waiting:
        return
    # Processes that start afresh, not forks: a fork would inherit torch's threads in an unknown state.
    context = get_context("spawn")
    jobs = min(jobs, len(waiting))
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin)
    futures: dict[str, Future[bool]] = {}

    def feed() -> None:
        # No more than can run: what a pool has queued it starts even after a Ctrl-C.
        while waiting and sum(not future.done() for future in futures.values()) < jobs:
            task = waiting.pop(0)
            futures[task.folder.name] = pool.submit(run_point, sweep.base, task.point, str(task.folder))

    watch.start(title, len(tasks), sum(task.rounds for task in tasks))
    try:
        with _deaf():  # processes started here inherit it; `run_point` listens while a run goes on
            feed()
        while waiting or not all(future.done() for future in futures.values()):
            time.sleep(0.2)
            if any(map(_interrupted, futures.values())) or any(map(_failed, futures.values())):
                waiting.clear()  # what fails one run (data that is missing, say) would fail the others too
            feed()
            _tell(watch, tasks)
        _tell(watch, tasks)  # what ended after the last look
    except BrokenProcessPool:
        pass  # the futures say which run it was
    finally:
        pool.shutdown(cancel_futures=True)  # runs under way finish their round and save
        watch.end()
    _refuse_failures(futures)


def _tell(watch: SweepWatch, tasks: Sequence[SweepRun]) -> None:
    watch.progress(sum(task.finished() for task in tasks), sum(task.rounds_done() for task in tasks))


@contextmanager
def _deaf() -> Iterator[None]:
    """Ctrl-C does nothing meanwhile."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(future: Future[bool]) -> bool:
    return future.done() and future.exception() is None and not future.result()


def _failed(future: Future[bool]) -> bool:
    return future.done() and future.exception() is not None


def _refuse_failures(futures: Mapping[str, Future[bool]]) -> None:
    failed = {name: error for name, future in futures.items() if (error := future.exception()) is not None}
    if failed:
        name, error = next(iter(failed.items()))
        raise UserError(f"{len(failed)} of {len(futures)} runs failed; the first, {name}: {error}")
    if any(map(_interrupted, futures.values())):
        raise KeyboardInterrupt


def _begin() -> None:
    """In a process for runs. A sweep that was killed must not leave it behind, waiting for work for ever; and
    what a run warns of is a line for a person, without the place in the code.
    """
    warnings.formatwarning = _line

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"note: {message}\n"


def _in_one_process(settings: config.Config) -> dict[str, Any]:
    """Overrides of the engine's section: runs share the cores, not clients. All else of it stays."""
    engine = settings.engine
    if not isinstance(engine, AutoSettings | PoolSettings):
        return {}
    several = isinstance(engine.device, tuple)  # a worker each, and there is one
    return {
        "engine.kind": "auto",
        "engine.workers": 0,
        **({"engine.device": engine.device[0]} if several else {}),
    }


def run_point(base: Mapping[str, Any], point: Point, folder_name: str) -> bool:
    """One run of a sweep, in a process of its own; whether it came to its end.

    To diverge is an end too: a rate that is too large for one method may be in the grid for another.
    """
    folder = Path(folder_name)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if (folder / CONFIG).exists():
            result = api.resume(folder)
        else:
            alone = _in_one_process(api.load(base, point))
            result = api.run(api.load(base, {**point, **alone}), folder)
    except KeyboardInterrupt:  # before the first round; later ones finish and save
        return False
    except Diverged:
        (folder / DIVERGED).touch()
        return True
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if result.finished:
        (folder / "finished").touch()
    return result.finished
