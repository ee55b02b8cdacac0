"""What the server accepts as an answer: anything else counts as if its client were absent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deploy_small import Small, federation, same, settings, vectors

from tacit.deploy.bodies import body_hash, encrypt_, pack
from tacit.deploy.client import Reply
from tacit.deploy.flower.gate import FLEET, LONGEST_REQUEST, Gate
from tacit.deploy.messages import Answer, BadMessage, Refusal, read, written
from tacit.deploy.roster import Member, Roster, read_card
from tacit.deploy.uploads import STRETCH, checked_norm, narrowed, widened
from tacit.errors import UserError
from tacit.privacy import Clip, Grid
from tacit.privacy.bounding import Bounding

BITS = 20
"""Of the grid of a small model."""
CLIENT: dict[str, Any] = {
    "privacy": {"unit": "client", "noise": 0.8, "clip": 0.5, "delta": 1e-3, "entropy": "seed"}, "cohort": 4,
}  # fmt: skip


def rewritten(small: Small, who: str, reply: Reply, **changes: Any) -> Reply:
    """An answer changed by the client itself, who can sign whatever it likes."""
    key = small.clients[small.whos.index(who)]._key
    answer = replace(read(reply[0], key.public_key(), Answer), **changes)
    return written(answer, key), reply[1]


def with_body(small: Small, who: str, reply: Reply, values: dict[str, torch.Tensor]) -> Reply:
    body, names = pack(values)
    head, _ = rewritten(small, who, reply, vectors=names, key=None, body=body_hash(body))
    return head, body


def filled(small: Small, who: str, reply: Reply, value: float) -> Reply:
    key = small.clients[small.whos.index(who)]._key
    answer = read(reply[0], key.public_key(), Answer)
    made = {name: torch.full((length,), value) for name, _, length in answer.vectors}
    return with_body(small, who, reply, made)


def whole(small: Small, who: str, reply: Reply, value: int) -> Reply:
    """The same of whole numbers, as a client sends them under a bound."""
    key = small.clients[small.whos.index(who)]._key
    (name, _, length) = read(reply[0], key.public_key(), Answer).vectors[0]
    count = 8 * length // (BITS + 2)
    return with_body(small, who, reply, narrowed({name: torch.full((count,), value)}, bounding(count)))


def bounding(dimension: int) -> Bounding:
    return Bounding(Clip(1.0).bind({"delta": dimension}), Grid(BITS, 2.0**-BITS))


def from_another(small: Small, who: str, reply: Reply) -> Reply:
    """Signed by another member of the federation."""
    other = small.clients[(small.whos.index(who) + 1) % 4]._key
    own = small.clients[small.whos.index(who)]._key
    return written(read(reply[0], own.public_key(), Answer), other), reply[1]


ATTACKS: dict[str, Callable[[Small, str, Reply], Reply | None]] = {
    "nothing": lambda s, who, r: None,
    "garbage": lambda s, who, r: (b"garbage", r[1]),
    "another's signature": from_another,
    "another body": lambda s, who, r: (r[0], bytes(len(r[1]))),
    "half a body": lambda s, who, r: (r[0], r[1][: len(r[1]) // 2]),
    "another nonce": lambda s, who, r: rewritten(s, who, r, nonce="0" * 32),
    "another order": lambda s, who, r: rewritten(s, who, r, order="0" * 64),
    "another run": lambda s, who, r: rewritten(s, who, r, run="0" * 32),
    "another's number": lambda s, who, r: rewritten(s, who, r, client=7),
    "another's state": lambda s, who, r: rewritten(s, who, r, state="9-9-9", state_digest="0" * 32),
    "a short vector": lambda s, who, r: with_body(s, who, r, {"delta": torch.zeros(3)}),
    "another name": lambda s, who, r: with_body(s, who, r, {"other": torch.zeros(3)}),
    "doubles of whole numbers": lambda s, who, r: with_body(
        s, who, r, {"delta": torch.zeros(3, dtype=torch.int64)}
    ),
    "nan": lambda s, who, r: filled(s, who, r, float("nan")),
    "infinity": lambda s, who, r: filled(s, who, r, float("inf")),
}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The model of a run in which client 2 is away."""
    place = tmp_path_factory.mktemp("away")
    away = federation(place)
    away.transport.away.add(away.whos[2])
    return vectors(away.run(settings("scaffold", away.folder, rounds=2, cohort=4), place / "run").path)


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_no_answer_counts_as_absence(
    name: str, without: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    small = federation(tmp_path)
    attack = ATTACKS[name]
    small.transport.changed = lambda who, reply: attack(small, who, reply) if who == small.whos[2] else reply
    attacked = small.run(settings("scaffold", small.folder, rounds=2, cohort=4), tmp_path / "attacked")
    assert same(without, vectors(attacked.path))
    assert [record["absent"] for record in attacked.metrics] == [1, 1]
    assert {line["client"] for line in small.log()} == {"owner-2"}
    assert {line["what"] for line in small.log()} <= {"invalid", "absent"}


def test_answers_of_an_earlier_round_and_of_another_client_are_refused(tmp_path: Path) -> None:
    small = federation(tmp_path)
    first: dict[str, Reply] = {}

    def again(who: str, reply: Reply) -> Reply:
        first.setdefault(who, reply)
        return next(iter(first.values())) if who == list(first)[1 % len(first)] else first[who]

    small.transport.changed = again
    with pytest.raises(UserError, match=r"round 2: none of 4 clients took part \(4 invalid\)"):
        small.run(settings(deployed=small.folder, cohort=4, rounds=3), tmp_path / "run")
    lines = [(line["round"], line["client"]) for line in small.log()]
    assert lines[0] == (0, f"owner-{small.whos.index(list(first)[1])}") and len(lines) == 5


@pytest.mark.parametrize("value", [1 << BITS, (1 << BITS + 1) - 1, -(1 << BITS + 1)])
def test_an_upload_beyond_the_clip_is_not_added(value: int, tmp_path: Path) -> None:
    """Where the server makes the noise, its sensitivity must not depend on the client's own bounding."""
    away = federation(tmp_path / "a")
    away.transport.away.add(away.whos[2])
    without = away.run(settings(deployed=away.folder, rounds=1, **CLIENT), tmp_path / "away")
    small = federation(tmp_path / "b")
    small.transport.changed = lambda who, r: whole(small, who, r, value) if who == small.whos[2] else r
    attacked = small.run(settings(deployed=small.folder, rounds=1, **CLIENT), tmp_path / "attacked")
    assert same(vectors(without.path), vectors(attacked.path))
    assert "clipping norm" in small.log()[0]["text"]


def test_nobody_can_ask_whether_an_update_that_it_guessed_was_sent(tmp_path: Path) -> None:
    """A SuperLink knows pieces by their hashes, and tells every member whether it has one. At client level
    updates have no noise yet, so somebody who knows all of another's records but one can compute them.
    """
    from tacit.deploy.flower.post import record

    inflatable = pytest.importorskip("flwr.supercore.inflatable.inflatable_object")
    seen: list[dict[str, set[str]]] = []
    models = []
    for name in ("a", "b"):
        small = federation(tmp_path / name)
        sent, result = (
            {},
            small.run(settings(deployed=small.folder, rounds=1, **CLIENT), tmp_path / f"r{name}"),
        )
        for who, (head, body) in small.transport.replies:
            key = small.clients[small.whos.index(who)]._key
            answer = read(head, key.public_key(), Answer)
            plain = bytearray(body)
            encrypt_(plain, str(answer.key))
            guessed, there = (set(inflatable.get_all_nested_objects(record(b))) for b in (plain, body))
            assert not guessed & there
            sent[who] = there
        seen.append(sent)
        models.append(vectors(result.path))
    assert same(*models), "the same updates"
    first, second = (set().union(*sent.values()) for sent in seen)
    assert first and not first & second


def test_whole_numbers_are_bounded_exactly() -> None:
    grid = Grid.fit(1.0, 4, 1.0)
    bounding = Bounding(Clip(1.0).bind({"delta": 4}), grid)
    edge = torch.zeros(4, dtype=torch.int32)
    edge[1] = -grid.radius
    checked_norm({"delta": edge}, bounding)
    edge[2] = 1
    with pytest.raises(BadMessage, match="clipping norm"):
        checked_norm({"delta": edge}, bounding)


@pytest.mark.parametrize("count", [1, 7, 8, STRETCH - 1, STRETCH, STRETCH + 3])
def test_whole_numbers_take_the_bits_that_their_bound_needs_whatever_they_are(count: int) -> None:
    bound, most = bounding(count), 1 << BITS
    rng = torch.Generator().manual_seed(count)
    for values in (torch.zeros(count), torch.randint(-most, most + 1, (count,), generator=rng)):
        values = values.long()
        values[0], values[-1] = -most, most
        sent = narrowed({"delta": values}, bound)
        assert sent["delta"].dtype == torch.uint8 and len(sent["delta"]) == -(-count * (BITS + 2) // 8)
        assert torch.equal(widened(sent, bound, {"delta": count})["delta"], values)
    if count * (BITS + 2) % 8:
        sent["delta"][-1] |= 128
        with pytest.raises(BadMessage, match="bits after the last number"):
            widened(sent, bound, {"delta": count})


def test_the_absent_count_as_zero_and_the_divisor_stays(tmp_path: Path) -> None:
    """At client level a round without anybody is noise over the same constant, and nobody is named."""
    small = federation(tmp_path)
    small.transport.away = set(small.whos[1:])
    result = small.run(settings(deployed=small.folder, rounds=2, **CLIENT), tmp_path / "run")
    assert [record["absent"] for record in result.metrics] == [3, 3]
    assert all("skipped" not in record for record in result.metrics)
    small.transport.changed = lambda who, reply: None
    small.resume(tmp_path / "run", rounds=3)


def test_an_answer_after_the_deadline_is_never_read_and_stays_paid(
    without: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = federation(tmp_path)
    slow, held, real, leaps = small.whos[2], list[bytes](), small.transport.receive, [0.0]

    def receive(tickets: Sequence[str]) -> dict[str, Any]:
        waiting = small.transport.waiting
        for ticket in tickets:
            if ticket in waiting and waiting[ticket][0] == slow:  # it has answered; the answer is on its way
                held.extend(reply[0] for reply in [real([ticket])[ticket]] if reply)
                leaps[0] += 601.0
        return real([ticket for ticket in tickets if ticket in waiting])

    monkeypatch.setattr(small.transport, "receive", receive)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + leaps[0], sleep=lambda seconds: None)
    monkeypatch.setattr("tacit.deploy.server.time", clock)
    late = small.run(settings("scaffold", small.folder, rounds=2, cohort=4), tmp_path / "late")
    assert len(held) == 2 and same(without, vectors(late.path))
    assert [record["absent"] for record in late.metrics] == [1, 1]
    assert {line["text"] for line in small.log()} == {"no answer by the deadline"}
    assert [line["what"] for line in small.log(2)] == ["unprotected", "answered"] * 2, "it knows what left it"


def test_a_run_waits_for_clients_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tacit.deploy import server

    small = federation(tmp_path)
    small.transport.away = set(small.whos)
    monkeypatch.setattr(
        server.time, "sleep", lambda seconds: monkeypatch.setattr(small.transport, "away", set())
    )
    assert small.run(settings(deployed=small.folder, rounds=1), tmp_path / "run").finished


def test_somebody_who_was_put_out_is_not_asked(tmp_path: Path) -> None:
    small = federation(tmp_path)
    Roster.read(small.folder).without("owner-2").write(small.folder)
    result = small.run(settings(deployed=small.folder, rounds=2, cohort=4), tmp_path / "run")
    assert [record["absent"] for record in result.metrics] == [1, 1]
    assert small.whos[2] not in {who for who, _, _ in small.transport.orders}


def test_joiners_wait_for_the_next_run_and_keys_are_one_client_each(tmp_path: Path) -> None:
    small = federation(tmp_path)
    roster = Roster.read(small.folder)
    with pytest.raises(UserError, match="already"):
        roster.with_member(replace(roster.members[0], name="me-again"))
    with pytest.raises(UserError, match="has 4 so far"):
        roster.first(5)
    small.run(settings(deployed=small.folder, rounds=1), tmp_path / "run")
    other = federation(tmp_path / "other")
    newcomer = replace(Roster.read(other.folder).members[0], name="newcomer")
    roster.with_member(newcomer).write(small.folder)
    assert small.resume(tmp_path / "run", rounds=2).finished
    for text in ("", "[]", '{"name": "x"}', '{"name": "../x", "key": "", "records": 1}'):
        with pytest.raises(UserError, match="card"):
            read_card(text, "card.json")
    damaged = small.folder / "roster.json"
    damaged.write_text(damaged.read_text().replace("newcomer", "newcomex"))
    with pytest.raises(UserError, match="damaged"):
        Roster.read(small.folder)


def test_a_client_that_lost_its_state_says_so(tmp_path: Path) -> None:
    small = federation(tmp_path)
    small.run(settings("scaffold", small.folder, rounds=1, cohort=4), tmp_path / "run")
    (state,) = (small.clients[2].folder / "runs").rglob("*.safetensors")
    state.write_bytes(state.read_bytes()[:-4] + b"\0\0\0\0")
    result = small.resume(tmp_path / "run", rounds=2)
    assert result.metrics[-1]["absent"] == 1
    assert small.log()[-1]["text"].startswith("mismatch: its own state")


def test_a_refusal_of_another_is_no_refusal(tmp_path: Path) -> None:
    small = federation(tmp_path)
    stranger = small.clients[0]._key

    def refuse(who: str, reply: Reply) -> Reply:
        if who != small.whos[2]:
            return reply
        own = small.clients[2]._key
        answer = read(reply[0], own.public_key(), Answer)
        return written(Refusal(answer.run, answer.client, answer.nonce, "budget", "no"), stranger), b""

    small.transport.changed = refuse
    small.run(settings(deployed=small.folder, rounds=1, cohort=4), tmp_path / "run")
    assert [line["what"] for line in small.log()] == ["invalid"]


def test_what_cannot_be_deployed_is_told_before_anything_starts(tmp_path: Path) -> None:
    small = federation(tmp_path)
    privacy = {"unit": "client", "noise": 8.0, "clip": 0.5, "delta": 1e-3, "noise_at": "clients"}
    with pytest.raises(UserError, match="noise_at"):
        small.run(settings(deployed=small.folder, privacy=privacy), tmp_path / "a")
    with pytest.raises(UserError, match="evaluate"):
        small.run(settings(deployed=small.folder, evaluate__clients=2, data__holdout=0.1), tmp_path / "b")
    members = [replace(member, records=0) for member in Roster.read(small.folder).members]
    Roster(tuple(members)).write(small.folder)
    example = {"unit": "example", "noise": 1.0, "clip": 0.5, "delta": 1e-3}
    with pytest.raises(UserError, match=r"did not tell it|no records|cannot take part"):
        small.run(settings(deployed=small.folder, privacy=example), tmp_path / "c")
    assert not small.transport.orders
    assert isinstance(members[0], Member)


class AtTheGate:
    """Requests to the public door, and what of them is passed on."""

    def __init__(self, known: bool = True) -> None:
        self.passed: list[str] = []
        self._gate = Gate(self._inner, lambda headers: known)

    async def _inner(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed.append(scope["path"])

    def ask(self, method: str, path: str, kind: str = "http", **headers: str) -> int | None:
        sent: list[Any] = []

        async def send(event: Any) -> None:
            sent.append(event)

        async def receive() -> Any:
            raise AssertionError("the body of a request was read at the gate")

        told = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": kind, "method": method, "path": path, "headers": told}
        asyncio.run(self._gate(scope, receive, send))
        return sent[0]["status"] if sent else None


def test_a_stranger_gets_404_at_the_gate() -> None:
    """Only eight paths of the Fleet interface are there; Control and Runtime are not on this door at all."""
    gate = AtTheGate()
    strange = "/ /docs /openapi.json /v1/control/start-run /v1/runtime/acquire-task /v1/fleet/"
    strange += (
        " /v1/fleet/register-node /v1/fleet/get-fab /v1/fleet/../control/start-run /V1/fleet/pull-messages"
    )
    for path in [*strange.split(), "/v1/fleet/pull-messages/", "//v1/fleet/pull-messages"]:
        assert gate.ask("POST", path, content_length="0") == 404
    assert gate.ask("GET", "/v1/fleet/pull-messages", content_length="0") == 404
    assert gate.ask("", "/v1/fleet/pull-messages", "websocket") is None
    assert not gate.passed
    for path in FLEET:
        assert gate.ask("POST", path, content_length="0") is None
    assert set(gate.passed) == FLEET


def test_nothing_is_read_of_what_a_stranger_sends_nor_more_of_a_members_than_a_piece() -> None:
    """Whoever the headers do not show to be on the roster could fill the memory with a body otherwise."""
    stranger, member = AtTheGate(known=False), AtTheGate()
    for path in FLEET:
        assert stranger.ask("POST", path, content_length="5") == 401
        for length in (str(LONGEST_REQUEST + 1), "9" * 5000, "", "-1", "1e3", "٣"):
            assert member.ask("POST", path, content_length=length) == 413
        assert member.ask("POST", path, transfer_encoding="chunked") == 413
        assert member.ask("POST", path, transfer_encoding="chunked", content_length="5") == 413
    assert not stranger.passed and not member.passed
    assert member.ask("POST", "/v1/fleet/push-object", content_length=str(LONGEST_REQUEST)) is None
