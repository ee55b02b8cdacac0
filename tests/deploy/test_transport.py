"""The server's requests to a SuperLink: none after the deadline, and nothing is left there."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from test_post import Office

from tacit.deploy.flower import post
from tacit.deploy.flower import transport as module
from tacit.deploy.flower.transport import SuperLinkTransport

pytest.importorskip("flwr")


class Link:
    """A SuperLink that fails to answer for messages that it has forgotten, as Flower's does."""

    def __init__(self) -> None:
        self.answers: dict[str, Office] = {}
        self.known: set[str] = set()
        self.pulls = 0
        self.dropped: list[str] = []

    def PullMessages(self, request: Any) -> Any:
        self.pulls += 1
        assert set(request.message_ids) <= self.known, "an error of Flower's"
        plains, trees = [], []
        for ticket in request.message_ids:
            if ticket in self.answers:
                about = SimpleNamespace(run_id=1, message_id=f"to-{ticket}", reply_to_message_id=ticket)
                plains.append(SimpleNamespace(metadata=about, HasField=lambda name: False))
                trees.append(self.answers[ticket].tree)
                self.known.remove(ticket)
        stray = SimpleNamespace(run_id=1, message_id="stray", reply_to_message_id="")
        plains.append(SimpleNamespace(metadata=stray, HasField=lambda name: False))
        return SimpleNamespace(messages_list=plains, message_object_trees=[*trees, None])

    def PullObject(self, request: Any) -> Any:
        for office in self.answers.values():
            if request.object_id in office.kept:
                return office.PullObject(request)
        raise AssertionError("an object of nobody's")

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.dropped.append(request.message_object_id)


class Grid:
    def __init__(self, link: Link) -> None:
        from flwr.proto.node_pb2 import Node

        self._client, self.node, self.run = link, Node(node_id=1), SimpleNamespace(run_id=1)

    def get_nodes(self) -> list[Any]:
        return []

    def push_messages(self, messages: list[Any]) -> list[str]:
        made = [f"order-{number}" for number, _ in enumerate(messages)]
        self._client.known = set(made)
        return made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A transport whose four orders are out, and the SuperLink behind it."""
    import httpx
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    link = Link()
    made = SuperLinkTransport.__new__(SuperLinkTransport)
    made._grid, made._failed = Grid(link), httpx.HTTPError  # type: ignore[assignment]
    made._came, made._due, made._unanswered, made._ends = {}, set(), set(), 0.0
    nodes = {name: number for number, name in enumerate("abcd")}
    made._nodes = nodes
    monkeypatch.setattr(SuperLinkTransport, "online", lambda self: set(nodes))
    tickets = made.send(dict.fromkeys(nodes, b"head"), b"body", 60.0)
    return made, link, tickets


def test_what_came_in_time_is_read_later_and_nothing_is_asked_for_after_the_deadline(
    sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client is looked at in its turn, which for most of them is after the first one's deadline."""
    transport, link, tickets = sent
    link.answers = {tickets["b"]: Office(b"body")}
    assert transport.receive([tickets["a"]]) == {}
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 61.0)
    link.answers[tickets["d"]] = Office(b"body")
    assert transport.receive([tickets["a"]]) == {tickets["a"]: None}
    link.known.clear()  # the SuperLink has forgotten them
    pulls = link.pulls
    parcel = transport.receive([tickets["b"]])[tickets["b"]]
    assert parcel is not None and parcel[0] == b"head" and parcel[1](4) == b"body"
    assert transport.receive([tickets["a"], tickets["b"]])[tickets["a"]] is None
    assert link.pulls == pulls


def test_an_answer_that_is_announced_and_held_back_keeps_nobody_waiting(
    sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, link, tickets = sent
    monkeypatch.setattr(post.time, "sleep", lambda seconds: pytest.fail("it waits"))
    held, whole = Office(b"body"), Office(b"other", head=b"another")
    held.awaited = set(held.kept)
    link.answers = {tickets["a"]: held, tickets["b"]: whole}
    found = transport.receive([tickets["a"], tickets["b"]])
    assert set(found) == {tickets["b"]}
    held.awaited.clear()
    assert transport.receive([tickets["a"]])[tickets["a"]] is not None


def test_orders_that_nobody_fetched_and_answers_that_nobody_read_are_dropped(sent: Any) -> None:
    """Each holds a body: a client that is away in every round would fill the SuperLink's memory."""
    transport, link, tickets = sent
    link.answers = {tickets["a"]: Office(b"body"), tickets["b"]: Office(b"body")}
    parcel = transport.receive([tickets["a"], tickets["b"]])[tickets["a"]]
    assert parcel is not None and parcel[1](4) == b"body"
    assert link.dropped == [f"to-{tickets['a']}"], "as soon as it is read"
    transport.send({"a": b"head"}, b"body", 60.0)
    assert sorted(link.dropped) == sorted(
        [f"to-{tickets['a']}", f"to-{tickets['b']}", tickets["c"], tickets["d"]]
    )
