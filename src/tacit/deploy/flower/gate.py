"""The gate of the public door: it decides which requests are passed on, and logs those that are not."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
"""The paths that the public door serves."""
LONGEST_REQUEST = 1 << 24
"""The most bytes of one request of a client; answers come in pieces of a third of that."""
OFTEN = 10.0
"""The least number of seconds between two log lines about refused requests."""

Address = tuple[str, int]


def ignore(code: int, scope: Any) -> None:
    """Ignore a refused request."""


class Gate:
    """An ASGI app in front of another. A path that is not the public door's does not exist. Of a request only
    the head is read, unless its headers show whose it is and how long it is.

    `known` says whether headers are a member's; `proven` is called with the address of each known caller;
    `refused` with each request that is answered with an error, here or behind the gate.
    """

    def __init__(
        self,
        app: Any,
        known: Callable[[Mapping[str, str]], bool],
        proven: Callable[[Address], None] = lambda address: None,
        refused: Callable[[int, Any], None] = ignore,
    ) -> None:
        self._app, self._known, self._proven, self._refused = app, known, proven, refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        async def noting(event: Any) -> None:
            if event["type"] == "http.response.start" and event["status"] >= 400:
                self._refused(event["status"], scope)
            await send(event)

        code = await self._code(scope)
        if code is None:
            await self._app(scope, receive, noting)
            return
        closing = [(b"content-length", b"0"), (b"connection", b"close")]
        await noting({"type": "http.response.start", "status": code, "headers": closing})
        await noting({"type": "http.response.body", "body": b""})

    async def _code(self, scope: Any) -> int | None:
        """Why a request is not passed on, as a status code."""
        if scope["method"] != "POST" or scope["path"] not in FLEET:
            return 404
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not await asyncio.to_thread(self._known, headers):
            return 401
        if scope.get("client"):
            self._proven(tuple(scope["client"]))
        length = headers.get("content-length", "")
        told = length.isdecimal() and len(length) <= len(str(LONGEST_REQUEST))
        told = told and "transfer-encoding" not in headers  # it would take precedence
        return None if told and int(length) <= LONGEST_REQUEST else 413


def on_roster(nodes: Mapping[bytes, int], headers: Mapping[str, str]) -> bool:
    """Whether the headers of a request belong to a member that was let in."""
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


class TurnedAway:
    """Log lines about refused requests: at most one per status code in `OFTEN` seconds, however many requests
    there are, so that nobody can fill a disk with them.
    """

    def __init__(self, log: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._counted: dict[int, tuple[int, float]] = {}
        """By status code: requests since the last line, and the time of that line."""

    def __call__(self, code: int, scope: Any) -> None:
        """Count a refused request; a line describes the last one, and says how many came since the line
        before.
        """
        with self._lock:
            count, written = self._counted.get(code, (0, -OFTEN))
            if self._clock() - written < OFTEN:
                self._counted[code] = count + 1, written
                return
            who = str(scope["client"][0]) if scope.get("client") else "somebody"
            line = {"time": time.time(), "what": "turned away", "requests": count + 1, "from": who}
            line |= {"asked": f"{scope['method'][:10]} {scope['path'][:100]}", "code": code}
            self._counted[code] = 0, self._clock()
            try:
                with self._log.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")
            except OSError:  # a full disk must not lock anybody out
                pass


__all__ = ["FLEET", "LONGEST_REQUEST", "Gate", "TurnedAway", "on_roster"]
