"""Users' own data and models: any object, any table, any class."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import tacit
from command import tacit as cli
from tacit import tasks
from tacit.data.table import Format, read_table
from tacit.data.tokens import Bytes

ROWS = [
    {
        "age": 20 + n,
        "pay": 1.5 * n,
        "job": ("vet", "cook", "tailor")[n % 3],
        "who": f"p{n % 5}",
        "note": f"no {n}",
    }
    for n in range(60)
]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: cli(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def sources() -> dict[str, Any]:
    import datasets
    import pandas

    found = {
        "rows": ROWS,
        "columns": {key: [row[key] for row in ROWS] for key in ROWS[0]},
        "pandas": pandas.DataFrame(ROWS),
        "datasets": datasets.Dataset.from_list(ROWS),
    }
    try:
        import polars

        found["polars"] = polars.DataFrame(ROWS)
    except ImportError:
        pass
    return found


def test_classes_that_are_named_do_not_depend_on_the_records() -> None:
    """Whether somebody has a class that nobody else has does not show in the data set's looks."""
    rows = [{"age": n, "job": ("cook", "vet")[n % 2]} for n in range(20)]
    named = {"features": ["age"], "label": "job", "classes": ("vet", "cook", "spy")}
    made = [tacit.dataset(data, test=rows, **named) for data in (rows, [*rows, {"age": 7, "job": "spy"}])]
    assert {(data.classes, data.label_names) for data in made} == {(3, ("vet", "cook", "spy"))}
    assert made[0].train.labels.tolist() == [1, 0] * 10 and made[1].train.labels[-1] == 2
    with pytest.raises(tacit.UserError, match="'judge' is not among the classes: vet, cook, spy"):
        tacit.dataset([*rows, {"age": 7, "job": "judge"}], test=rows, **named)
    with pytest.raises(tacit.UserError, match="named twice"):
        tacit.dataset(rows, features=["age"], label="job", classes=("vet", "cook", "vet"))


@pytest.mark.parametrize("odd", ["judge", 3])
def test_a_label_outside_the_named_classes_is_a_bad_row_like_any_other(odd: Any) -> None:
    """In the training part and in the test part; what is left does not depend on it."""
    rows = [{"age": n, "job": ("cook", "vet")[n % 2]} for n in range(20)]
    named = {"features": ["age"], "label": "job", "classes": ("vet", "cook")}
    strange = [*rows, {"age": 7, "job": odd}]
    for train, test, what in ((strange, rows, "among the classes"), (rows, strange, "not among the classes")):
        with pytest.raises(tacit.UserError, match=what):
            tacit.dataset(train, test=test, **named)
        data = tacit.dataset(train, test=test, on_bad="skip", **named)
        assert "1 bad row left out" in data.origin and data.label_names == ("vet", "cook")
        assert data.train.labels.tolist() == data.test.labels.tolist() == [1, 0] * 10


def test_the_same_records_come_out_of_every_library() -> None:
    """Each road must give the very same data set: values, classes, users, split."""
    made = {
        kind: tacit.dataset(source, features=["age", "pay"], label="job", user="who")
        for kind, source in sources().items()
    }
    for kind, data in made.items():
        assert (len(data.train) + len(data.test), data.classes, data.shape) == (60, 3, (2,)), kind
        assert 1 <= len(data.test) <= 15, "about a tenth"
        assert data.label_names == ("cook", "tailor", "vet"), kind
        for record in (0, 17, 49):
            batch = data.train.take(np.array([record]))
            age = float(batch["x"][0, 0])
            row = ROWS[int(age) - 20]
            assert float(batch["x"][0, 1]) == row["pay"]
            assert data.label_names[int(batch["y"][0])] == row["job"], kind
            assert data.train.users[record] == row["who"], kind
        assert np.array_equal(data.train.x, made["rows"].train.x), kind


def test_arrays_lists_and_torch_data_sets(config) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 1, 4, 4)), rng.integers(1, 5, 80)  # float64, and classes from 1 on
    data = tacit.dataset((x, y), user=[n % 8 for n in range(80)])
    assert data.shape == (1, 4, 4) and data.classes == 4 and data.label_names == ("1", "2", "3", "4")
    assert data.train.x.dtype == np.float32 and set(data.train.y) == {0, 1, 2, 3}
    assert tacit.run(config(rounds=1), "a", dataset=data).finished
    pairs = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    again = tacit.dataset(pairs, user=[n % 8 for n in range(80)])
    assert np.array_equal(again.train.x, data.train.x) and np.array_equal(again.train.y, data.train.y)
    listed = tacit.dataset(([[1.0, 2.0], [3.0, 4.0]] * 5, ["no", "yes"] * 5), test=([[1.0, 2.0]], ["yes"]))
    assert listed.shape == (2,) and listed.label_names == ("no", "yes") and listed.test.y.tolist() == [1]


class Stream(IterableDataset[Any]):
    """Pairs, one after the other."""

    def __iter__(self) -> Any:
        return iter([(torch.zeros(2), 0), (torch.ones(2), 1)] * 10)


class Endless(torch.utils.data.Dataset[Any]):
    """Pairs by number, nobody knows how many."""

    def __getitem__(self, number: int) -> Any:
        return torch.zeros(2), number % 2


def test_records_that_only_stream_are_refused_with_what_to_do() -> None:
    import datasets

    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    named = {"features": ["age"], "label": "job"}
    for place, given in (
        ("source", {"source": stream}),
        ("test", {"source": ROWS, "test": stream}),
        ("source", {"source": datasets.IterableDatasetDict(train=stream)}),
    ):
        with pytest.raises(tacit.UserError, match=rf"{place}: this IterableDataset .* without streaming"):
            tacit.dataset(**given, **named)
    for own in (Stream(), Endless()):
        with pytest.raises(tacit.UserError, match=rf"this {type(own).__name__} .* with __len__ and"):
            tacit.dataset(own)


def test_a_file_is_a_source_too(tmp_path) -> None:
    import pandas

    file = tmp_path / "my people.csv"
    pandas.DataFrame(ROWS).to_csv(file, index=False)
    ask = {"features": "age", "label": "job", "user": "who"}
    for source in (file, str(file)):
        assert np.array_equal(tacit.dataset(source, **ask).train.take(np.arange(9))["x"],
                              tacit.dataset(ROWS, **ask).train.take(np.arange(9))["x"])  # fmt: skip
    with pytest.raises(tacit.UserError, match="there are no records"):
        tacit.dataset([], **ask)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("who,age,job\nu,1,vet\nv,2,judge\nw,3,vet\n",
         "people.csv, line 3: 'judge' is not among the classes: vet, spy; correct it, name it there (data."),
        ("who,age,job\n", "people.csv has no records; give a table with some"),
        ("who,age,job\nu,1,vet\nv,2,spy\n", "give a file of others to test on (data.test)"),
        ("who,age,job\nu,1,vet\n", "give a file of others to test on (data.test)"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_told_where_and_what_to_do(tmp_path, text: str, said: str) -> None:
    (tmp_path / "people.csv").write_text(text)
    with pytest.raises(tacit.UserError) as refused:
        tacit.dataset(
            tmp_path / "people.csv", features="age", label="job", user="who", classes=("vet", "spy"),
            test=tmp_path / "people.csv" if "judge" in text else None,
        )  # fmt: skip
    assert said in str(refused.value)


def test_a_task_that_does_not_exist_is_told_before_a_table_is_read(tmp_path) -> None:
    """It was taken for classification by whoever only looks at the data."""
    from tacit.config.build import build_dataset

    config = tacit.load({
        "rounds": 1, "task": "regresion", "model": "mlp", "cohort": 1,
        "local": {"steps": 1, "batch": 1, "lr": 0.1},
        "data": {"name": "table", "path": str(tmp_path / "none.csv"), "features": ["age"], "label": "job",
                 "partition": {"kind": "iid", "clients": 2}},
    })  # fmt: skip
    with pytest.raises(tacit.UserError, match="unknown task 'regresion'; did you mean 'regression'"):
        build_dataset(config)


@pytest.mark.parametrize("network", ["logistic", "mlp"])
def test_texts_are_refused_where_a_model_takes_numbers(config, network, tmp_path) -> None:
    data = tacit.dataset(ROWS, text="note", label="job", tokenizer="bytes", name="notes")
    settings = config(model=network)
    with pytest.raises(
        tacit.UserError, match=f"model: {network} takes numbers or pictures, .* notes are texts"
    ):
        tacit.run(settings, tmp_path / "run", dataset=data)


def test_classes_of_a_datasets_object_keep_their_names() -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    source = datasets.Dataset.from_dict({"text": ["a", "b"] * 10, "label": [0, 1] * 10}, features=features)
    data = tacit.dataset({"train": source, "test": source}, text="text", label="label", tokenizer="bytes")
    assert data.label_names == ("neg", "pos") and len(data.test) == 20 and data.shape == (128,)


BAD = [
    ({"label": "nothing"}, "there is no column 'nothing'"),
    ({}, "label: name the column"),
    ({"label": "pay"}, "which is no class; set task: regression"),
    ({"label": "job", "features": []}, "features, text, image or audio .none is named"),
    ({"label": "job", "text": "note"}, "not features and text together"),
    ({"label": "job", "features": [], "text": "note"}, "tokenizer: texts need one"),
    ({"label": "job", "features": ["note"]}, "row 0: column 'note' is 'no 0', not a number"),
    ({"label": "job", "task": "guess"}, "'guess' is not one of classification"),
    ({"label": "job", "user": "whom"}, "there is no column 'whom'"),
    ({"label": "age"}, "column 'age' is what is to be learnt, so it must not be learnt from"),
    ({"label": "job", "features": ["age", "age"]}, "column 'age' is named twice"),
    ({"label": "job", "mean": (1.0, math.nan)}, "mean: give finite numbers"),
    ({"label": "job", "mean": "a"}, "mean: give finite numbers"),
    ({"label": "job", "std": (0, 2)}, "std: .* must be greater than 0"),
    ({"label": "job", "test": "nowhere.csv"}, "test: there is no nowhere.csv"),
    ({"label": "job", "classes": 2}, r"classes: give their names in order, .* \(got 2\)"),
    ({"label": "job", "classes": "vet"}, r"classes: give their names in order"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda o: str(o)[:30])
def test_mistakes_are_named(options, message) -> None:
    with pytest.raises(tacit.UserError, match=message):
        tacit.dataset(ROWS, **{"test": ROWS, "features": ["age"], **options})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"age": float("nan")}, r"row 7: column 'age' is nan, not a finite number"),
        ({"age": None}, r"row 7: column 'age' is missing"),
        ({"job": None}, r"row 7: column 'job' is missing"),
        ({"job": ""}, r"row 7: column 'job' is empty; .*on_bad: skip"),
        ({"job": " "}, r"row 7: column 'job' is empty"),
        ({"who": None}, r"row 7: column 'who' is missing; whose record"),
        ({"job": 3}, "holds both numbers and words"),
        ({"age": 1e60}, r"row 7: column 'age' is 1e\+60, not a finite number that float32 holds"),
        ({"age": "2024-09-16"}, r"row 7: column 'age' is '2024-09-16', not a number; .*on_bad: skip"),
    ],
)
def test_a_bad_row_is_named_or_skipped(row, message) -> None:
    rows = [{**r, **row} if n == 7 else r for n, r in enumerate(ROWS)]
    ask = {"features": ["age"], "label": "job", "user": "who", "test": ROWS}
    with pytest.raises(tacit.UserError, match=message):
        tacit.dataset(rows, **ask)
    if "both" not in message:
        data = tacit.dataset(rows, on_bad="skip", **ask)
        assert len(data.train) == 59 and "1 bad row left out" in data.origin
        assert data.left_out in data.origin and "on_bad" not in data.left_out, "that is what was done"


@pytest.mark.parametrize("value", [1e60, -1e39, float("inf")])
def test_no_number_becomes_infinite_on_its_way_to_float32(value: float) -> None:
    """It would be trained on: float64 holds it, so a check before the cast lets it through."""
    x = np.ones((20, 3))
    x[4, 1] = value
    with pytest.raises(tacit.UserError, match=r"row 4: place \(1,\) .* float32 holds"):
        tacit.dataset((x, np.arange(20) % 2), test=(x, np.arange(20) % 2))
    with pytest.raises(tacit.UserError, match="float32 holds"):
        tacit.dataset((np.ones((20, 3)), np.full(20, value)), task="regression")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (lambda n: n, r"'y' has (\d+) different values in \1 training records, which are no classes"),
        (lambda n: "yes", "'y' is 'yes' in every training record, so there is nothing to learn"),
        (lambda n: ("no", "yes", " yes")[n % 3], "' yes' and 'yes', which differ in spaces alone"),
        (lambda n: ["a", "b"][: n % 3], "holds a list .*, which is no class; set task: multi-label"),
        (
            lambda n: n % 3 - 1,
            r"holds -1 \(row 0\), which often stands for a label that is missing; .*\(classes\)",
        ),
        (lambda n: str(n % 2 - 1), r"holds -1 \(row 0\), which often stands for a label that is missing"),
        (lambda n: f"{n % 5}.5", r"holds 0\.5 .*, which is no class; set task: regression"),  # as csv has it
    ],
)
def test_a_label_that_cannot_be_one_is_named(labels, message) -> None:
    rows = [{"age": n, "y": labels(n)} for n in range(60)]
    with pytest.raises(tacit.UserError, match=message):
        tacit.dataset(rows, features=["age"], label="y")


def test_an_empty_cell_is_a_class_only_where_it_is_named_as_one() -> None:
    """Else one person's gap would be one more output of everybody's model."""
    rows = [{"age": n, "y": "" if n % 2 else "yes"} for n in range(60)]
    with pytest.raises(tacit.UserError, match=r"'y' is 'yes' in every training record"):
        tacit.dataset(rows, features=["age"], label="y", on_bad="skip")
    data = tacit.dataset(rows, features=["age"], label="y", classes=["", "yes"])
    assert data.label_names == ("", "yes") and set(data.train.labels.tolist()) == {0, 1}


def test_classes_that_are_named_may_all_but_one_be_missing() -> None:
    rows = [{"age": n, "y": "yes"} for n in range(60)]
    assert tacit.dataset(rows, features=["age"], label="y", classes=["no", "yes"]).classes == 2


def test_labels_that_are_true_or_false_are_classes_by_these_names() -> None:
    """Also where 1 is a class, which Python takes for the same."""
    rows = [{"age": n, "y": n % 3 == 0} for n in range(60)]
    for classes in (["False", "True"], (False, True), np.array([False, True])):
        data = tacit.dataset(rows, features=["age"], label="y", classes=classes)
        assert data.label_names == ("False", "True") and data.train.labels.tolist().count(1) == 18
    data = tacit.dataset(rows, features=["age"], label="y", classes=["True", "1", "False"])
    assert set(data.train.labels.tolist()) == {0, 2}
    with pytest.raises(tacit.UserError, match=r"row 1: False is not among the classes: 0, 1"):
        tacit.dataset(rows, features=["age"], label="y", classes=["0", "1"])


def test_classes_that_are_given_as_floats_are_those_of_a_column_of_floats() -> None:
    y = np.arange(40) % 2 * 1.0
    assert tacit.dataset((np.ones((40, 2)), y), classes=np.unique(y)).label_names == ("0", "1")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"features": "age", "size": 8}, "size: it is for pictures, and own data is features"),
        ({"features": "age", "seconds": 2.0}, "seconds: it is for classes of sounds"),
        ({"features": "age", "max_length": 64}, "max_length: it is for texts"),
        ({"features": "age", "language": "de"}, "language: it is for task: speech"),
        ({"text": "note", "tokenizer": Bytes(), "mean": 1.0}, "mean .data.normalise.: it is for numbers"),
        (
            {"features": "age", "label": "pay", "task": "regression", "classes": ["a", "b"]},
            "classes: it is for labels, and own data is features for task: regression",
        ),
        ({"text": "note", "tokenizer": Bytes(), "max_length": 2}, "so 2 is too few; give 4 or more"),
    ],
)
def test_what_would_do_nothing_for_such_records_is_refused(given, message) -> None:
    with pytest.raises(tacit.UserError, match=message):
        tacit.dataset(ROWS, **{"label": "job"} | given)


def test_a_tokenizer_may_be_an_object_of_transformers() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "no": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    given = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    before = given.backend_tokenizer.to_str()
    data = tacit.dataset(ROWS, text="note", label="job", tokenizer=given, max_length=8)
    batch = data.train.prepare(data.train.take(np.array([0])))
    assert batch["input_ids"][0, :2].tolist() == [1, 0]
    assert given.backend_tokenizer.to_str() == before, "the object that was given is as it was"
    with pytest.raises(tacit.UserError, match="tokenizer: a int is not known as one; give bytes, a folder"):
        tacit.dataset(ROWS, text="note", label="job", tokenizer=3)


def test_a_single_split_is_not_trained_on_and_tested_on() -> None:
    import datasets

    only = datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)})
    data = tacit.dataset(only, features=["age"], label="job")
    assert len(data.train) + len(data.test) == len(ROWS) and 1 <= len(data.test) <= 15


def test_several_labels_of_which_no_record_has_one_are_none() -> None:
    rows = [{"age": n, "y": []} for n in range(20)]
    with pytest.raises(tacit.UserError, match="'y' names no class in any training record"):
        tacit.dataset(rows, features=["age"], label="y", task="multi-label")


def test_lists_beside_other_features_are_told_what_to_do() -> None:
    rows = [{"age": n, "more": [1.0, 2.0], "y": n % 2} for n in range(20)]
    with pytest.raises(tacit.UserError, match="'more' is a list; a column of lists is the only one"):
        tacit.dataset(rows, features=["age", "more"], label="y")


def test_a_label_below_zero_is_a_class_where_it_is_named_as_one() -> None:
    """One of a torch data set, too: −1 must not become one more class."""
    x, y = torch.arange(40.0)[:, None], torch.arange(40) % 2
    y[7] = -1
    with pytest.raises(tacit.UserError, match=r"holds -1 \(row 7\)"):
        tacit.dataset(TensorDataset(x, y), test=(x, y))
    for source in ((x, 2 * (torch.arange(40) % 2) - 1), (x, [str(2 * (n % 2) - 1) for n in range(40)])):
        data = tacit.dataset(source, classes=[-1, 1])
        assert data.label_names == ("-1", "1") and set(data.train.labels.tolist()) == {0, 1}


def test_classes_may_be_called_what_float_reads_as_a_number() -> None:
    rows = [{"age": n, "y": ("nan", "inf", "1e2")[n % 3]} for n in range(60)]
    assert tacit.dataset(rows, features=["age"], label="y").label_names == ("1e2", "inf", "nan")


def test_several_labels_are_a_list_and_no_text() -> None:
    rows = [{"age": n, "y": "a|b" if n % 2 else "a"} for n in range(60)]
    with pytest.raises(tacit.UserError, match=r"'y' holds 'a' .*multi-label takes a list of classes"):
        tacit.dataset(rows, features=["age"], label="y", task="multi-label")


def test_who_runs_on_fewer_rows_is_told(config, capsys) -> None:
    rows = [{**r, "age": None} if n == 7 else r for n, r in enumerate(ROWS)]
    data = tacit.dataset(rows, features=["age"], label="job", user="who", test=ROWS, on_bad="skip")
    told: list[str] = []

    class Listens(tacit.Tracker):
        def start(self, round, rounds, facts):
            told.extend(facts["notes"])

    tacit.run(config(rounds=1), "run", dataset=data, trackers=[Listens()])
    assert any("1 bad row left out" in note for note in told)
    told.clear()
    private = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3}
    tacit.run(config(rounds=1, privacy=private), "private", dataset=data, trackers=[Listens()])
    assert not any("left out" in note for note in told), "how many there are is nobody's to know exactly"


def test_a_class_that_was_never_trained_is_named() -> None:
    with pytest.raises(tacit.UserError, match="class 'spy' is in no training record; known: cook"):
        tacit.dataset(ROWS, test=[{**ROWS[0], "job": "spy"}], features=["age"], label="job")


def test_pictures_from_files_and_a_broken_one_among_many(tmp_path) -> None:
    from PIL import Image

    files = []
    for n in range(12):
        file = tmp_path / f"{n}.png"
        Image.fromarray(np.full((6, 5), 20 * n, np.uint8)).save(file)
        files.append(str(file))
    rows = {"file": files, "kind": ["a", "b"] * 6}
    data = tacit.dataset(rows, image="file", label="kind")
    assert data.shape == (1, 6, 5) and data.train.x.dtype == np.uint8
    assert tacit.dataset(rows, image="file", label="kind", size=8).shape == (1, 8, 8)
    Path(files[4]).write_bytes(b"not a picture")
    with pytest.raises(tacit.UserError, match=r"image: row \d: '.*4\.png' cannot be read as a picture"):
        tacit.dataset(rows, image="file", label="kind")
    assert len(tacit.dataset(rows, image="file", label="kind", on_bad="skip").train) in range(8, 12)


@pytest.mark.parametrize("deep", [np.uint16, np.int32, np.float32])
def test_a_picture_of_more_than_eight_bits_is_refused_and_not_cut(tmp_path, deep) -> None:
    from PIL import Image

    rows = [{"file": str(tmp_path / f"{n}.tiff"), "kind": "ab"[n % 2]} for n in range(12)]
    for row in rows:
        Image.fromarray(np.full((6, 5), 200, np.uint8)).save(row["file"])
    Image.fromarray(np.full((6, 5), 20_000, deep)).save(rows[4]["file"])
    with pytest.raises(tacit.UserError, match=r"4\.tiff' cannot be read as a picture \(its pixels have more"):
        tacit.dataset(rows, image="file", label="kind")
    assert len(tacit.dataset(rows, image="file", label="kind", on_bad="skip").train) in range(8, 12)


@pytest.mark.parametrize(
    ("given", "read"), [((8, 6, 4), (4, 8, 6)), ((8, 6, 3), (3, 8, 6)), ((13, 4, 4), (13, 4, 4))]
)
def test_arrays_with_their_channels_last_are_turned(given, read) -> None:
    rows = [{"picture": np.full(given, n, np.uint8), "kind": "ab"[n % 2]} for n in range(12)]
    assert tacit.dataset(rows, image="picture", label="kind").shape == read


def test_dates_and_complex_numbers_are_no_numbers_in_any_unit() -> None:
    """Python's `float` makes nanoseconds of the one, and drops half of the other."""
    for unit in ("ns", "us", "D"):
        for values, told in (
            (np.array(["2024-07-02"] * 20, f"M8[{unit}]"), "is the date 2024-07-02.*, not a number; make it"),
            (np.array([183] * 20, "m8[D]").astype(f"m8[{unit}]"), "is the time 183 days.*, not a number"),
        ):
            with pytest.raises(tacit.UserError, match=rf"features: row \d: column 'v' {told}"):
                tacit.dataset({"v": values, "y": [0, 1] * 10}, features=["v"], label="y")
            with pytest.raises(tacit.UserError, match=rf"label: row \d: column 'v' {told}"):
                tacit.dataset({"v": values, "x": [0, 1] * 10}, features=["x"], label="v", task="regression")
    wave = np.arange(20) * (1 + 2j)
    with pytest.raises(tacit.UserError, match="column 'v' is 0j, not one number; make it two"):
        tacit.dataset({"v": wave, "y": [0, 1] * 10}, features=["v"], label="y")
    with pytest.raises(tacit.UserError, match="column 'v' is 0j, not one number"):
        tacit.dataset({"v": wave, "x": [0, 1] * 10}, features=["x"], label="v", task="regression")


@pytest.mark.parametrize("unit", ["ns", "us"])
def test_a_day_that_is_missing_is_missing(unit) -> None:
    """In nanoseconds numpy calls it -9223372036854775808: a user of that name, or a class."""
    days = np.array(["2024-07-02", "2024-07-03"] * 10, f"M8[{unit}]")
    days[3] = "NaT"
    rows = {"x": np.arange(20.0), "y": [0, 1] * 10, "day": days}
    with pytest.raises(tacit.UserError, match="user: row 3: column 'day' is missing"):
        tacit.dataset(rows, features=["x"], label="y", user="day")
    with pytest.raises(tacit.UserError, match="label: row 3: column 'day' is missing"):
        tacit.dataset(rows, features=["x"], label="day")
    with pytest.raises(tacit.UserError, match=r"features: row \d: column 'day' is missing; fill it in"):
        tacit.dataset({**rows, "day": days[3:4].repeat(20)}, features=["day"], label="y")


def test_columns_with_numbers_for_names() -> None:
    """As those of a DataFrame made from an array are."""
    import pandas

    x = np.arange(20.0)
    frame = pandas.DataFrame({0: x, 1: x**2, 2: [0, 1] * 10, 3: list(range(10)) * 2})
    data = tacit.dataset(frame, features=[0, 1], label=2, user=3)
    assert data.shape == (2,) and data.classes == 2 and data.train.x[4, 1] == data.train.x[4, 0] ** 2
    assert data.train.users is not None and len(set(data.train.users)) in (9, 10)
    with pytest.raises(tacit.UserError, match=r"label: name one column \(got \[0, 2\]\); several numbers"):
        tacit.dataset(frame, features=[1], label=[0, 2], task="regression")


def test_a_column_that_test_data_lack_is_not_looked_for_in_those_to_train_on() -> None:
    tested = [{"age": row["age"], "job": row["job"]} for row in ROWS]
    with pytest.raises(tacit.UserError, match="no column 'who'; the test data have age, job"):
        tacit.dataset(ROWS, test=tested, features=["age"], label="job", user="who")


def test_a_sparse_matrix_is_told_how_to_become_an_array() -> None:
    sparse = pytest.importorskip("scipy.sparse").csr_matrix(np.eye(20))
    with pytest.raises(tacit.UserError, match=r"x is a sparse matrix; give an array \(x\.toarray\(\)\)"):
        tacit.dataset((sparse, [0, 1] * 10))


@pytest.mark.parametrize(
    ("task", "labels", "read"),
    [
        ("regression", [0.25, 0.5, -1.75], [0.25, 0.5, -1.75]),
        ("regression", [[0.5, 1.5], [2.5, 3], [4, 5]], [[0.5, 1.5], [2.5, 3.0], [4.0, 5.0]]),
        ("multi-label", [["a"], ["a", "b"], []], [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]),
    ],
)
def test_labels_of_texts_that_are_no_classes_are_kept_as_they_are(task, labels, read) -> None:
    rows = [{"t": f"word {n}", "y": label} for n, label in enumerate(labels * 4)]
    data = tacit.dataset(rows, test=rows, text="t", label="y", task=task, tokenizer="bytes")
    again = pickle.loads(pickle.dumps(data.train))
    for records in (data.train, again):
        assert records.take(np.array([2, 0, 1]))["y"].tolist() == [read[2], read[0], read[1]]
        assert records.labels is None and len({records.raw(n) for n in (0, 3)}) == 2
    assert data.train.raw(0).decode() == f"{read[0]}\0word 0"


# --- tasks --------------------------------------------------------------------------------------------------


def linear(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def test_regression_learns_a_line(config) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 3
    data = tacit.dataset((x, y), task="regression")
    assert data.classes == 1 and data.train.labels is None
    settings = config(rounds=30, local__lr=0.05, data__partition={"kind": "iid", "clients": 12})
    result = tacit.run(settings, "run", dataset=data, model=linear(3, 1))
    assert result.last("rmse") < 0.05 and result.best() == result.best("rmse") <= result.last("rmse")


def test_several_labels_at_once(config) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4))
    names = [[name for name, on in zip("abcd", row > 0, strict=True) if on] for row in x]
    data = tacit.dataset({"x": list(x), "tags": names}, features=["x"], label="tags", task="multi-label")
    assert data.classes == 4 and data.label_names == ("a", "b", "c", "d")
    settings = config(rounds=20, local__lr=1.0, data__partition={"kind": "iid", "clients": 12})
    result = tacit.run(settings, "run", dataset=data, model=linear(4, 4))
    assert result.last("f1") > 0.95 and 0.8 < result.last("exact") <= 1


def test_a_class_for_each_token(config) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 10, (200, 6))
    y = np.where(x % 2 == 0, 0, 1)
    y[:, -1] = -100
    data = tacit.dataset((x, y), task="token-classification")
    settings = config(rounds=12, local__lr=2.0, data__partition={"kind": "iid", "clients": 12})
    result = tacit.run(
        settings, "run", dataset=data, model=nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    )
    assert result.last("accuracy") > 0.95


@pytest.mark.parametrize("name", ["regression", "multi-label", "token-classification"])
def test_losses_are_of_each_record_alone(name) -> None:
    """Changing one record must leave every other record's loss as it is, bit for bit."""
    task = tasks.build(name)
    torch.manual_seed(0)
    x, y = {
        "regression": (torch.randn(5, 3), torch.randn(5)),
        "multi-label": (torch.randn(5, 3), (torch.randn(5, 2) > 0).float()),
        "token-classification": (torch.randn(5, 4, 3), torch.randint(0, 2, (5, 4))),
    }[name]
    model = linear(3, 1 if name == "regression" else 2)
    before = task.losses(model, {"x": x, "y": y})
    other = x.clone()
    other[2] += 1
    after = task.losses(model, {"x": other, "y": y})
    assert before.shape == (5,)
    assert (before == after).tolist() == [True, True, False, True, True]
    whole = task.evaluate(model, {"x": x, "y": y})
    halves = [task.evaluate(model, {"x": x[a], "y": y[a]}) for a in (slice(0, 2), slice(2, 5))]
    for key, value in whole.items():
        assert float(value) == pytest.approx(sum(float(half[key]) for half in halves), rel=1e-6)


# --- tables -------------------------------------------------------------------------------------------------


def test_a_table_is_read_as_declared(tmp_path) -> None:
    file = tmp_path / "people.csv"
    file.write_bytes("name;age\nNA;3\nnull;-\nJosé;5\n".encode("latin-1"))
    columns = read_table(file, Format(";", "latin-1", ("-",)))
    assert list(columns.values["name"]) == ["NA", "null", "José"], "a person called NA keeps the name"
    assert list(columns.values["age"]) == ["3", None, "5"]
    assert columns.where(2) == f"{file}, line 4"


def test_two_columns_of_one_name_are_not_taken_for_one(tmp_path) -> None:
    file = tmp_path / "people.csv"
    file.write_text("age,name,age\n1,a,2\n")
    with pytest.raises(tacit.UserError, match=r"people.csv, line 1: two columns are called 'age'"):
        read_table(file, Format())


def test_two_columns_of_an_object_are_not_taken_for_one() -> None:
    import pandas

    twice = pandas.DataFrame([[1.0, 2.0, n % 2] for n in range(20)], columns=["a", "a", "y"])
    with pytest.raises(tacit.UserError, match="source: two columns are called 'a'; rename one"):
        tacit.dataset(twice, features=["a"], label="y")
    one = {1: [1.0] * 20, "1": [2.0] * 20, "y": [0, 1] * 10}
    rows = [{1: 1.0, "1": 2.0, "y": n % 2} for n in range(20)]
    for source in (one, rows, pandas.DataFrame(one)):
        with pytest.raises(tacit.UserError, match="source: two columns are called '1'"):
            tacit.dataset(source, features=["1"], label="y")
    data = [{"1": 2.0, "y": n % 2} for n in range(20)]
    with pytest.raises(tacit.UserError, match="test: two columns are called '1'"):
        tacit.dataset(data, test=rows, features=["1"], label="y")


def test_what_kind_of_file_it_is_need_not_be_guessed_from_a_message(tmp_path) -> None:
    file = tmp_path / "my people.csv"
    with pytest.raises(tacit.UserError, match=r"there is no .*my people\.csv"):
        read_table(file, Format())
    file.write_bytes("âge;name\n1;a\n".encode("latin-1"))
    with pytest.raises(tacit.UserError, match=r"set data\.encoding, for example to latin-1"):
        read_table(file, Format())
    with pytest.raises(tacit.UserError, match=r"people\.csv, line 1: .*; set data\.delimiter to ';'"):
        read_table(file, Format(encoding="latin-1"))


@pytest.mark.parametrize("statistics", [{"mean": (1.0, 2.0)}, {"mean": 1.0, "std": (1.0, 1.0, 1.0)}])
def test_constants_are_as_many_as_the_features(statistics) -> None:
    with pytest.raises(tacit.UserError, match="numbers for 1 features; give one, or one for each"):
        tacit.dataset(ROWS, features=["age"], label="job", **statistics)


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind) -> None:
    import pandas

    frame, file = pandas.DataFrame(ROWS), tmp_path / f"t.{kind}"
    match kind:
        case "csv":
            frame.to_csv(file, index=False)
        case "tsv":
            frame.to_csv(file, index=False, sep="\t")
        case "parquet":
            frame.to_parquet(file)
        case _:
            frame.to_json(file, orient="records", lines=kind == "jsonl")
    data = tacit.dataset(read_table(file, Format()), features=["age", "pay"], label="job", user="who")
    same = tacit.dataset(ROWS, features=["age", "pay"], label="job", user="who")
    assert np.array_equal(data.train.x, same.train.x) and np.array_equal(data.train.y, same.train.y)
    assert data.train.users.tolist() == same.train.users.tolist()


def test_a_bad_row_has_the_same_number_in_a_frame_and_in_its_files(tmp_path) -> None:
    import pandas

    frame = pandas.DataFrame({"x": [float(n) for n in range(20)], "y": [0, 1] * 10})
    frame.loc[7, "x"] = None
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_json(tmp_path / "t.json", orient="records")
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    files = {"parquet": "row 7", "json": "row 7", "csv": "line 9", "jsonl": "line 8"}
    for source, place in ((frame, "row 7"), *((tmp_path / f"t.{kind}", at) for kind, at in files.items())):
        with pytest.raises(tacit.UserError, match=f"{place}: column 'x'"):
            tacit.dataset(source, features=["x"], label="y")


TABLE = """\
rounds: 1
data:
  name: table
  path: people.csv
  features: [age, pay]
  label: job
  user: who
  partition: {kind: natural}
model: {name: mlp, hidden: [4]}
cohort: 2
local: {steps: 1, batch: 5, lr: 0.1}
engine: {workers: 0}
"""


def test_a_table_by_name_in_a_config(command) -> None:
    import pandas

    pandas.DataFrame(ROWS).to_csv("people.csv", index=False)
    Path("c.yaml").write_text(TABLE)
    code, out, err = command("run", "c.yaml", "--out", "run")
    assert code == 0, err
    assert json.loads(Path("run/labels.json").read_text()) == ["cook", "tailor", "vet"]
    code, out, _ = command("data", "c.yaml")
    assert code == 0 and "tailor" in out and "p3" in out, "classes and clients by their names"
    text = Path("people.csv").read_text().splitlines()
    text[9] = text[9].replace(text[9].split(",")[0], "old", 1)
    Path("people.csv").write_text("\n".join(text) + "\n")
    code, _, err = command("run", "c.yaml", "--out", "other")
    assert code == 2 and "people.csv, line 10: column 'age' is 'old', not a number" in err
    assert not Path("other").exists() and len(err.splitlines()) == 1
    Path("people.csv").write_text("\n".join([*text[:4], "1,2"]) + "\n")
    code, _, err = command("run", "c.yaml", "--out", "other")
    assert code == 2 and "people.csv, line 5: 2 values where the first line names 5 columns" in err
    code, _, err = command("run", "c.yaml", "--set", "data.encoding=nonsense")
    assert code == 2 and "nonsense" in err


def test_a_file_of_numbers_is_a_table_whatever_it_is_called(command) -> None:
    import pandas

    pandas.DataFrame(ROWS).to_csv("people.csv", index=False, sep=";")
    plain = TABLE.replace("delimiter", "# delimiter")
    assert "name: table" in plain
    Path("c.yaml").write_text(plain.replace("name: table", 'name: csv\n  delimiter: ";"'))
    code, out, err = command("data", "c.yaml")
    assert code == 0 and "tailor" in out and not err
    code, _, err = command("data", "c.yaml", "--set", "data.features=age", "--set", "data.partition=natural")
    assert code == 0, err
    code, _, err = command(
        "data", "c.yaml", "--set", "data.name=fashion-mnist-slice", "--set", "data.path=null"
    )
    assert code == 2 and "data.features: it is of a table, which fashion-mnist-slice is not" in err


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("max_length=32", "max_length: it is for texts"),
        ("tokenizer=bytes", "data.tokenizer: it is of texts, and no column of texts is named"),
        ("speech={}", "data.speech: it is of corpora"),
        ("options.count=3", "data.options: they are for `import`"),
    ],
)
def test_keys_that_a_table_would_ignore_are_refused(command, key, message) -> None:
    import pandas

    pandas.DataFrame(ROWS).to_csv("people.csv", index=False)
    Path("c.yaml").write_text(TABLE)
    code, _, err = command("data", "c.yaml", "--set", f"data.{key}")
    assert code == 2 and message in err, err


@pytest.mark.parametrize("key", ["max_length=32", "tokenizer=bytes"])
def test_keys_of_texts_are_refused_for_pictures(command, key) -> None:
    Path("c.yaml").write_text(
        "rounds: 1\ndata: {name: fashion-mnist-slice, partition: {kind: iid, clients: 4}}\nmodel: mlp\n"
        "cohort: 2\nlocal: {steps: 1, batch: 5, lr: 0.1}\n"
    )
    code, _, err = command("data", "c.yaml", "--set", f"data.{key}")
    assert code == 2 and "it is of texts, which fashion-mnist-slice is not; leave it out" in err


TEXTS = """\
rounds: 1
data:
  {name: json, path: notes.jsonl, text: t, label: y, tokenizer: bytes, max_length: 16,
   partition: {kind: iid, clients: 3}}
model: {config: {model_type: bert, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}}
cohort: 2
local: {steps: 1, batch: 5, lr: 0.1}
engine: {workers: 0}
"""


@pytest.mark.parametrize("task", ["regression", "multi-label"])
def test_a_file_of_texts_with_labels_that_are_no_classes_is_a_table(command, task) -> None:
    def of(n: int) -> object:
        return n / 4 if task == "regression" else [["a"], ["a", "b"], []][n % 3]

    Path("notes.jsonl").write_text("\n".join(json.dumps({"t": f"word {n}", "y": of(n)}) for n in range(30)))
    Path("c.yaml").write_text(TEXTS)
    code, _, err = command("run", "c.yaml")
    assert code == 2 and f"set task: {task}" in err
    code, out, err = command("run", "c.yaml", "--set", f"task={task}", "--out", "run")
    assert code == 0 and ("RMSE" if task == "regression" else "F1") in out, err


def test_an_export_says_which_columns_are_meant_and_what_outputs_are(command) -> None:
    import pandas

    pandas.DataFrame(ROWS).to_csv("people.csv", index=False)
    Path("t.yaml").write_text(TABLE)
    normalise = "data.normalise={mean: [40, 3], std: [20, 3]}"
    assert command("run", "t.yaml", "--set", normalise, "--out", "run")[0] == 0
    assert command("export", "run", "table")[0] == 0
    told = "It takes float32 [batch, 2]: age, pay (in this order), minus (40, 3), divided by (20, 3)."
    assert told in Path("table/README.md").read_text()
    Path("c.yaml").write_text(TEXTS)
    for task, kind, labels in (
        ("regression", "regression", [0.5, 1.5]),
        ("multi-label", "multi_label_classification", [["a"], ["a", "b"]]),
        ("classification", None, ["a", "b"]),
    ):
        rows = [json.dumps({"t": f"word {n}", "y": labels[n % 2]}) for n in range(30)]
        Path("notes.jsonl").write_text("\n".join(rows))
        code, _, err = command("run", "c.yaml", "--set", f"task={task}", "--out", f"runs/{task}")
        assert code == 0 and command("export", f"runs/{task}", task)[0] == 0, err
        assert json.loads(Path(task, "config.json").read_text()).get("problem_type") == kind
        assert "Tokens are a text's UTF-8 bytes" in Path(task, "README.md").read_text()


def test_texts_of_a_table_are_packed_too(command) -> None:
    Path("notes.jsonl").write_text("\n".join(json.dumps({"t": f"word {n}"}) for n in range(30)))
    Path("c.yaml").write_text(TEXTS.replace("label: y, ", "pack: 100, on_bad: skip, "))
    code, out, err = command("data", "c.yaml", "--set", "task=language", "--json")
    assert code == 0, err
    assert json.loads(out)["train_records"] < 15, out


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("jsonl", "unknown data set 'jsonl'; a jsonl file is `name: table` with `path: FILE`"),
        ("people.csv", "unknown data set 'people.csv'; a csv file is `name: table` with `path: FILE`"),
        ("tabel", "unknown data set 'tabel'; did you mean 'table'?"),
        ("folder", "data.features: it is of a table, which folder is not; leave it out"),
    ],
)
def test_a_data_set_that_does_not_exist_is_told_before_its_keys(command, name, told) -> None:
    import pandas

    pandas.DataFrame(ROWS).to_csv("people.csv", index=False)
    Path("c.yaml").write_text(TABLE.replace("name: table", f"name: {name}"))
    code, _, err = command("data", "c.yaml")
    assert code == 2 and told in err


# --- by import path -----------------------------------------------------------------------------------------

MODULE = """
from dataclasses import dataclass
import numpy as np
from torch import nn
import tacit
from tacit.algorithms import FedAvg
from tacit.tasks import Classification

class Net(nn.Module):
    def __init__(self, shape, classes, width=4):
        super().__init__()
        inputs = int(np.prod(shape))
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.Linear(width, classes))
    def forward(self, x):
        return self.layers(x)

def records(count=60):
    rng = np.random.default_rng(0)
    return tacit.dataset((rng.normal(size=(count, 3)), rng.integers(0, 2, count)))

@dataclass(frozen=True)
class Mine(FedAvg):
    pull: float = 0.5

class Own(Classification):
    pass
"""
IMPORTS = """\
rounds: 1
data: {import: "mymodule:records", options: {count: 80}, partition: {kind: iid, clients: 8}}
model: {import: "mymodule:Net", width: 6}
method: {import: "mymodule:Mine", pull: 0.25}
task: {import: "mymodule:Own"}
cohort: 4
local: {steps: 1, batch: 5, lr: 0.1}
"""


@pytest.mark.slow
def test_everything_of_ones_own_by_import_path(tmp_path) -> None:
    """As a person would: a file beside the config, the command started there, two workers."""
    (tmp_path / "mymodule.py").write_text(MODULE)
    (tmp_path / "c.yaml").write_text(IMPORTS)
    start = [sys.executable, "-m", "tacit", "run", "c.yaml", "--out", "run", "--set", "engine.workers=2"]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    saved = tacit.load(tmp_path / "run" / "config.yaml")
    assert saved.model.name == "import:mymodule:Net" and saved.model.options == {"width": 6}
    again = [sys.executable, "-m", "tacit", "resume", "run"]
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mymodule:Net", "mymodule:Nett", "model.import: mymodule has no 'Nett'"),
        ("mymodule:Net", "nomodule:Net", "model.import: 'nomodule' cannot be imported"),
        ("mymodule:Net", "mymodule", "model.import: write it as module:name"),
        ("width: 6", "breadth: 6", "unexpected keyword argument 'breadth'"),
        ("mymodule:records", "mymodule:Own", "data"),
        ("options: {", "size: 8, options: {", "data.size: records from `import` are used as"),
        ("mymodule:Mine", "mymodule:Own", "method"),
        ("mymodule:Net", "mymodule:Own", "model"),
    ],
)
def test_wrong_import_paths_are_one_line(command, old, new, message, monkeypatch) -> None:
    Path("mymodule.py").write_text(MODULE)
    Path("c.yaml").write_text(IMPORTS.replace(old, new) + "engine: {workers: 0}\n")
    sys.modules.pop("mymodule", None)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    code, _, err = command("run", "c.yaml", "--out", "run")
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1, err
    sys.modules.pop("mymodule", None)


def test_a_model_by_import_path_is_asked_before_the_run(command, monkeypatch) -> None:
    Path("mymodule.py").write_text(
        MODULE.replace("return self.layers(x)", "return {'logits': self.layers(x)}")
    )
    Path("c.yaml").write_text(
        IMPORTS.replace('task: {import: "mymodule:Own"}\n', "") + "engine: {workers: 0}\n"
    )
    sys.modules.pop("mymodule", None)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    code, _, err = command("run", "c.yaml", "--out", "run")
    assert code == 2 and "tacit: model: Net answers with a dict; let its `forward` return logits" in err
    assert not Path("run").exists()
    sys.modules.pop("mymodule", None)


# --- exports ------------------------------------------------------------------------------------------------


def test_a_model_of_ones_own_is_exported_with_a_card(config, dataset) -> None:
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    privacy = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3}
    result = tacit.run(config(rounds=1, privacy=privacy), "run", model=model, dataset=dataset)
    with pytest.raises(
        tacit.UserError, match=r"tacit\.export\('run', DIR, model=Sequential\(\), dataset=Dataset\("
    ):
        tacit.export("run", "out", dataset=dataset)
    tacit.export("run", "out", model=model, dataset=dataset)
    saved = load_file("out/model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in result.model.state_dict().items())
    card = Path("out/README.md").read_text()
    assert tacit.statement("run").summary() in card and "Not covered" in card and "load_file" in card
    assert str(Path.cwd()) not in card, "it goes to other machines"


@pytest.mark.parametrize("kind", ["features", "pixels"])
def test_a_card_says_enough_to_judge_the_model_without_this_program(config, kind) -> None:
    """Weights, and the inputs that the card tells of, give the accuracy that the run told of."""
    from safetensors.torch import load_file

    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 120)
    mean, std = ((3.0, -1.0), (2.0, 4.0)) if kind == "features" else ((0.25,), (0.5,))
    x = rng.normal(size=(120, 2)) + y[:, None] if kind == "features" else rng.integers(0, 255, (120, 1, 3, 3))
    x = x.astype("float32" if kind == "features" else "uint8")
    data = tacit.dataset((x, y), test=(x, y), mean=mean, std=std)
    result = tacit.run(config(rounds=1, model={"name": "logistic"}), "run", dataset=data)
    tacit.export("run", "out", dataset=data)
    told = {
        "features": "float32 [batch, 2], minus (3, -1), divided by (2, 4).",
        "pixels": "float32 [batch, 1, 3, 3] of pixels ÷ 255, minus 0.25, divided by 0.5.",
    }
    assert told[kind] in Path("out/README.md").read_text()
    weight, bias = load_file("out/model.safetensors").values()
    if weight.ndim == 1:
        weight, bias = bias, weight
    fed = (
        torch.from_numpy(x).float() / (255 if kind == "pixels" else 1) - torch.tensor(mean)
    ) / torch.tensor(std)
    guess = (fed.flatten(1) @ weight.T + bias).argmax(1)
    assert float((guess == torch.from_numpy(y)).float().mean()) == pytest.approx(result.last("accuracy"))


@pytest.mark.slow
def test_an_adapter_loads_by_name_alone_somewhere_else(tmp_path) -> None:
    """peft's AutoPeftModel in another process and folder, without a network; classes have their names."""
    from tacit.models import hub

    torch.manual_seed(4)
    roberta = {"model_type": "roberta", "vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 1,
               "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 40,
               "pad_token_id": 1, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}  # fmt: skip
    for labels in (5, 3):  # a base with another head, and one with the same
        folder = tmp_path / str(labels)
        hub.from_config(roberta, (9,), labels).save_pretrained(folder / "base")
        data = tacit.dataset(ROWS, text="note", label="job", tokenizer="bytes", max_length=16)
        config = tacit.load({
            "rounds": 1, "data": {"name": "notes", "partition": {"kind": "iid", "clients": 6}},
            "model": {"hub": str(folder / "base"), "lora": {"rank": 2}}, "cohort": 3,
            "local": {"steps": 1, "batch": 4, "lr": 0.1}, "engine": {"workers": 0},
        })  # fmt: skip
        result = tacit.run(config, folder / "run", dataset=data)
        tacit.export(folder / "run", folder / "out", dataset=data)
        saved = json.loads((folder / "out" / "adapter_config.json").read_text())
        own = folder / "out" / "base" if labels == 5 else folder / "base"
        assert saved["base_model_name_or_path"] == str(own.resolve())
        ids = torch.arange(10).reshape(1, 10) + 3
        code = f"""
            import torch
            from peft import AutoPeftModelForSequenceClassification as Auto
            model = Auto.from_pretrained({str(folder / "out")!r}).eval()
            ids = torch.arange(10).reshape(1, 10) + 3
            with torch.no_grad():
                answer = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            torch.save((answer, model.config.id2label if {labels} == 5 else None), {str(folder / "a.pt")!r})
        """
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        import os

        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], cwd=elsewhere, env=environment,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        theirs, names = torch.load(folder / "a.pt")
        with torch.no_grad():
            ours = result.model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        assert torch.equal(ours, theirs)
        assert names in (None, {0: "cook", 1: "tailor", 2: "vet"})
        card = (folder / "out" / "README.md").read_text()
        together = ("from_pretrained('out/base')", "PeftModel.from_pretrained(model, 'out')")
        assert all(line in card for line in together) == (labels == 5), "loads from wherever both are"
        assert ("AutoPeftModelForSequenceClassification" in card) == (labels == 3)


@pytest.mark.parametrize(
    ("y", "classes"), [(["b", "a", "b", "c"], ["c", "b", "a", "d"]), ([2, 0, 2, 1], [0, 1, 2, 3])]
)
def test_the_classes_that_there_may_be_are_those_that_are_named(y: list[Any], classes: list[Any]) -> None:
    """Labels mean the same whichever of them somebody's records have; also in a test part with a new one."""
    x = np.zeros((4, 2), np.float32)
    for rows in ([0, 1], [2, 3], [0, 1, 2, 3]):
        given = x[rows], [y[row] for row in rows]
        data = tacit.dataset(given, test=(x[:1], [classes[3]]), classes=classes)
        assert (data.classes, data.label_names) == (4, tuple(map(str, classes)))
        assert list(data.train.labels) == [classes.index(y[row]) for row in rows]
        assert list(data.test.labels) == [3]
    with pytest.raises(tacit.UserError, match="is not among the classes"):
        tacit.dataset((x, y), classes=classes[:2])
    with pytest.raises(tacit.UserError, match="one is named twice"):
        tacit.dataset((x, y), classes=[*classes, classes[0]])


def test_numbers_of_word_classes_are_below_the_number_of_classes() -> None:
    x, y = torch.randn(5, 4, 3), torch.tensor([[0, 1, 2, -100]] * 5)
    assert tacit.dataset((x, y), task="token-classification", classes=["a", "b", "c", "d"]).classes == 4
    with pytest.raises(tacit.UserError, match="2 is the number of none of 2 classes"):
        tacit.dataset((x, y), task="token-classification", classes=["a", "b"])


def test_series_go_by_their_place_and_not_by_their_index() -> None:
    """As after a shuffle or a split; beside arrays, in dicts of columns, as labels and as users."""
    pandas = pytest.importorskip("pandas")
    whole = pandas.DataFrame(
        {"a": np.arange(40.0), "b": 1.0, "y": np.arange(40) // 2 % 2, "who": np.arange(40) % 5}
    )
    for frame in (whole.sample(frac=1, random_state=1), whole[::2], whole):
        x = frame[["a", "b"]]
        for data in (
            tacit.dataset((x.to_numpy(), frame.y), user=frame.who, test=(x.to_numpy(), frame.y)),
            tacit.dataset((x, frame.y), user=frame.who.to_numpy(), test=(x, frame.y)),
            tacit.dataset(
                {"a": frame.a.to_numpy(), "y": frame.y, "who": frame.who},
                features=["a"], label="y", user="who", test=frame,
            ),
            tacit.dataset(frame, features=["a", "b"], label="y", user="who", test=frame),
        ):  # fmt: skip
            own = data.train.x[:, 0].astype(int)
            assert own.tolist() == frame.a.astype(int).tolist()
            assert data.train.labels.tolist() == (own // 2 % 2).tolist()
            assert [str(who) for who in data.train.users] == [str(n % 5) for n in own]
    with pytest.raises(tacit.UserError, match="'who' names a column, and a pair"):
        tacit.dataset((whole[["a"]], whole.y), user="who")


HOT = [{"x": float(n), "tags": [n % 2, 1, 0]} for n in range(30)]
"""Zeros and ones for three classes."""


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ([1, 2, 0], r"row 7: column 'tags' holds \[1, 2, 0\], where others have 3 zeros and ones; mend it"),
        ([1, 0.5, 0], "where others have 3 zeros and ones"),
        ([1, 0], "where others have 3 zeros and ones"),
        ("cat", r"holds 'cat' \(row 7\), and multi-label takes a list"),
        (None, "row 7: .*'tags' is missing"),
        ([1, float("nan"), 0], "row 7: something is missing in column 'tags'"),
    ],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_bad_row_of_zeros_and_ones_changes_no_other(tags: Any, message: str, part: str) -> None:
    """It was taken for a list of names, and everybody's targets with it."""
    rows = [{**row, "tags": tags} if n == 7 else row for n, row in enumerate(HOT)]
    ask: dict[str, Any] = {"features": ["x"], "label": "tags", "task": "multi-label"}
    given = {"source": rows, "test": HOT} if part == "train" else {"source": HOT, "test": rows}
    with pytest.raises(tacit.UserError, match=message):
        tacit.dataset(**given, **ask)
    if not isinstance(tags, str):
        data = tacit.dataset(**given, **ask, on_bad="skip")
        left = [row["tags"] for n, row in enumerate(HOT) if n != 7]
        assert getattr(data, part).y.tolist() == left and data.classes == 3


def test_lists_of_numbers_may_be_names_of_classes() -> None:
    rows = [{"x": float(n), "tags": [[1], [0, 2], [2, 1], [0]][n % 4]} for n in range(40)]
    data = tacit.dataset(rows, features=["x"], label="tags", task="multi-label", test=rows)
    assert data.label_names == ("0", "1", "2") and data.train.y[:2].tolist() == [[0, 1, 0], [1, 0, 1]]
    missing = [{**row, "tags": None} if n == 0 else row for n, row in enumerate(rows)]
    with pytest.raises(tacit.UserError, match=r"row 0: .* is missing"):
        tacit.dataset(missing, features=["x"], label="tags", task="multi-label", test=rows)


@pytest.mark.parametrize(
    ("y", "advice"),
    [
        (np.arange(20)[:, None] % 2, r"y\.ravel\(\)"),
        (np.eye(3, dtype=int)[np.arange(20) % 3], r"y\.argmax\(1\)"),
        (np.ones((20, 3), int), "set task: multi-label"),
    ],
)
def test_labels_of_another_shape_are_told_what_to_do(y: Any, advice: str) -> None:
    with pytest.raises(tacit.UserError, match=advice):
        tacit.dataset((np.zeros((20, 2)), y))


def test_lists_with_something_missing_or_of_other_lengths_are_told_or_skipped() -> None:
    words = [{"words": ["a", "b"], "t": [0, 1]} for _ in range(12)]
    words[3] = {"words": ["a", "b"], "t": [0, float("nan")]}
    told: dict[str, Any] = {
        "text": "words",
        "label": "t",
        "task": "token-classification",
        "tokenizer": "bytes",
    }
    with pytest.raises(tacit.UserError, match="row 3: a class is missing in column 't'"):
        tacit.dataset(words, test=words[:2], **told)
    assert len(tacit.dataset(words, test=words[:2], on_bad="skip", **told).train) == 11
    numbers = [{"x": 1.0, "y": [1.0, 2.0]} for _ in range(12)]
    numbers[4] = {"x": 1.0, "y": [1.0]}
    asked: dict[str, Any] = {"features": ["x"], "label": "y", "task": "regression"}
    with pytest.raises(tacit.UserError, match="row 4: 1 numbers, where most have 2"):
        tacit.dataset(numbers, test=numbers[:2], **asked)
    assert len(tacit.dataset(numbers, test=numbers[:2], on_bad="skip", **asked).train) == 11


@pytest.mark.parametrize("place", [0, 20])
def test_what_becomes_of_numbers_and_tags_does_not_depend_on_another_users_record(place: int) -> None:
    """One who writes them another way is left out, or understood; nobody else's are others for it."""

    def read(rows: list[dict[str, Any]], **asked: Any) -> dict[str, Any]:
        data = tacit.dataset(rows, test=others[:2], user="who", on_bad="skip", **asked)
        return {f"{n}": data.train.raw(n) for n in range(len(data.train)) if data.train.users[n] != "z"}

    def same(odd: dict[str, Any], **asked: Any) -> bool:
        rows = [*others[:place], {**others[0], **odd, "who": "z"}, *others[place:]]
        before, after = read(others, **asked), read(rows, **asked)
        return len(before) == 20 and sorted(before.values()) == sorted(after.values())

    others: list[dict[str, Any]] = [
        {"x": float(n), "y": [float(n)], "words": ["a", "b"], "tags": [0, 1], "who": f"user {n}"}
        for n in range(20)
    ]
    assert same({"y": [1.0, 2.0]}, features=["x"], label="y", task="regression")
    words = {"text": "words", "label": "tags", "task": "token-classification", "tokenizer": "bytes"}
    for tags in (["PER", "O"], ["?", "O"], [0, 7]):
        assert same({"tags": tags}, classes=["O", "PER"], **words)
    assert same({"tags": ["0", "1"]}, classes=["1", "0"], **words), "numbers that are names of others"
    some = [{**others[0], "y": [1.0] * (1 + n % 3)} for n in range(9)]
    with pytest.raises(tacit.UserError, match="lists of 1, 2, 3 numbers"):
        read(some, features=["x"], label="y", task="regression")


def test_whose_a_record_is_is_neither_learnt_nor_learnt_from() -> None:
    rows = [{"x": float(n), "who": n % 3, "y": n % 2} for n in range(20)]
    for asked in ({"features": ["x"], "label": "who"}, {"features": ["x", "who"], "label": "y"}):
        with pytest.raises(tacit.UserError, match="'who' says whose a record is"):
            tacit.dataset(rows, user="who", **asked)
