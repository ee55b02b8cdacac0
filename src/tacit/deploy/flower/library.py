"""Flower itself, with telemetry off by default, and its clients at the private door."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tacit.errors import UserError

SOCKET, HOME = "superlink.sock", "flower"
HEARTBEAT = 10.0
"""Seconds between two signs of life of a client, and of a run."""


def flower(home: Path) -> Any:
    """Flower, with telemetry and update checks off by default; a UserError if it is not installed."""
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


def private(cls: Any, folder: Path, interceptors: Sequence[Any] = ()) -> Any:
    """A client of the private door."""
    import httpx

    client = cls("http://superlink", interceptors=interceptors)
    client._client.close()
    client._client = httpx.Client(transport=httpx.HTTPTransport(uds=str(folder / SOCKET)), timeout=30.0)
    return client
