"""A sweep from the command line: many runs, side by side, with one progress display.

Each run is a process of its own with one thread; as many run at once as there are cores. Finished runs are
never run again and interrupted ones go on, so the same command continues a sweep that was stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tacit.errors import UserError

if TYPE_CHECKING:
    from tacit.config.sweep import Point, Sweep

CHILD = "from tacit.cli.sweep import child; child()"


@dataclass(frozen=True)
class Task:
    """One run of a sweep."""

    folder: Path
    point: Point
    rounds: int

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.folder.with_name(self.folder.name + ".log")

    def finished(self) -> bool:
        return (self.folder / "finished").exists()

    def rounds_done(self) -> int:
        try:
            return (
                self.rounds if self.finished() else (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
            )
        except OSError:
            return 0


def run_sweep(sweep: Sweep, folder: Path, console: Console, jobs: int | None = None) -> Path:
    """Tune, then run every point; returns the folder that `tacit compare` reads."""
    from tacit.config.sweep import slug

    jobs = jobs or len(os.sched_getaffinity(0))
    folder.mkdir(parents=True, exist_ok=True)
    points = sweep.points
    if sweep.tune:
        groups = {slug(_without_seed(p)): p for p in points}
        tuning = {
            name: [Task(folder / "tuning" / slug(c), c, sweep.config(c).rounds) for c in sweep.candidates(p)]
            for name, p in groups.items()
        }
        everything = {task.folder: task for tasks in tuning.values() for task in tasks}
        _run_all(sweep, list(everything.values()), console, "tuning", jobs)
        chosen = {name: _best(tasks, list(sweep.tune)) for name, tasks in tuning.items()}
        (folder / "tuned.json").write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
        points = [{**p, **chosen[slug(_without_seed(p))]} for p in points]
    tasks = [Task(folder / slug(p), p, sweep.config(p).rounds) for p in points]
    _run_all(sweep, tasks, console, "runs", jobs)
    return folder


def _without_seed(point: Point) -> Point:
    return {key: value for key, value in point.items() if key != "seed"}


def _best(tasks: Sequence[Task], keys: Sequence[str]) -> Point:
    """The tuned values of the run that ended best on the validation records."""
    from tacit.federation import read_metrics

    def score(task: Task) -> float:
        last = read_metrics(task.folder / "metrics.jsonl")[-1:]
        names = ("tuned_accuracy", "personal_accuracy", "accuracy")
        found = [float(record[name]) for record in last for name in names if name in record]
        return found[0] if found else float("-inf")

    best = max(tasks, key=score)
    return {key: best.point[key] for key in keys}


def _run_all(sweep: Sweep, tasks: Sequence[Task], console: Console, title: str, jobs: int) -> None:
    waiting = [task for task in tasks if not task.finished()]
    running: list[tuple[Task, subprocess.Popen[bytes]]] = []
    failed: list[Task] = []
    total = sum(task.rounds for task in tasks)
    columns = (
        TextColumn(f"{title:<7}"),
        BarColumn(20),
        TextColumn("{task.fields[runs]}"),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    said = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        line = bar.add_task(title, total=total, runs="")
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    task = waiting.pop(0)
                    running.append((task, _start(sweep, task)))
                time.sleep(0.2)
                failed += [task for task, process in running if process.poll()]
                running = [(task, process) for task, process in running if process.poll() is None]
                done = sum(task.finished() for task in tasks)
                bar.update(
                    line, completed=sum(t.rounds_done() for t in tasks), runs=f"{done}/{len(tasks)} runs,"
                )
                if not console.is_terminal and time.monotonic() - said > 30:
                    said = time.monotonic()
                    console.print(f"{title}: {done}/{len(tasks)} runs done")
        finally:
            for _, process in running:
                process.terminate()  # each finishes its round and saves
            for _, process in running:
                process.wait()
    if failed:
        log = failed[0].log
        reason = log.read_text(encoding="utf-8").strip().splitlines()[-1:] or ["no message"]
        raise UserError(
            f"{len(failed)} of {len(tasks)} runs failed; the first, {failed[0].folder.name}: {reason[0]}"
        )


def _start(sweep: Sweep, task: Task) -> subprocess.Popen[bytes]:
    task.folder.parent.mkdir(parents=True, exist_ok=True)
    order = {"base": sweep.base, "point": task.point, "folder": str(task.folder)}
    with task.log.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )


def child() -> None:
    """One run of a sweep, in a process of its own."""
    from tacit import api

    order = json.loads(sys.argv[1])
    folder = Path(order["folder"])
    try:
        if (folder / api.CONFIG).exists():
            result = api.resume(folder)
        else:
            overrides = {**order["point"], "engine": {"workers": 0}}
            result = api.run(api.load(order["base"], overrides), folder)
    except UserError as error:
        print(error)
        sys.exit(2)
    if result.finished:
        (folder / "finished").touch()
