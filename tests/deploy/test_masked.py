"""Secure aggregation between real clients: what the server sees, dropouts, and a server that lies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deploy_small import Small, dataset, federation, same, settings, vectors

import tacit
from tacit.deploy.bodies import body_hash
from tacit.deploy.client import LEDGERS, Reply, refuse_small
from tacit.deploy.keys import new_key
from tacit.deploy.ledgers import read_accounts
from tacit.deploy.messages import Answer, Refusal, StepAnswer, StepOrder, TrainOrder, read_any, written
from tacit.deploy.policy import NotAllowed
from tacit.deploy.statement import own_statement
from tacit.engine import DirectoryStates, Order
from tacit.engine.secure import Secured
from tacit.errors import UserError
from tacit.privacy import Clip, Poisson, SecureSum
from tacit.secure import Delivery, Stage, Survivors, Terms, decode, encode
from tacit.secure.messages import Masked, Signed

PRIVACY = {"unit": "client", "noise": 2.0, "clip": 0.5, "delta": 1e-3, "aggregation": "secure"}
SECURE: dict[str, Any] = {"method": "fedavg", "privacy": PRIVACY, "cohort": 4, "rounds": 1}
OWNER = {"unit": "client", "aggregation": "secure", "delta": 1e-3, "send": []}
LEGS = ("advertise", "share", "train", "agree", "unmask")


def leg_of(order: TrainOrder | StepOrder) -> str:
    if isinstance(order, StepOrder):
        return order.step
    return "advertise" if order.delivery is None else "train"


def paid(small: Small) -> list[int]:
    return [sum(len(a.contents.charges) for a in read_accounts(c.folder / LEDGERS)) for c in small.clients]


def leaving(small: Small, gone: set[int], leg: str) -> Callable[[str, Reply], Reply | None]:
    """Whoever is gone no longer answers, from this leg on."""

    def changed(who: str, reply: Reply) -> Reply | None:
        last = read_any(small.transport.orders[-1][1], small.key.public_key())
        assert isinstance(last, TrainOrder | StepOrder)
        late = LEGS.index(leg_of(last)) >= LEGS.index(leg)
        return None if late and small.whos.index(who) in gone else reply

    return changed


def test_the_server_hears_masks_and_nothing_else(tmp_path: Path) -> None:
    small = federation(tmp_path, OWNER)
    small.run(settings(deployed=small.folder, **SECURE), tmp_path / "run")
    kinds, uploads = [], 0
    for who, (head, body) in small.transport.replies:
        answer = read_any(head, small.clients[small.whos.index(who)]._key.public_key())
        said = decode(Signed, bytes(body))
        kinds.append(said.kind)
        assert isinstance(answer, Answer if said.kind == 3 else StepAnswer)
        if isinstance(answer, Answer):
            told = (answer.steps, answer.norm, answer.examples, answer.loss, answer.notes, answer.seconds)
            assert told == (2, None, None, None, None, None), "the steps that the order itself names"
            uploads += 1
            masked = np.frombuffer(decode(Masked, said.body).vector, np.uint8)
            ones = np.unpackbits(masked).mean()
            assert abs(ones - 0.5) < 6 * 0.5 / np.sqrt(8 * masked.size)  # false alarm 2·10⁻⁹
    assert kinds == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4 and uploads == 4
    assert paid(small) == [1] * 4 and not small.log()
    models, server = tacit.statement(tmp_path / "run").observers
    assert models.epsilon is not None and server.epsilon is not None
    for client in small.clients:
        own = own_statement(client.folder, client.allow)
        assert own.epsilon == pytest.approx(server.epsilon), "both ends count the same"
        assert all(epsilon == own.epsilon for _, epsilon, _ in own.observers)


@pytest.mark.parametrize("leg", LEGS)
def test_dropouts_are_left_out_as_in_the_simulation(
    leg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four, which the threshold lets go, at each stage; the same bits as in one program."""
    asked = {**SECURE, "privacy": {**PRIVACY, "entropy": "seed"}, "rounds": 2}
    stage = Stage(LEGS.index(leg))

    def leave(order: Order, client: int) -> Stage | None:
        return stage if client == 2 else None

    with monkeypatch.context() as patch:
        patch.setattr("tacit.federation.run.Secured", lambda *given: Secured(*given, leave))
        simulated = tacit.run(settings(**asked), tmp_path / "sim", dataset=dataset(), progress=False)
    small = federation(tmp_path)
    small.transport.changed = leaving(small, {2}, leg)
    real = small.run(settings(deployed=small.folder, **asked), tmp_path / "real")
    assert same(vectors(simulated.path), vectors(real.path))
    left_out = LEGS.index(leg) <= LEGS.index("train")
    assert [record.get("absent", 0) for record in real.metrics] == [int(left_out)] * 2
    assert {(line["what"], line["client"]) for line in small.log()} == {("absent", "owner-2")}
    assert paid(small) == [2, 2, 2 if LEGS.index(leg) >= LEGS.index("train") else 0, 2]


@pytest.mark.parametrize("leg", LEGS)
def test_with_too_few_left_there_is_no_sum_and_the_round_is_played_again(leg: str, tmp_path: Path) -> None:
    small = federation(tmp_path, OWNER)
    small.transport.changed = leaving(small, {0, 3}, leg)
    with pytest.raises(UserError, match=r"2 of 4 clients are left where 3 must be.*tacit resume"):
        small.run(settings(deployed=small.folder, **SECURE), tmp_path / "run")
    once = paid(small)
    assert all(count <= 1 for count in once)
    small.transport.changed = lambda who, reply: reply
    assert small.resume(tmp_path / "run").finished
    assert paid(small) == [count + 1 for count in once], "what may have left is paid, each time"
    assert all(not finding.problem for finding in tacit.verify(tmp_path / "run"))


def test_a_client_that_is_started_again_in_a_round_is_out_of_it_and_back_in_the_next(tmp_path: Path) -> None:
    small = federation(tmp_path, OWNER)
    seen: list[str] = []

    def kill(who: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        order = read_any(head, small.key.public_key())
        assert isinstance(order, TrainOrder | StepOrder)
        if leg_of(order) == "agree" and order.client == 1 and not seen:
            seen.append(who)
            small.reopened(1)
        return head, body

    small.transport.rewritten = kill
    config = settings(deployed=small.folder, **{**SECURE, "rounds": 2})
    result = small.run(config, tmp_path / "run")
    assert [record.get("absent", 0) for record in result.metrics] == [0, 0], "its update had arrived"
    assert paid(small) == [2] * 4
    assert {line["text"].split(":")[0] for line in small.log()} == {"protocol"}


def rewriting(
    small: Small, leg: str, change: Callable[[Any, bytes], tuple[Any, bytes]], client: int = 2
) -> None:
    """A server that sends one client something else in one leg, signed as it should be."""

    def rewritten(who: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        order = read_any(head, small.key.public_key())
        assert isinstance(order, TrainOrder | StepOrder)
        if order.client != client or leg_of(order) != leg:
            return head, body
        other, body = change(order, body)
        return written(other, small.key), body

    small.transport.rewritten = rewritten


def with_terms(order: TrainOrder, **changes: Any) -> TrainOrder:
    assert order.terms is not None
    return replace(order, terms=encode(replace(decode(Terms, bytes.fromhex(order.terms)), **changes)).hex())


def another_delivery(order: TrainOrder) -> TrainOrder:
    assert order.delivery is not None
    delivery = decode(Delivery, bytes.fromhex(order.delivery))
    return replace(order, delivery=encode(replace(delivery, boxes=delivery.boxes[::-1])).hex())


def another_body(order: Any, body: bytes) -> tuple[Any, bytes]:
    return replace(order, size=len(body), body=body_hash(body)), body


def another_model(order: TrainOrder, body: bytes) -> tuple[TrainOrder, bytes]:
    other = bytes(len(body))
    return replace(order, body=body_hash(other)), other


LIES: dict[str, tuple[str, Callable[[Any, bytes], tuple[Any, bytes]], str, int]] = {
    "an upload in the open": (
        "train", lambda o, b: (replace(o, terms=None, delivery=None), b), "mismatch", 0,
    ),
    "another model": ("train", another_model, "mismatch", 0),
    "another learning rate": ("train", lambda o, b: (replace(o, lr=9.0), b), "mismatch", 0),
    "a member that nobody knows": (
        "advertise", lambda o, b: (replace(o, members=(*o.members[:3], "f" * 64)), b), "mismatch", 0,
    ),
    "a member twice": (
        "advertise", lambda o, b: (replace(o, members=(o.members[0], *o.members[:3])), b), "mismatch", 0,
    ),
    "another threshold": ("advertise", lambda o, b: (with_terms(o, threshold=4), b), "mismatch", 0),
    "fewer bits": ("advertise", lambda o, b: (with_terms(o, bits=20), b), "mismatch", 0),
    "another round": ("train", lambda o, b: (with_terms(o, nonce=bytes(32)), b), "protocol", 0),
    "garbage for terms": ("advertise", lambda o, b: (replace(o, terms="00ff"), b), "protocol", 0),
    "shares held back": ("train", lambda o, b: (another_delivery(o), b), "protocol", 1),
    "keys that are none": ("share", lambda o, b: another_body(o, b[:-1]), "protocol", 0),
    "other survivors": (
        "agree", lambda o, b: another_body(o, encode(Survivors((0, 1, 2)))), "protocol", 1,
    ),
    "too few survivors": ("agree", lambda o, b: another_body(o, encode(Survivors((1, 2)))), "protocol", 1),
    "unmasking twice": ("agree", lambda o, b: (replace(o, step="unmask"), b), "protocol", 1),
    "a body cut short": ("unmask", lambda o, b: (o, b[:-1]), "mismatch", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_server_that_lies_to_one_client_gets_nothing_from_it(name: str, tmp_path: Path) -> None:
    leg, change, reason, charged = LIES[name]
    small = federation(tmp_path, OWNER)
    rewriting(small, leg, change)
    small.run(settings(deployed=small.folder, **SECURE), tmp_path / "run")
    refusals = []
    for who, (head, body) in small.transport.replies:
        if who == small.whos[2]:
            answer = read_any(head, small.clients[2]._key.public_key())
            if isinstance(answer, Refusal):
                refusals.append(answer.reason)
                assert not body
    assert refusals and refusals[0] == reason
    assert paid(small) == [1, 1, charged, 1]
    unmasked = [who for who, (_, body) in small.transport.replies if body and decode(Signed, body).kind == 5]
    assert sorted(unmasked) == sorted(who for who in small.whos if who != small.whos[2])


def test_a_server_that_tells_two_halves_different_survivors_has_no_sum(tmp_path: Path) -> None:
    small = federation(tmp_path, OWNER)
    rewriting(small, "agree", lambda o, b: another_body(o, encode(Survivors((0, 1, 2)))), client=0)
    small.transport.away.add(small.whos[1])  # nobody's signature is left to spare
    with pytest.raises(UserError, match="2 of 4 clients are left where 3 must be"):
        small.run(settings(deployed=small.folder, **SECURE), tmp_path / "run")
    assert not any(body and decode(Signed, body).kind == 5 for _, (_, body) in small.transport.replies)


@pytest.mark.parametrize(
    ("allow", "privacy"),
    [
        ({}, {"aggregation": "plain"}),
        ({"colluding": 0.3}, {}),
        ({"epsilon": 0.01}, {}),
    ],
)
def test_the_owner_says_under_which_protection_updates_leave(
    allow: dict[str, Any], privacy: dict[str, Any], tmp_path: Path
) -> None:
    small = federation(tmp_path, {**OWNER, **allow})
    asked = {**SECURE, "privacy": {**PRIVACY, **privacy}}
    if privacy:
        small.run(settings(deployed=small.folder, **asked), tmp_path / "run")
    else:
        with pytest.raises(UserError, match="0 of 4 clients are left"):
            small.run(settings(deployed=small.folder, **asked), tmp_path / "run")
    reasons = {line["text"].split(":")[0] for line in small.log()}
    assert reasons == {"budget" if "epsilon" in allow else "not allowed"}
    assert paid(small) == [0] * 4


def test_a_client_takes_part_among_those_whom_its_owner_knows(tmp_path: Path) -> None:
    """The server's roster has a member that one owner has never heard of."""
    small = federation(tmp_path, OWNER)
    known = small.peers()
    small.clients[0]._parts._peers = lambda: [known[1], known[2], new_key(tmp_path / "x").public_key()]
    small.run(settings(deployed=small.folder, **SECURE), tmp_path / "run")
    line = small.log()[0]
    assert line["client"] == "owner-0" and "1 of 4 members are not on the roster" in line["text"]
    assert paid(small) == [0, 1, 1, 1]


def test_states_are_named_by_what_nobody_else_can_compute(tmp_path: Path) -> None:
    small = federation(tmp_path, OWNER)
    asked = {**SECURE, "method": "scaffold", "rounds": 2}
    result = small.run(settings(deployed=small.folder, **asked), tmp_path / "run")
    assert [record.get("absent", 0) for record in result.metrics] == [0, 0]
    told = {
        answer.state_digest
        for who, (head, _) in small.transport.replies
        if isinstance(
            answer := read_any(head, small.clients[small.whos.index(who)]._key.public_key()), Answer
        )
    }
    plain = {
        hashes
        for client in small.clients
        for file in (client.folder / "runs").rglob("*.safetensors")
        for hashes in (sha256(file.read_bytes()).hexdigest(), digest_of(file))
    }
    assert plain and told and None not in told and not told & plain


def test_an_update_that_is_not_finite_shows_in_no_answer(tmp_path: Path) -> None:
    """A server that sends a model on which some records overflow would learn of them otherwise."""
    told = {}
    for lr in (0.1, 1e38):
        place = tmp_path / str(lr)
        small = federation(place, OWNER)
        local = {"steps": 2, "batch": 5, "lr": lr}
        asked = {**SECURE, "method": "scaffold", "rounds": 2, "local": local}
        result = small.run(settings(deployed=small.folder, **asked), place / "run")
        assert [record.get("absent", 0) for record in result.metrics] == [0, 0] and not small.log()
        told[lr] = [
            replace(
                head, nonce="", order="", run="", body="", state_digest=head.state_digest and "", vectors=()
            )
            for who, (data, _) in small.transport.replies
            if isinstance(
                head := read_any(data, small.clients[small.whos.index(who)]._key.public_key()), Answer
            )
        ]
    assert len(told[0.1]) == 8 and told[0.1] == told[1e38]
    assert all(head.state and head.state_digest is not None for head in told[1e38])


def digest_of(file: Path) -> str:
    """As the engine that trained it names a state."""
    return DirectoryStates(file.parents[2]).digest(int(file.parent.name), file.stem)


@pytest.mark.parametrize(
    ("threshold", "colluding", "drawn", "fix"),
    [
        (2 / 3, 0.1, 2, "it takes 3"),
        (2 / 3, 0.1, 3, ""),
        (0.75, 0.0, 3, "it takes 4"),
        (1.0, 0.0, 100, "lower"),
    ],
)
def test_no_update_leaves_in_a_cohort_whose_members_know_too_much_of_the_noise(
    threshold: float, colluding: float, drawn: int, fix: str
) -> None:
    """What is left between two of them is measured in tests/privacy/test_secure_noise.py."""
    mechanism = SecureSum(2.0, 1e-5, Clip(0.5), Poisson(0.1), threshold=threshold, colluding=colluding)
    with pytest.raises(NotAllowed, match=fix) if fix else nullcontext():
        refuse_small(drawn, mechanism)
