"""A client at the public door: it connects, carries out orders as they arrive, and answers."""

from __future__ import annotations

import logging
import random
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.deploy.flower.library import HEARTBEAT, flower
from tacit.deploy.flower.post import BODY, HEAD, Post, record
from tacit.deploy.keys import PrivateKey

if TYPE_CHECKING:  # the transport starts without importing the training code
    from tacit.deploy.client import Reply
    from tacit.deploy.messages import Body

SHORTEST, POLL = 0.1, 1.0
"""Seconds between two polls for orders: right after an order, and later."""
LONGEST_PAUSE = 60.0
"""The most seconds before a client that cannot reach the server tries again."""
LONGEST_ANSWER = 1 << 26
"""The most bytes of one SuperLink answer that a client reads; bodies come in pieces of a twelfth of that."""

_log = logging.getLogger("tacit.deploy")


class Lost(Exception):
    """The connection was lost and must be made again."""


def attend(
    server: str,
    authority: Path,
    key: PrivateKey,
    answer: Callable[[bytes, Body], Reply | None],
    stop: threading.Event,
    home: Path,
    say: Callable[[str], None] = _log.info,
) -> None:
    """Carry out a federation's orders until `stop`; reconnect whenever the connection is lost."""
    flower(home)
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
        except Exception as error:  # whatever a server sent, the client keeps running
            say(f"{server}: {type(error).__name__}: {error}; trying again in {pause:.0f} s")
        # Clients must not all reconnect at once after a server's restart.
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
    """A registered client of the public door, its node, and an event that is set when the connection ends."""
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
            except Exception:  # a network or server error: the main loop reconnects
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
            post = Post(client, node, plain, tree)
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
        BODY: record(reply[1]),
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
