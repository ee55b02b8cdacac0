"""Checks whether the Hugging Face hub is reachable: it is asked first and has three seconds to answer, so
that a machine without it does not wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

TIMEOUT = 3.0
"""Seconds the hub has to answer before the next source is tried."""


class Unavailable(Exception):
    """The hub, or the data set on it, cannot be reached."""


def left_out(offline: bool) -> bool:
    """Whether the hub must not be asked: by the config, or by the hub's own environment variable."""
    return offline or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


def probe(question: Callable[[], object]) -> None:
    """Raise `Unavailable` unless the hub answers a question in time."""
    failure: list[str] = [f"no answer within {TIMEOUT:g} s"]

    def ask() -> None:
        try:
            question()
            failure.clear()
        except Exception as error:  # whatever it is, the next source is tried and the reason is reported
            failure[:] = [first_line(error)]

    # A thread, because the client's timeouts do not cover a name server that does not answer.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    if failure:
        raise Unavailable(failure[0])


def first_line(error: BaseException) -> str:
    """An error as its kind and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
