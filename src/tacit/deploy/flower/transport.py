"""The server's side of a run: it sends orders and receives answers through the federation's own SuperLink."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from tacit.deploy.flower.library import HEARTBEAT, HOME, SOCKET, flower, private
from tacit.deploy.flower.post import BODY, HEAD, NotYet, Post, record
from tacit.deploy.keys import fingerprint
from tacit.errors import UserError

if TYPE_CHECKING:  # the transport starts without importing the training code
    from tacit.deploy.messages import Body
    from tacit.deploy.server import Parcel

GRACE = 600.0
"""Seconds after the deadline for which the SuperLink still remembers an order. Asked about an order that it
has forgotten, it fails.
"""
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


class SuperLinkTransport:
    """A `Transport` through the federation's own SuperLink; one Flower run as long as it lives."""

    def __init__(self, folder: Path) -> None:
        if not (folder / SOCKET).exists():
            raise UserError(
                f"engine.federation: nobody serves {folder}; start it with `tacit server start {folder}`"
            )
        flower(folder / HOME)
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
        self._came: dict[str, Post | None] = {}
        """Answers to the pending orders; None: no answer will come."""
        self._unanswered: set[str] = set()
        self._due: set[str] = set()
        """Orders that have no answer yet."""
        self._ends = 0.0
        bundle, _ = build_fab_from_files({"pyproject.toml": APP, "nothing.py": b"app = None\n"})
        control, runtime = private(ControlHttpClient, folder), private(RuntimeHttpClient, folder)
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
        self._grid._client = private(RuntimeHttpClient, folder, [RuntimeTokenHttpInterceptor(token=token)])
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

        self._forget()
        online = self.online()
        there = [who for who in orders if who in online]
        shared = record(body)
        messages = [
            Message(
                RecordDict({HEAD: ConfigRecord({HEAD: orders[who]}), BODY: shared}),
                self._nodes[who],
                "train",
                ttl=ttl + GRACE,
            )
            for who in there
        ]
        if not messages:
            return {}
        with self._answering():
            tickets = list(self._grid.push_messages(messages))
        self._ends, self._due = time.monotonic() + ttl, {ticket for ticket in tickets if ticket}
        return {who: ticket for who, ticket in zip(there, tickets, strict=True) if ticket}

    def receive(self, tickets: Sequence[str]) -> dict[str, Parcel | None]:
        """Fetch all answers that have come at once, also those for orders that are read later. After the
        deadline this happens once more, and then no longer.
        """
        found: dict[str, Parcel | None] = {}
        with self._answering():
            if self._due:
                over = time.monotonic() > self._ends
                self._pull()
                if over:
                    self._came |= dict.fromkeys(self._due)
                    self._unanswered |= self._due
                    self._due = set()
            for ticket in tickets:
                post = self._came.get(ticket)
                if post is not None:
                    with suppress(NotYet):  # announced but not delivered: do not keep the others waiting
                        parcel = post.parcel(wait=False)
                        found[ticket] = parcel and (parcel[0], self._fetching(parcel[1]))
                elif ticket in self._came:
                    found[ticket] = None
        return found

    def _pull(self) -> None:
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        client = self._grid._client
        assert client is not None
        pulled = client.PullMessages(PullAppMessagesRequest(message_ids=list(self._due)))
        for plain, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            ticket = plain.metadata.reply_to_message_id
            if ticket not in self._due:  # from a client that has no pending order
                continue
            failed = plain.HasField("error")
            self._came[ticket] = None if failed else Post(client, self._grid.node, plain, tree, self._ends)
            self._unanswered |= {ticket} if failed else set()
            self._due.discard(ticket)

    def _forget(self) -> None:
        """Make the SuperLink drop what is left of earlier orders: answers that were not read to the end, and
        orders that their clients never fetched, each of which holds a whole body.
        """
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        client, run = self._grid._client, self._grid.run.run_id
        assert client is not None
        with self._answering():
            for post in self._came.values():
                if post is not None:
                    post.confirm()
            for ticket in self._unanswered | self._due:
                client.ConfirmMessageReceived(
                    ConfirmMessageReceivedRequest(node=self._grid.node, run_id=run, message_object_id=ticket)
                )
        self._came, self._due, self._unanswered = {}, set(), set()

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
        """Turn the errors of a SuperLink that is gone, or no longer knows this run, into a message for the
        user.
        """
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

        client = private(RuntimeHttpClient, folder, [RuntimeTokenHttpInterceptor(token=token)])
        while not self._stop.is_set():  # the first one at once: its timeout is the shortest
            with suppress(self._failed):
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            self._stop.wait(HEARTBEAT / 2)
        client.close()
