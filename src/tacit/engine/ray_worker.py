"""The program of one Ray worker: a resident model, and client state that may come with the work.

`tacit.engine.ray` makes an actor of `RayWorker`.
"""

from __future__ import annotations

import os
import platform
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import tacit
from tacit.engine import shared
from tacit.engine.contract import Order, Participant, Tune
from tacit.engine.device import DeviceSettings
from tacit.engine.guard import Shown
from tacit.engine.states import NONE
from tacit.engine.worker import Worker
from tacit.errors import ClientError, UserError
from tacit.vector import Vectors

Arrays = dict[str, NDArray[Any]]
"""Named vectors as Ray transfers them. NumPy arrays are mapped from its object store; torch tensors would be
copied.
"""
Carried = dict[int, dict[str, Arrays]]
"""Client states that travel with the work, by client and version."""
Outcome = tuple[str, Any]
"""`answer` with the result; `refused` or `error` with the reason; `lost` if the worker is unusable."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
"""Environment variables that limit torch, oneDNN and MKL to instructions that every x86 server of the last
ten years has.
"""


class CarriedStates:
    """Client states in memory: filled before a shard, drained after it. The driver holds the store."""

    def __init__(self) -> None:
        self._given: Carried = {}
        self._made: Carried = {}

    def fill(self, states: Carried) -> None:
        self._given, self._made = states, {}

    def drain(self) -> Carried:
        made, self._given, self._made = self._made, {}, {}
        return made

    def load(self, client: int, version: str) -> Vectors:
        if version == NONE:
            return {}
        # Copies: the originals lie in memory shared with others, and a client may write to its own state.
        return {name: torch.from_numpy(v.copy()) for name, v in self._given[client][version].items()}

    def save(self, client: int, version: str, state: Mapping[str, Tensor]) -> None:
        arrays = {name: v.detach().as_subclass(Tensor).cpu().numpy().copy() for name, v in state.items()}
        self._made.setdefault(client, {})[version] = arrays

    def digest(self, client: int, version: str) -> str:
        raise NotImplementedError("the store is the driver's")

    def sync(self, versions: Mapping[int, str]) -> None:
        raise NotImplementedError("the store is the driver's")

    def prune(self, client: int, keep: set[str]) -> None:
        raise NotImplementedError("the store is the driver's")

    def clear(self) -> None:
        raise NotImplementedError("the store is the driver's")


class RayWorker:
    """One worker. `ready` reports its facts; after `start`, it runs the tasks that it is given."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        # Vectors are read in place, in memory that torch would warn is not writable; nothing writes there.
        warnings.filterwarnings("ignore", message=".*(not|non-)writ", category=UserWarning)
        self._worker: Worker | None = None
        self._states: CarriedStates | None = None
        self._turn = -1
        self._message: Vectors = {}
        self._memory: Vectors = {}
        self._shown: Shown | None = None
        self._sums: Vectors = {}
        """A row for each shard of a task."""

    def ready(self, token: str | None) -> dict[str, Any]:
        """Facts about this process and its machine. Nothing about the run has reached it yet.

        `token`: a file that the driver wrote into the run's folder.
        """
        import ray  # it is there: this is one of its workers

        return {
            "host": platform.node(),
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "seen": None if token is None else _content(Path(token)),
            "threads": torch.get_num_threads(),
            "authenticated": _authenticated(),
            **software(),
            "processor": processor(),
        }

    def start(
        self,
        device: DeviceSettings,
        carried: bool,
        job_apart: tuple[list[str], bytes, list[list[int]]],
        *large: NDArray[np.uint8],
    ) -> Outcome:
        """Load the job; `large` holds its buffers, mapped from memory that the machine's workers share."""
        path, body, lengths = job_apart
        sys.path += [entry for entry in path if entry not in sys.path]
        try:
            parts = [
                part for group, sizes in zip(large, lengths, strict=True) for part in split(group, sizes)
            ]
            job = shared.load_apart(body, parts)
            if carried:
                self._states = CarriedStates()
                job = replace(job, states=self._states)
            self._worker = Worker(job, device.one())
            self._sums = {name: total[None] for name, total in job.empty_sums().items()}
        except BaseException as error:
            return _failed(error)
        return "answer", None

    def run(
        self, turn: int, message: Arrays, kind: str, states: Carried, *task: Any
    ) -> tuple[Outcome, Arrays]:
        """Run one task. `turn` counts messages: calls with the same `turn` have the same `message`.

        The sum is returned apart from the answer, so that it stays in the object store. It lies in this
        worker's memory, which Ray copies before the next task begins.
        """
        assert self._worker is not None
        try:
            if self._states is not None:
                self._states.fill(states)
            answer, sums = self._play(turn, message, kind, task)
        except BaseException as error:
            return _failed(error), {}
        made = {} if self._states is None else self._states.drain()
        return ("answer", (answer, made)), sums

    def _play(self, turn: int, message: Arrays, kind: str, task: tuple[Any, ...]) -> tuple[Any, Arrays]:
        worker = self._worker
        assert worker is not None
        if turn != self._turn:
            self._message = worker.compute.vectors({n: torch.from_numpy(v) for n, v in message.items()})
            self._shown, self._turn = None, turn
        if kind == "sum":
            order: Order = task[0]
            shards: Sequence[Sequence[Participant]] = task[1]
            if self._shown is None:
                self._shown = Shown.copy_of(self._message, self._memory)
                self._memory = self._shown.memory
            if len(shards) > len(next(iter(self._sums.values()))):
                self._sums = {
                    name: rows.new_empty(len(shards), rows.shape[1]) for name, rows in self._sums.items()
                }
            reports = []
            for row, shard in enumerate(shards):
                into = {name: rows[row] for name, rows in self._sums.items()}
                reports += worker.sum(order, self._shown, shard, into)
            return reports, {name: rows[: len(shards)].numpy() for name, rows in self._sums.items()}
        if kind == "evaluate":
            worker.load(self._message)
            return worker.evaluate_chunk(task[0]), {}
        participant: Participant = task[0]
        tune: Tune | None = task[1]
        return worker.evaluate_client(self._message, participant, tune), {}


def joined(buffers: Sequence[memoryview]) -> NDArray[np.uint8]:
    """Buffers as one array, each at a multiple of 64 bytes. A single one is not copied."""
    if len(buffers) == 1:
        return np.frombuffer(buffers[0], np.uint8)
    whole = np.zeros(sum(_padded(buffer.nbytes) for buffer in buffers), np.uint8)
    for part, buffer in zip(split(whole, [b.nbytes for b in buffers]), buffers, strict=True):
        part[:] = buffer
    return whole


def split(whole: NDArray[np.uint8], lengths: Sequence[int]) -> list[memoryview]:
    """The buffers that `joined` put together.

    >>> [bytes(part) for part in split(joined([memoryview(b"one"), memoryview(b"three")]), [3, 5])]
    [b'one', b'three']
    """
    starts = np.cumsum([0, *map(_padded, lengths)])
    memory: memoryview = whole.data
    return [memory[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def _padded(length: int) -> int:
    return -(-length // 64) * 64


def _failed(error: BaseException) -> Outcome:
    """Errors as text: their classes may be the user's own, which the driver may lack."""
    if isinstance(error, UserError):
        return "refused", str(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "lost", "ran out of memory"
    text = (
        str(error) if isinstance(error, ClientError) else f"a worker failed: {type(error).__name__}: {error}"
    )
    return "error", f"{text}\n{''.join(traceback.format_exception(error))}"


def _content(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


def _authenticated() -> bool:
    """Whether this machine's part of the cluster requires a token. Workers inherit its settings."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


@cache
def software() -> dict[str, str]:
    """The versions that must agree everywhere for a job to mean the same."""
    digest = blake2b(digest_size=8)
    root = Path(tacit.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return {
        "tacit": f"{tacit.__version__} ({digest.hexdigest()})",
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def processor() -> str:
    """What decides which instructions torch, oneDNN, MKL and CUDA choose. Different instructions change
    results in their last bits.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    capability = torch.backends.cpu.get_cpu_capability()
    first = (_content(Path("/proc/cpuinfo")) or "").split("\n\n")[0]
    known = {name.strip(): value for name, _, value in (line.partition(":") for line in first.splitlines())}
    wide = [flag for flag in known.get("flags", "").split() if flag.startswith(("avx", "amx", "fma"))]
    maker = known.get("vendor_id", platform.machine()).strip()
    if all(os.environ.get(name) == value for name, value in AVX2.items()):
        return f"{maker} {capability}, pinned"
    return f"{maker} {capability} ({' '.join(sorted(wide))})"
