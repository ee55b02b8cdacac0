"""`tacit data` shows what the clients hold."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from tacit.data import ArrayRecords, Population, dirichlet
from tacit.data.describe import client_table, split_picture, to_json, to_table
from tacit.errors import UserError


def population(clients: int = 40, classes: int = 10) -> Population:
    labels = np.random.default_rng(0).integers(0, classes, 2000)
    labels[-classes:] = np.arange(classes)
    records = ArrayRecords(np.zeros((2000, 1, 1, 1), np.uint8), labels)
    return Population(records, *dirichlet(labels, clients, 0.3, np.random.default_rng(1)), holdout=0.1)


def test_all_rows_together_are_the_whole_data_set() -> None:
    people = population()
    rows = client_table(people, 10, limit=1000)
    assert [row.client for row in rows] == list(range(40))
    assert (
        np.sum([row.labels for row in rows], axis=0).tolist() == np.bincount(people.records.labels).tolist()
    )
    assert all(row.train + row.test == sum(row.labels) == 50 and row.test == 5 for row in rows)


def test_a_limit_spreads_over_the_population() -> None:
    assert [row.client for row in client_table(population(), 10, limit=4)] == [0, 13, 26, 39]


def test_json_holds_plain_values() -> None:
    text = json.loads(json.dumps(to_json(population(), 10, limit=2)))
    assert text["clients"] == 40 and text["records"] == 2000 and text["train_records"] == 1800
    assert text["train_size"] == {"min": 45, "median": 45.0, "max": 45}
    assert len(text["shown"]) == 2 and len(text["shown"][0]["labels"]) == 10


@pytest.mark.parametrize("classes", [10, 50])
def test_the_table_prints(classes: int) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(to_table(population(classes=classes), classes, limit=3))
    assert "3 of 40 clients" in console.export_text()


@pytest.mark.parametrize("classes", [10, 100])
def test_the_picture_is_a_picture(classes: int, tmp_path: Path) -> None:
    split_picture(population(classes=classes), classes, tmp_path / "split.png")
    with Image.open(tmp_path / "split.png") as image:
        assert image.format == "PNG" and min(image.size) > 400
    assert [p.name for p in tmp_path.iterdir()] == ["split.png"]


def test_the_picture_has_room_for_full_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: figures.append(figure) or file.touch())
    labels, names = np.array([0, 1] * 4), np.repeat(["Jean-Luc de la Rochefoucauld", "Z" * 300], 4)
    records = ArrayRecords(np.zeros((8, 1)), labels, users=names)
    people = Population(records, np.array([0, 4, 8]), np.arange(8))
    split_picture(people, 2, tmp_path / "split.png", names=("bad", "good"))
    (figure,) = figures
    figure.draw_without_rendering()
    drawn = figure.get_tightbbox()
    assert drawn.x0 >= 0 and drawn.x1 <= figure.get_figwidth(), "nothing is cut off"
    assert figure.axes[0].get_window_extent().width > 100, "what it is about is drawn"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written to"):
        split_picture(population(), 10, tmp_path / "no" / "such" / "split.png")


def test_records_without_classes_have_a_table_but_no_picture(tmp_path: Path) -> None:
    records = ArrayRecords(np.zeros((4, 1)), np.zeros(4))
    people = Population(records, np.array([0, 2, 4]), np.arange(4))
    assert client_table(people, 0)[0].labels == ()
    for classes in (0, 50_000):  # of a language model: its words
        assert [column.header for column in to_table(people, classes).columns] == ["client", "train", "test"]
    with pytest.raises(UserError, match="no class labels"):
        split_picture(people, 0, tmp_path / "split.png")
