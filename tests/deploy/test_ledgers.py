"""An owner's ledgers: one budget for all its federations, whatever fails on disks and clocks."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from deploy_small import Small, allowing, federation, settings
from test_owners import CLIENT, EXAMPLE, charges, given, refusal

from tacit.deploy.client import LEDGERS, LOG, RUNS
from tacit.deploy.ledgers import OverBudget, OwnLedgers, own_cost, read_accounts, spent
from tacit.deploy.messages import Answer, TrainOrder, read, written
from tacit.deploy.statement import own_statement
from tacit.errors import UserError
from tacit.privacy import ledger as ledger_file


def again(small: Small, **changes: Any) -> tuple[int, Any]:
    """The first order once more, as another one: to which client, and its answer."""
    client, order, _, body = given(small)
    fresh = TrainOrder(**{**vars(order), "nonce": os.urandom(16).hex(), **changes})
    return client, small.clients[client].answer(written(fresh, small.key), lambda size: bytearray(body))


def answered(small: Small, client: int, reply: Any) -> bool:
    return read(reply[0], small.clients[client]._key.public_key(), Answer).client == client


def test_one_budget_for_all_federations_of_an_owner(tmp_path: Path) -> None:
    """Two servers that do not know of each other, and an owner's two clients with the same records."""
    probe = federation(tmp_path / "probe", {"unit": "example"})
    probe.run(settings(deployed=probe.folder, rounds=2, **EXAMPLE), tmp_path / "p")
    budget = 1.0001 * max(
        spent(read_accounts(client.folder / LEDGERS), allowing(unit="example")).value
        for client in probe.clients
    )
    shared = tmp_path / "ledgers"
    first, second = (
        federation(tmp_path / name, {"unit": "example", "epsilon": budget}, ledgers=shared)
        for name in ("a", "b")
    )
    first.run(settings(deployed=first.folder, rounds=1, **EXAMPLE), tmp_path / "first")
    second.run(settings(deployed=second.folder, rounds=1, **EXAMPLE), tmp_path / "second")
    with pytest.raises(UserError, match="refused"):
        first.run(settings(deployed=first.folder, rounds=9, **EXAMPLE), tmp_path / "third")
    assert {line["text"].split(":")[0] for line in first.log()} == {"budget"}
    for number, client in enumerate(second.clients):
        said = own_statement(client.folder, client.allow, shared / str(number))
        assert said.epsilon <= budget and said.rounds >= 2 and said.runs >= 2
        assert not (client.folder / LEDGERS).exists()


def only(small: Small, **allow: Any) -> dict[str, Any]:
    """What the first owner is told by a federation that shares its ledgers and asks for nothing yet."""
    client = small.clients[0]
    return own_statement(client.folder, allowing(**allow), client.ledgers.folder).to_dict()


def test_what_protects_single_records_bounds_nothing_for_an_owner_who_wants_more(tmp_path: Path) -> None:
    """Six example-level rounds, then a federation of the same owners that promises to protect whole clients:
    ε was told as 0, and its budget had room.
    """
    shared = tmp_path / "ledgers"
    first = federation(tmp_path / "a", {"unit": "example"}, ledgers=shared)
    first.run(settings(deployed=first.folder, rounds=6, **EXAMPLE), tmp_path / "first")
    assert only(first, unit="example")["epsilon"] < 1e3
    said = only(first, unit="client")
    assert (said["epsilon"], said["narrower"], said["rounds"]) == (None, 6, 6)
    second = federation(tmp_path / "b", {"unit": "client", "epsilon": 1e9}, ledgers=shared)
    second.run(settings(deployed=second.folder, rounds=3, **CLIENT), tmp_path / "second")
    assert {line["text"].split(":")[0] for line in second.log()} == {"budget"}, "nobody took part"
    assert only(second, unit="client")["rounds"] == 6


def test_a_round_without_privacy_is_on_the_ledger_and_leaves_no_budget(tmp_path: Path) -> None:
    """Three plain rounds of one federation were told to nobody in the owner's other one."""
    shared = tmp_path / "ledgers"
    first = federation(tmp_path / "a", ledgers=shared)
    first.run(settings(deployed=first.folder, rounds=3, cohort=4), tmp_path / "first")
    said = only(first)
    assert (said["epsilon"], said["unprotected"], said["rounds"]) == (None, 3, 3)
    second = federation(tmp_path / "b", {"unit": "example", "epsilon": 1e9}, ledgers=shared)
    with pytest.raises(UserError, match="refused"):
        second.run(settings(deployed=second.folder, rounds=1, **EXAMPLE), tmp_path / "second")
    with pytest.raises(ValueError, match="no ε bounds"):
        allowing(unit="none", epsilon=5)


def test_a_rehearsal_counts_as_no_protection_where_rehearsals_are_not_allowed(tmp_path: Path) -> None:
    small = federation(tmp_path, {"unit": "example"})
    small.run(
        settings(deployed=small.folder, rounds=2, **EXAMPLE | {"privacy__entropy": "seed"}), tmp_path / "run"
    )
    rehearsal, real = (only(small, unit="example", simulation=allowed) for allowed in (True, False))
    assert rehearsal["epsilon"] < 1e3 and real["epsilon"] is None and real["simulated"] == 2


def test_two_that_charge_at_once_do_not_overlook_each_other(tmp_path: Path) -> None:
    small = federation(tmp_path, {"unit": "example"})
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    client = small.clients[given(small)[0]]
    assert client._made is not None
    prepared = client._made[1]
    mechanism = prepared.job.privacy
    assert mechanism is not None
    cost = own_cost(mechanism, prepared.job.workload, given(small)[0])
    place = tmp_path / "common"
    both = [OwnLedgers(place), OwnLedgers(place)]
    probe, free = OwnLedgers(tmp_path / "probe"), allowing(unit="example")
    for round in range(6):
        probe.charge("f" * 32, round, (cost,), cost, mechanism, prepared.data, free)
    probe.close()
    budget = 1.0001 * spent(read_accounts(tmp_path / "probe"), free).value
    allow = allowing(unit="example", epsilon=budget)
    paid: list[int] = []

    def spend(number: int) -> None:
        for round in range(6):
            try:
                both[number].charge(f"{number}" * 32, round, (cost,), cost, mechanism, prepared.data, allow)
                paid.append(number)
            except OverBudget:
                pass

    threads = [threading.Thread(target=spend, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in both:
        one.close()
    assert len(paid) == 6
    assert spent(read_accounts(place), allow).value <= budget


@pytest.mark.parametrize("taken", [0, 30])
def test_a_full_disk_lets_nothing_out_and_the_client_goes_on_when_there_is_room(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`taken`: bytes of the charge's line that still find room. What is cut off counts as a charge."""
    small = federation(tmp_path, {"unit": "example"})
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    real, full = os.write, [True]

    def write(fd: int, data: bytes) -> int:
        if not full[0]:
            return real(fd, data)
        if taken:
            return real(fd, data[:taken])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "os", _With(write))  # nonces still have room
        client, reply = again(small)
        assert refusal(small, client, reply) == "failed" and not reply[1]
    full[0] = False
    client, reply = again(small)
    assert answered(small, client, reply)
    assert charges(small, client) == 2 + bool(taken), "what was cut off is counted, too"


class _With:
    """The module `os`, with another `write`."""

    def __init__(self, write: Any) -> None:
        self.write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def test_a_log_that_cannot_be_written_raises_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = federation(tmp_path, {"unit": "example"})
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    client = small.clients[given(small)[0]]
    (client.folder / LOG).unlink()
    (client.folder / LOG).mkdir()
    assert client.answer(b"garbage", lambda size: b"") is None
    assert answered(small, *again(small))
    assert "dropped" in capsys.readouterr().err


def test_a_clock_that_goes_wrong_and_right_again_brings_no_order_back(tmp_path: Path) -> None:
    shift = [0.0]
    small = federation(tmp_path, {"unit": "example"}, clock=lambda: time.time() + shift[0])
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    client, order, head, body = given(small)
    shift[0] = 5 * 365.0 * 86400
    small.reopened(client)
    assert answered(small, *again(small, created=order.created + shift[0])), "others are forgotten by this"
    shift[0] = 0.0
    before = charges(small, client)
    small.reopened(client)
    assert refusal(small, client, small.clients[client].answer(head, lambda size: body)) in (
        "expired",
        "replayed",
    )
    assert charges(small, client) == before
    assert answered(small, *again(small, created=order.created + 1)), "later ones are carried out"


def test_orders_that_are_refused_leave_nothing_behind(tmp_path: Path) -> None:
    """Else a server could fill a disk with names of runs, at no cost."""
    small = federation(tmp_path, {"unit": "example"})
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    client = small.clients[given(small)[0]]
    before = set(client.folder.rglob("*"))
    for change in ({"layout": "a" * 64}, {"config": "rounds: [1"}, {"shape": (9,)}):
        number, reply = again(small, run=os.urandom(16).hex(), **change)
        assert refusal(small, number, reply) == "mismatch"
    assert set(client.folder.rglob("*")) == before
    assert (client.folder / RUNS).exists() == any(RUNS in file.parts for file in before)


STEPS = {
    "before the nonce": ("Nonces.add", False, 0, True),
    "after the nonce": ("Nonces.add", True, 0, False),
    "before the charge": ("OwnLedgers.charge", False, 0, False),
    "after the charge": ("OwnLedgers.charge", True, 1, False),
    "before training": ("Worker.sum", False, 1, False),
    "after training": ("Worker.sum", True, 1, False),
    "before it answers": ("written", False, 1, False),
}
"""Where a client is killed, whether that is after the call, what it has paid, and whether the same order may
be carried out afterwards."""


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_a_client_has_paid_for_what_it_may_have_sent_and_sends_nothing_twice(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tacit.deploy import client as module

    name, after, paid, carried_out = STEPS[step]
    small = federation(tmp_path, {"unit": "example"})
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    number, order, _, body = given(small)
    head = written(TrainOrder(**{**vars(order), "nonce": "9" * 32}), small.key)
    owner, _, method = name.rpartition(".")
    where = getattr(module, owner) if owner else module
    real = getattr(where, method)

    def killed(*args: Any) -> Any:
        if after:
            real(*args)
        raise KeyboardInterrupt  # which nothing in a client takes for an answer

    with monkeypatch.context() as patch:
        patch.setattr(where, method, killed)
        with pytest.raises(KeyboardInterrupt):
            small.clients[number].answer(head, lambda size: bytearray(body))
    again = small.reopened(number)
    assert charges(small, number) == 1 + paid, "as the disk has it"
    reply = again.answer(head, lambda size: bytearray(body))
    if carried_out:
        assert answered(small, number, reply) and charges(small, number) == 2
    else:
        assert refusal(small, number, reply) == "replayed" and charges(small, number) == 1 + paid
