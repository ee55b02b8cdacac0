"""How messages travel: through a Flower SuperLink. All that this package knows of Flower is in this file.

The SuperLink is a post office. It knows clients by their keys and keeps messages until they are fetched, in
memory alone. It runs no app, and neither do clients: Flower's own SuperNode would run whatever code the
SuperLink sends, so a client here is a program of its own that speaks the Fleet API, and the only code it runs
is what its owner installed. The app bundle that Flower wants for a run is an empty one.

Two doors
---------
A SuperLink serves three interfaces on one port, and its Control interface lets anybody start runs. Here the
public door (TLS) has eight paths of the Fleet interface and answers 404 to everything else; whoever is not on
the roster is answered before anything but the head of its request is read. All of it is served only on a Unix
socket in the federation's folder, which the operating system opens to its owner alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.deploy.keys import PrivateKey, fingerprint
from tacit.deploy.roster import Roster
from tacit.errors import UserError

if TYPE_CHECKING:  # what carries messages starts without what trains
    from tacit.deploy.client import Reply
    from tacit.deploy.messages import Body
    from tacit.deploy.server import Parcel

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
SHORTEST, POLL = 0.1, 1.0
"""Seconds between two looks for orders: after one has come, and after a while."""
LONGEST_PAUSE = 60.0
"""Seconds before a client that cannot reach the server tries again, at most."""
LONGEST_ANSWER = 1 << 26
"""Bytes of one answer of the SuperLink that a client reads; bodies come in pieces of a twelfth of that."""
LONGEST_REQUEST = 1 << 24
"""Bytes of one request of a client; answers come in pieces of a third of that."""
PATIENCE = 300.0
"""Seconds that the next piece of a body may take."""
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
    """An ASGI app in front of another: what is not a path of the public door is not there, and nothing is
    read of a request but its head unless its headers show whose it is, and of what length.
    """

    def __init__(self, app: Any, known: Callable[[Mapping[str, str]], bool]) -> None:
        self._app, self._known = app, known

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        code = await self._refused(scope)
        if code is None:
            await self._app(scope, receive, send)
            return
        closing = [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": code, "headers": closing})
        await send({"type": "http.response.body", "body": b""})

    async def _refused(self, scope: Any) -> int | None:
        """Why a request is not passed on, as a status code."""
        if scope["method"] != "POST" or scope["path"] not in FLEET:
            return 404
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not await asyncio.to_thread(self._known, headers):
            return 401
        length = headers.get("content-length", "")
        told = length.isdecimal() and len(length) <= len(str(LONGEST_REQUEST))
        told = told and "transfer-encoding" not in headers  # which would count instead
        return None if told and int(length) <= LONGEST_REQUEST else 413


def _on_roster(nodes: Mapping[bytes, int], headers: Mapping[str, str]) -> bool:
    """Whether the headers of a request are those of somebody who was let in."""
    from types import SimpleNamespace

    from fastapi import HTTPException
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.superlink.routers.fleet.node_auth import authenticate_node

    try:
        key = b64decode(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""), validate=True)
    except ValueError:
        return False
    if key not in nodes:
        return False
    state = SimpleNamespace(protobuf_request=ActivateNodeRequest(public_key=key))
    asked: Any = SimpleNamespace(headers=headers, state=state)
    try:
        authenticate_node(asked)
    except HTTPException:
        return False
    return True


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
    # Whoever connects lets go of an idle connection after 5 s. If the server did so first, one that was just
    # to be used again would be closed under it.
    common: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    common["timeout_keep_alive"] = 60

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    socket = folder / SOCKET
    socket.unlink(missing_ok=True)
    private = Server(uvicorn.Config(app, uds=str(socket), **common))
    nodes: dict[bytes, int] = {}
    public = Server(
        uvicorn.Config(
            Gate(app, partial(_on_roster, nodes)),
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


def _keep_members(
    folder: Path, nodes: dict[bytes, int], stop: threading.Event, ready: Callable[[], None]
) -> None:
    """Let in whoever is on the roster, and put out whoever was taken off it; `nodes` are those who are in."""
    from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    told = False
    control = _private(ControlHttpClient, folder)
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
        self._unread: list[_Post] = []
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

    def send(self, orders: Mapping[str, bytes], body: bytes | bytearray, ttl: float) -> dict[str, str]:
        from flwr.app import ConfigRecord, Message, RecordDict

        with self._answering():
            for post in self._unread:
                post.confirm()
        self._unread.clear()
        online = self.online()
        there = [who for who in orders if who in online]
        shared = _record(body)
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
        with self._answering():
            tickets = list(self._grid.push_messages(messages))
        return {who: ticket for who, ticket in zip(there, tickets, strict=True) if ticket}

    def receive(self, tickets: Sequence[str]) -> dict[str, Parcel | None]:
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        found: dict[str, Parcel | None] = {}
        with self._answering():
            assert self._grid._client is not None
            pulled = self._grid._client.PullMessages(PullAppMessagesRequest(message_ids=list(tickets)))
            for plain, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
                post = _Post(self._grid._client, self._grid.node, plain, tree)
                parcel = None if plain.HasField("error") else post.parcel()
                self._unread.append(post)
                found[plain.metadata.reply_to_message_id] = parcel and (parcel[0], self._fetching(parcel[1]))
        return found

    def _fetching(self, body: Body) -> Body:
        def fetch(size: int) -> bytes | bytearray:
            with self._answering():
                return body(size)

        return fetch

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
        return "it does not let this client in: its key is not on the roster, or the clocks differ"
    if code == 412:
        return "it takes this client to be connected already"
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
    client._client.close()
    client._client = _bounded(trust)
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
    from flwr.common.serde import message_from_proto
    from flwr.proto.fleet_pb2 import PullMessagesRequest

    client, node, lost = connection
    pause = POLL
    while not stop.is_set():
        if lost.is_set():
            raise Lost("the server no longer answers")
        pulled = client.PullMessages(PullMessagesRequest(node=node))
        if not pulled.messages_list:
            stop.wait(pause)
            pause = min(1.2 * pause, POLL)
            continue
        pause = SHORTEST
        for plain, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            post = _Post(client, node, plain, tree)
            parcel = post.parcel()
            reply = None if parcel is None else answer(*parcel)
            post.confirm()
            if reply is not None:
                _returned(client, node, message_from_proto(plain), reply)


def _returned(client: Any, node: Any, order: Any, reply: Reply) -> None:
    """Send an answer."""
    from flwr.app import ConfigRecord, Message, RecordDict
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
        BODY: _record(reply[1]),
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


def _record(body: bytes | bytearray) -> Any:
    """A body as Flower carries it: sliced where it is, never copied as a whole."""
    from flwr.app import Array, ArrayRecord

    array: Any = Array(dtype="uint8", shape=(len(body),), stype="raw", data=b"")
    array.data, record = body, ArrayRecord()
    record[BODY] = array
    return record


# --- what is in a message -------------------------------------------------------------------------------


class _Post:
    """A message that lies at the SuperLink: its head is fetched first, its body only if somebody asks for it,
    piece by piece, and no further than its head has promised.
    """

    def __init__(self, client: Any, node: Any, plain: Any, tree: Any) -> None:
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf

        self._client, self._node, self._plain, self._tree = client, node, plain, tree
        self._pull = make_pull_object_fn_protobuf(client.PullObject, node, plain.metadata.run_id)
        self._confirmed = False

    def parcel(self) -> Parcel | None:
        """Its head, and how to get its body; None if it has another form."""
        from flwr.app import ConfigRecord, RecordDict
        from flwr.supercore.inflatable.inflatable_object import get_object_body

        from tacit.deploy.messages import BadMessage

        try:
            (content,) = self._tree.children
            records = json.loads(get_object_body(self._part(content.object_id), RecordDict))
            head = ConfigRecord.inflate(self._part(records[HEAD]))[HEAD]
            body = records[BODY]
        except (BadMessage, KeyError, TypeError, ValueError, IndexError):
            return None
        return (head, lambda size: self._body(body, size)) if isinstance(head, bytes) else None

    def confirm(self) -> None:
        """Let the SuperLink forget it."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        if not self._confirmed:
            self._confirmed = True
            about = self._plain.metadata
            self._client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=self._node, run_id=about.run_id, message_object_id=about.message_id
                )
            )

    def _body(self, name: str, size: int) -> bytearray:
        from flwr.app import Array, ArrayRecord
        from flwr.app.message.arraychunk import ArrayChunk
        from flwr.supercore.inflatable.inflatable_object import (
            get_object_body,
            get_object_children_ids_from_object_content,
        )

        from tacit.deploy.messages import BadMessage

        content, at = bytearray(size), 0
        try:
            array = self._part(json.loads(get_object_body(self._part(name), ArrayRecord))[BODY])
            pieces = get_object_children_ids_from_object_content(array)
            for place in json.loads(get_object_body(array, Array))["arraychunk_ids"]:
                piece = get_object_body(self._part(pieces[place]), ArrayChunk)
                if at + len(piece) > size or not piece:
                    raise BadMessage(f"its body is not the {size:,} bytes that its head promises")
                content[at : at + len(piece)] = piece
                at += len(piece)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadMessage(f"its body is none ({type(error).__name__})") from None
        del content[at:]
        self.confirm()
        return content

    def _part(self, name: Any) -> bytes:
        """One piece, as soon as its sender has brought it."""
        from flwr.supercore.inflatable.inflatable_object import get_object_id
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

        from tacit.deploy.messages import BadMessage

        if not isinstance(name, str):
            raise BadMessage("it names no piece")
        ends, pause = time.monotonic() + PATIENCE, 0.02
        while True:
            try:
                part: bytes = self._pull(name)
            except ObjectUnavailableError:
                if time.monotonic() > ends:
                    raise BadMessage("a piece of it never came") from None
                time.sleep(pause)
                pause = min(1.5 * pause, 1.0)
            except ObjectPullError:
                raise BadMessage("a piece of it is gone") from None
            else:
                if get_object_id(part) != name:
                    raise BadMessage("a piece of it is another one")
                return part


def _bounded(trust: ssl.SSLContext) -> Any:
    """An HTTP client that reads no more of any answer than `LONGEST_ANSWER` bytes."""
    import httpx

    class Counted(httpx.SyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __iter__(self) -> Iterator[bytes]:
            left = LONGEST_ANSWER
            for piece in self._stream:
                left -= len(piece)
                if left < 0:
                    raise httpx.ReadError(f"an answer of more than {LONGEST_ANSWER:,} bytes")
                yield piece

        def close(self) -> None:
            self._stream.close()

    class Bounded(httpx.HTTPTransport):
        def handle_request(self, request: Any) -> Any:
            response = super().handle_request(request)
            if "content-encoding" in response.headers:
                response.close()
                raise httpx.ReadError("an answer that is compressed; it was not asked for")
            response.stream = Counted(response.stream)
            return response

    return httpx.Client(
        transport=Bounded(verify=trust), timeout=60.0, headers={"accept-encoding": "identity"}
    )


__all__ = ["FLEET", "SOCKET", "Gate", "SuperLinkTransport", "attend", "online", "serve"]
