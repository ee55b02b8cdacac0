"""A message at the SuperLink: a head, which is fetched first, and a body in pieces."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tacit.deploy.messages import BadMessage

if TYPE_CHECKING:  # the transport starts without importing the training code
    from tacit.deploy.server import Parcel

PATIENCE = 300.0
"""Seconds to wait for the next piece of a body."""
LEAST = 1 << 20
"""The fewest bytes of any piece but the last: nobody can keep a reader busy with one-byte pieces."""
HEAD, BODY = "head", "body"


class NotYet(Exception):
    """A piece was announced, but its sender has not delivered it yet."""


class Post:
    """A message that lies at the SuperLink. Its head is fetched first. Its body is fetched only on request,
    piece by piece, up to the length that the head promised. Pieces that have not come when it `ends` are not
    waited for.

    Whatever its sender put there, it is either a message or a `BadMessage`.
    """

    def __init__(self, client: Any, node: Any, plain: Any, tree: Any, ends: float = math.inf) -> None:
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf

        self._client, self._node, self._plain, self._tree = client, node, plain, tree
        self._pull = make_pull_object_fn_protobuf(client.PullObject, node, plain.metadata.run_id)
        self._confirmed, self._ends = False, ends

    def parcel(self, wait: bool = True) -> Parcel | None:
        """Its head, and a way to get its body; None if it has another form. With `wait=False`, raises
        `NotYet` instead of waiting for the head.
        """
        from flwr.app import ConfigRecord, RecordDict
        from flwr.supercore.inflatable.inflatable_object import get_object_body

        patience = PATIENCE if wait else 0.0
        try:
            with _whatever_it_is():
                (content,) = self._tree.children
                records = json.loads(get_object_body(self._part(content.object_id, patience), RecordDict))
                head = ConfigRecord.inflate(self._part(records[HEAD], patience))[HEAD]
                body = records[BODY]
        except NotYet:
            if wait or time.monotonic() > self._ends:
                return None
            raise
        except BadMessage:
            return None
        return (head, lambda size: self._body(body, size)) if isinstance(head, bytes) else None

    def confirm(self) -> None:
        """Let the SuperLink delete it."""
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

        content, at = bytearray(size), 0
        with _whatever_it_is(), _in_time():
            array = self._part(json.loads(get_object_body(self._part(name), ArrayRecord))[BODY])
            pieces = get_object_children_ids_from_object_content(array)
            for place in json.loads(get_object_body(array, Array))["arraychunk_ids"]:
                piece = get_object_body(self._part(pieces[place]), ArrayChunk)
                if at + len(piece) > size or len(piece) < min(LEAST, size - at):
                    raise BadMessage(f"its body is not the {size:,} bytes that its head promises")
                content[at : at + len(piece)] = piece
                at += len(piece)
        del content[at:]
        self.confirm()
        return content

    def _part(self, name: Any, patience: float = PATIENCE) -> bytes:
        """One piece, as soon as its sender has delivered it."""
        from flwr.supercore.inflatable.inflatable_object import get_object_id
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

        if not isinstance(name, str):
            raise BadMessage("it names no piece")
        ends, pause = min(self._ends, time.monotonic() + patience), 0.02
        while True:
            try:
                part: bytes = self._pull(name)
            except ObjectUnavailableError:
                if time.monotonic() >= ends:
                    raise NotYet from None
                time.sleep(pause)
                pause = min(1.5 * pause, 1.0)
            except ObjectPullError:
                raise BadMessage("a piece of it is gone") from None
            else:
                if get_object_id(part) != name:
                    raise BadMessage("a piece of it is another one")
                return part


@contextmanager
def _in_time() -> Iterator[None]:
    try:
        yield
    except NotYet:
        raise BadMessage("a piece of it never came") from None


@contextmanager
def _whatever_it_is() -> Iterator[None]:
    """The sender chooses what is put there, and so also how Flower fails to read it."""
    import httpx

    try:
        yield
    except (BadMessage, NotYet, httpx.HTTPError):
        raise
    except Exception as error:
        raise BadMessage(f"it is none ({type(error).__name__})") from None


def record(body: bytes | bytearray) -> Any:
    """A body in Flower's form: sliced in place, never copied as a whole."""
    from flwr.app import Array, ArrayRecord

    array: Any = Array(dtype="uint8", shape=(len(body),), stype="raw", data=b"")
    array.data, made = body, ArrayRecord()
    made[BODY] = array
    return made
