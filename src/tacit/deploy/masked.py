"""A client's part in secure aggregation over real messages: its own checks of a round, and its steps.

`tacit.secure` implements the protocol; its messages are signed and bound to the round's terms. The client
must check what only its owner's side can know:

- *who the others are*: the owner must hold a key for each member of the cohort, and not from the server. A
  server that could invent members would be left with a sum of one;
- *that all were asked the same*: the terms contain a digest of the order (settings, round, model and all).
  Clients who were sent different models therefore share no round, and have no sum. Otherwise a server could
  separate one client's update from the others' (Pasquini, Francati and Ateniese 2022, arXiv:2111.07380);
- *how much noise*: threshold, colluders, bits and the noise share follow from the settings that the owner
  allowed and from the members that the terms name.

A client's part lives in memory. If its process ends, the round goes on without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from hashlib import sha256

from torch import Tensor

from tacit.deploy.bodies import exact
from tacit.deploy.keys import PrivateKey, PublicKey, fingerprint
from tacit.deploy.messages import AGREE, SHARE, Body, StepOrder, TrainOrder
from tacit.engine.secure import terms_of
from tacit.errors import UserError
from tacit.privacy import Bounding, Mechanism, SecureSum
from tacit.secure import Agreement, Client, Delivery, Keys, Refused, Roster, Survivors, Terms, decode

MOST = 8
"""How many runs a client may have a part in at one time."""
MASKED = ("masked", "u1")
"""Name and dtype of a masked upload in an answer's head."""
OWN = frozenset(
    {
        "to",
        "client",
        "nonce",
        "created",
        "ttl",
        "replay",
        "state",
        "state_digest",
        "keep",
        "terms",
        "delivery",
    }
)
"""Fields of an order that differ between clients, or between its first and its second sending."""


class Mismatch(UserError):
    """The order does not fit this client."""


def asked_digest(order: TrainOrder) -> bytes:
    """A digest of what all clients of a round are asked to do."""
    common = {f.name: getattr(order, f.name) for f in fields(order) if f.name not in OWN}
    return sha256(b"tacit 1: asked\0" + json.dumps(common, sort_keys=True).encode()).digest()


class Parts:
    """One client's parts in rounds of secure aggregation, one for each run."""

    def __init__(self, key: PrivateKey, peers: Callable[[], Iterable[PublicKey]]) -> None:
        self._key, self._peers = key, peers
        self._parts: dict[str, Client] = {}

    def begin(self, order: TrainOrder, mechanism: Mechanism, bounding: Bounding) -> bytes:
        """Begin a round, dropping what is left of the run's last one; returns the client's keys for it."""
        terms = self._terms(order, mechanism, bounding)
        self._parts.pop(order.run, None)
        while len(self._parts) >= MOST:
            self._parts.pop(next(iter(self._parts)))
        self._parts[order.run] = Client(order.client, self._key, self._roster(order, terms), terms)
        return self._parts[order.run].advertise()

    def refuse_unless_due(self, order: TrainOrder, mechanism: Mechanism, bounding: Bounding) -> None:
        """Raise unless the upload is the next step of this order's round."""
        part = self._part(order.run, self._terms(order, mechanism, bounding).digest)
        if part.due != "masked_input":
            raise Refused(f"an upload is asked for where {part.due or 'nothing'} is due")

    def masked(self, order: TrainOrder, upload: Tensor) -> bytes:
        """The masked upload; call `refuse_unless_due` first."""
        assert order.delivery is not None
        delivery = decode(Delivery, bytes.fromhex(order.delivery))
        return self._parts[order.run].masked_input(delivery, upload.numpy())

    def step(self, order: StepOrder, body: Body) -> bytes:
        """The client's message in one of the other steps."""
        part = self._part(order.run, bytes.fromhex(order.terms))
        said = bytes(exact(body, order.size, order.body))
        if order.step == SHARE:
            return part.share_keys(decode(Keys, said))
        if order.step == AGREE:
            return part.consistency(decode(Survivors, said))
        return part.unmask(decode(Agreement, said))

    def _part(self, run: str, terms: bytes) -> Client:
        part = self._parts.get(run)
        if part is None or part.terms.digest != terms:
            raise Refused("this client has no part in that round; it was started again, or another one began")
        return part

    def _terms(self, order: TrainOrder, mechanism: Mechanism, bounding: Bounding) -> Terms:
        """The round's terms; refused unless they are those of this order."""
        assert order.terms is not None and isinstance(mechanism, SecureSum)
        terms = decode(Terms, bytes.fromhex(order.terms))
        run, members = bytes.fromhex(order.run), terms.members
        if len(members) != len(order.members):
            raise Mismatch("the order and its terms name different members")
        due = terms_of(mechanism, bounding, run, order.round, order.attempt, asked_digest(order), members)
        if replace(due, nonce=terms.nonce) != terms:
            raise Mismatch("the terms of the round's masks are not those of the order and its settings")
        return terms

    def _roster(self, order: TrainOrder, terms: Terms) -> Roster:
        """The members' keys, as this client's owner holds them."""
        own = self._key.public_key()
        known = {fingerprint(key): key for key in (*self._peers(), own)}
        numbered = dict(zip(terms.members, order.members, strict=True))
        if numbered.get(order.client) != fingerprint(own):
            raise Mismatch("the order gives this client another's number")
        if len(set(order.members)) != len(order.members):
            raise Mismatch("the order counts a member twice")
        strangers = [who for who in numbered.values() if who not in known]
        if strangers:
            raise Mismatch(
                f"{len(strangers)} of {len(numbered)} members are not on the roster that this client's owner "
                f"holds, the first with key {strangers[0][:16]}…; `tacit client trust` takes cards in"
            )
        return Roster({number: known[who] for number, who in numbered.items()})


__all__ = ["MASKED", "Mismatch", "Parts", "asked_digest"]
