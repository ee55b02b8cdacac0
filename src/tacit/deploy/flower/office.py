"""The federation's post office: a SuperLink with two doors, which lets in the members of the roster."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tacit.deploy.flower.door import Unproven, servers
from tacit.deploy.flower.gate import Gate, TurnedAway, on_roster
from tacit.deploy.flower.library import HOME, SOCKET, flower, private
from tacit.deploy.keys import fingerprint
from tacit.deploy.roster import Roster
from tacit.errors import UserError

LOG = "log.jsonl"
"""The federation's log."""
DESCRIPTORS = 1 << 16
"""The most files and connections that the post office requests from the operating system."""

_log = logging.getLogger("tacit.deploy")


def serve(folder: Path, host: str, port: int, ready: Callable[[], None] = lambda: None) -> None:
    """Run the post office until SIGTERM or Ctrl-C; `ready` is called when clients may connect."""
    flower(folder / HOME)
    import uvicorn
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
    from flwr.superlink.main import create_app

    config = SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=host,
        port=port,
        insecure=False,
        certificates=None,
        superexec_auth_secret=None,
        authn_plugin=load_control_authn_plugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type="grpc-rere",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        database=":flwr-in-memory:",
        isolation="process",
        runtime_dependency_install=False,
    )
    app = create_app(config, SuperLinkLifespan)
    # Clients drop an idle connection after 5 s. If the server dropped it first, it could close one that is
    # about to be reused.
    common: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    common["timeout_keep_alive"] = 60

    quiet, at_door = servers(uvicorn)
    socket = folder / SOCKET
    socket.unlink(missing_ok=True)
    private_door = quiet(uvicorn.Config(app, uds=str(socket), **common))
    nodes: dict[bytes, int] = {}
    unproven = Unproven()
    gate = Gate(app, partial(on_roster, nodes), unproven.proven, TurnedAway(folder / LOG))
    public = at_door(
        uvicorn.Config(
            gate,
            host=host,
            port=port,
            http="h11",
            lifespan="off",
            ssl_certfile=str(folder / "tls.crt"),
            ssl_keyfile=str(folder / "tls.key"),
            **common | {"log_level": "error"},  # strangers must not fill the log
        ),
        unproven,
    )
    _ask_for_descriptors()
    stop = threading.Event()

    async def both() -> None:
        loop = asyncio.get_running_loop()

        def end() -> None:
            stop.set()
            private_door.should_exit = public.should_exit = True

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end)
        before = os.umask(0o077)
        task = asyncio.create_task(private_door.serve())
        while not private_door.started and not task.done():
            await asyncio.sleep(0.05)
        os.umask(before)
        socket.chmod(0o600)
        members = threading.Thread(target=_keep_members, args=(folder, nodes, stop, ready), daemon=True)
        members.start()
        try:
            await public.serve()
        finally:
            end()
            await task

    try:
        asyncio.run(both())
    except SystemExit:
        raise UserError(f"{host}:{port}: this door cannot be opened; is another program using it?") from None
    finally:
        socket.unlink(missing_ok=True)


def _ask_for_descriptors() -> None:
    """Raise the limit of open files: each client has several connections, and the usual limit is 1,024 for
    all.
    """
    import resource  # not on every system, but a system with Unix sockets has it

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _keep_members(
    folder: Path, nodes: dict[bytes, int], stop: threading.Event, ready: Callable[[], None]
) -> None:
    """Let in members of the roster, and put out those who were removed from it; `nodes` holds those who are
    in.
    """
    from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    told = False
    control = private(ControlHttpClient, folder)
    while not stop.is_set():
        try:
            for member in Roster.read(folder).members:
                key = public_key_to_bytes(member.public_key)
                if member.revoked and key in nodes:
                    control.UnregisterNode(UnregisterNodeRequest(node_id=nodes.pop(key)))
                elif not member.revoked and key not in nodes:
                    asked = RegisterNodeRequest(public_key=key, name=member.name)
                    nodes[key] = control.RegisterNode(asked).node_id
            if not told:
                told = True
                ready()
        except Exception as error:  # the post office stays open to those already in
            _log.warning("the roster could not be followed: %s", error)
        stop.wait(2.0)


def online(folder: Path) -> set[str]:
    """The clients that are connected to a federation's SuperLink now."""
    flower(folder / HOME)
    import httpx
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key

    control = private(ControlHttpClient, folder)
    try:
        nodes = control.ListNodes(ListNodesRequest()).nodes_info
    except httpx.HTTPError as error:
        raise UserError(f"{folder}: the SuperLink does not answer ({error}); start it again") from None
    finally:
        control.close()
    return {fingerprint(bytes_to_public_key(n.public_key)) for n in nodes if n.status == "online"}
