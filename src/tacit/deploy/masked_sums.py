"""The engine for real clients under secure aggregation: it never sees a single update.

A round has five legs of orders and answers, each with its own deadline (`tacit.secure` has the protocol,
`tacit.deploy.masked` the clients' side):

    asked      the order, and the round's terms      →  keys of the client's own, signed
    share      everybody's keys                      →  shares of its secrets, sealed for the others
    train      the order again, with its shares      →  its update, bounded, noised and masked
    agree      whose update is in the sum            →  its signature under that
    unmask     t of these signatures                 →  what removes the masks from the sum, and from no part

A client that does not answer a leg has left the round. If fewer clients than the threshold are left, there is
no sum. The round has been paid for all the same, and `tacit resume` repeats it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from tacit.deploy.bodies import body_hash, exact, pack
from tacit.deploy.masked import MASKED, asked_digest
from tacit.deploy.messages import (
    AGREE,
    SHARE,
    UNMASK,
    Answer,
    BadMessage,
    Body,
    StepAnswer,
    StepOrder,
    TrainOrder,
)
from tacit.deploy.server import Deployed, Leg, Nothing
from tacit.engine import Order, Participant, Report, shards
from tacit.engine.contract import Progress, ignore
from tacit.engine.secure import terms_of
from tacit.errors import UserError
from tacit.privacy import SecureSum
from tacit.secure import Refused, Roster, Server, Terms, encode
from tacit.vector import Vectors

ENVELOPE = 4096
"""The most bytes of a masked upload besides its numbers."""


class MaskedSums(Deployed):
    """An `Engine` whose clients are other people's machines, and which learns only sums."""

    masks = True
    """Masking is built in: no wrapper has to add it."""

    def sum(
        self, order: Order, message: Vectors, participants: Sequence[Participant], progress: Progress = ignore
    ) -> tuple[Vectors, list[Report]]:
        if not participants:
            for total in self._total.values():
                total.zero_()
            return self._total, []
        self._wait()
        try:
            return self._masked_sum(order, message, participants, progress)
        except Refused as error:
            raise UserError(
                f"{error}. {self._log} says why of each. Mend that, then `tacit resume`"
            ) from None

    def _masked_sum(
        self, order: Order, message: Vectors, participants: Sequence[Participant], progress: Progress
    ) -> tuple[Vectors, list[Report]]:
        body, vectors = pack(message)
        name = body_hash(body)
        orders = {
            participant.client: self._order(order, participant, vectors, name) for participant in participants
        }
        members = tuple(orders[number].to for number in sorted(orders))
        orders = {number: replace(one, members=members) for number, one in orders.items()}
        terms = self._terms(order, orders)
        told = encode(terms).hex()
        keys = {number: self._member(number).public_key for number in orders}
        server = Server(terms, Roster(keys))

        asked = [replace(one, terms=told) for one in orders.values()]
        self._steps(order, server, asked, b"")
        said = encode(server.keys())
        self._steps(order, server, self._next(order, terms, SHARE, orders, said), said)
        deliveries = {n: encode(delivery).hex() for n, delivery in server.deliveries().items()}
        training = [
            replace(
                one, terms=told, delivery=deliveries[n], nonce=secrets.token_hex(16), created=self._clock()
            )
            for n, one in orders.items()
            if n in deliveries
        ]
        leg = self._sent(training, body)
        reports = self._uploads(order, server, leg, participants, progress)
        survivors = server.survivors()
        said = encode(survivors)
        self._steps(order, server, self._next(order, terms, AGREE, survivors.numbers, said), said)
        said = encode(server.agreement())
        self._steps(order, server, self._next(order, terms, UNMASK, survivors.numbers, said), said)
        parts = torch.split(torch.from_numpy(server.result()), [*self.job.upload_sizes.values()])
        return dict(zip(self.job.upload_sizes, parts, strict=True)), reports

    def _terms(self, order: Order, orders: Mapping[int, TrainOrder]) -> Terms:
        mechanism, bounding = self.job.privacy, order.bounding
        assert isinstance(mechanism, SecureSum) and bounding is not None
        run, asked = bytes.fromhex(self._states.run), asked_digest(next(iter(orders.values())))
        return terms_of(mechanism, bounding, run, order.round, order.attempt, asked, sorted(orders))

    def _next(
        self, order: Order, terms: Terms, step: str, clients: Iterable[int], said: bytes
    ) -> list[StepOrder]:
        """Orders for one of the steps around the upload, for the clients that are still there."""
        return [
            StepOrder(
                run=self._states.run,
                to=self._member(client).who,
                client=client,
                nonce=secrets.token_hex(16),
                created=self._clock(),
                ttl=float(self._patience.deadline),
                round=order.round,
                attempt=order.attempt,
                step=step,
                terms=terms.digest.hex(),
                size=len(said),
                body=body_hash(said),
            )
            for client in clients
        ]

    def _steps(
        self, order: Order, server: Server, orders: Sequence[TrainOrder | StepOrder], body: bytes
    ) -> None:
        """One leg: send the orders, and pass the answers to the protocol's server."""
        leg = self._sent(orders, body)
        clients = [one.client for one in orders]
        parcels = self._collected(leg, clients)
        for client in clients:
            with self._noting(order, client):
                head = self._opened(leg, client, parcels.get(client), StepAnswer)
                server.receive(bytes(exact(parcels[client][1], head.size, head.body)))

    def _uploads(
        self, order: Order, server: Server, leg: Leg, participants: Sequence[Participant], progress: Progress
    ) -> list[Report]:
        """The leg of the uploads, processed in the order of the shards, so that memory holds only one shard's
        uploads.
        """
        reports: list[Report] = []
        done = 0
        for shard in shards(participants, self._population.sizes):
            asked = [participant for participant in shard if participant.client in leg.told]
            parcels = self._collected(leg, [participant.client for participant in asked])
            for participant in asked:
                with self._noting(order, participant.client):
                    head = self._opened(leg, participant.client, parcels.get(participant.client), Answer)
                    reports.append(
                        self._received(order, server, participant, head, parcels[participant.client][1])
                    )
            done += len(shard)
            progress(done)
        return reports

    def _received(
        self, order: Order, server: Server, participant: Participant, head: Answer, body: Body
    ) -> Report:
        most = (server.terms.length * server.terms.bits + 7) // 8 + ENVELOPE
        vectors = head.vectors
        if len(vectors) != 1 or vectors[0][:2] != MASKED or vectors[0][2] > most:
            raise BadMessage("what it sent is no masked upload")
        self._refuse_other_state(order, participant, head)
        server.receive(bytes(exact(body, vectors[0][2], head.body)))
        return self._reported(participant, head, 1.0, math.nan if head.norm is None else head.norm)

    @contextmanager
    def _noting(self, order: Order, client: int) -> Iterator[None]:
        """If a client does not answer properly, it has left the round, and the log says why."""
        try:
            yield
        except Nothing as nothing:
            self._note(nothing.what, order, client, str(nothing))
        except (BadMessage, Refused) as error:
            self._note("invalid", order, client, str(error))


__all__ = ["MaskedSums"]
