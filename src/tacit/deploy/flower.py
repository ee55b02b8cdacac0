"""How messages travel: through a Flower SuperLink. All that this package knows of Flower is in this file.

The SuperLink is a post office. It knows clients by their keys and keeps messages until they are fetched, in
memory alone. It runs no app, and neither do clients: Flower's own SuperNode would run whatever code the
SuperLink sends, so a client here is a program of its own that speaks the Fleet API, and the only code it runs
is what its owner installed. The app bundle that Flower wants for a run is an empty one.

Two doors
---------
A SuperLink serves three interfaces on one port, and its Control interface lets anybody start runs. Here the
public door (TLS) has eight paths of the Fleet interface and answers 404 to everything else; all of it is
served only on a Unix socket in the federation's folder, which the operating system opens to its owner alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from tacit.deploy.client import Reply
from tacit.deploy.keys import PrivateKey, fingerprint
from tacit.deploy.messages import Body
from tacit.deploy.roster import Roster
from tacit.deploy.server import Parcel
from tacit.errors import UserError

SOCKET, HOME = "superlink.sock", "flower"
FLEET = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
"""What the public door is for."""
HEARTBEAT = 10.0
"""Seconds between two signs of life of a client, and of a run."""
POLL = 1.0
"""Seconds between two looks for orders."""
LONGEST_PAUSE = 60.0
"""Seconds before a client that cannot reach the server tries again, at most."""
HEAD, BODY = "head", "body"

APP = b"""[project]
name = "tacit-post"
version = "1.0.0"
description = "No app: orders and answers are carried, never run."
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "tacit"
[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"
"""

_log = logging.getLogger("tacit.deploy")


def _flwr(home: Path) -> Any:
    """Flower, told to keep to itself; a UserError if it is not there."""
    os.environ.setdefault("FLWR_HOME", str(home))
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    try:
        import flwr
    except ImportError:
        raise UserError("real clients are reached through Flower; pip install 'tacit[flower]'") from None
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return flwr


# --- the server's two doors -----------------------------------------------------------------------------


class Gate:
    """An ASGI app in front of another: what is not a path of the public door is not there."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in FLEET:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})


def serve(folder: Path, host: str, port: int, ready: Callable[[], None] = lambda: None) -> None:
    """Run the federation's post office until SIGTERM or Ctrl-C; `ready` is told when clients may come."""
    _flwr(folder / HOME)
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
    common: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    socket = folder / SOCKET
    socket.unlink(missing_ok=True)
    private = Server(uvicorn.Config(app, uds=str(socket), **common))
    public = Server(
        uvicorn.Config(
            Gate(app),
            host=host,
            port=port,
            lifespan="off",
            ssl_certfile=str(folder / "tls.crt"),
            ssl_keyfile=str(folder / "tls.key"),
            **common,
        )
    )
    stop = threading.Event()

    async def both() -> None:
        loop = asyncio.get_running_loop()

        def end() -> None:
            stop.set()
            private.should_exit = public.should_exit = True

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end)
        before = os.umask(0o077)
        task = asyncio.create_task(private.serve())
        while not private.started and not task.done():
            await asyncio.sleep(0.05)
        os.umask(before)
        socket.chmod(0o600)
        members = threading.Thread(target=_keep_members, args=(folder, stop, ready), daemon=True)
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


def _keep_members(folder: Path, stop: threading.Event, ready: Callable[[], None]) -> None:
    """Let in whoever is on the roster, and put out whoever was taken off it."""
    from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    nodes: dict[str, int] = {}
    told = False
    control = _private(ControlHttpClient, folder)
    while not stop.is_set():
        try:
            for member in Roster.read(folder).members:
                who = member.who
                if member.revoked and who in nodes:
                    control.UnregisterNode(UnregisterNodeRequest(node_id=nodes.pop(who)))
                elif not member.revoked and who not in nodes:
                    key = public_key_to_bytes(member.public_key)
                    nodes[who] = control.RegisterNode(
                        RegisterNodeRequest(public_key=key, name=member.name)
                    ).node_id
            if not told:
                told = True
                ready()
        except Exception as error:  # the post office stays open to those who are in
            _log.warning("the roster could not be followed: %s", error)
        stop.wait(2.0)


def _private(cls: Any, folder: Path, interceptors: Sequence[Any] = ()) -> Any:
    """A client of the private door."""
    import httpx

    client = cls("http://superlink", interceptors=interceptors)
    client._client.close()
    client._client = httpx.Client(transport=httpx.HTTPTransport(uds=str(folder / SOCKET)), timeout=30.0)
    return client


def online(folder: Path) -> set[str]:
    """Who is connected to a federation's SuperLink now."""
    _flwr(folder / HOME)
    import httpx
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key

    control = _private(ControlHttpClient, folder)
    try:
        nodes = control.ListNodes(ListNodesRequest()).nodes_info
    except httpx.HTTPError as error:
        raise UserError(f"{folder}: the SuperLink does not answer ({error}); start it again") from None
    finally:
        control.close()
    return {fingerprint(bytes_to_public_key(n.public_key)) for n in nodes if n.status == "online"}


# --- the server's side of a run -------------------------------------------------------------------------


class SuperLinkTransport:
    """A `Transport` through the federation's own SuperLink; one Flower run as long as it lives."""

    def __init__(self, folder: Path) -> None:
        if not (folder / SOCKET).exists():
            raise UserError(
                f"engine.federation: nobody serves {folder}; start it with `tacit server start {folder}`"
            )
        _flwr(folder / HOME)
        import httpx
        from flwr.cli.build import build_fab_from_files
        from flwr.common.serde import run_from_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.fab_pb2 import Fab
        from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid import HttpGrid

        self._failed, self._nodes, self._stop = httpx.HTTPError, dict[str, int](), threading.Event()
        bundle, _ = build_fab_from_files({"pyproject.toml": APP, "nothing.py": b"app = None\n"})
        control, runtime = _private(ControlHttpClient, folder), _private(RuntimeHttpClient, folder)
        try:
            fab = Fab(hash_str=sha256(bundle).hexdigest(), content=bundle)
            run = control.StartRun(StartRunRequest(fab=fab)).run_id
            ends, token = time.monotonic() + 30.0, ""
            while not token:
                found = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
                if found.HasField("task") and found.task.run_id == run:
                    token = found.token
                elif time.monotonic() > ends:
                    raise UserError(
                        f"{folder}: the SuperLink did not start a run within 30 s; start it again"
                    )
                elif not found.HasField("task"):
                    time.sleep(0.2)
        except httpx.HTTPError as error:
            raise UserError(f"{folder}: the SuperLink does not answer ({error}); start it again") from None
        finally:
            control.close()
            runtime.close()
        self._grid = HttpGrid(token=token)
        self._grid._client = _private(RuntimeHttpClient, folder, [RuntimeTokenHttpInterceptor(token=token)])
        given = self._grid._client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        self._grid.set_run(run_from_proto(given.run))
        threading.Thread(target=self._live, args=(folder, token), daemon=True).start()

    def online(self) -> set[str]:
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key

        with self._answering():
            nodes = self._grid.get_nodes()
            self._nodes = {fingerprint(bytes_to_public_key(node.public_key)): node.node_id for node in nodes}
        return set(self._nodes)

    def send(self, orders: Mapping[str, bytes], body: bytes, ttl: float) -> dict[str, str]:
        from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

        there = [who for who in orders if who in self.online()]
        shared = ArrayRecord({BODY: _array(body)})
        messages = [
            Message(
                RecordDict({HEAD: ConfigRecord({HEAD: orders[who]}), BODY: shared}),
                self._nodes[who],
                "train",
                ttl=ttl,
            )
            for who in there
        ]
        if not messages:
            return {}
        tickets = list(self._grid.push_messages(messages))
        return {who: ticket for who, ticket in zip(there, tickets, strict=True) if ticket}

    def receive(self, tickets: Sequence[str]) -> dict[str, Parcel | None]:
        found: dict[str, Parcel | None] = {}
        with self._answering():
            for message in self._grid.pull_messages(list(tickets)):
                found[message.metadata.reply_to_message_id] = (
                    None if message.has_error() else _parcel(message.content)
                )
        return found

    def close(self) -> None:
        from flwr.proto.runtime_pb2 import PushTaskOutputRequest

        self._stop.set()
        with suppress(self._failed):
            assert self._grid._client is not None
            self._grid._client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed", details=""))
        self._grid.close()

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """What a SuperLink that is gone, or knows this run no more, means for the person who started it."""
        try:
            yield
        except self._failed as error:
            raise UserError(
                f"the SuperLink is gone, or was restarted ({error}); then `tacit resume`"
            ) from None

    def _live(self, folder: Path, token: str) -> None:
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        client = _private(RuntimeHttpClient, folder, [RuntimeTokenHttpInterceptor(token=token)])
        while not self._stop.wait(HEARTBEAT):
            with suppress(self._failed):
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        client.close()


# --- a client -------------------------------------------------------------------------------------------


class Lost(Exception):
    """The connection must be made anew."""


def attend(
    server: str,
    authority: Path,
    key: PrivateKey,
    answer: Callable[[bytes, Body], Reply | None],
    stop: threading.Event,
    home: Path,
    say: Callable[[str], None] = _log.info,
) -> None:
    """Carry out a federation's orders until `stop`: connect, and again whenever the connection is lost."""
    _flwr(home)
    import httpx

    trust = ssl.create_default_context(cafile=str(authority))
    pause = 1.0
    while not stop.is_set():
        try:
            with _connected(server, trust, key, stop) as connection:
                say(f"connected to {server}")
                pause = 1.0
                _attend(connection, answer, stop, say)
        except (httpx.HTTPError, Lost, OSError, ssl.SSLError) as error:
            if not stop.is_set():
                say(f"{server}: {_reason(error)}; trying again in {pause:.0f} s")
        except Exception as error:  # whatever a server sent: a client stays
            say(f"{server}: {type(error).__name__}: {error}; trying again in {pause:.0f} s")
        # Not all at once after a server's restart.
        stop.wait(pause * random.uniform(0.7, 1.3))
        pause = min(2 * pause, LONGEST_PAUSE)


def _reason(error: Exception) -> str:
    code = getattr(getattr(error, "response", None), "status_code", None)
    if code == 401:
        return "it does not let this client in: its key was put out, or the clocks differ"
    if code == 412:
        return "it does not know this client's key, or takes it to be connected already"
    return f"{type(error).__name__}: {error}"


@contextmanager
def _connected(
    server: str, trust: ssl.SSLContext, key: PrivateKey, stop: threading.Event
) -> Iterator[tuple[Any, Any, threading.Event]]:
    """A client of the public door that is known there, its node, and an event for when that ends."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    public = key.public_key()
    client = FleetHttpClient(
        f"https://{server}", interceptors=[NodeAuthHttpInterceptor(key, public)], verify=trust, timeout=60.0
    )
    asked = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=HEARTBEAT)
    node: Any = None
    lost = threading.Event()

    def live() -> None:
        failures = 0
        while not lost.wait(HEARTBEAT * random.uniform(0.6, 0.8)):
            try:
                sign = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
                failures = 0 if client.SendNodeHeartbeat(sign).success else 9
            except Exception:  # the network's, or the server's: the main loop makes a new connection
                failures += 1
            if failures > 2:
                lost.set()

    try:
        node = Node(node_id=client.ActivateNode(asked).node_id)
        threading.Thread(target=live, daemon=True).start()
        yield client, node, lost
    finally:
        lost.set()
        if node is not None:
            with suppress(Exception):
                client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
        client.close()


def _attend(
    connection: tuple[Any, Any, threading.Event],
    answer: Callable[[bytes, Body], Reply | None],
    stop: threading.Event,
    say: Callable[[str], None],
) -> None:
    from flwr.proto.fleet_pb2 import PullMessagesRequest

    client, node, lost = connection
    while not stop.is_set():
        if lost.is_set():
            raise Lost("the server no longer answers")
        pulled = client.PullMessages(PullMessagesRequest(node=node))
        if not pulled.messages_list:
            stop.wait(POLL)
            continue
        for message, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            order = _fetched(client, node, message, tree)
            parcel = _parcel(order.content) if order.has_content() else None
            reply = None if parcel is None else answer(*parcel)
            if reply is not None:
                _returned(client, node, order, reply)


def _fetched(client: Any, node: Any, plain: Any, tree: Any) -> Any:
    """A message with all that belongs to it."""
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

    run, name = plain.metadata.run_id, plain.metadata.message_id
    contents = pull_objects(
        [part.object_id for part in iterate_object_tree(tree)],
        make_pull_object_fn_protobuf(client.PullObject, node, run),
    )
    client.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=name)
    )
    message: Any = inflate_object_from_contents(name, contents)
    message.metadata.__dict__["_message_id"] = name
    return message


def _returned(client: Any, node: Any, order: Any, reply: Reply) -> None:
    """Send an answer."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import push_objects

    records: dict[str, Any] = {
        HEAD: ConfigRecord({HEAD: reply[0]}),
        BODY: ArrayRecord({BODY: _array(reply[1])}),
    }
    message = Message(RecordDict(records), reply_to=order)
    with no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        pushed = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(message))],
                message_object_trees=[get_object_tree(message)],
                clientapp_runtime_list=[0.0],
            )
        )
        push_objects(
            get_all_nested_objects(message),
            make_push_object_fn_protobuf(client.PushObject, node, message.metadata.run_id, pushed.session_id),
            object_ids_to_push=set(pushed.objects_to_push),
        )


def _array(body: bytes) -> Any:
    from flwr.app import Array

    return Array(dtype="uint8", shape=(len(body),), stype="raw", data=body)


def _parcel(content: Any) -> Parcel | None:
    """Head and body of a message; None if it has another form."""
    try:
        head, body = content[HEAD][HEAD], content[BODY][BODY].data
    except (KeyError, TypeError, AttributeError):
        return None
    if not isinstance(head, bytes) or not isinstance(body, bytes):
        return None
    return head, lambda size: body


__all__ = ["FLEET", "SOCKET", "Gate", "SuperLinkTransport", "attend", "online", "serve"]
