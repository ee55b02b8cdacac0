"""The program of one process of the pool: `python -P -m tacit.engine.pool_worker FD`, or a fork.

It reads tasks from the pipe FD until the other end is closed (or its parent dies), and does each on its one
resident model. A separate thread shows, in shared memory, that the process is alive.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from tacit.engine import shared
from tacit.engine.device import Compute
from tacit.engine.guard import Shown
from tacit.engine.worker import Worker
from tacit.errors import ClientError, UserError
from tacit.vector import Vectors

BEAT = 1.0
"""Seconds between signs of life."""


def serve(pipe: Connection[Any, Any]) -> None:
    """Answer tasks until the pipe closes."""
    parent, places, message_sizes, sizes, number, threads, compute = pipe.recv()
    body, arrays, message_place, beats, *slots = places
    _show_life(torch.frombuffer(beats.map(), dtype=torch.float64), number, parent)
    torch.set_num_threads(threads)
    worker = Worker(shared.load(bytes(body.map()), arrays), compute)
    message = shared.map_vectors(message_place, message_sizes)
    # What clients see: shared pages, and a private copy of a page as soon as it is written to. Only Linux
    # promises that the unwritten pages follow the message from round to round; elsewhere the message is
    # copied.
    private = shared.map_vectors(message_place, message_sizes, private=True)
    follows = sys.platform == "linux"
    there = _There(compute)
    results = [shared.map_vectors(place, sizes, worker.job.sum_dtype) for place in slots]
    for place in places:
        place.close()
    pipe.send(("ready", None))
    while True:
        task = pipe.recv()
        answer: Any
        match task:
            case "sum", shard, slot, order, participants, number:
                if not compute.here:
                    shown = there.shown(message, number)
                else:
                    shown = Shown(message, private) if follows else Shown.copy_of(message, private)
                answer = shard, slot, worker.sum(order, shown, participants, results[slot])
            case "evaluate", index, chunk, number:
                worker.load(there.message(message, number))
                answer = index, worker.evaluate_chunk(chunk)
            case "client", index, participant, tune, number:
                answer = index, worker.evaluate_client(there.message(message, number), participant, tune)
            case _:
                raise ValueError(f"unknown task {task!r}")
        pipe.send(("answer", answer))


class _There:
    """The message on this worker's device: copied once, however many tasks use it."""

    def __init__(self, compute: Compute) -> None:
        self._compute, self._number = compute, 0
        self._message: Vectors = {}
        self._memory: Vectors = {}

    def message(self, message: Vectors, number: int) -> Vectors:
        """The vectors of the message with that number."""
        if number != self._number:
            self._message, self._number = self._compute.vectors(message), number
        return self._message

    def shown(self, message: Vectors, number: int) -> Shown:
        shown = Shown.copy_of(self.message(message, number), self._memory)
        self._memory = shown.memory
        return shown


def _show_life(beats: Tensor, number: int, parent: int) -> None:
    def beat() -> None:
        while True:
            beats[number] = time.monotonic()
            if os.getppid() != parent:  # the parent has died: end now, even in the middle of a task
                os._exit(1)
            time.sleep(BEAT)

    threading.Thread(target=beat, daemon=True).start()


def work(pipe: Connection[Any, Any]) -> None:
    """Serve; if that fails, tell the other end why."""
    try:
        try:
            serve(pipe)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
        except UserError as error:
            pipe.send(("refused", str(error)))
        except ClientError as error:
            pipe.send(("error", f"{error}\n{traceback.format_exc()}"))
        except Exception as error:
            text = f"a worker failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            pipe.send(("error", text))
    except OSError:
        return  # the other end is closed


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])))
