"""The public door's sockets: strangers who only stay connected make room for new callers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tacit.deploy.flower import door
from tacit.deploy.flower.door import Unproven
from tacit.deploy.flower.gate import OFTEN, TurnedAway


@pytest.fixture
def pairs() -> Iterator[Any]:
    made: list[socket.socket] = []

    def pair() -> tuple[socket.socket, socket.socket]:
        made.extend(two := socket.socketpair())
        two[1].setblocking(False)
        return two

    yield pair
    for one in made:
        one.close()


def open_still(far: socket.socket) -> bool:
    """Whether the other end has not been closed."""
    try:
        return far.recv(1) != b""
    except BlockingIOError:
        return True


def test_the_oldest_of_an_address_and_of_all_make_room(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "STRANGERS", 3)
    monkeypatch.setattr(door, "ALL", 5)
    unproven, far = Unproven(), {}
    for address in [("a", 1), ("a", 2), ("b", 1), ("a", 3), ("a", 4)]:
        near, far[address] = pairs()
        unproven.add(address, near)
    assert not open_still(far["a", 1]) and len(unproven) == 4, "a has three, and b is not asked to leave"
    unproven.proven(("a", 2))
    for address in [("c", 1), ("c", 2), ("d", 1)]:
        near, far[address] = pairs()
        unproven.add(address, near)
    assert not open_still(far["b", 1]) and len(unproven) == 5
    assert open_still(far["a", 2]), "who has shown a key stays"


def test_who_says_nothing_is_closed_in_time_and_who_left_is_forgotten(
    pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(door, "monotonic", lambda: now[0])
    unproven, far = Unproven(), {}
    for number in range(3):
        near, far[number] = pairs()
        unproven.add(("a", number), near)
        now[0] += door.PROOF / 2
        if number == 1:
            near.close()
    unproven.close_stale()
    assert not open_still(far[0]) and open_still(far[2]) and len(unproven) == 1


def test_turning_thousands_away_fills_no_disk(tmp_path: Path) -> None:
    now, log = [0.0], tmp_path / "log.jsonl"
    away = TurnedAway(log, lambda: now[0])
    scope = {"client": ("1.2.3.4", 5), "method": "POST" * 100, "path": "/\n" + "x" * 10_000}
    for _ in range(2000):
        away(404, scope)
        now[0] += OFTEN / 1000  # 10 ms
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0]["requests"] == 1 and 2 <= len(lines) <= 3
    assert sum(line["requests"] for line in lines) <= 2000
    assert all(len(line["asked"]) <= 111 and line["from"] == "1.2.3.4" for line in lines)
    log.unlink()
    log.mkdir()
    now[0] += 2 * OFTEN
    away(401, scope)  # a log that cannot be written shuts nobody out
