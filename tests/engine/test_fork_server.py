"""Workers as forks of a server: what is imported when, who sees what, and when forking is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import blobs
from tacit.algorithms import Algorithm
from tacit.config.build import build_job
from tacit.engine import Order, Participant, Pool, fork_server
from tacit.engine.device import Compute
from tacit.vector import read_values

pytestmark = pytest.mark.skipif(not fork_server.SUPPORTED, reason="no fork here")


@dataclass(frozen=True)
class Telling(Algorithm):
    """Writes down what a worker knows: who it is, its parent, a random number, and its open files."""

    folder: str = ""

    def client(self, msg: Any, memory: Any, work: Any) -> Any:
        files = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        seen = {"pid": os.getpid(), "parent": os.getppid(), "coin": np.random.random(), "files": files}  # noqa: NPY002
        new = Path(self.folder, f"new-{os.getpid()}")
        new.write_text(json.dumps(seen))
        new.rename(new.with_name(f"worker-{os.getpid()}"))
        return {"delta": work.load(msg["theta"]) - msg["theta"]}, {}


class Workers:
    """A pool, and what its workers know."""

    def __init__(self, config: Any, folder: Path, number: int = 2) -> None:
        job = build_job(config(), folder, None, blobs(48), Telling(str(folder)))
        self.folder, self.number = folder, number
        self.message = {"theta": read_values(job.model, job.layout).clone()}
        self.pool = Pool(job, self.message, number)

    def told(self) -> list[dict[str, Any]]:
        for file in self.folder.glob("worker-*"):
            file.unlink()
        deadline = time.monotonic() + 60
        while len(found := list(self.folder.glob("worker-*"))) < self.number and time.monotonic() < deadline:
            self.pool.sum(Order(0, 0.1, 1), self.message, [Participant(client) for client in range(12)])
        return [json.loads(file.read_text()) for file in found]


@pytest.fixture
def workers(config: Any, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(config, tmp_path)
    yield made
    made.pool.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_share_libraries_and_no_secret_and_come_and_go_with_their_server(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = workers.told()
    assert one["parent"] == other["parent"] != os.getpid()
    assert one["coin"] != other["coin"], "numpy's generator was copied by the fork"
    slots = [set(re.findall(r"tacit-slot-(\d)", " ".join(worker["files"]))) for worker in (one, other)]
    assert sorted(map(sorted, slots)) == [["0"], ["1"]], "a worker has another's memory"

    os.kill(one["pid"], signal.SIGSTOP)  # one that could not end by itself
    os.kill(one["parent"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while alive(one["pid"]) or alive(other["pid"]):
        assert time.monotonic() < deadline, "a worker outlived its server"
        time.sleep(0.01)
    after = workers.told()
    assert {worker["parent"] for worker in after}.isdisjoint({one["parent"], os.getpid()})

    monkeypatch.setattr(fork_server, "ANSWER", 1.0)
    os.kill(after[-1]["parent"], signal.SIGSTOP)
    os.kill(after[-1]["pid"], signal.SIGKILL)
    assert len(workers.told()) >= 2, "a server that is stopped has stopped the run"


def test_no_fork_is_made_of_a_process_with_threads_nor_for_an_accelerator(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if any('fork_server' in word for word in sys.orig_argv):\n"
        "    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    workers = Workers(config, tmp_path, 1)
    try:
        assert workers.pool._server is not None
        assert [worker["parent"] for worker in workers.told()] == [os.getpid()]
        assert workers.pool._forked(workers.pool._processes[0].pipe, [], Compute("cuda")) is None
    finally:
        workers.pool.close()


def test_what_is_imported_before_the_fork_is_known_libraries_alone() -> None:
    homes = ["transformers.models.llama.modeling_llama", "peft.tuners.lora.layer", "mine", "__main__"]
    parts = [type("Part", (torch.nn.Module,), {"__module__": home})() for home in homes]
    assert fork_server.modules(torch.nn.Sequential(*parts)) == sorted(homes[:2])
