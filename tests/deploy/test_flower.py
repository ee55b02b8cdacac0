"""The real thing, small: a SuperLink with two doors and two clients, TLS and keys, on loopback."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deploy_small import same, vectors

import tacit
from tacit.deploy.folders import Invitation, init_client, init_server
from tacit.deploy.keys import fingerprint, read_key
from tacit.deploy.roster import Member, Roster

pytest.importorskip("flwr")

SPLIT = {"kind": "dirichlet", "clients": 2, "alpha": 0.5}
OWNER = """name: owner-{part}
server: localhost:{port}
data: {{name: fashion-mnist-slice, partition: {{kind: dirichlet, clients: 2, alpha: 0.5}}}}
part: {part}
allow: {{unit: example, epsilon: 100, delta: 1.0e-5, methods: [dp-fedadamw], send: [examples, loss, metrics],
  simulation: true}}
"""


def settings(folder: Path | None) -> dict[str, Any]:
    return {
        "rounds": 2,
        "data": {
            "name": "fashion-mnist-slice",
            "partition": SPLIT if folder is None else {"kind": "owners", "clients": 2},
        },
        "model": "logistic",
        "method": "dp-fedadamw",
        "cohort": 2,
        "local": {"steps": 2, "batch": 20, "lr": 0.01},
        "privacy": {"unit": "example", "noise": 1.0, "clip": 1.0, "delta": 1e-5, "entropy": "seed"},
        "engine": {"kind": "in-process"}
        if folder is None
        else {"kind": "flower", "federation": str(folder), "deadline": 300, "wait": 2},
    }


@contextmanager
def started(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "tacit", *arguments]
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def says(log: Path, text: str, seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < ends, log.read_text()
        time.sleep(0.1)


def answer(port: int, trust: ssl.SSLContext, path: str, method: str = "POST") -> int:
    connection = http.client.HTTPSConnection("localhost", port, timeout=30, context=trust)
    connection.request(method, path, b"", {"content-type": "application/protobuf"})
    return connection.getresponse().status


@pytest.mark.slow
def test_two_clients_behind_a_superlink_compute_what_the_simulation_does(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "federation"
    invitation: Invitation = init_server(folder, ["localhost"], "127.0.0.1", port)
    roster, simulated = Roster(), tacit.load(settings(None))
    sim = tacit.run(simulated, tmp_path / "sim", progress=False)
    sizes = [5000, 5000]
    for part in range(2):
        home = tmp_path / f"owner-{part}"
        init_client(home, invitation, OWNER.format(part=part, port=port))
        key = (home / "key.pub").read_text().strip()
        roster = roster.with_member(Member(f"owner-{part}", key, sizes[part]))
    roster.write(folder)
    stranger = tmp_path / "stranger"
    init_client(stranger, invitation, OWNER.format(part=0, port=port))
    with started(tmp_path / "server.log", "server", "start", str(folder)):
        says(tmp_path / "server.log", "open at")
        trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        # A stranger at the public door: nothing but the Fleet interface, and that only with a known key.
        for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/register-node"):
            assert answer(port, trust, path) == 404
        assert answer(port, trust, "/v1/fleet/pull-messages") in (400, 401, 415, 422)
        with pytest.raises(ssl.SSLError):
            answer(port, ssl.create_default_context(), "/v1/fleet/pull-messages")
        assert (folder / "superlink.sock").stat().st_mode & 0o077 == 0
        logs = [tmp_path / f"owner-{part}.log" for part in range(2)]
        with (
            started(logs[0], "client", "start", str(tmp_path / "owner-0")),
            started(logs[1], "client", "start", str(tmp_path / "owner-1")),
            started(tmp_path / "stranger.log", "client", "start", str(stranger)),
        ):
            real = tacit.run(tacit.load(settings(folder)), tmp_path / "real", progress=False)
            says(tmp_path / "stranger.log", "does not know this client's key")
    assert same(vectors(sim.path), vectors(real.path))
    assert "connected to" not in (tmp_path / "stranger.log").read_text()
    for part in range(2):
        home = tmp_path / f"owner-{part}"
        log = [json.loads(line) for line in (home / "state" / "log.jsonl").read_text().splitlines()]
        assert [line["what"] for line in log] == ["answered", "answered"]
    assert fingerprint(read_key(stranger / "key").public_key()) not in {m.who for m in roster.members}
