"""Any engine with each client's upload masked: secure aggregation in simulation.

Every round runs the whole protocol of `tacit.secure`: keys are advertised and signed, secrets are shared,
each client's bounded and noised upload is masked before the server's part gets it, the survivors are agreed
on, and the sum is unmasked. The sum is the same bit for bit: the uploads are whole numbers, and the masks
cancel.

Clients are trained one at a time: only a masked upload passes from a client to the server.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from hashlib import sha256

import torch

from tacit.engine.contract import Engine, Order, Participant, Progress, Report, Tune, ignore, shards
from tacit.engine.worker import Job
from tacit.privacy.bounding import Bounding
from tacit.privacy.mechanisms import SecureSum
from tacit.secure import Client, Roster, Server, Stage, Terms, bits_needed, ec
from tacit.vector import Vectors

Leave = Callable[[Order, int], Stage | None]
"""The stage of a round at which a client leaves; None: it stays."""


def stay(order: Order, client: int) -> Stage | None:
    """No client leaves."""
    return None


class Secured:
    """An engine whose sums are made by secure aggregation. `leave` is for tests of dropouts."""

    def __init__(self, engine: Engine, job: Job, mechanism: SecureSum, leave: Leave = stay) -> None:
        self._engine, self._job, self._mechanism, self._leave = engine, job, mechanism, leave
        self._run = os.urandom(16)
        self._identities: dict[int, ec.EllipticCurvePrivateKey] = {}
        self.heard: Callable[[bytes], None] | None = None
        """Called with every message that the server's part receives."""

    def sum(
        self, order: Order, message: Vectors, participants: Sequence[Participant], progress: Progress = ignore
    ) -> tuple[Vectors, list[Report]]:
        if not participants:
            return self._engine.sum(order, message, participants, progress)
        terms = self._terms(order, participants)
        keys = {n: self._identity(n) for n in terms.members}
        roster = Roster({n: key.public_key() for n, key in keys.items()})
        server = Server(terms, roster)
        clients = {n: Client(n, key, roster, terms) for n, key in keys.items()}

        def there(number: int) -> bool:
            gone = self._leave(order, number)
            return gone is None or server.stage < gone

        def send(data: bytes) -> None:
            if self.heard is not None:
                self.heard(data)
            server.receive(data)

        for n, client in clients.items():
            if there(n):
                send(client.advertise())
        advertised = server.keys()
        for n, client in clients.items():
            if there(n):
                send(client.share_keys(advertised))
        deliveries = server.deliveries()
        reports: list[Report] = []
        for shard in shards(participants, self._job.population.sizes):
            for participant in shard:
                if participant.client in deliveries and there(participant.client):
                    total, report = self._engine.sum(order, message, [participant])
                    vector = torch.cat([total[name] for name in self._job.upload_sizes]).numpy()
                    send(clients[participant.client].masked_input(deliveries[participant.client], vector))
                    reports += report
            progress(len(reports))
        survivors = server.survivors()
        for n in survivors.numbers:
            if there(n):
                send(clients[n].consistency(survivors))
        agreement = server.agreement()
        for n in survivors.numbers:
            if there(n):
                send(clients[n].unmask(agreement))
        parts = torch.split(torch.from_numpy(server.result()), [*self._job.upload_sizes.values()])
        return dict(zip(self._job.upload_sizes, parts, strict=True)), reports

    def _terms(self, order: Order, participants: Sequence[Participant]) -> Terms:
        bounding = order.bounding
        assert bounding is not None
        sizes, grid, share = self._job.upload_sizes, bounding.grid, bounding.share
        asked = repr((order.round, order.attempt, order.lr, order.steps, sizes, grid, share))
        members, digest = (
            [participant.client for participant in participants],
            sha256(asked.encode()).digest(),
        )
        return terms_of(self._mechanism, bounding, self._run, order.round, order.attempt, digest, members)

    def _identity(self, number: int) -> ec.EllipticCurvePrivateKey:
        """A client's long-term key, for the whole run."""
        if number not in self._identities:
            self._identities[number] = ec.generate_private_key(ec.SECP256R1())
        return self._identities[number]

    def evaluate(self, message: Vectors) -> dict[str, float]:
        return self._engine.evaluate(message)

    def evaluate_clients(
        self, message: Vectors, participants: Sequence[Participant], tune: Tune | None = None
    ) -> list[dict[str, float]]:
        return self._engine.evaluate_clients(message, participants, tune)

    def close(self) -> None:
        self._engine.close()


def terms_of(
    mechanism: SecureSum, bounding: Bounding, run: bytes, round: int, attempt: int, asked: bytes,
    members: Sequence[int],
) -> Terms:  # fmt: skip
    """The terms of a round. All but the nonce follow from the mechanism and from the clients that were drawn.

    `asked` is a digest of what the clients are asked to do.
    """
    assert bounding.grid is not None
    drawn = len(members)
    return Terms.fresh(
        run=run,
        round=round,
        attempt=attempt,
        config=asked,
        members=members,
        length=bounding.bound.dimension,
        bits=bits_needed(drawn, bounding.grid.radius, bounding.share * math.sqrt(drawn)),
        threshold=mechanism.threshold_of(drawn),
        colluding=mechanism.colluding_of(drawn),
    )
