"""The public door's sockets: a caller who has not shown a known key yet cannot keep others out.

A connection costs a file descriptor and some memory before anything is known about the caller. So a
connection that shows no member's signature within `PROOF` seconds is closed, whatever it has sent by then.
Beyond `STRANGERS` such connections from one address, and `ALL` in total, the oldest ones are closed. New
callers are served, while idle ones make room. h11 reads the heads of requests, and stops at 64 kB.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from tacit.deploy.flower.gate import Address

PROOF = 15.0
"""Seconds that a connection may stay without having shown a known key."""
STRANGERS, ALL = 64, 512
"""Such connections allowed, from one address and in total."""


class Unproven:
    """Connections that have not shown a known key, in the order of their arrival."""

    def __init__(self) -> None:
        self._since: OrderedDict[Address, tuple[float, socket.socket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since)

    def add(self, address: Address, connection: socket.socket) -> None:
        """Add a connection; the oldest one of the same address, or of all, makes room for it."""
        self._since[address] = monotonic(), connection
        same = [other for other in self._since if other[0] == address[0]]
        if len(same) > STRANGERS:
            self._close(same[0])
        if len(self._since) > ALL:
            self._close(next(iter(self._since)))

    def proven(self, address: Address) -> None:
        """The connection from this address has shown a known key."""
        self._since.pop(address, None)

    def close_stale(self) -> None:
        """Close connections that have been here too long; forget those that have left."""
        now = monotonic()
        for address, (since, connection) in list(self._since.items()):
            if connection.fileno() < 0:
                del self._since[address]
            elif now - since > PROOF:
                self._close(address)

    def _close(self, address: Address) -> None:
        _, connection = self._since.pop(address)
        with suppress(OSError):  # it has already gone
            connection.shutdown(socket.SHUT_RDWR)


def servers(uvicorn: Any) -> tuple[type[Any], type[Any]]:
    """uvicorn's server without signal handlers, and the same for the public door."""

    class Quiet(uvicorn.Server):  # type: ignore[misc]
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    class Public(Quiet):
        """Accepts connections itself, so that it can close those that have not shown a known key."""

        def __init__(self, config: Any, unproven: Unproven) -> None:
            super().__init__(config)
            self._unproven = unproven

        async def startup(self, sockets: Any = None) -> None:
            await self.lifespan.startup()
            config = self.config
            try:
                where = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
                self._listener = socket.create_server(where[4][:2], family=where[0], backlog=config.backlog)
            except OSError:
                raise SystemExit(1) from None
            self._listener.setblocking(False)
            self.servers: list[Any] = []
            self._accepting = asyncio.create_task(self._accept())
            self._tidying = asyncio.create_task(self._tidy())
            self._joining: set[asyncio.Task[None]] = set()
            self.started = True

        async def shutdown(self, sockets: Any = None) -> None:
            for task in (self._accepting, self._tidying, *self._joining):
                task.cancel()
            self._listener.close()
            await super().shutdown(sockets)

        async def _accept(self) -> None:
            loop = asyncio.get_running_loop()
            while True:
                try:
                    connection, address = await loop.sock_accept(self._listener)
                except OSError:  # out of descriptors, or gone before it was accepted
                    await asyncio.sleep(0.1)
                    continue
                self._unproven.add(address[:2], connection)
                task = asyncio.create_task(self._join(connection))
                self._joining.add(task)
                task.add_done_callback(self._joining.discard)

        async def _join(self, connection: socket.socket) -> None:
            loop, config = asyncio.get_running_loop(), self.config

            def protocol() -> Any:
                return config.http_protocol_class(
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                )

            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.connect_accepted_socket(
                    protocol, connection, ssl=config.ssl, ssl_handshake_timeout=PROOF
                )
            except (OSError, TimeoutError):  # no TLS, or none in time
                connection.close()

        async def _tidy(self) -> None:
            while True:
                await asyncio.sleep(1.0)
                self._unproven.close_stale()

    return Quiet, Public


__all__ = ["ALL", "PROOF", "STRANGERS", "Unproven", "servers"]
