"""Every party is killed in the middle of a round, over a real SuperLink: all come back, the run continues,
and nobody is charged for less than was sent.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_flower import EXAMPLE, Federation, new, says, started

import tacit

pytest.importorskip("flwr")
ROUNDS = 4


class Play:
    """The processes of a federation; each may be ended in any way and started again."""

    def __init__(self, federation: Federation, stack: ExitStack) -> None:
        self.federation, self._stack = federation, stack
        self.running: dict[Any, subprocess.Popen[bytes]] = {}

    def start(self, name: Any) -> None:
        making = {"server": self.federation.server}.get(name, lambda: self.federation.client(name))
        self.running[name] = self._stack.enter_context(making())

    def train(self, *arguments: str) -> None:
        self.running["run"] = self._stack.enter_context(
            started(self.federation.place / "run.log", *arguments)
        )

    def end(self, name: Any, how: signal.Signals) -> int:
        self.running[name].send_signal(how)
        return self.running[name].wait(120)

    def paid(self) -> int:
        return sum(len(self.federation.charges(part)) for part in range(2))

    def in_a_round(self) -> None:
        """Return just after a client has paid for one more round: it is training now."""
        before, ends = self.paid(), time.monotonic() + 400
        while self.paid() == before:
            assert time.monotonic() < ends, (self.federation.place / "run.log").read_text()
            time.sleep(0.02)


@pytest.mark.long
def test_everybody_may_be_killed_in_the_middle_of_a_round(tmp_path: Path) -> None:
    federation = new(tmp_path)
    config, run = tmp_path / "run.yaml", tmp_path / "run"
    values = {
        "rounds": ROUNDS,
        "data": {"name": "fashion-mnist-slice", "partition": {"kind": "owners", "clients": 2}},
        "model": "logistic",
        "method": "dp-fedadamw",
        "cohort": 2,
        "local": {"steps": 150, "batch": 20, "lr": 0.01},
        "privacy": EXAMPLE,
        "engine": {"kind": "flower", "federation": str(federation.folder), "deadline": 120, "wait": 2},
    }
    config.write_text(yaml.safe_dump(values))
    resume = "resume", str(run)
    with ExitStack() as stack:
        play = Play(federation, stack)
        for name in ("server", 0, 1):
            play.start(name)
        says(tmp_path / "server.log", "open at")
        play.train("run", str(config), "--out", str(run))

        play.in_a_round()  # a client dies; somebody who watches over it starts it again
        assert play.end(0, signal.SIGKILL) == -signal.SIGKILL
        play.start(0)
        play.in_a_round()  # the loop dies; a client is told to end, which it does when it is done
        play.end("run", signal.SIGKILL)
        assert play.end(1, signal.SIGTERM) == 0
        play.start(1)
        play.train(*resume)
        play.in_a_round()  # the SuperLink dies: the run says so and ends, clients try again by themselves
        play.end("server", signal.SIGKILL)
        assert play.running["run"].wait(240) == 2
        assert "tacit resume" in (tmp_path / "run.log").read_text()
        play.start("server")
        says(tmp_path / "server.log", "open at", times=2)
        play.train(*resume)
        play.in_a_round()  # all of the server is told to end: the loop ends its round first, and is saved
        assert play.end("run", signal.SIGTERM) == 130
        assert play.end("server", signal.SIGTERM) == 0
        play.start("server")
        says(tmp_path / "server.log", "open at", times=3)
        play.train(*resume)
        assert play.running["run"].wait(400) == 0, (tmp_path / "run.log").read_text()

    assert [line["round"] for line in map(json.loads, (run / "metrics.jsonl").open())] == [
        *range(1, ROUNDS + 1)
    ]
    assert all(not finding.problem for finding in tacit.verify(run))
    for part in range(2):
        paid, answered = (
            federation.charges(part),
            [line["round"] for line in federation.lines(part) if line["what"] == "answered"],
        )
        assert set(paid) <= set(range(ROUNDS)) and len(paid) <= 2 * ROUNDS
        for round in range(ROUNDS):
            assert paid.count(round) >= answered.count(round), "what left was paid for before"
    attempts = [json.loads(line).get("round") for line in (run / "ledger.jsonl").read_text().splitlines()]
    for round in range(ROUNDS):
        assert attempts.count(round) >= 1
