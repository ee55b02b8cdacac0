"""The engine for real clients: it sends orders, checks each answer, and adds up the sum.

The mechanism draws the cohort from the roster, whether or not clients are connected. Each client of the
cohort gets its own order with its own nonce. Answers are taken in the order of the shards, so memory holds no
more than one shard's, and the sum has the same bits as in one process. A client that has not answered by the
deadline, refuses, or sends something that is not an answer to its order counts as zero. Anything later is
never looked at.

An answer counts if it is signed by the client's key, names the order, its nonce and its hash, and has exactly
the expected vectors. Where the server makes the noise, the answer's whole numbers must be within the clipping
norm. The server checks this again, so the sensitivity never depends on what a client did.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from tacit.deploy.bodies import body_hash, pack, unpack
from tacit.deploy.deployable import refuse_undeployable, sent_config, trains_everything
from tacit.deploy.keys import PrivateKey
from tacit.deploy.messages import (
    Answer,
    BadMessage,
    Body,
    Refusal,
    StepAnswer,
    StepOrder,
    TrainOrder,
    Vector,
    head_hash,
    read_any,
    written,
)
from tacit.deploy.owners import Owners
from tacit.deploy.roster import Member
from tacit.deploy.states import RemoteStates
from tacit.deploy.uploads import checked_norm, expected_upload, layout_hash, widened
from tacit.engine import Job, Order, Participant, Report, Tune, Worker, shards
from tacit.engine.contract import Progress, ignore
from tacit.engine.states import version
from tacit.errors import UserError
from tacit.federation.checkpoint import CONFIG
from tacit.privacy import ClientLevel
from tacit.vector import Vectors, frozen_hash

SHORTEST, POLL = 0.05, 0.5
"""Seconds between two polls for answers: at first, and later."""
LOG = "log.jsonl"
Parcel = tuple[bytes, Body]
"""An answer's head, and how to get its body."""
Told = tuple[TrainOrder | StepOrder, bytes]
"""An order as it was sent to a client: its values, and its bytes."""
_A = TypeVar("_A", Answer, StepAnswer)


class Transport(Protocol):
    """How orders reach clients, and how answers come back. It is trusted with delivery only."""

    def online(self) -> set[str]:
        """The clients that are connected now, by the hashes of their keys."""

    def send(self, orders: Mapping[str, bytes], body: bytes | bytearray, ttl: float) -> dict[str, str]:
        """Send an order to each of these clients, all with one body; returns a ticket for each client that
        took it.
        """

    def receive(self, tickets: Sequence[str]) -> dict[str, Parcel | None]:
        """The answers so far for these tickets; None where none will come."""

    def close(self) -> None:
        """Release everything it holds."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for clients."""

    deadline: float = 600.0
    """Seconds from the order to the last answer that counts."""
    wait: int = 1
    """Clients that must be connected before a round begins."""


class Deployed:
    """An `Engine` whose clients are other people's machines."""

    def __init__(
        self, job: Job, transport: Transport, key: PrivateKey, log: Path, patience: Patience,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        if not isinstance(job.population, Owners) or not isinstance(job.states, RemoteStates):
            raise UserError("engine: real clients need `data.partition: {kind: owners, clients: N}`")
        refuse_undeployable(job)
        self.job, self._population, self._states = job, job.population, job.states
        self._transport, self._key, self._log, self._patience = transport, key, log, patience
        self._clock = clock
        self._worker = Worker(job)
        self._total, self._shard = job.empty_sums(), job.empty_sums()
        self._config = sent_config(job.states.root.parent / CONFIG, whole=trains_everything(job))
        self._layout, self._frozen = layout_hash(job.layout), frozen_hash(job.model)

    def sum(
        self, order: Order, message: Vectors, participants: Sequence[Participant], progress: Progress = ignore
    ) -> tuple[Vectors, list[Report]]:
        for total in self._total.values():
            total.zero_()
        self._wait()
        body, vectors = pack(message)
        body_name = body_hash(body)
        leg = self._sent(
            [self._order(order, participant, vectors, body_name) for participant in participants], body
        )
        reports: list[Report] = []
        outcomes: dict[str, int] = {}
        done = 0
        for shard in shards(participants, self._population.sizes):
            for total in self._shard.values():
                total.zero_()
            parcels = self._collected(leg, [participant.client for participant in shard])
            for participant in shard:
                done += 1
                try:
                    reports.append(self._added(order, participant, leg, parcels.get(participant.client)))
                except Nothing as error:
                    outcomes[error.what] = outcomes.get(error.what, 0) + 1
                    self._note(error.what, order, participant.client, str(error))
            for name, total in self._total.items():
                total.add_(self._shard[name])
            progress(done)
        if participants and not reports and not isinstance(self.job.privacy, ClientLevel):
            counted = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
            raise UserError(
                f"round {order.round + 1}: none of {len(participants)} clients took part ({counted}); "
                f"{self._log} says why of each. Mend that, then `tacit resume`"
            )
        return self._total, reports

    def evaluate(self, message: Vectors) -> dict[str, float]:
        self._worker.load(message)
        job = self.job
        return job.summarise([self._worker.evaluate_chunk(chunk) for chunk in range(job.chunks)])

    def evaluate_clients(
        self, message: Vectors, participants: Sequence[Participant], tune: Tune | None = None
    ) -> list[dict[str, float]]:
        raise UserError(
            "evaluate.clients: real clients do not tell how good their own models are; leave it out"
        )

    def close(self) -> None:
        self._worker.forget()
        self._transport.close()

    def _member(self, client: int) -> Member:
        return self._population.roster.members[client]

    def _wait(self) -> None:
        """Wait until enough clients of the federation are connected, up to a deadline."""
        members = {m.who for m in self._population.roster.members if not m.revoked}
        ends, wanted = time.monotonic() + self._patience.deadline, self._patience.wait
        while len(there := self._transport.online() & members) < wanted:
            if time.monotonic() > ends:
                raise UserError(
                    f"engine.wait: {len(there)} of the {wanted} clients that a round needs came within "
                    f"{self._patience.deadline:g} s; `tacit server clients` shows who is there. Then `tacit "
                    "resume`"
                )
            time.sleep(POLL)

    def _order(
        self, order: Order, participant: Participant, vectors: tuple[Vector, ...], body: str
    ) -> TrainOrder:
        looks, states, client = self._population.looks, self._states, participant.client
        return TrainOrder(
            run=states.run,
            to=self._member(client).who,
            client=client,
            clients=len(self._population),
            nonce=secrets.token_hex(16),
            created=self._clock(),
            ttl=float(self._patience.deadline),
            round=order.round,
            attempt=order.attempt,
            replay=participant.replay,
            lr=float(order.lr),
            steps=order.steps,
            decay=float(order.decay),
            bound=None if order.bounding is None else float(order.bounding.bound.bound),
            config=self._config,
            shape=tuple(looks.shape),
            classes=looks.classes,
            labels=looks.labels,
            layout=self._layout,
            frozen=self._frozen,
            state=participant.state,
            state_digest=states.told(client, participant.state),
            keep=states.kept(client),
            vectors=vectors,
            body=body,
        )

    def _sent(self, orders: Sequence[TrainOrder | StepOrder], body: bytes | bytearray) -> Leg:
        """Send these orders, all with one body, to those of their clients that are still members."""
        told: dict[int, Told] = {}
        for order in orders:
            if not self._member(order.client).revoked:
                told[order.client] = order, written(order, self._key)
        ends, deadline = time.monotonic() + self._patience.deadline, self._patience.deadline
        tickets = self._transport.send({order.to: head for order, head in told.values()}, body, deadline)
        given = {n: tickets[order.to] for n, (order, _) in told.items() if order.to in tickets}
        return Leg(told, given, ends)

    def _collected(self, leg: Leg, clients: Sequence[int]) -> dict[int, Parcel]:
        """These clients' answers, up to the deadline."""
        found: dict[int, Parcel] = {}
        left = {client: leg.tickets[client] for client in clients if client in leg.tickets}
        pause = SHORTEST
        while left:
            came = self._transport.receive(list(left.values()))
            late = time.monotonic() > leg.ends
            for client, ticket in list(left.items()):
                if ticket in came:
                    parcel = came[ticket]
                    del left[client]
                    if parcel is not None:
                        found[client] = parcel
            if late:
                break
            if left:
                time.sleep(pause)
                pause = SHORTEST if came else min(1.5 * pause, POLL)
        return found

    def _opened(self, leg: Leg, client: int, parcel: Parcel | None, kind: type[_A]) -> _A:
        """The head of a client's answer to its order; raises `Nothing` if there is no valid answer."""
        told = leg.told.get(client)
        if told is None or parcel is None:
            raise Nothing("absent", "no answer by the deadline" if told else "it was put out")
        sent = told[0]
        try:
            head = read_any(parcel[0], self._member(client).public_key)
            if isinstance(head, TrainOrder | StepOrder) or (head.run, head.client, head.nonce) != (
                sent.run, sent.client, sent.nonce,
            ):  # fmt: skip
                raise BadMessage("it is not an answer to this order")
            if isinstance(head, Refusal):
                raise Nothing("refused", f"{head.reason}: {head.text}")
            if not isinstance(head, kind) or head.order != head_hash(told[1]):
                raise BadMessage("it is an answer to another order")
        except BadMessage as error:
            raise Nothing("invalid", str(error)) from error
        return head

    def _added(self, order: Order, participant: Participant, leg: Leg, parcel: Parcel | None) -> Report:
        """Add a client's answer to the shard's sum, if it is valid."""
        head, member = self._opened(leg, participant.client, parcel, Answer), self._member(participant.client)
        assert parcel is not None
        try:
            bounding, sizes = order.bounding, self.job.upload_sizes
            upload = widened(unpack(parcel[1], head, expected_upload(self.job, bounding)), bounding, sizes)
            weight = self._weight(order, head, member)
            norm = checked_norm(upload, bounding)
            self._refuse_other_state(order, participant, head)
        except BadMessage as error:
            raise Nothing("invalid", str(error)) from error
        for name, vector in upload.items():
            self._shard[name].add_(vector, alpha=weight)
        if head.norm is not None and isinstance(self.job.privacy, ClientLevel):
            norm = head.norm
        return self._reported(participant, head, weight, norm)

    @staticmethod
    def _refuse_other_state(order: Order, participant: Participant, head: Answer) -> None:
        if head.state not in (None, version(order.round, order.attempt, participant.replay)):
            raise BadMessage("it names a state that it was not asked for")

    def _reported(self, participant: Participant, head: Answer, weight: float, norm: float) -> Report:
        """The report on a client whose upload is in the sum."""
        if head.state is not None and head.state_digest is not None:
            self._states.note(participant.client, head.state, head.state_digest)
        return Report(
            client=participant.client,
            weight=float(weight),
            examples=self._member(participant.client).records if head.examples is None else head.examples,
            steps=head.steps,
            loss=math.nan if head.loss is None else head.loss,
            norm=norm,
            finite=True,
            state=head.state,
            notes=head.notes or {},
            seconds=head.seconds or 0.0,
        )

    @staticmethod
    def _weight(order: Order, head: Answer, member: Member) -> int:
        if not order.weighted:
            return 1
        if head.examples is None or head.examples != member.records:
            raise BadMessage("weights: examples, and it does not have the records that it joined with")
        return head.examples

    def _note(self, what: str, order: Order, client: int, text: str) -> None:
        line = {"time": self._clock(), "what": what, "client": self._member(client).name}
        line |= {"run": self._states.run, "round": order.round, "attempt": order.attempt, "text": text}
        with self._log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Leg:
    """Pending orders: what each client was sent, the transport's tickets, and the deadline."""

    told: Mapping[int, Told]
    tickets: Mapping[int, str]
    ends: float


class Nothing(Exception):
    """A client adds nothing to the sum; the exception says why."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(text)
        self.what = what


__all__ = ["Deployed", "Patience", "Transport"]
