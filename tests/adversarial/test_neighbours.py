"""Adding or removing a client changes nothing for the others: a client-level guarantee depends on that.

The accountant assumes that one client moves a sum by at most the clipping norm. That holds only if everybody
else sends the same with it and without it. An adversary who knows the seed, the program and all other data
asks what depends on a client besides its own upload: which records the others train on, in which batches,
under which masks.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import tacit
from tacit.algorithms import FedAvg
from tacit.config.build import build_dataset, build_job
from tacit.data import Dataset, Tokenisation, load
from tacit.data.speech.tiny import tiny
from tacit.data.tokens import Bytes
from tacit.engine.contract import Order, Participant
from tacit.engine.worker import Job, Worker
from tacit.federation.run import SPLIT_USERS

CLIENT = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3}
PEOPLE = 12


def rows(out: int | None, extra: int = 0) -> list[dict[str, Any]]:
    """Records of people, but for one of them, or with some more of that one's."""
    rng = np.random.default_rng(0)
    made = [
        {"a": float(a), "b": float(b), "kind": "yes" if a > b else "no", "who": f"person {n % PEOPLE}"}
        for n, (a, b) in enumerate(rng.normal(size=(25 * PEOPLE, 2)))
    ]
    more = [{"a": 0.5, "b": 0.1 * i, "kind": "yes", "who": "person 3"} for i in range(extra)]
    return [row for row in [*made, *more] if row["who"] != f"person {out}"]


def job(given: list[dict[str, Any]], privacy: dict[str, Any] | None, folder: Path, **data: Any) -> Job:
    dataset = tacit.dataset(given, features=["a", "b"], label="kind", user="who", classes=["no", "yes"])
    settings = {
        "rounds": 1,
        "data": {"name": "people", "partition": {"kind": "natural"}, **data},
        "model": "mlp",
        "cohort": 5,
        "local": {"epochs": 2, "batch": 2, "lr": 0.5},
        "engine": {"workers": 0},
        **({} if privacy is None else {"privacy": privacy}),
    }
    torch.manual_seed(0)
    return build_job(tacit.load(settings), folder, nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), dataset)


def held(one: Job) -> dict[str, tuple[list[bytes], list[bytes]]]:
    """What each person trains on and holds out, by name."""
    found, records = {}, one.population.records
    assert records.users is not None
    for client in range(len(one.population)):
        parts = [
            [records.raw(int(i)) for i in own(client)] for own in (one.population.train, one.population.test)
        ]
        found[str(records.users[one.population.train(client)[0]])] = (sorted(parts[0]), sorted(parts[1]))
    return found


@pytest.mark.parametrize("extra", [0, 1, 40])
def test_nobody_elses_records_are_dealt_anew_for_one_client(tmp_path: Path, extra: int) -> None:
    """With person 3 gone, or with more records, all others train on, hold out and test on the same ones."""
    whole = job(rows(None), CLIENT, tmp_path, holdout=0.2, validation=0.1)
    other = job(rows(None, extra) if extra else rows(3), CLIENT, tmp_path, holdout=0.2, validation=0.1)
    before, after = held(whole), held(other)
    others = {name for name in before if name != "person 3"}
    assert {name: before[name] for name in others} == {name: after[name] for name in others}
    assert len(others) == PEOPLE - 1 and all(train and test for train, test in before.values())

    def tested(one: Job) -> list[bytes]:
        users = one.test.users
        assert users is not None
        return sorted(one.test.raw(i) for i in range(len(one.test)) if users[i] != "person 3")

    assert tested(whole) == tested(other)


EXAMPLE = {"unit": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-3}


def trained(dataset: Dataset) -> Counter[bytes]:
    return Counter(dataset.train.raw(i) for i in range(len(dataset.train)))


@pytest.mark.parametrize("user", [None, "who"])
def test_one_record_more_does_not_change_which_others_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: Any
) -> None:
    """Without test records, a tenth was drawn by the records' places: a record at the head of 1,000 others
    changed 161 of those to train on, and of a protected record nothing may change but itself.
    """
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    texts: dict[str, Any] = {"text": ("kind",), "labelled": False, "tokens": Tokenisation(Bytes())}
    given = rows(None)
    given += given[:7]  # some of them twice
    whole = tacit.dataset(given, features=["a", "b"], label="kind", user=user)
    assert 10 <= len(whole.test) <= 60  # a tenth of 307
    for out in (0, 5, 150, 300):
        kept = [row for n, row in enumerate(given) if n != out]
        less = tacit.dataset(kept, features=["a", "b"], label="kind", user=user)
        assert not trained(less) - trained(whole) and (trained(whole) - trained(less)).total() <= 1
    for name, lines in (("whole", given), ("less", given[1:])):
        file = tmp_path / f"{name}.csv"
        file.write_text("kind,who\n" + "".join(f"text {row['a']},{row['who']}\n" for row in lines))
    one, other = (trained(load("csv", tmp_path / f"{n}.csv", user=user, **texts)) for n in ("whole", "less"))
    assert not other - one and (one - other).total() <= 1


@pytest.mark.parametrize("kind", ["arrays", "users", "pictures", "torch"])
def test_nor_does_it_where_records_come_as_arrays(kind: str) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(200, 3)).astype(np.float32), rng.integers(0, 3, 200)
    x[100], y[100] = x[3], y[3]  # one of them twice
    who, pictures = np.array([f"u{n % 17}" for n in range(200)]), rng.integers(0, 255, (200, 8, 8), np.uint8)

    def made(rows: NDArray[np.int64]) -> Counter[bytes]:
        source: Any = (pictures[rows] if kind == "pictures" else x[rows], y[rows])
        if kind == "torch":
            source = torch.utils.data.TensorDataset(*map(torch.from_numpy, source))
        users = {"user": who[rows]} if kind == "users" else {}
        return trained(tacit.dataset(source, classes=["0", "1", "2"], **users))

    whole = made(np.arange(200))
    for out in (0, 3, 100, 199):
        less = made(np.delete(np.arange(200), out))
        assert not less - whole and (whole - less).total() <= 1


@pytest.mark.parametrize("share", ["holdout", "validation"])
def test_what_clients_hold_out_of_protected_records_is_refused(tmp_path: Path, share: str) -> None:
    with pytest.raises(tacit.UserError, match=r"data\.holdout: .* one record more .* give records to test"):
        job(rows(None), EXAMPLE, tmp_path, **{share: 0.2})
    job(rows(None), {**EXAMPLE, "entropy": "seed"}, tmp_path, **{share: 0.2})
    job(rows(None), EXAMPLE, tmp_path)


def test_who_is_drawn_does_not_depend_on_who_else_is_there(tmp_path: Path) -> None:
    """Some of the users by a share; a number of them would draw others for one less, and is refused."""

    def drawn(out: int | None, **how: Any) -> set[str]:
        one = job(rows(out), CLIENT, tmp_path, partition={"kind": "natural", **how})
        users = one.population.records.users
        assert users is not None
        return set(users[one.population.indices].tolist())

    whole = drawn(None, share=0.6)
    assert 0 < len(whole) < PEOPLE
    for out in range(PEOPLE):
        assert drawn(out, share=0.6) == whole - {f"person {out}"}
    with pytest.raises(tacit.UserError, match=r"data\.partition\.clients: .* set data\.partition\.share"):
        drawn(None, clients=6)


def test_who_is_public_does_not_depend_on_who_else_is_there(tmp_path: Path) -> None:
    """Each user is set aside, or not, by its own name: with any one gone, all others stay what they were."""

    def public(out: int | None) -> set[str]:
        one = job(rows(out), CLIENT, tmp_path, public=0.4)
        users = one.population.records.users
        assert users is not None
        return set(users[one.public].tolist())

    whole = public(None)
    assert 0 < len(whole) < PEOPLE
    for out in range(PEOPLE):
        assert public(out) == whole - {f"person {out}"}


def leaf(out: int | None, folder: Path, **data: Any) -> Job:
    """LEAF's files of people, but for one of them."""
    rng, place = np.random.default_rng(0), folder / f"leaf without {out}"
    people = {f"person {n:02}": {"x": rng.random((9, 4)).tolist(), "y": [0, 1, 2] * 3} for n in range(PEOPLE)}
    people.pop(f"person {out:02}" if out is not None else "", None)
    for split in ("train", "test"):
        (place / split).mkdir(parents=True, exist_ok=True)
        (place / split / "all.json").write_text(json.dumps({"user_data": people}))
    config = {
        "rounds": 1,
        "data": {"name": "leaf", "path": str(place), "partition": {"kind": "natural"}, **data},
        "model": {"name": "mlp", "hidden": [4]},
        "cohort": 2,
        "local": {"steps": 1, "batch": 2, "lr": 0.1},
        "privacy": CLIENT,
        "engine": {"workers": 0},
    }
    return build_job(tacit.load(config), folder)


@pytest.mark.parametrize("data", [{"holdout": 0.2}, {"partition": {"kind": "natural", "share": 0.6}}])
def test_users_of_files_keep_their_names(
    tmp_path: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their place among all names would rename everybody after one that goes, and with that deal all of
    their records anew.
    """
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    whole = held(leaf(None, tmp_path, **data))
    for out in (0, 5):
        fewer = held(leaf(out, tmp_path, **data))
        assert fewer == {name: parts for name, parts in whole.items() if name != f"person {out:02}"}


@pytest.mark.parametrize("strange", [99.5, 2**63, "zoe"])
def test_one_users_id_does_not_rename_the_others(tmp_path: Path, strange: Any) -> None:
    """An array has one type: beside 99.5 the users 1 and 2 were called 1.0 and 2.0."""

    def numbered(out: bool) -> dict[str, tuple[list[bytes], list[bytes]]]:
        ids = {f"person {n}": strange if n == 3 else n for n in range(PEOPLE)}
        return held(
            job([row | {"who": ids[row["who"]]} for row in rows(3 if out else None)], CLIENT, tmp_path)
        )

    whole = numbered(out=False)
    assert numbered(out=True) == {name: parts for name, parts in whole.items() if name != str(strange)}


@pytest.mark.parametrize("kind", [{"kind": "natural"}, {"kind": "iid", "clients": 6}])
def test_clients_that_are_not_the_users_are_said_to_be_what_is_protected(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    """Dealt out at random, a person is at many clients, and no clipping norm bounds all of them together."""
    data = tacit.dataset(rows(None), features=["a", "b"], label="kind", user="who", classes=["no", "yes"])
    settings = {
        "rounds": 1,
        "data": {"name": "people", "partition": kind},
        "model": "mlp",
        "cohort": 3,
        "local": {"steps": 1, "batch": 2, "lr": 0.5},
        "engine": {"workers": 0},
        "privacy": CLIENT,
    }
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = tacit.run(tacit.load(settings), tmp_path / "run", dataset=data)
    said = [str(one.message) for one in heard] + [tacit.statement(result.path).text()]
    assert [SPLIT_USERS[:30] in " ".join(one.split()) for one in said].count(True) == (
        0 if kind["kind"] == "natural" else 2
    )


def uploads(one: Job, times: int) -> list[torch.Tensor]:
    """What client 5 sends in the same round, again and again, in whole numbers."""
    worker, found = Worker(one), []
    assert one.privacy is not None
    bounding = one.privacy.bounding({}, one.upload_sizes, one.layout, 1)
    message = {"theta": worker.flat.shared.clone()}
    for _ in range(times):
        sums = one.empty_sums()
        worker.sum(Order(0, 0.5, None, bounding=bounding), copy.deepcopy(message), [Participant(5)], sums)
        found.append(sums["delta"].clone())
    return found


def test_batches_and_masks_under_a_guarantee_have_no_name(tmp_path: Path) -> None:
    """Whoever knows seed, round and number of a client cannot repeat its batches and masks: numbers depend on
    who else is there, so named draws would be others for everybody after a client that goes.
    """
    found = uploads(job(rows(None), CLIENT, tmp_path), 4)
    assert len({tuple(sent.tolist()) for sent in found}) == 4
    simulated = uploads(job(rows(None), {**CLIENT, "entropy": "seed"}, tmp_path), 2)
    assert torch.equal(*simulated), "a simulation can be repeated"


def test_what_others_send_has_the_same_law_with_a_client_and_without(tmp_path: Path) -> None:
    """Person 5 (client 7 or 8 of the sorted names) sends as much on average in both worlds: the means of 400
    uploads differ by no more than chance, at six standard errors.
    """
    means, errors = [], []
    for out in (None, 3):
        one = job(rows(out), CLIENT, tmp_path)
        users = one.population.records.users
        assert users is not None
        (client,) = (c for c in range(len(one.population)) if users[one.population.train(c)[0]] == "person 5")
        worker = Worker(one)
        assert one.privacy is not None
        bounding = one.privacy.bounding({}, one.upload_sizes, one.layout, 1)
        message, sent = {"theta": worker.flat.shared.clone()}, []
        for _ in range(400):
            sums = one.empty_sums()
            worker.sum(Order(0, 0.5, None, bounding=bounding), message, [Participant(client)], sums)
            sent.append(sums["delta"].double())
        values = torch.stack(sent)
        means.append(values.mean(0))
        errors.append(values.std(0) / 20)
    spread = torch.sqrt(errors[0] ** 2 + errors[1] ** 2)
    assert ((means[0] - means[1]).abs() <= 6 * spread).all()


@pytest.mark.parametrize(
    ("local", "data", "match"),
    [
        ({"epochs": 1, "within": {"cosine": True}}, {}, r"local\.within"),
        ({"steps": 2}, {"public": 0.4}, r"data\.public"),
    ],
)
def test_no_client_follows_the_mean_length_of_everybodys_sounds(
    tmp_path: Path, local: dict[str, Any], data: dict[str, Any], match: str
) -> None:
    """Batches by seconds make so many records on average, over everybody: one speaker with long recordings
    would move all others' schedules, and the size of public batches.
    """
    corpus = tiny(speakers=6, utterances=4)
    settings = {
        "rounds": 1,
        "data": {"name": "tiny", "partition": {"kind": "natural"}, **data},
        "model": {"name": "ctc-transformer", "size": "tiny", "depth": 1, "width": 24, "hidden": 32},
        "cohort": 2,
        "local": {"seconds": 2.0, "lr": 0.1, **local},
        "privacy": CLIENT,
        "engine": {"workers": 0},
    }
    with pytest.raises(tacit.UserError, match=match):
        build_job(tacit.load(settings), tmp_path, dataset=corpus)
    settings["privacy"] = {**CLIENT, "entropy": "seed"}
    assert build_job(tacit.load(settings), tmp_path, dataset=corpus).local.seconds == 2.0


class Remembers(FedAvg):
    """A method of one's own that does not say that its clients keep something."""

    def client(self, msg: Any, state: Any, work: Any) -> Any:
        return super().client(msg, state, work)[0], {"seen": torch.ones(1)}


@pytest.mark.parametrize("method", ["scaffold", "dp2-fedsam", "centaur", "own"])
def test_state_and_cohorts_of_a_fixed_size_do_not_go_together(tmp_path: Path, method: str) -> None:
    """Without replacement the others' draws tell of one client's, and what they kept tells of their draws:
    the composition of sampled rounds is proved for independent draws, or for clients that keep nothing.
    """
    data = tacit.dataset(rows(None), features=["a", "b"], label="kind", user="who", classes=["no", "yes"])

    def run(name: str, sampling: str, **privacy: Any) -> bool:
        settings = {
            "rounds": 1,
            "data": {"name": "people", "partition": {"kind": "natural"}},
            "model": {"name": "mlp", "hidden": [3]},
            "method": "fedavg" if method == "own" else method,
            "cohort": {"size": 5, "sampling": sampling},
            "local": {"steps": 1, "batch": 2, "lr": 0.5},
            "engine": {"workers": 0},
            "privacy": CLIENT | privacy,
        }
        own = {"algorithm": Remembers()} if method == "own" else {}
        return tacit.run(tacit.load(settings), tmp_path / name, dataset=data, progress=False, **own).finished

    with pytest.raises(tacit.UserError, match=r"cohort\.sampling"):
        run("refused", "fixed")
    assert run("poisson", "poisson") and run("simulation", "fixed", entropy="seed")


class Drawing(nn.Module):
    """A network that draws from Python's generator and NumPy's, as augmentations inside of models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        DRAWN.append((random.random(), float(np.random.random())))  # noqa: NPY002
        out: torch.Tensor = self.linear(x)
        return out


DRAWN: list[tuple[float, float]] = []


def test_no_client_draws_where_the_one_before_it_stopped(tmp_path: Path) -> None:
    """A script that seeds both generators, and a client more or less: the others would have drawn other
    numbers, in a sequence that anybody can repeat.
    """
    one = replace(job(rows(None), CLIENT, tmp_path), model=Drawing())
    worker = Worker(one)
    assert one.privacy is not None
    bounding = one.privacy.bounding({}, one.upload_sizes, one.layout, 1)
    message, seen = {"theta": worker.flat.shared.clone()}, []
    for clients in ([0, 5], [5], [5]):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        DRAWN.clear()
        participants = [Participant(client) for client in clients]
        worker.sum(Order(0, 0.5, None, bounding=bounding), message, participants, one.empty_sums())
        seen.append(DRAWN[-1])
        assert random.random() == random.Random(1).random(), "the script's own generator is as it was"
    assert len({number for pair in seen for number in pair}) == 6


@pytest.mark.parametrize(
    ("kind", "before", "more"),
    [
        ("csv", ["001", "002", "003"], "ann"),
        ("csv", ["1", "2", "3"], "2.5"),
        ("folder", ["001", "002", "003"], "ann"),
        ("json", ["1", "2", "3"], "2.5"),
    ],
)
def test_users_of_tables_keep_their_names(
    tmp_path: Path, kind: str, before: list[Any], more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that finds one type for a whole column calls 001 by another name if nobody has letters."""
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))

    def users(ids: list[Any], name: str) -> set[str]:
        given = [{"text": f"{who} says {i}", "label": i % 2, "user": who} for who in ids for i in range(20)]
        file = tmp_path / name / f"all.{'csv' if kind == 'folder' else kind}"
        file.parent.mkdir()
        if kind == "json":
            file.write_text("\n".join(json.dumps(row) for row in given))
        else:
            file.write_text(
                "text,label,user\n" + "".join(f"{','.join(map(str, r.values()))}\n" for r in given)
            )
        place = file.parent if kind == "folder" else file
        data = {"name": kind, "path": str(place), "text": "text", "label": "label", "user": "user"}
        settings = {
            "rounds": 1, "data": {**data, "tokenizer": "bytes", "partition": {"kind": "natural"}},
            "model": {"name": "text-transformer", "width": 8, "depth": 1}, "cohort": 1,
            "local": {"steps": 1, "batch": 2, "lr": 0.1},
        }  # fmt: skip
        dataset = build_dataset(tacit.load(settings))
        assert dataset.train.users is not None
        return {str(name) for name in dataset.train.users}

    few, many = users(before, "few"), users([*before, more], "many")
    assert few == {str(who) for who in before} and many == few | {str(more)}


def test_ids_that_are_no_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    for number, ids in enumerate(([1, 2.5], [1, "ann"], [1, None])):
        file = tmp_path / f"{number}.json"
        given = [{"text": f"{who} says {i}", "label": i % 2, "user": who} for who in ids for i in range(20)]
        file.write_text("\n".join(json.dumps(row) for row in given))
        settings = {
            "rounds": 1,
            "data": {"name": "json", "path": str(file), "text": "text", "label": "label", "user": "user",
                     "tokenizer": "bytes", "partition": {"kind": "natural"}},
            "model": {"name": "text-transformer", "width": 8, "depth": 1}, "cohort": 1,
            "local": {"steps": 1, "batch": 2, "lr": 0.1},
        }  # fmt: skip
        with pytest.raises(tacit.UserError, match="column 'user'"):
            build_dataset(tacit.load(settings))


def test_numbers_that_a_pictures_table_was_read_as_are_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """001 is 1 in a metadata.csv where nobody has letters, and 001 where somebody has."""
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    folder, lines = tmp_path / "pictures", ["file_name,label,user"]
    folder.mkdir()
    for number in range(40):
        Image.new("L", (4, 4), number).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{number % 2},{number % 4:03}")
    (folder / "metadata.csv").write_text("\n".join(lines))
    settings = {
        "rounds": 1, "data": {"name": "folder", "path": str(folder), "label": "label", "user": "user",
                              "partition": {"kind": "natural"}},
        "model": "mlp", "cohort": 1, "local": {"steps": 1, "batch": 2, "lr": 0.1},
    }  # fmt: skip
    with pytest.raises(tacit.UserError, match=r"write metadata\.jsonl, with ids as texts"):
        build_dataset(tacit.load(settings))
    rows = [dict(zip(("file_name", "label", "user"), line.split(","), strict=True)) for line in lines[1:]]
    (folder / "metadata.csv").unlink()
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    users = build_dataset(tacit.load(settings)).train.users
    assert users is not None and set(users.tolist()) == {"000", "001", "002", "003"}


def test_one_users_pictures_do_not_rescale_everybodys() -> None:
    """Together they would be float32, and nobody's bytes divided by 255."""
    made = [{"image": np.zeros((1, 4, 4), np.uint8), "label": 0, "who": "ann"} for _ in range(12)]
    odd = {"image": np.zeros((1, 4, 4), np.float32), "label": 1, "who": "zed"}
    with pytest.raises(tacit.UserError, match="uint8 and some float32"):
        tacit.dataset([*made, *[odd] * 12], image="image", label="label", user="who", classes=[0, 1])
