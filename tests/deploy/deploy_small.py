"""A federation of four real clients in one process: both ends unchanged, with messages passed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import tacit
from conftest import blobs
from tacit.config.build import build_population
from tacit.config.owner import Owner, OwnRecords
from tacit.config.schema import Config
from tacit.data import Dataset
from tacit.deploy.client import Client, Reply
from tacit.deploy.keys import PrivateKey, PublicKey, fingerprint, new_key, public_text, read_key
from tacit.deploy.policy import Allow
from tacit.deploy.roster import Member, Roster
from tacit.deploy.server import LOG, Deployed, Parcel, Patience
from tacit.deploy.settings import deployed
from tacit.engine import Job
from tacit.engine.contract import Replay, free
from tacit.federation import Result
from tacit.federation.checkpoint import VECTORS
from tacit.vector import Vectors

CLIENTS, RECORDS, CLASSES = 4, 60, 3
ALLOW: dict[str, Any] = {
    "unit": "none", "delta": 1e-5, "simulation": True,
    "methods": ["fedavg", "scaffold", "dp2-fedsam", "dp-fedadamw", "dp-fedavg", "dp-fedlamb"],
    "send": ["examples", "loss", "metrics", "seconds"],
}  # fmt: skip


def allowing(**changes: Any) -> Allow:
    """What owners allow: everything, or with a budget beyond all that is spent here."""
    budget = {"epsilon": 1e6} if changes.get("unit", "none") != "none" else {}
    return Allow(**ALLOW | budget | changes)


def dataset() -> Dataset:
    return blobs(RECORDS, classes=CLASSES, seed=3)


def settings(method: str = "fedavg", deployed: Path | None = None, **overrides: Any) -> Config:
    """The same run simulated, or deployed in a federation's folder."""
    values: dict[str, Any] = {
        "seed": 5,
        "rounds": 3,
        "data": {"name": "blobs", "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 1.0}},
        "model": {"name": "mlp", "hidden": [6]},
        "method": method,
        "cohort": 3,
        "local": {"steps": 2, "batch": 5, "lr": 0.1},
        "engine": {"kind": "in-process"},
    }
    if deployed is not None:
        values["data"]["partition"] = {"kind": "owners", "clients": CLIENTS}
        values["engine"] = {"kind": "flower", "federation": str(deployed)}
    return tacit.load(values, {key.replace("__", "."): value for key, value in overrides.items()})


class Held(OwnRecords):
    """Records of a client that are an object of the test's."""

    def __init__(self, owner: Owner, held: Dataset, own: NDArray[Any]) -> None:
        super().__init__(owner)
        self._held, self._own = held, own

    def _records(self, config: Config) -> tuple[Dataset, NDArray[Any]]:
        return self._held, self._own


@dataclass
class ByHand:
    """Carries messages between the two ends; a test may lose, change or repeat them on the way."""

    clients: Mapping[str, Client]
    away: set[str] = field(default_factory=set)
    """Who is not there."""
    changed: Callable[[str, Reply], Reply | None] = lambda who, reply: reply
    """What becomes of a reply on its way."""
    rewritten: Callable[[str, bytes, bytes], tuple[bytes, bytes]] = lambda who, head, body: (head, body)
    """What becomes of an order on its way."""
    orders: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    """Every order that was handed over: to whom, head and body."""
    replies: list[tuple[str, Reply]] = field(default_factory=list)
    waiting: dict[str, tuple[str, bytes, bytes]] = field(default_factory=dict)

    def online(self) -> set[str]:
        return set(self.clients) - self.away

    def send(self, orders: Mapping[str, bytes], body: bytes, ttl: float) -> dict[str, str]:
        tickets = {}
        for who, head in orders.items():
            if who not in self.away:
                tickets[who] = str(len(self.orders))
                self.orders.append((who, *self.rewritten(who, head, bytes(body))))
                self.waiting[tickets[who]] = self.orders[-1]
        return tickets

    def receive(self, tickets: Sequence[str]) -> dict[str, Parcel | None]:
        found: dict[str, Parcel | None] = {}
        for ticket in tickets:
            who, head, body = self.waiting.pop(ticket)
            reply = self.clients[who].answer(head, lambda size, body=body: bytearray(body))
            if reply is not None:
                self.replies.append((who, reply))
                reply = self.changed(who, reply)
            found[ticket] = (
                None if reply is None else (reply[0], lambda size, reply=reply: bytearray(reply[1]))
            )
        return found

    def close(self) -> None:
        pass


@dataclass
class Small:
    """A federation: its folder, its clients, and what carries their messages."""

    folder: Path
    key: PrivateKey
    clients: list[Client]
    whos: list[str]
    transport: ByHand
    held: Dataset
    peers: Callable[[], list[PublicKey]]

    kind = "flower"

    def open(self, job: Job, message: Vectors, cohort: int, before_replay: Replay = free) -> Deployed:
        return deployed(job, self.transport, self.key, self.folder / LOG, Patience(600.0, 1))

    def run(self, config: Config, folder: Path) -> Result:
        return tacit.run(config, folder, dataset=self.held, engine=self, progress=False)

    def resume(self, folder: Path, rounds: int | None = None) -> Result:
        return tacit.resume(folder, dataset=self.held, engine=self, progress=False, rounds=rounds)

    def reopened(self, number: int) -> Client:
        """A client whose process ended and was started again."""
        old = self.clients[number]
        old.close()
        new = Client(
            old.folder, old._key, old._server, old.allow, old._prepare, old._clock, self.peers,
            old.ledgers.folder,
        )  # fmt: skip
        self.clients[number] = new
        self.transport.clients = {**self.transport.clients, self.whos[number]: new}
        return new

    def log(self, client: int | None = None) -> list[dict[str, Any]]:
        """The server's log, or a client's."""
        file = self.folder / LOG if client is None else self.clients[client].folder / "log.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def vectors(folder: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint's vectors."""
    newest = max((folder / "checkpoint").glob("[0-9]*[0-9]"), key=lambda p: int(p.name))
    found: dict[str, torch.Tensor] = load_file(newest / VECTORS)
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def federation(
    place: Path,
    allow: Mapping[str, Any] | None = None,
    clock: Callable[[], float] | None = None,
    ledgers: Path | None = None,
    **sim: Any,
) -> Small:
    """Four clients with the records that they would have in the simulation; `ledgers`: a folder for those of
    each owner, who may be in another federation, too.
    """
    held, folder = dataset(), place / "federation"
    folder.mkdir(parents=True)
    split = build_population(settings(**sim), held)
    key = new_key(folder / "server")
    clients, members, whos, known = [], [], [], list[PublicKey]()
    for number in range(CLIENTS):
        home = place / f"client-{number}"
        home.mkdir()
        own_key = new_key(home / "key")
        owner = Owner.model_validate(
            {"name": f"owner-{number}", "server": "localhost:1", "data": {"name": "blobs"},
             "allow": allowing(**(allow or {})).model_dump()}
        )  # fmt: skip
        own = np.asarray(split.train(number))
        records = Held(owner, held, own)
        more: dict[str, Any] = {} if clock is None else {"clock": clock}
        if ledgers is not None:
            more["ledgers"] = ledgers / str(number)
        clients.append(
            Client(
                home / "state",
                read_key(home / "key"),
                key.public_key(),
                owner.allow,
                records.prepare,
                peers=lambda: list(known),
                **more,
            )
        )
        known.append(own_key.public_key())
        whos.append(fingerprint(own_key.public_key()))
        members.append(Member(owner.name, public_text(own_key.public_key()), len(own)))
    roster = Roster()
    for member in members:
        roster = roster.with_member(member)
    roster.write(folder)
    return Small(
        folder, key, clients, whos, ByHand(dict(zip(whos, clients, strict=True))), held, lambda: list(known)
    )
