"""The program of one process of the pool: `python -m tacit.engine.pool_worker FD`.

It reads tasks from the pipe FD until the other end is closed (or its maker dies), and does each on its one
resident model.
"""

from __future__ import annotations

import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tacit.engine import shared
from tacit.engine.worker import ClientError, Worker
from tacit.errors import UserError


def serve(pipe: Connection[Any, Any]) -> None:
    """Answer tasks until the pipe closes."""
    folder_name, body, message_sizes, sizes, slots, number, threads = pipe.recv()
    torch.set_num_threads(threads)
    folder = Path(folder_name)
    worker = Worker(shared.load(body, folder / "job"))
    message = shared.map_vectors(folder / "message", message_sizes)
    files = [folder / f"slot-{number}-{slot}" for slot in range(slots)]
    results = [shared.map_vectors(file, sizes, worker.job.sum_dtype) for file in files]
    pipe.send(("ready", None))
    while True:
        task = pipe.recv()
        answer: Any
        match task:
            case "sum", shard, slot, order, visits:
                answer = shard, slot, worker.sum(order, message, visits, results[slot])
            case "evaluate", index, chunk:
                worker.load(message)
                answer = index, worker.evaluate_chunk(chunk)
            case "client", index, visit, tune:
                answer = index, worker.evaluate_client(message, visit, tune)
            case _:
                raise ValueError(f"unknown task {task!r}")
        pipe.send(("answer", answer))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the round loop's to handle
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        serve(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except UserError as error:
        pipe.send(("user error", str(error)))
    except ClientError as error:
        pipe.send(("error", f"{error}\n{traceback.format_exc()}"))
    except Exception as error:
        pipe.send(("error", f"a worker failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"))


if __name__ == "__main__":
    main()
