"""The scheduler of a sweep: many runs side by side.

There are as many runs at once as cores, each in a process with one thread. Finished runs are never repeated
and interrupted runs continue, so the same command continues a sweep that was stopped.
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
"""A marker in the folder of a run that diverged: it is not tried again, and its rate is not chosen."""


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
    """Shows the progress of a sweep."""

    def start(self, title: str, runs: int, rounds: int) -> None:
        """This many runs, with this many rounds in all, are about to start."""
        return

    def progress(self, runs: int, rounds: int) -> None:
        """This many are done; called several times a second."""
        return

    def end(self) -> None:
        """All runs are done, or something went wrong."""
        return


def run_sweep(
    sweep: Sweep, folder: Path, jobs: int | None = None, watch: SweepWatch | None = None
) -> list[SweepRun]:
    """Tune, then run every point in its own folder under `folder`; returns the runs, in order.

    Only one process at a time may run it: a second one is refused, in one line, before it changes anything.

    Args:
        sweep: from `tacit.config.sweep.read_sweep`.
        folder: where the runs are; those already there are not repeated, or continue.
        jobs: how many runs at once; by default one for each core.
        watch: called with the progress.

    Raises:
        UserError: a run failed, a run in the folder has other settings, or the folder holds other things.
    """
    _refuse_strangers(folder)  # before a lock file is created there
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
    """Refuse a folder of other things, such as records, or of a single run: it is no place for a sweep."""
    try:
        found = {file.name for file in folder.iterdir()}
    except OSError:  # it does not exist, or locking it will report the problem
        return
    if CONFIG in found:
        raise UserError(f"{folder} holds a run, and a sweep is many; choose another folder with --out")
    known = LOCK in found or any((folder / name / CONFIG).exists() for name in found)
    if found and not known:
        raise UserError(f"{folder} is not empty, and holds no sweep; choose another folder with --out")


class _Nobody(SweepWatch):
    """Shows nothing."""


def _best(tasks: Sequence[SweepRun], keys: Sequence[str]) -> Point:
    """The tuned values of the run with the best result on the validation records."""
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
    """Runs with other settings in the folder must not pass for the requested runs."""
    for task in tasks:
        if not (task.folder / CONFIG).exists():
            continue
        there = config.load(task.folder / CONFIG, presets=False).model_dump(mode="json")
        here = sweep.config(task.point).model_dump(mode="json")
        if here["privacy"] and here["privacy"]["noise"] is None and there["privacy"]:
            there["privacy"]["noise"] = None  # calibration found it for the budget, which is compared
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
    # Fresh processes, not forks: a fork would inherit torch's threads in an unknown state.
    context = get_context("spawn")
    jobs = min(jobs, len(waiting))
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin)
    futures: dict[str, Future[bool]] = {}

    def feed() -> None:
        # Submit no more than can run: a pool starts what it has queued even after a Ctrl-C.
        while waiting and sum(not future.done() for future in futures.values()) < jobs:
            task = waiting.pop(0)
            futures[task.folder.name] = pool.submit(run_point, sweep.base, task.point, str(task.folder))

    watch.start(title, len(tasks), sum(task.rounds for task in tasks))
    try:
        with _deaf():  # child processes inherit this; `run_point` listens during a run
            feed()
        while waiting or not all(future.done() for future in futures.values()):
            time.sleep(0.2)
            if any(map(_interrupted, futures.values())) or any(map(_failed, futures.values())):
                waiting.clear()  # what fails one run (missing data, say) would fail the others too
            feed()
            _tell(watch, tasks)
        _tell(watch, tasks)  # runs that ended since the last update
    except BrokenProcessPool:
        pass  # the futures tell which run failed
    finally:
        pool.shutdown(cancel_futures=True)  # active runs finish their round and save
        watch.end()
    _refuse_failures(futures)


def _tell(watch: SweepWatch, tasks: Sequence[SweepRun]) -> None:
    watch.progress(sum(task.finished() for task in tasks), sum(task.rounds_done() for task in tasks))


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore Ctrl-C inside this context."""
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
    """Set up a process for runs. It must not outlive a sweep that was killed, waiting for work forever; and a
    run's warning is printed as one line for the user, without the place in the code.
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
    """Overrides of the engine section: runs, not clients, share the cores. The other settings stay."""
    engine = settings.engine
    if not isinstance(engine, AutoSettings | PoolSettings):
        return {}
    several = isinstance(engine.device, tuple)  # a list needs one worker per device, and here there is one
    return {
        "engine.kind": "auto",
        "engine.workers": 0,
        **({"engine.device": engine.device[0]} if several else {}),
    }


def run_point(base: Mapping[str, Any], point: Point, folder_name: str) -> bool:
    """One run of a sweep, in its own process; returns whether it finished.

    Divergence counts as finishing: a rate that is too large for one method may be in the grid for another.
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
