"""How a client fetches a message: the head, then the body, never more than promised."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tacit.deploy.flower import post as module
from tacit.deploy.flower.post import BODY, HEAD, LEAST, NotYet, Post, record
from tacit.deploy.messages import BadMessage

flwr = pytest.importorskip("flwr")

SIZE = 11 << 20
"""Three pieces."""


class Office:
    """A SuperLink's answers for one message, and what was asked for."""

    def __init__(self, body: bytes, head: Any = b"head") -> None:
        from flwr.app import ConfigRecord, RecordDict
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        content = RecordDict({HEAD: ConfigRecord({HEAD: head}), BODY: record(body)})
        self.kept = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
        self.tree = SimpleNamespace(children=[get_object_tree(content)])
        self.asked: list[str] = []
        self.awaited: set[str] = set()
        """Pieces that were announced and have not come."""
        self.confirmed = 0

    def PullObject(self, request: Any) -> Any:
        self.asked.append(request.object_id)
        there = request.object_id in self.kept
        content = self.kept.get(request.object_id, b"")
        come = there and request.object_id not in self.awaited
        return SimpleNamespace(object_found=there, object_available=come, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed += 1

    @property
    def post(self) -> Post:
        return self.posted()

    def posted(self, ends: float = math.inf) -> Post:
        plain = SimpleNamespace(metadata=SimpleNamespace(run_id=1, message_id="m"))
        from flwr.proto.node_pb2 import Node

        return Post(self, Node(node_id=1), plain, self.tree, ends)

    @property
    def fetched(self) -> int:
        return sum(len(self.kept.get(name, b"")) for name in self.asked)


def test_the_body_is_fetched_when_it_is_asked_for_and_no_further_than_promised() -> None:
    body = bytes(range(256)) * (SIZE // 256)
    office = Office(body)
    post = office.post
    parcel = post.parcel()
    assert parcel is not None and parcel[0] == b"head"
    assert office.fetched < 1000 and not office.confirmed, "the head alone"
    fetched = parcel[1](SIZE)
    assert fetched == body and office.confirmed == 1
    post.confirm()
    assert office.confirmed == 1, "once"
    short = Office(body)
    parcel = short.post.parcel()
    assert parcel is not None
    with pytest.raises(BadMessage, match="head promises"):
        parcel[1](1000)
    assert short.fetched < 6 << 20, "it stops at the first piece that is too much"
    assert len(parcel[1](SIZE + 1)) == SIZE, "and what is missing is noticed by its length"


def test_pieces_that_are_gone_or_others_are_noticed() -> None:
    office = Office(b"a" * SIZE)
    parcel = office.post.parcel()
    assert parcel is not None
    (large,) = [name for name, part in office.kept.items() if len(part) > 5 << 20]
    office.kept[large] = office.kept[large].replace(b"a", b"b")
    with pytest.raises(BadMessage, match="another one"):
        parcel[1](SIZE)
    del office.kept[large]
    with pytest.raises(BadMessage, match="gone"):
        parcel[1](SIZE)
    assert Office(b"", head="text").post.parcel() is None
    broken = Office(b"")
    broken.tree = SimpleNamespace(children=[])
    assert broken.post.parcel() is None


def test_what_was_announced_and_never_came_keeps_nobody_waiting_beyond_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client can announce an answer and hold back its head, or its body."""
    office = Office(bytes(SIZE))
    office.awaited = set(office.kept)
    post = office.posted(ends=time.monotonic() + 3600)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(NotYet):
        post.parcel(wait=False)
    assert office.posted(ends=time.monotonic() - 1).parcel(wait=False) is None
    office.awaited.clear()
    parcel = office.posted(ends=time.monotonic() - 1).parcel(wait=False)
    assert parcel is not None and len(parcel[1](SIZE)) == SIZE, "what is there is read, also a little later"
    (large,) = [name for name, part in office.kept.items() if len(part) > 5 << 20]
    office.awaited = {large}
    with pytest.raises(BadMessage, match="never came"):
        parcel[1](SIZE)


def test_nobody_is_kept_busy_with_pieces_of_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.app.message import array

    assert array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE > LEAST
    monkeypatch.setattr(array, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1000)
    office = Office(bytes(5000))
    parcel = office.post.parcel()
    assert parcel is not None
    before = len(office.asked)
    with pytest.raises(BadMessage, match="head promises"):
        parcel[1](5000)
    assert len(office.asked) - before == 3, "record, array and one piece"


@pytest.mark.parametrize("content", [b"", b"\0", b"garbage", b"RecordDict 3\0abc", b"ConfigRecord 9999999\0"])
def test_whatever_a_client_puts_there_is_a_message_or_none(content: bytes) -> None:
    office = Office(b"body")
    from flwr.supercore.inflatable.inflatable_object import get_object_id

    name = get_object_id(content)
    office.kept[name] = content
    office.tree = SimpleNamespace(children=[SimpleNamespace(object_id=name)])
    assert office.post.parcel() is None
