"""What a client fetches of a message, and when: the head, then the body, no further than promised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tacit.deploy.flower.post import BODY, HEAD, Post, record
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
        self.confirmed = 0

    def PullObject(self, request: Any) -> Any:
        self.asked.append(request.object_id)
        there = request.object_id in self.kept
        content = self.kept.get(request.object_id, b"")
        return SimpleNamespace(object_found=there, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed += 1

    @property
    def post(self) -> Post:
        plain = SimpleNamespace(metadata=SimpleNamespace(run_id=1, message_id="m"))
        from flwr.proto.node_pb2 import Node

        return Post(self, Node(node_id=1), plain, self.tree)

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
