"""Clients and a server of secure aggregation for tests, and a round in which any client may drop out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.secure import Client, Roster, Server, Terms, ec, least_threshold

STAGES = ("advertise", "shares", "masked", "agreed", "unmask")


@cache
def identity(number: int) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def roster_of(numbers: Collection[int]) -> Roster:
    return Roster({n: identity(n).public_key() for n in numbers})


def terms_for(n: int, **changes: Any) -> Terms:
    given: dict[str, Any] = {
        "run": b"r" * 16,
        "round": 3,
        "attempt": 0,
        "config": b"c" * 32,
        "members": range(n),
        "length": 5,
        "bits": 16,
        "threshold": least_threshold(n),
    }
    return Terms.fresh(**given | changes)


class Parties:
    """A server, all members of a cohort, and everything that the server was sent (`heard`)."""

    def __init__(self, terms: Terms, absent: Mapping[str, Collection[int]] | None = None) -> None:
        self.terms, self.roster = terms, roster_of(terms.members)
        self.server = Server(terms, self.roster)
        self.clients = {n: Client(n, identity(n), self.roster, terms) for n in terms.members}
        self.absent = {stage: set((absent or {}).get(stage, ())) for stage in STAGES}
        self.heard: dict[str, dict[int, bytes]] = {stage: {} for stage in STAGES}

    def step(self, stage: str, say: Mapping[int, Callable[[], bytes]]) -> None:
        """Whoever is still there speaks; those absent from this stage on leave."""
        for n, speak in say.items():
            if n in self.clients and n not in self.absent[stage]:
                self.heard[stage][n] = speak()
                self.server.receive(self.heard[stage][n])
            else:
                self.clients.pop(n, None)

    def masked(self, vectors: Mapping[int, NDArray[np.int64]]) -> None:
        """The first three stages."""
        self.step("advertise", {n: c.advertise for n, c in [*self.clients.items()]})
        keys = self.server.keys()
        self.step("shares", {n: lambda c=c: c.share_keys(keys) for n, c in [*self.clients.items()]})
        self.deliveries = self.server.deliveries()
        self.step(
            "masked",
            {
                n: lambda n=n, d=d: self.clients[n].masked_input(d, vectors[n])
                for n, d in self.deliveries.items()
            },
        )

    def sum(self, vectors: Mapping[int, NDArray[np.int64]]) -> NDArray[np.int64]:
        self.masked(vectors)
        survivors = self.server.survivors()
        numbers = survivors.numbers
        self.step("agreed", {n: lambda n=n: self.clients[n].consistency(survivors) for n in numbers})
        agreement = self.server.agreement()
        self.step("unmask", {n: lambda n=n: self.clients[n].unmask(agreement) for n in numbers})
        return self.server.result()


def uploads(terms: Terms, seed: int = 0) -> dict[int, NDArray[np.int64]]:
    """Random uploads whose sum fits."""
    rng = np.random.default_rng(seed)
    most = max(1, (1 << terms.bits - 1) // len(terms.members))
    return {n: rng.integers(-most, most, terms.length, dtype=np.int64) for n in terms.members}
