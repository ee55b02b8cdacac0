"""A small real federation: a SuperLink with two doors and three clients, TLS and keys, on loopback."""

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deploy_small import same, vectors

import tacit
from tacit.deploy.flower.door import ALL
from tacit.deploy.flower.gate import FLEET
from tacit.deploy.flower.library import private
from tacit.deploy.folders import init_client, init_server
from tacit.deploy.keys import fingerprint, read_key
from tacit.deploy.roster import Member, Roster

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

CLIENTS = 3
SPLIT = {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.5}
OWNER = """name: owner-{part}
server: localhost:{port}
data: {{name: fashion-mnist-slice, partition: {{kind: dirichlet, clients: 3, alpha: 0.5}}}}
part: {part}
allow: {{unit: none, delta: 1.0e-5, methods: [dp-fedadamw, dp-fedlamb],
  send: [examples, loss, metrics], simulation: true}}
"""
EXAMPLE = {"unit": "example", "noise": 1.0, "clip": 1.0, "delta": 1e-5, "entropy": "seed"}
SECURE = {"unit": "client", "noise": 1.0, "clip": 1.0, "delta": 1e-5, "entropy": "seed"}
SECURE |= {"aggregation": "secure", "threshold": 0.6}


def settings(folder: Path | None, method: str, privacy: dict[str, Any], **more: Any) -> Any:
    values = {
        "rounds": 2,
        "data": {
            "name": "fashion-mnist-slice",
            "partition": SPLIT if folder is None else {"kind": "owners", "clients": CLIENTS},
        },
        "model": "logistic",
        "method": method,
        "cohort": {"size": CLIENTS, "sampling": "fixed"},
        "local": {"steps": 2, "batch": 20, "lr": 0.01},
        "privacy": privacy,
        "engine": {"kind": "in-process"}
        if folder is None
        else {"kind": "flower", "federation": str(folder), "deadline": 240, "wait": CLIENTS},
    }
    return tacit.load(values | more)


@contextmanager
def started(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with log.open("ab") as stream:
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
                process.wait()


def says(log: Path, text: str, seconds: float = 120.0, times: int = 1) -> None:
    ends = time.monotonic() + seconds
    while log.read_text().count(text) < times:
        assert time.monotonic() < ends, log.read_text()
        time.sleep(0.1)


def answer(port: int, trust: ssl.SSLContext, path: str, length: int = 0) -> int:
    connection = http.client.HTTPSConnection("localhost", port, timeout=30, context=trust)
    headers = {"content-type": "application/protobuf", "content-length": str(length)}
    connection.request("POST", path, None, headers)
    return connection.getresponse().status


def as_another(federation: Federation, trust: ssl.SSLContext) -> dict[str, int]:
    """What the door says to the first owner's key where it is used in the second's name."""
    import httpx
    from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    keys = [read_key(federation.home(part) / "key") for part in range(2)]
    control = private(ControlHttpClient, federation.folder)
    ids = {bytes(n.public_key): n.node_id for n in control.ListNodes(ListNodesRequest()).nodes_info}
    control.close()
    other = Node(node_id=ids[public_key_to_bytes(keys[1].public_key())])
    client = FleetHttpClient(
        f"https://localhost:{federation.port}",
        interceptors=[NodeAuthHttpInterceptor(keys[0], keys[0].public_key())],
        verify=trust,
    )
    tries = {
        "orders": lambda: client.PullMessages(fleet_pb2.PullMessagesRequest(node=other)),
        "uploads": lambda: client.PullObject(message_pb2.PullObjectRequest(node=other, object_id="0" * 64)),
        "answers": lambda: client.PushMessages(fleet_pb2.PushMessagesRequest(node=other)),
        "pieces": lambda: client.PushObject(message_pb2.PushObjectRequest(node=other)),
        "deletes": lambda: client.ConfirmMessageReceived(
            message_pb2.ConfirmMessageReceivedRequest(node=other)
        ),
        "lives": lambda: client.SendNodeHeartbeat(
            heartbeat_pb2.SendNodeHeartbeatRequest(node=other, heartbeat_interval=10.0)
        ),
        "leaves": lambda: client.DeactivateNode(
            fleet_pb2.DeactivateNodeRequest(node_id=other.node_id)
        ),
    }  # fmt: skip
    told = {}
    for name, attempt in tries.items():
        try:
            attempt()
            told[name] = 200
        except httpx.HTTPStatusError as error:
            told[name] = error.response.status_code
    client.close()
    return told


@dataclass
class Federation:
    """Folders of a server, three owners and a stranger, and processes that can be started again."""

    place: Path
    port: int

    @property
    def folder(self) -> Path:
        return self.place / "federation"

    def home(self, part: int | str) -> Path:
        return self.place / f"owner-{part}"

    def log(self, part: int | str) -> Path:
        return self.place / f"owner-{part}.log"

    def server(self) -> Any:
        return started(self.place / "server.log", "server", "start", str(self.folder))

    def client(self, part: int | str) -> Any:
        return started(self.log(part), "client", "start", str(self.home(part)))

    def lines(self, part: int) -> list[dict[str, Any]]:
        file = self.home(part) / "state" / "log.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def charges(self, part: int) -> list[int]:
        """The rounds that a client has paid for, of all runs, as its ledgers on disk have them."""
        found = []
        for file in (self.home(part) / "state" / "ledgers").glob("*.jsonl"):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            found += [line["round"] for line in lines if "round" in line]
        return sorted(found)


def new(place: Path) -> Federation:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    federation = Federation(place, port)
    invitation = init_server(federation.folder, ["localhost"], "127.0.0.1", port)
    roster = Roster()
    for part in range(CLIENTS):
        init_client(federation.home(part), invitation, OWNER.format(part=part, port=port))
        key = (federation.home(part) / "key.pub").read_text().strip()
        roster = roster.with_member(Member(f"owner-{part}", key, 3000))
    roster.write(federation.folder)
    for part in range(CLIENTS):
        others = tuple(m for number, m in enumerate(roster.members) if number != part)
        Roster(others).write(federation.home(part))
    init_client(federation.home("stranger"), invitation, OWNER.format(part=0, port=port))
    return federation


def test_three_clients_behind_a_superlink_compute_what_the_simulation_does(tmp_path: Path) -> None:
    """Noise of each client's own, then secure aggregation; a stranger at the door, and somebody put out."""
    federation = new(tmp_path)
    folder, port = federation.folder, federation.port
    asked = {"plain": ("dp-fedadamw", EXAMPLE), "secure": ("dp-fedlamb", SECURE)}
    simulated = {
        name: tacit.run(settings(None, *given), tmp_path / f"sim-{name}", progress=False)
        for name, given in asked.items()
    }
    with ExitStack() as stack:
        stack.enter_context(federation.server())
        says(tmp_path / "server.log", "open at")
        for part in (*range(CLIENTS), "stranger"):
            stack.enter_context(federation.client(part))
        trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        # A stranger at the public door: nothing but the Fleet interface, and that only with a known key.
        silent = [socket.create_connection(("localhost", port)) for _ in range(ALL + 100)]
        for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/register-node"):
            assert answer(port, trust, path) == 404
        for path in sorted(FLEET):
            # Of a gigabyte that it announces not a byte is waited for.
            assert answer(port, trust, path, length=1 << 30) == 401
        for connection in silent:
            connection.close()
        # A head without an end is not read to its end.
        with pytest.raises(OSError), socket.create_connection(("localhost", port)) as plain:
            endless = trust.wrap_socket(plain, server_hostname="localhost")
            endless.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\n")
            for _ in range(1000):
                endless.sendall(b"x: " + b"a" * (1 << 16) + b"\r\n")
        with pytest.raises(ssl.SSLError):
            answer(port, ssl.create_default_context(), "/v1/fleet/pull-messages")
        assert (folder / "superlink.sock").stat().st_mode & 0o077 == 0
        for name, given in asked.items():
            real = tacit.run(settings(folder, *given), tmp_path / f"real-{name}", progress=False)
            assert same(vectors(simulated[name].path), vectors(real.path)), name
        says(federation.log("stranger"), "its key is not on the roster")
        assert set(as_another(federation, trust).values()) == {401}
        # Somebody is put out while it is connected: it is refused at its next message, and both sides say so.
        Roster.read(folder).without("owner-2").write(folder)
        says(federation.log(2), "its key is not on the roster", 60)
        once = {
            "rounds": 1,
            "engine": settings(folder, *asked["plain"]).engine.model_copy(update={"wait": 2}),
        }
        config = settings(folder, *asked["plain"]).model_copy(update=once)
        assert tacit.run(config, tmp_path / "without", progress=False).metrics[0]["absent"] == 1
    steps = ["stepped"] * 2 + ["answered"] + ["stepped"] * 2
    for part in range(CLIENTS):
        expected = ["answered"] * 2 + steps * 2 + ["answered"] * (part != 2)
        assert [line["what"] for line in federation.lines(part)] == expected
    assert "connected to" not in federation.log("stranger").read_text()
    stranger = fingerprint(read_key(federation.home("stranger") / "key").public_key())
    assert stranger not in {m.who for m in Roster.read(folder).members}
    told = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    away = [line for line in told if line["what"] == "turned away"]
    assert {line["code"] for line in away} <= {401, 404, 413} and {line["from"] for line in away} == {
        "127.0.0.1"
    }
    absent = next(line for line in away if line["code"] == 404)
    assert absent["asked"] == "POST /v1/control/start-run", "an attempt to start a run is in the log"
    assert [(line["client"], line["text"]) for line in told if line not in away] == [
        ("owner-2", "it was put out")
    ]
