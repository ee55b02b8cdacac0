"""A server's hostile settings against an owner's real records: refusals reveal nothing to it."""

from __future__ import annotations

import csv
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tacit
from tacit.config.owner import Owner, OwnRecords
from tacit.config.yamls import to_yaml
from tacit.data.identity import identify
from tacit.data.population import Population
from tacit.deploy.client import Client
from tacit.deploy.keys import fingerprint, new_key
from tacit.deploy.messages import Refusal, TrainOrder, read_any, written
from tacit.deploy.statement import own_statement
from tacit.errors import UserError

SECRET = "Ann Smith, HIV positive since 2011"
SETTINGS: dict[str, Any] = {
    "seed": 5, "rounds": 5, "data": {"name": "owners", "partition": {"kind": "owners", "clients": 4}},
    "model": {"name": "mlp", "hidden": [4]}, "method": "dp-fedavg", "cohort": 3,
    "local": {"steps": 2, "batch": 20, "lr": 0.1},
    "privacy": {"unit": "example", "noise": 1.0, "clip": 0.5, "delta": 1e-5},
}  # fmt: skip


@pytest.fixture
def clinic(tmp_path: Path) -> tuple[Client, Any, Owner]:
    """A client with a table of its own, read by the program's own reader, and the server's key."""
    with (tmp_path / "clinic.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "ward", "note", "y"])
        for n in range(40):
            writer.writerow([n % 5, n % 3, f"w{n % 7}", SECRET if n == 9 else f"well {n}", n % 2])
    (tmp_path / "other.csv").write_text(f"a,b,y\n1,2,{SECRET}\n")
    data = {"name": "table", "path": str(tmp_path / "clinic.csv"), "features": ["a", "b"], "label": "y"}
    allow = {"unit": "example", "epsilon": 1.0, "delta": 1e-5, "methods": ["dp-fedavg", "adadps"]}
    owner = Owner.model_validate({"name": "clinic", "server": "h:1", "data": data, "allow": allow})
    server = new_key(tmp_path / "server")
    client = Client(
        tmp_path / "state",
        new_key(tmp_path / "key"),
        server.public_key(),
        owner.allow,
        OwnRecords(owner).prepare,
    )
    return client, server, owner


def order(client: Client, settings: dict[str, Any], **more: Any) -> TrainOrder:
    values: dict[str, Any] = {
        "run": secrets.token_hex(16), "to": fingerprint(client._key.public_key()), "client": 0, "clients": 4,
        "nonce": secrets.token_hex(16), "created": time.time(), "ttl": 600.0, "round": 0, "attempt": 0,
        "replay": 0, "lr": 0.1, "steps": 2, "decay": 1.0, "bound": None, "config": to_yaml(settings),
        "shape": (2,), "classes": 2, "labels": ("0", "1"), "layout": "0" * 64, "frozen": None, "state": "",
        "state_digest": None, "keep": (), "vectors": (), "body": "0" * 64,
    }  # fmt: skip
    return TrainOrder(**values | more)


def answer(client: Client, server: Any, asked: TrainOrder) -> Refusal:
    said = read_any(
        client.answer(written(asked, server), lambda size: bytearray())[0], client._key.public_key()
    )
    assert isinstance(said, Refusal)
    return said


@pytest.mark.parametrize(
    "evil",
    [
        {"data": {"user": "note", "missing": [SECRET]}},
        {"data": {"user": "ward"}},
        {"data": {"missing": ["w3"], "on_bad": "skip"}},
        {"data": {"test": "other.csv"}},
        {"data": {"path": "other.csv"}},
        {"data": {"features": ["note"]}},
        {"data": {"label": "note"}},
        {"data": {"public": 0.05}, "method": {"name": "adadps", "beta": 0.0}},
        {"data": {"validation": 0.5}},
        {"task": "token-classification"},
        {"task": "regression"},
        {"evaluate": {"layers": True}},
        {"engine": {"workers": 4}},
        {"trackers": ["tensorboard"]},
        {"data": None},
    ],
    ids=str,
)
def test_a_servers_settings_reach_no_record(clinic: Any, evil: dict[str, Any]) -> None:
    """Whatever it asks for, what comes back has no value or place of the owner's, and costs nothing."""
    client, server, owner = clinic
    settings = {**SETTINGS, **evil}
    if isinstance(evil.get("data"), dict):
        settings["data"] = {**SETTINGS["data"], **evil["data"]}
    said = answer(client, server, order(client, settings))
    for hidden in (SECRET, "well", "clinic.csv", "line ", "w3"):
        assert hidden not in said.text
    assert said.reason in ("not allowed", "mismatch")
    statement = own_statement(client.folder, owner.allow)
    assert (statement.rounds, statement.epsilon) == (0, 0.0)


@pytest.mark.parametrize(
    "named",
    [
        {"_attn_implementation": "kernels-community/flash-attn2"},
        {"attn_implementation": "kernels-community/flash-attn2@main"},
        {"_attn_implementation_internal": "eager"},
        {"backbone": "resnet50", "use_pretrained_backbone": True},
        {"text_config": {"name_or_path": "somewhere"}},
        {"layers": ["somebody/backbone"]},
    ],
    ids=str,
)
def test_a_config_of_a_network_names_nothing_that_is_elsewhere(clinic: Any, named: dict[str, Any]) -> None:
    """Transformers fetches kernels, which are code, by a name in the config of a network."""
    client, server, _ = clinic
    settings = {**SETTINGS, "model": {"config": {"model_type": "bert", **named}}}
    said = answer(client, server, order(client, settings))
    assert said.reason == "not allowed" and "allow.models" in said.text


def test_the_reason_is_in_the_owners_log(clinic: Any) -> None:
    client, server, _ = clinic
    said = answer(client, server, order(client, SETTINGS, shape=(3,)))
    assert said.text == "the run cannot be prepared here; the client's log says why"
    assert "records of shape (2,) where the run's are (3,)" in (client.folder / "log.jsonl").read_text()


@pytest.mark.parametrize(("count", "why"), [(1, "allow.members is 2"), (129, "masks need an honest server")])
def test_masks_hide_among_enough_and_not_too_many(clinic: Any, count: int, why: str) -> None:
    client, server, _ = clinic
    members = tuple(f"{n:064x}" for n in range(count))
    asked = order(client, SETTINGS, terms="00", members=members)
    assert why in answer(client, server, asked).text


def test_one_record_of_a_rare_class_decides_nothing_where_the_owner_names_the_classes(
    tmp_path: Path,
) -> None:
    """A server asks for fewer and fewer classes until it is refused: free of charge, and exact."""
    asked = [("0", "1"), ("0", "1", "2"), ("1", "0", "2")]
    told: dict[tuple[bool, bool], list[str]] = {}
    for declared in (False, True):
        for rare in (False, True):
            place = tmp_path / f"{declared}-{rare}"
            place.mkdir()
            rows = [f"{n % 5},{n % 3},{n % 2}" for n in range(40)]
            rows[7] = f"1,2,{2 if rare else 1}"
            (place / "clinic.csv").write_text("a,b,y\n" + "\n".join(rows) + "\n")
            (place / "test.csv").write_text("a,b,y\n1,2,0\n")
            data = {"name": "table", "path": str(place / "clinic.csv"), "test": str(place / "test.csv"),
                    "features": ["a", "b"], "label": "y"}  # fmt: skip
            if declared:
                data["classes"] = [0, 1, 2]
            allow = {"unit": "example", "epsilon": 1.0, "delta": 1e-5, "methods": ["dp-fedavg"]}
            owner = Owner.model_validate({"name": "clinic", "server": "h:1", "data": data, "allow": allow})
            server, key = new_key(place / "server"), new_key(place / "key")
            client = Client(place / "state", key, server.public_key(), owner.allow, OwnRecords(owner).prepare)
            told[declared, rare] = [
                answer(client, server, order(client, SETTINGS, classes=len(labels), labels=labels)).text
                for labels in asked
            ]
    assert told[False, False] != told[False, True], "so the attack works where nothing is declared"
    assert told[True, False] == told[True, True]
    assert len(set(told[True, True])) == 2, "one of the three fits"


def population(users: list[str]) -> Population:
    x = np.arange(80, dtype=np.float32).reshape(40, 2)
    records = tacit.ArrayRecords(x, np.arange(40) % 2, users=users)
    return Population(records, np.array([0, 40]), np.arange(40))


def test_the_same_records_under_another_column_for_users_are_the_same() -> None:
    by_ward, by_zip = (population([f"{kind}{n % 7}" for n in range(40)]) for kind in ("w", "z"))
    first, second = identify("table", by_ward), identify("table", by_zip)
    assert first.overlaps(second) and second.overlaps(first)
    other = replace(second, sketch=("0" * 16,))
    assert not first.overlaps(other)  # other people, other records
    assert first.overlaps(replace(other, people=("w3",)))


def test_a_guarantee_on_a_model_of_the_same_records_is_refused_by_any_column(tmp_path: Path) -> None:
    with (tmp_path / "one.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "ward", "zip", "y"])
        for n in range(60):
            writer.writerow([n, n * n % 13, f"w{n % 7}", f"z{n % 11}", n % 2])
    data = {"name": "table", "path": str(tmp_path / "one.csv"), "features": ["a", "b"], "label": "y",
            "normalise": {"mean": [30.0, 6.0], "std": [20.0, 4.0]}}  # fmt: skip
    base = {"rounds": 1, "model": {"name": "mlp", "hidden": [4]}, "cohort": 2, "engine": {"workers": 0},
            "local": {"steps": 1, "batch": 5, "lr": 0.1}}  # fmt: skip
    natural = {"partition": {"kind": "natural"}}
    plain = tacit.load({**base, "data": {**data, "user": "ward", **natural}})
    tacit.run(plain, tmp_path / "plain", progress=False)
    private = {"unit": "client", "noise": 1.0, "clip": 0.5, "delta": 1e-3}
    model = {**base["model"], "start": str(tmp_path / "plain")}
    for user in ("ward", "zip"):
        config = tacit.load(
            {**base, "model": model, "data": {**data, "user": user, **natural}, "privacy": private}
        )
        with pytest.raises(UserError, match="start"):
            tacit.run(config, tmp_path / user, progress=False)


def test_no_road_lets_a_guaranteed_run_choose_by_its_tests(config: Any, dataset: Any) -> None:
    """A validated config that is copied with other values is not validated again; the run is."""
    private = config(privacy={"unit": "client", "noise": 1.0, "clip": 0.5, "delta": 1e-3})
    for key, value in (("patience", 1), ("keep_best", True)):
        evaluate = private.evaluate.model_copy(update={key: value})
        with pytest.raises(UserError, match="choose by records"):
            tacit.run(private.model_copy(update={"evaluate": evaluate}), "run", dataset=dataset)
