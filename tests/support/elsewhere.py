"""Tests of the simulated device run in forks of a process that has computed nothing yet.

Autograd asks for the number of devices once per process, at its first backward pass. So a process that has
computed something cannot get a new device, and a process with a device has threads for it and cannot fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

import accel


class Elsewhere:
    """A process, forked now, that runs each of `items` in its own fork on request."""

    def __init__(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        self._config = session.config
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # made here, once for all
        self._pipe, theirs = multiprocessing.Pipe()
        if os.fork() == 0:
            try:
                self._pipe.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                self._serve(theirs, {item.nodeid: item for item in items})
            finally:
                os._exit(0)
        theirs.close()

    def run(self, item: pytest.Item) -> list[pytest.TestReport]:
        """The reports of one test. A process that dies is a failure like any other."""
        self._pipe.send(item.nodeid)
        found: list[dict[str, Any]] | None = self._pipe.recv()
        if found is None:
            call = pytest.CallInfo.from_call(lambda: pytest.fail("the test's process died"), "call")
            return [pytest.TestReport.from_item_and_call(item, call)]
        hook = self._config.hook
        return [hook.pytest_report_from_serializable(config=self._config, data=data) for data in found]

    def _serve(self, pipe: Connection[Any, Any], items: dict[str, pytest.Item]) -> None:
        while True:
            try:
                item = items[pipe.recv()]
            except EOFError:  # the tests have ended
                return
            child = os.fork()
            if child == 0:
                self._play(item, pipe)
            if os.waitpid(child, 0)[1] != 0:
                pipe.send(None)

    def _play(self, item: pytest.Item, pipe: Connection[Any, Any]) -> None:
        try:
            accel.install()
            hook, reports = self._config.hook, runtestprotocol(item, nextitem=None, log=False)
            pipe.send([hook.pytest_report_to_serializable(config=self._config, report=r) for r in reports])
            os._exit(0)
        finally:
            os._exit(1)
