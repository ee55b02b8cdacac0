"""A client: it carries out orders on its owner's records, if its owner's policy allows it.

A client checks an order in these steps. Is it the server's, for this client, and of this protocol? Is it
still valid? Was it carried out before? Does the policy allow it? Do model and records fit? Is the body what
the head says? Only then does the client's own ledger pay (on disk, before anything else); the client trains,
saves its state (on disk), and answers. A refused order costs nothing. An order that fails after the charge
stays charged.

Under secure aggregation (`tacit.deploy.masked`) an order comes twice, the first time to ask whether the
client would carry it out, and the upload leaves masked. The other steps of the protocol have their own
orders.

Transport is elsewhere (`tacit.deploy.flower`). The client is a function from bytes to bytes, and it raises
nothing, whatever the bytes are.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from tacit.data.identity import Identity
from tacit.deploy.bodies import body_hash, encrypt_, pack, unpack
from tacit.deploy.keys import PrivateKey, PublicKey, fingerprint, keyed_hash
from tacit.deploy.ledgers import Nonces, OverBudget, OwnLedgers, due_parts, own_cost
from tacit.deploy.masked import MASKED, Mismatch, Parts
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
from tacit.deploy.policy import Allow, NotAllowed
from tacit.deploy.uploads import expected_message, layout_hash, narrowed
from tacit.engine import Job, Order, Participant, Report, Worker
from tacit.engine.states import NONE
from tacit.errors import UserError
from tacit.privacy import AdaptiveClip, Bounding, ClientLevel, SecureSum
from tacit.secure import Refused
from tacit.secure.graph import COMPLETE
from tacit.vector import frozen_hash

AHEAD = 300.0
"""Seconds by which the server's clock may be ahead of the client's."""
LONGEST = 7 * 86400.0
"""The longest validity of an order, in seconds; the client must remember each order that long."""
RUNS, LEDGERS, NONCES, LOG = "runs", "ledgers", "nonces.json", "log.jsonl"


@dataclass(frozen=True)
class Prepared:
    """What a client needs to carry out a run's orders: the job, in which only this client has records, and
    their identity.
    """

    job: Job
    data: Identity


Prepare = Callable[[TrainOrder, Path], Prepared]
"""Makes a job from an order's settings and the owner's records, with its states in a folder.

Raises `NotAllowed` if the owner's policy forbids it, and `UserError` if it cannot be done.
"""
Reply = tuple[bytes, bytes | bytearray]
"""A head and a body."""


class Client:
    """One owner's client, which keeps its state in its own folder."""

    def __init__(
        self,
        folder: Path,
        key: PrivateKey,
        server: PublicKey,
        allow: Allow,
        prepare: Prepare,
        clock: Callable[[], float] = time.time,
        peers: Callable[[], Iterable[PublicKey]] = tuple,
        ledgers: Path | None = None,
    ) -> None:
        """`peers`: keys of other clients, obtained by this client's owner; see `tacit.deploy.masked`.
        `ledgers`: a folder that this owner's clients of several federations share.
        """
        self.folder, self.allow = folder, allow
        self._key, self._server, self._prepare, self._clock = key, server, prepare, clock
        self._who = fingerprint(key.public_key())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ledgers = OwnLedgers(ledgers or folder / LEDGERS)
        self._nonces = Nonces(folder / NONCES)
        self._parts = Parts(key, peers)
        self._made: tuple[str, Prepared, Worker] | None = None

    def answer(self, head: bytes, body: Body) -> Reply | None:
        """Carry out an order; None if it is not an order of the server to this client.

        `body` is fetched only after everything else about the order has been checked.
        """
        try:
            order = read_any(head, self._server)
            if not isinstance(order, TrainOrder | StepOrder):
                raise BadMessage("it is no order")
            if order.to != self._who:
                raise BadMessage("it is for another client")
        except BadMessage as error:
            self.log("dropped", text=str(error))
            return None
        try:
            if isinstance(order, StepOrder):
                return self._stepped(order, head, body)
            if order.terms is not None:
                self._refuse_cohort(order)
            if order.terms is not None and order.delivery is None:
                return self._advertised(order, head)
            answer = self._carried_out(order, head, body)
            self.log("answered", order)
            return answer
        except OverBudget as error:
            return self._refused(order, "budget", str(error))
        except NotAllowed as error:
            return self._refused(order, "not allowed", str(error))
        except _Late as error:
            return self._refused(order, error.reason, str(error))
        except Refused as error:
            return self._refused(order, "protocol", str(error))
        except (Mismatch, BadMessage) as error:
            return self._refused(order, "mismatch", str(error))
        except Exception as error:  # the server must not learn what went wrong with the owner's records
            self.log("failed", order, f"{type(error).__name__}: {error}")
            return self._refused(order, "failed", "see the client's log")

    def close(self) -> None:
        self.ledgers.close()

    def _advertised(self, order: TrainOrder, head: bytes) -> Reply:
        """Join a round of secure aggregation, if the order that will follow would be carried out."""
        self._refuse_late(order)
        prepared, _ = self._worker(order)
        self._refuse_misfit(order, prepared.job)
        mechanism, bounding = prepared.job.privacy, _bounding(order, prepared.job)
        assert mechanism is not None and bounding is not None
        cost = own_cost(mechanism, prepared.job.workload, order.client)
        self.ledgers.refuse_over([cost], prepared.data, self.allow)
        return self._said(order, head, self._parts.begin(order, mechanism, bounding))

    def _stepped(self, order: StepOrder, head: bytes, body: Body) -> Reply:
        self._refuse_late(order)
        return self._said(order, head, self._parts.step(order, body))

    def _said(self, order: TrainOrder | StepOrder, head: bytes, said: bytes) -> Reply:
        step = order.step if isinstance(order, StepOrder) else "advertise"
        self.log("stepped", order, step)
        answer = StepAnswer(order.run, order.client, order.nonce, head_hash(head), len(said), body_hash(said))
        return written(answer, self._key), said

    def _carried_out(self, order: TrainOrder, head: bytes, body: Body) -> Reply:
        self._refuse_late(order)
        prepared, worker = self._worker(order)
        job = prepared.job
        self._refuse_misfit(order, job)
        bounding = _bounding(order, job)
        masked = order.terms is not None
        if masked:
            assert job.privacy is not None and bounding is not None
            self._parts.refuse_unless_due(order, job.privacy, bounding)
        message = unpack(body, order, expected_message(job))
        if order.state != NONE and self._digest(job, order.client, order.state) != order.state_digest:
            raise Mismatch("its own state is not the one that the server knows of")
        self._refuse_late(order)  # fetching a large body takes time
        self._nonces.add(order.nonce, order.created + order.ttl, self._clock())
        self._pay(order, prepared)
        into = job.empty_sums()
        participant = Participant(order.client, order.state, order.replay)
        work = Order(order.round, order.lr, order.steps, order.decay, False, order.attempt, bounding)
        (report,) = worker.sum(work, message, [participant], into)
        if not report.finite and not masked:  # under masks only its noise is sent, and nobody can tell
            raise ArithmeticError("the update was infinite or not a number")
        digest = None
        if report.state is not None:
            job.states.sync({order.client: report.state})
            digest = self._digest(job, order.client, report.state)
        keep = {order.state, *order.keep, *filter(None, [report.state])}
        job.states.prune(order.client, keep)
        if masked:
            whole = torch.cat([into[name] for name in job.upload_sizes])
            upload = self._parts.masked(order, whole)
            return self._told(order, head, upload, ((*MASKED, len(upload)),), report, digest)
        return self._told(order, head, *pack(narrowed(into, bounding)), report, digest)

    def _digest(self, job: Job, client: int, version: str) -> str | None:
        """The keyed hash by which the server names a state: nobody without the client's key can use it to
        test a guess at the state.
        """
        try:
            return keyed_hash(self._key, job.states.digest(client, version).encode())
        except ValueError:
            return None

    def _refuse_late(self, order: TrainOrder | StepOrder) -> None:
        now = self._clock()
        if not 0 < order.ttl <= LONGEST or order.created > now + AHEAD:
            raise _Late("expired", "the order holds for too long, or is from the future; compare the clocks")
        if now > order.created + order.ttl or self._nonces.expired(order.created + order.ttl):
            raise _Late("expired", "the order has expired")
        if order.nonce in self._nonces:
            raise _Late("replayed", "the order was carried out before")

    def _worker(self, order: TrainOrder) -> tuple[Prepared, Worker]:
        """The job of an order, built once per run."""
        about = (
            order.run,
            order.client,
            order.clients,
            order.config,
            order.shape,
            order.classes,
            order.labels,
        )
        name = sha256(repr(about).encode()).hexdigest()
        if self._made is None or self._made[0] != name:
            self._made = None
            try:
                prepared = self._prepare(order, self.folder / RUNS / order.run)
            except NotAllowed:
                raise
            except UserError as error:
                # The reason may quote a record, so only the owner sees it.
                self.log("unprepared", order, str(error))
                raise Mismatch("the run cannot be prepared here; the client's log says why") from error
            self._made = name, prepared, Worker(prepared.job)
        return self._made[1], self._made[2]

    def _refuse_cohort(self, order: TrainOrder) -> None:
        """Under masks an update hides among the members' updates, so there must be enough members. In the
        neighbour graph of larger cohorts, a lying server could choose a client's neighbours.
        """
        count = len(order.members)
        if count < self.allow.members:
            raise NotAllowed(f"the cohort has {count} members, and allow.members is {self.allow.members}")
        if count > COMPLETE:
            raise NotAllowed(
                f"the cohort has {count:,} members; beyond {COMPLETE} masks need an honest server"
            )

    @staticmethod
    def _refuse_misfit(order: TrainOrder, job: Job) -> None:
        if layout_hash(job.layout) != order.layout:
            raise Mismatch("its model has other parameters than the server's; compare versions of tacit")
        if frozen_hash(job.model) != order.frozen:
            raise Mismatch("the frozen part of its model is not the server's")

    def _pay(self, order: TrainOrder, prepared: Prepared) -> None:
        job, ledgers, run = prepared.job, self.ledgers, order.run
        if job.privacy is None:  # its records may change between rounds: one ledger for each version
            self.log("unprotected", order)
            run = f"{run}-{sha256(prepared.data.fingerprint.encode()).hexdigest()[:16]}"
        cost, before = own_cost(job.privacy, job.workload, order.client), ledgers.rounds(run)
        parts = due_parts(job.privacy, job.workload, order.client, order.round, before)
        ledgers.charge(run, order.round, parts, cost, job.privacy, prepared.data, self.allow)

    def _told(
        self,
        order: TrainOrder,
        head: bytes,
        body: bytes | bytearray,
        vectors: tuple[Vector, ...],
        report: Report,
        digest: str | None,
    ) -> Reply:
        send, key = self.allow.send, None
        if isinstance(body, bytearray):
            key = secrets.token_hex(32)
            encrypt_(body, key)
        answer = Answer(
            run=order.run,
            client=order.client,
            nonce=order.nonce,
            order=head_hash(head),
            # With a batch of one, the steps of an epoch reveal the number of examples.
            steps=report.steps if "examples" in send else order.steps or 1,
            norm=float(report.norm) if "metrics" in send and math.isfinite(report.norm) else None,
            examples=report.examples if "examples" in send else None,
            loss=float(report.loss) if "loss" in send and math.isfinite(report.loss) else None,
            notes={k: float(v) for k, v in report.notes.items() if math.isfinite(v)}
            if "metrics" in send
            else None,
            seconds=float(report.seconds) if "seconds" in send else None,
            state=report.state,
            state_digest=digest,
            vectors=vectors,
            key=key,
            body=body_hash(body),
        )
        return written(answer, self._key), body

    def _refused(self, order: TrainOrder | StepOrder, reason: str, text: str) -> Reply:
        self.log("refused", order, f"{reason}: {text}")
        refusal = Refusal(order.run, order.client, order.nonce, reason, _printable(text)[:1000])
        return written(refusal, self._key), b""

    def log(self, what: str, order: TrainOrder | StepOrder | None = None, text: str = "") -> None:
        """Write one line to the owner's log."""
        line = {"time": self._clock(), "what": what}
        if order is not None:
            line |= {"run": order.run, "round": order.round, "attempt": order.attempt}
        if text:
            line["text"] = _printable(text)
        try:
            with (self.folder / LOG).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk: charges are refused, but the client keeps running
            print(f"{self.folder / LOG}: {error.strerror}; {json.dumps(line)}", file=sys.stderr)


class _Late(UserError):
    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def _bounding(order: TrainOrder, job: Job) -> Bounding | None:
    """How the client bounds its upload: by its own rule, made from the settings that its owner allowed."""
    mechanism = job.privacy
    if not isinstance(mechanism, ClientLevel):
        if order.bound is not None or order.terms is not None:
            raise Mismatch("the order names a clipping norm, or masks, where none are used")
        return None
    adaptive = isinstance(mechanism, AdaptiveClip)
    if order.bound is None or (not adaptive and order.bound != mechanism.clip.bound):
        raise Mismatch("the order's clipping norm is not the run's")
    secure = isinstance(mechanism, SecureSum)
    if secure != (order.terms is not None):
        raise Mismatch(
            f"the run is under {'secure' if secure else 'plain'} aggregation, and the order is not"
        )
    drawn = len(order.members) if secure else 1
    if isinstance(mechanism, SecureSum):
        refuse_small(drawn, mechanism)
    return mechanism.bounding({"bound": order.bound}, job.upload_sizes, job.layout, drawn)


def refuse_small(drawn: int, mechanism: SecureSum) -> None:
    """Each member of the cohort knows its own share of the noise; the others' shares must add up to what is
    charged.
    """
    least = mechanism.least_members(mechanism.seen_noise)
    if least is None or drawn < least:
        enough = "lower privacy.threshold" if least is None else f"it takes {least}"
        raise NotAllowed(
            f"the cohort has {drawn} members, of whom each knows its own share of the noise, so another's "
            f"update would have less than its ledger is charged for; {enough}"
        )


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


__all__ = ["LEDGERS", "LOG", "Client", "Mismatch", "Prepare", "Prepared"]
