"""Small runs to break: without privacy, with client states or the best model, at client and example level."""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import forks
import torch
import yaml
from safetensors.torch import load_file

import tacit
from conftest import blobs
from tacit.federation import checkpoint

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "states": {"method": "scaffold"},
    "best": {"evaluate": {"every": 1, "keep_best": True}},
    "client": {"privacy": {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3}},
    "example": {"privacy": {"unit": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-3}},
    "seeded": {"privacy": {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3, "entropy": "seed"}},
}
"""Runs without privacy, and those whose noise has a name, end with one model if nothing interrupts them."""


def values(kind: str, rounds: int = 4) -> dict[str, Any]:
    """The config of a run of a few rounds that takes a tenth of a second."""
    return {
        "rounds": rounds,
        "data": {"name": "x", "partition": {"kind": "iid", "clients": 12}},
        "model": {"name": "logistic"},
        "cohort": 4,
        "local": {"steps": 2, "batch": 5, "lr": 0.1},
        "server": {"optimizer": "adam", "lr": 0.01},
        "engine": {"workers": 0},
        "checkpoint": {"every": 1, "keep": 2},
        **KINDS[kind],
    }


def settings(kind: str, rounds: int = 4, **overrides: Any) -> tacit.Config:
    return tacit.load(
        values(kind, rounds), {key.replace("__", "."): value for key, value in overrides.items()}
    )


def records() -> tacit.Dataset:
    """The same data for the `tacit` command: `data: {import: faults_small:records}`."""
    return blobs(48)


def recipe(kind: str, file: Path, rounds: int = 4, **sections: Any) -> Path:
    """The same run as a file for the command."""
    plain = values(kind, rounds) | sections | KINDS[kind]
    plain["data"] = {"import": "faults_small:records", "partition": {"kind": "iid", "clients": 12}}
    file.write_text(yaml.safe_dump(plain), encoding="utf-8")
    return file


def run(kind: str, folder: Path, rounds: int = 4, **overrides: Any) -> tacit.Result:
    return tacit.run(settings(kind, rounds, **overrides), folder, dataset=blobs(48))


def resume(folder: Path, rounds: int | None = None) -> tacit.Result:
    return tacit.resume(folder, dataset=blobs(48), rounds=rounds)


def half(kind: str, folder: Path, stop: int, rounds: int, again: bool = False) -> None:
    """A run that was stopped after `stop` of its `rounds`: a copy of one, unless it is to be run `again`."""
    if not again:
        shutil.copytree(_halves(kind, stop, rounds), folder)
        return
    run(kind, folder, stop)
    if stop < rounds:
        from tacit.config import dump
        from tacit.federation.files import sealed_text, write_atomically

        write_atomically(folder / "config.yaml", sealed_text(dump(resolved(folder, rounds))))


@cache
def _halves(kind: str, stop: int, rounds: int) -> Path:
    place = Path(tempfile.mkdtemp(prefix="tacit-half-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    half(kind, place / "run", stop, rounds, again=True)
    return place / "run"


def resolved(folder: Path, rounds: int) -> tacit.Config:
    from tacit.config.loading import load

    return load(folder / "config.yaml", {"rounds": rounds}, presets=False)


def vectors(folder: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint's vectors; where the best model is kept, also that one's."""
    newest = max((folder / "checkpoint").glob("[0-9]*[0-9]"), key=lambda p: int(p.name))
    found: dict[str, torch.Tensor] = load_file(newest / checkpoint.VECTORS)
    if (folder / checkpoint.BEST).exists():
        best = checkpoint.kept(folder)
        assert best is not None
        found |= {f"best {best.round} {name}": vector for name, vector in best.vectors.items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, to see later whether anything changed. The lock's own file is nobody's."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in files(folder) if f.name != "lock"}


def copy(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to


def program(kind: str, folder: Path, rounds: int, **overrides: Any) -> forks.Process:
    """A run in a process of its own, in a session of its own; it says how it ended."""

    def play() -> int:
        try:
            result = run(kind, folder, rounds, **overrides)
        except tacit.UserError as error:
            print(f"tacit: {error}", file=sys.stderr)
            return 2
        print("finished" if result.finished else "stopped", flush=True)
        return 0

    return forks.Process(play)


def metric_rounds(folder: Path) -> list[int]:
    return [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def shm() -> set[str]:
    """Names in the system's shared memory, but for semaphores: those are of other tests' own processes."""
    place = Path("/dev/shm")
    names = {entry.name for entry in place.iterdir()} if place.is_dir() else set()
    return {name for name in names if not name.startswith("sem.")}


def children(pid: int, servers: bool = False) -> Iterator[int]:
    """Process ids of a process's workers; with `servers` also of those that fork them."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            with suppress(OSError):  # it has ended meanwhile
                forks = b"fork_server" in Path(f"/proc/{child}/cmdline").read_bytes()
                server = forks and not _forked(child)
                if server:
                    yield from children(child, servers)
                if servers or not server:
                    yield child


def _forked(pid: int) -> bool:
    """Whether it is a worker of a fork server, whose command line it has."""
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return b"fork_server" in Path(f"/proc/{parent}/cmdline").read_bytes()
