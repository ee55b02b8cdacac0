"""An owner's policy: the client alone refuses everything else, at no cost, whatever the server says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from deploy_small import Small, allowing, federation, settings

import tacit
from tacit.deploy.client import LEDGERS
from tacit.deploy.ledgers import read_accounts, spent
from tacit.deploy.messages import Answer, Refusal, TrainOrder, read, written
from tacit.deploy.policy import Allow, Asked, NotAllowed, refuse_beyond
from tacit.deploy.statement import own_statement
from tacit.errors import UserError

EXAMPLE: dict[str, Any] = {
    "method": "dp-fedadamw", "privacy__unit": "example", "privacy__noise": 1.0, "privacy__clip": 0.5,
    "privacy__delta": 1e-3, "cohort": 4,
}  # fmt: skip
CLIENT: dict[str, Any] = {
    "method": "fedavg", "privacy": {"unit": "client", "noise": 4.0, "clip": 0.5, "delta": 1e-3}, "cohort": 3,
}  # fmt: skip


def charges(small: Small, client: int) -> int:
    """How many rounds a client has paid for, by its own ledgers on disk."""
    return sum(
        len(account.contents.charges) for account in read_accounts(small.clients[client].folder / LEDGERS)
    )


def given(small: Small, number: int = 0) -> tuple[int, TrainOrder, bytes, bytes]:
    """An order that was sent: to which client, as values, and as bytes."""
    who, head, body = small.transport.orders[number]
    return small.whos.index(who), read(head, small.key.public_key(), TrainOrder), head, body


def refusal(small: Small, client: int, reply: tuple[bytes, bytes] | None) -> str:
    assert reply is not None
    return read(reply[0], small.clients[client]._key.public_key(), Refusal).reason


def test_the_budget_is_kept_by_the_client_alone_over_all_runs(tmp_path: Path) -> None:
    probe = federation(tmp_path / "probe", {"unit": "example"})
    probe.run(settings(deployed=probe.folder, rounds=2, **EXAMPLE), tmp_path / "p")
    budget = 0.0
    for number, client in enumerate(probe.clients):
        accounts = read_accounts(client.folder / LEDGERS)
        assert len(accounts) == 1 and charges(probe, number) == 2
        budget = max(budget, 1.0001 * spent(accounts, allowing(unit="example")).value)

    small = federation(tmp_path / "real", {"unit": "example", "epsilon": budget})
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "first")
    with pytest.raises(UserError, match=r"none of 4 clients took part \(4 refused\)"):
        small.run(settings(deployed=small.folder, rounds=9, **EXAMPLE), tmp_path / "second")
    assert {line["text"].split(":")[0] for line in small.log()} == {"budget"}
    paid = [charges(small, number) for number in range(4)]
    assert min(paid) == 2, "one round of the first run, one of the second"
    for number, client in enumerate(small.clients):
        said = own_statement(client.folder, client.allow)
        assert said.epsilon <= budget and (said.rounds, said.runs) == (paid[number], 2)
        assert f"{said.rounds} rounds of {said.runs} runs" in said.text()
    worst = paid.index(2)
    head, body = small.transport.orders[-1][1:]
    order = read(head, small.key.public_key(), TrainOrder)
    fresh = TrainOrder(**{**vars(order), "nonce": "a" * 32, "to": small.whos[worst], "client": worst})
    again = small.reopened(worst).answer(written(fresh, small.key), lambda size: body)
    assert refusal(small, worst, again) == "budget" and charges(small, worst) == 2


def test_client_level_is_charged_without_amplification(tmp_path: Path) -> None:
    small = federation(tmp_path, {"unit": "client", "epsilon": 50, "delta": 1e-3})
    result = small.run(settings(deployed=small.folder, rounds=4, **CLIENT), tmp_path / "run")
    asked = [small.whos.index(who) for who, _, _ in small.transport.orders]
    for number, client in enumerate(small.clients):
        assert charges(small, number) == asked.count(number)
        said = own_statement(client.folder, client.allow)
        assert [who for who, epsilon, _ in said.observers if epsilon is None] == [
            "the server, and whoever runs it"
        ]
    worst = max(own_statement(client.folder, client.allow).epsilon for client in small.clients)
    often = max(asked.count(number) for number in range(4))
    if often == 4:  # in all rounds, and nothing counted on chance: never less than the server's own number
        assert worst >= result.metrics[-1]["epsilon"]
    models, server, network = tacit.statement(tmp_path / "run").observers
    assert (models.epsilon, server.epsilon) == (result.metrics[-1]["epsilon"], None)
    assert network.epsilon == pytest.approx(worst), "both ends count the same, each on its own disk"
    assert "watches the network" in network.who


@pytest.mark.parametrize(
    ("allow", "run"),
    [
        ({"methods": ["scaffold"]}, {}),
        ({"unit": "example"}, {}),
        ({"unit": "client"}, EXAMPLE),
        ({"unit": "example"}, CLIENT),
        ({"unit": "example", "simulation": False}, {**EXAMPLE, "privacy__entropy": "seed"}),
        ({"send": []}, {"weights": "examples"}),
        ({}, {"data__tokenizer": "somewhere"}),
    ],
)
def test_what_is_not_allowed_is_refused_and_costs_nothing(
    allow: dict[str, Any], run: dict[str, Any], tmp_path: Path
) -> None:
    small = federation(tmp_path, allow)
    config = settings(deployed=small.folder, **run)
    if config.privacy is not None and config.privacy.unit == "client":
        small.run(
            config, tmp_path / "run"
        )  # noise alone: under client-level privacy nobody sees who was there
    else:
        with pytest.raises(UserError, match="refused"):
            small.run(config, tmp_path / "run")
    assert small.log() and all(line["text"].startswith("not allowed: ") for line in small.log())
    assert all(charges(small, number) == 0 for number in range(4))


def test_the_policy_names_what_it_forbids() -> None:
    allow = allowing(methods=["fedavg"], models=["minilm"])
    refuse_beyond(allow, Asked("fedavg", "example", True, ("minilm",), ("loss",)))
    for asked, match in [
        (Asked("import:evil:Method", None, False), "method"),
        (Asked("fedavg", None, False, ("import:os:system",)), "import:os:system"),
        (Asked("fedavg", None, False, ("/etc",)), "/etc"),
    ]:
        with pytest.raises(NotAllowed, match=match):
            refuse_beyond(allow, asked)
    with pytest.raises(ValueError, match="epsilon"):
        Allow.model_validate({"unit": "example", "methods": ["fedavg"]})


def test_a_stale_order_costs_nothing(tmp_path: Path) -> None:
    late = [0.0]
    small = federation(tmp_path, {"unit": "example"}, clock=lambda: time.time() + late[0])
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    client, order, _, body = given(small)
    fresh = written(TrainOrder(**{**vars(order), "nonce": "f" * 32}), small.key)
    for shift in (order.ttl + 60, -3600.0):
        late[0] = shift
        assert refusal(small, client, small.clients[client].answer(fresh, lambda size: body)) == "expired"
    assert charges(small, client) == 1
    late[0] = 0.0
    assert small.clients[client].answer(fresh, lambda size: body) is not None
    assert charges(small, client) == 2, "the very same order is carried out while it holds"


def test_an_order_is_carried_out_once(tmp_path: Path) -> None:
    small = federation(tmp_path, {"unit": "example"})
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    client, _, head, body = given(small)
    assert refusal(small, client, small.clients[client].answer(head, lambda size: body)) == "replayed"
    small.reopened(client)
    assert refusal(small, client, small.clients[client].answer(head, lambda size: body)) == "replayed"
    assert charges(small, client) == 1


def test_an_order_for_another_or_from_another_is_dropped(tmp_path: Path) -> None:
    small = federation(tmp_path, {"unit": "example"})
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    client, order, head, body = given(small)
    other = (client + 1) % 4
    assert small.clients[other].answer(head, lambda size: body) is None
    forged = written(TrainOrder(**{**vars(order), "nonce": "e" * 32}), small.clients[other]._key)
    assert small.clients[client].answer(forged, lambda size: body) is None
    assert [small.log(c)[-1]["what"] for c in (client, other)] == ["dropped", "dropped"]
    assert charges(small, client) == charges(small, other) == 1


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A federation that has played one round; for tests that leave it as it is."""
    place = tmp_path_factory.mktemp("played")
    small = federation(place, {"unit": "example"})
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), place / "run")
    return small


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "a" * 64},
        {"frozen": "a" * 64},
        {"shape": (1, 5, 5)},
        {"classes": 2},
        {"labels": ("cat", "dog", "bird")},
        {"bound": 1.0},
        {"vectors": (("theta", "f4", 3),)},
        {"body": "a" * 64},
        {"state": "7-0-0", "state_digest": "a" * 32},
        {"config": "rounds: [1"},
        {"config": "!!python/object/apply:os.system ['true']"},
        {"config": "a: &a [*a]"},
    ],
)
def test_what_does_not_fit_is_refused_and_costs_nothing(change: dict[str, Any], played: Small) -> None:
    small = played
    client, order, _, body = given(small)
    head = written(TrainOrder(**{**vars(order), "nonce": "d" * 32, **change}), small.key)
    assert refusal(small, client, small.clients[client].answer(head, lambda size: body)) == "mismatch"
    assert charges(small, client) == 1


def test_a_run_that_gets_dearer_is_another_run(tmp_path: Path) -> None:
    """A server that lowers the noise under the name of a run that was allowed before."""
    small = federation(tmp_path, {"unit": "example"})
    small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    client, order, _, body = given(small)
    config = order.config.replace("noise: 1.0", "noise: 0.5")
    assert config != order.config
    head = written(TrainOrder(**{**vars(order), "nonce": "c" * 32, "config": config}), small.key)
    assert refusal(small, client, small.clients[client].answer(head, lambda size: body)) == "failed"
    assert charges(small, client) == 1


def test_exact_numbers_leave_only_if_the_owner_says_so(tmp_path: Path) -> None:
    small = federation(tmp_path, {"send": []})
    every, steps = {"epochs": 1, "batch": 1, "lr": 0.1}, set()
    result = small.run(settings(deployed=small.folder, rounds=1, local=every), tmp_path / "run")
    for who, (head, _) in small.transport.replies:
        answer = read(head, small.clients[small.whos.index(who)]._key.public_key(), Answer)
        assert (answer.norm, answer.examples, answer.loss, answer.notes, answer.seconds) == (None,) * 5
        steps.add(answer.steps)
    assert "train_loss" not in result.metrics[0]
    assert len(small.transport.replies) == 3 and len(steps) == 1, "with a batch of one, steps are examples"


def test_a_charge_stays_when_the_client_dies_before_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = federation(tmp_path, {"unit": "example"})
    from tacit.deploy import client as module

    real, killed = module.Worker.sum, []

    def dies(self: Any, *args: Any) -> Any:
        if not killed:
            killed.append(1)
            raise KeyboardInterrupt  # no `except Exception` may take it for an answer
        return real(self, *args)

    monkeypatch.setattr(module.Worker, "sum", dies)
    with pytest.raises(KeyboardInterrupt):
        small.run(settings(deployed=small.folder, rounds=1, **EXAMPLE), tmp_path / "run")
    client = small.whos.index(small.transport.orders[0][0])
    paid = [number for number in range(4) if charges(small, number)]
    assert len(paid) == 1 and charges(small, paid[0]) == 1
    small.reopened(paid[0])
    small.resume(tmp_path / "run")
    assert charges(small, paid[0]) == 2, "the round that is played again is paid again"
    assert client in range(4)


def test_correlated_noise_is_paid_once_and_nobody_is_asked_before_its_turn(tmp_path: Path) -> None:
    """Four clients in two groups: each takes part in every other round, and checks that by itself."""
    blt = {"unit": "client", "noise": 4.0, "clip": 0.5, "delta": 1e-3, "mechanism": {"kind": "blt"}}
    asked = {"method": "fedavg", "privacy": blt, "cohort": 2, "rounds": 4}
    small = federation(tmp_path, {"unit": "client", "epsilon": 50, "delta": 1e-3})
    result = small.run(settings(deployed=small.folder, **asked), tmp_path / "run")
    assert [charges(small, number) for number in range(4)] == [2] * 4
    (models, server) = tacit.statement(tmp_path / "run").observers
    assert server.epsilon is None and "who took part when" in models.who
    for client in small.clients:
        own = own_statement(client.folder, client.allow)
        assert own.epsilon == pytest.approx(result.metrics[-1]["epsilon"]), "all of the run, from its start"
    client, order, _, body = given(small)
    for round, seed in ((order.round + 1, None), (order.round + 3, None), (order.round + 3, 9), (4, None)):
        config = order.config if seed is None else order.config.replace("seed: 5", f"seed: {seed}")
        assert seed is None or config != order.config
        head = written(
            TrainOrder(
                **{**vars(order), "nonce": f"{round:016x}{seed or 0:016x}", "round": round, "config": config}
            ),
            small.key,
        )
        assert refusal(small, client, small.clients[client].answer(head, lambda size: body)) == "not allowed"
    assert charges(small, client) == 2
    again = TrainOrder(**{**vars(order), "nonce": "b" * 32, "round": order.round + 2, "attempt": 1})
    reply = small.reopened(client).answer(written(again, small.key), lambda size: body)
    assert reply is not None and charges(small, client) == 3
    assert (
        own_statement(small.clients[client].folder, small.clients[client].allow).epsilon
        > result.metrics[-1]["epsilon"]
    ), "a round that is played again is paid again"
    with pytest.raises(UserError, match="leave it out, so that clients take turns"):
        banded = {**blt, "mechanism": {"kind": "banded", "bands": 2}}
        small.run(
            settings(
                deployed=small.folder,
                **{**asked, "privacy": banded, "cohort": {"size": 2, "sampling": "poisson"}},
            ),
            tmp_path / "banded",
        )
