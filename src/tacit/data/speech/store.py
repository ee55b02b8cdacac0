"""Corpora in the cache: features are computed once, on all cores, and a killed job resumes where it stopped.

A corpus is cut into shards. Each finished shard is a file that appears whole or not at all. When the last one
is there, they become the arrays of `SpeechRecords`. Unusable utterances are recorded with the corpus; whether
they are tolerated is decided when it is opened.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tacit import system
from tacit.data.speech.features import BANDS
from tacit.data.speech.options import OnBad as OnBad
from tacit.data.speech.records import Heard, SpeechRecords
from tacit.errors import UserError
from tacit.fetching import cache

SPLITS = ("train", "validation", "test")
_PARTS = ("x", "offsets", "tokens", "token_offsets", "users", "seconds")


class Bad(NamedTuple):
    """An unusable utterance: its file's name, and the reason."""

    name: str
    reason: str


Outcome = tuple[str, Heard] | Bad
"""An utterance with its split, or the reason why there is none."""


def build(
    key: str,
    shards: Sequence[Callable[[], list[Outcome]]],
    sizes: Sequence[int],
    what: str,
    about: dict[str, Any],
) -> None:
    """Make the cache entry `key` from shards, which are functions that each return this many outcomes.

    Shards run on all cores in threads, since decoding, resampling and features all release Python's lock. A
    second process that requests the same corpus waits for the first.
    """
    if cache.has(key):
        return
    folder = cache.root() / f".{key}.parts"
    with _alone(folder, what):
        if not cache.has(key):  # unless the process we waited for made it
            _build(key, folder, shards, sizes, what, about)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone(folder: Path, what: str) -> Iterator[None]:
    """One process at a time in `folder`, which is created; a killed process cannot leave the lock behind."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise UserError(
            f"the data cache {cache.root()} cannot be written ({error.strerror}); "
            "set TACIT_CACHE to a folder that can"
        ) from None
    with lock:
        try:
            system.lock(lock.fileno(), record=False)
        except (BlockingIOError, PermissionError):
            with Console(stderr=True).status(f"{what}: another process is at it; waiting"):
                system.lock(lock.fileno(), wait=True, record=False)
        folder.mkdir(exist_ok=True)  # the other process may have removed it
        yield


def _build(
    key: str,
    folder: Path,
    shards: Sequence[Callable[[], list[Outcome]]],
    sizes: Sequence[int],
    what: str,
    about: dict[str, Any],
) -> None:
    files = [folder / f"{number:06d}.npz" for number in range(len(shards))]
    missing = [number for number, file in enumerate(files) if not file.exists()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(what, total=sum(sizes))
        progress.advance(bar, sum(sizes) - sum(sizes[number] for number in missing))
        jobs = (partial(_make, shards[number], files[number], sizes[number]) for number in missing)
        for size in _in_threads(jobs):
            progress.advance(bar, size)
    with cache.adding(key) as (scratch, notes):
        notes |= about
        notes["bad"] = _assemble(files, scratch)


def open_corpus(key: str, on_bad: OnBad) -> tuple[dict[str, SpeechRecords], dict[str, Any]]:
    """The memory-mapped splits of an entry that `build` made, and its notes."""
    arrays, about = cache.read(key)
    bad = [Bad(*entry) for entry in about["bad"]]
    good = sum(len(arrays[f"{split}_users"]) for split in SPLITS)
    if bad:
        listed = "; ".join(f"{b.name}: {b.reason}" for b in bad[:3])
        more = "; …" if len(bad) > 3 else ""
        summary = f"{len(bad)} of {len(bad) + good} utterances cannot be used ({listed}{more})"
        if on_bad == "refuse":
            raise UserError(f"{summary}; mend them, or leave them out with data.speech.on_bad: skip")
        Console(stderr=True, highlight=False).print(f"skipped: {summary}", markup=False, soft_wrap=True)
    records = {s: SpeechRecords(*(arrays[f"{s}_{part}"] for part in _PARTS)) for s in SPLITS}
    for split in ("train", "test"):
        if not len(records[split]):
            raise UserError(f"the {split} part of the corpus is empty: it has no usable utterance")
    return {split: part for split, part in records.items() if len(part)}, about


def _in_threads(jobs: Iterable[Callable[[], int]]) -> Iterator[int]:
    """Results as they arrive, with no more jobs running than there are cores."""
    workers = system.cores()
    jobs = iter(jobs)
    with ThreadPoolExecutor(workers) as pool:
        running: deque[Future[int]] = deque(pool.submit(job) for job in islice(jobs, workers + 1))
        try:
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(job) for job in islice(jobs, 1))
        finally:
            for future in running:
                future.cancel()


def _make(shard: Callable[[], list[Outcome]], file: Path, size: int) -> int:
    """Run a shard and store its outcomes in a file that appears only when complete; returns `size`."""
    outcomes = shard()
    heard = [(split, h) for o in outcomes if not isinstance(o, Bad) for split, h in [o]]
    arrays: dict[str, Any] = {
        "x": _joined([h.x for _, h in heard], np.zeros((0, BANDS), np.float16)),
        "frames": np.array([len(h.x) for _, h in heard], np.int64),
        "tokens": _joined([h.tokens.astype(np.int16) for _, h in heard], np.zeros(0, np.int16)),
        "lengths": np.array([len(h.tokens) for _, h in heard], np.int64),
        "users": np.array([h.speaker for _, h in heard], np.str_),
        "seconds": np.array([h.seconds for _, h in heard], np.float32),
        "splits": np.array([split for split, _ in heard], np.str_),
        "bad": np.array(json.dumps([o for o in outcomes if isinstance(o, Bad)])),
    }
    half = file.with_suffix(".half")
    with half.open("wb") as stream:
        np.savez(stream, **arrays)
    half.replace(file)
    return size


def _joined(parts: list[NDArray[Any]], nothing: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else nothing


def _assemble(files: Sequence[Path], into: Path) -> list[Bad]:
    """Write all shards as one `.npy` file for each array of each split; returns the unusable utterances."""
    small: dict[str, list[NDArray[Any]]] = {
        n: [] for n in ("frames", "lengths", "users", "seconds", "splits")
    }
    bad: list[Bad] = []
    for file in files:
        with np.load(file) as shard:
            for name, parts in small.items():
                parts.append(shard[name])
            bad += [Bad(*entry) for entry in json.loads(str(shard["bad"]))]
    facts = {name: np.concatenate(parts) for name, parts in small.items()}
    for split in SPLITS:
        mine = facts["splits"] == split
        offsets = np.concatenate([[0], np.cumsum(facts["frames"][mine])])
        token_offsets = np.concatenate([[0], np.cumsum(facts["lengths"][mine])])
        x = np.lib.format.open_memmap(into / f"{split}_x.npy", "w+", np.float16, (int(offsets[-1]), BANDS))
        tokens = np.zeros(token_offsets[-1], np.int16)
        at = at_token = 0
        for file in files:
            with np.load(file) as shard:
                chosen = shard["splits"] == split
                if not chosen.any():
                    continue
                rows = shard["x"][np.repeat(chosen, shard["frames"])]
                spelt = shard["tokens"][np.repeat(chosen, shard["lengths"])]
            x[at : at + len(rows)] = rows
            tokens[at_token : at_token + len(spelt)] = spelt
            at, at_token = at + len(rows), at_token + len(spelt)
        x.flush()
        arrays = (offsets, tokens, token_offsets, facts["users"][mine], facts["seconds"][mine])
        for name, array in zip(_PARTS[1:], arrays, strict=True):
            np.save(into / f"{split}_{name}.npy", array)
    return bad
