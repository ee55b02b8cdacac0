"""Texts are tokenized once, whoever asks and whatever fails; padding changes nothing."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tacit
from tacit import api
from tacit.config import load
from tacit.config.build import build_dataset, build_job, build_model
from tacit.config.records import build_tokenizer
from tacit.data import TextRecords, Texts
from tacit.data.text import BUCKET
from tacit.data.tokens import Bytes, from_folder
from tacit.errors import UserError
from tacit.fetching import cache
from tacit.gradients import ClippedGradient
from tacit.tasks import Classification, Language
from text_helpers import WORDS, Counting, sentences, word_tokenizer

TEXTS = ["short", "", "naïve café ☕", "a text that is longer than what is kept of it", "x" * 200]
BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64, "initializer_range": 0.3,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
        "initializer_range": 0.3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))


def ids(records: TextRecords, index: int) -> list[int]:
    """The tokens of one text, read back from a batch."""
    batch = records.prepare(records.take(np.array([index])))
    return batch["input_ids"][0, : int(batch["attention_mask"].sum())].tolist()


@pytest.mark.parametrize("shared", [True, False])
def test_a_text_is_tokenised_when_first_asked_for_and_never_again(shared: bool, tmp_path: Path) -> None:
    tokenizer = Counting()
    keep = tmp_path / "tokens" if shared else None
    records = TextRecords(Texts.of(TEXTS), tokenizer, 32, keep=keep)
    assert tokenizer.asked == []
    records.take(np.array([3, 0, 3]))
    assert sorted(tokenizer.asked) == sorted([TEXTS[3], TEXTS[0]])
    for i, text in enumerate(TEXTS):
        assert ids(records, i) == Bytes()([text], None, 32)[0].ids
    assert sorted(tokenizer.asked) == sorted(TEXTS)
    if shared:  # a resume, or another process
        again = TextRecords(Texts.of(TEXTS), later := Counting(), 32, keep=keep)
        assert [ids(again, i) for i in range(5)] == [ids(records, i) for i in range(5)]
        assert later.asked == []


def test_another_tokenizer_or_length_has_tokens_of_its_own(tmp_path: Path) -> None:
    first = TextRecords(Texts.of(TEXTS), Counting(), 32, keep=tmp_path)
    first.take(np.arange(5))
    for tokenizer, length in ((Counting(fingerprint="other"), 32), (Counting(), 16)):
        records = TextRecords(Texts.of(TEXTS), tokenizer, length, keep=tmp_path)
        records.take(np.arange(5))
        assert sorted(tokenizer.asked) == sorted(TEXTS)
        assert len(ids(records, 4)) == length


def test_a_row_that_was_only_half_written_is_made_again(tmp_path: Path) -> None:
    expected = TextRecords(Texts.of(TEXTS), Counting(), 32, keep=tmp_path)
    whole = {name: values.clone() for name, values in expected.take(np.arange(5)).items()}
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    for start in range(0, len(good), 14):  # a hole anywhere, as a lost page would leave it
        file.write_bytes(good[:start] + bytes(len(good[start : start + 14])) + good[start + 14 :])
        again = TextRecords(Texts.of(TEXTS), Counting(), 32, keep=tmp_path).take(np.arange(5))
        assert all(torch.equal(again[name], whole[name]) for name in whole)


CHILD = """
import sys, time
import numpy as np
from pathlib import Path
from tacit.data import TextRecords, Texts
from tacit.data.tokens import Bytes
texts = [str(i) * (i % 50) for i in range(3000)]
records = TextRecords(Texts.of(texts), Bytes(), 64, keep=Path(sys.argv[1]))
print("ready", flush=True)
for i in np.random.default_rng(int(sys.argv[2])).permutation(3000):
    records.take(np.array([i]))
"""


@pytest.mark.slow
def test_killed_processes_that_share_tokens_leave_right_ones(tmp_path: Path) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), str(i)], stdout=subprocess.PIPE)
        for i in range(2)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    time.sleep(0.05)
    for child in children:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    texts = [str(i) * (i % 50) for i in range(3000)]
    found = TextRecords(Texts.of(texts), Bytes(), 64, keep=tmp_path).take(np.arange(3000))
    fresh = TextRecords(Texts.of(texts), Bytes(), 64).take(np.arange(3000))
    assert all(torch.equal(found[name], fresh[name]) for name in fresh)


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    records = TextRecords(Texts.of(TEXTS), Bytes(), 32, keep=tmp_path / "file")
    assert ids(records, 0) == [256, *b"short", 257]


def test_batches_have_few_shapes_and_no_more_padding_than_a_bucket() -> None:
    texts = ["x" * n for n in range(100)]
    records = TextRecords(Texts.of(texts), Bytes(), 70, labels=np.zeros(100))
    widths = set()
    for n in range(100):
        batch = records.prepare(records.take(np.array([0, n])))
        width = batch["input_ids"].shape[1]
        widths.add(width)
        assert width == min(70, -(-(n + 2) // BUCKET) * BUCKET) or n > 68
    assert widths == {16, 32, 48, 64, 70}
    empty = records.prepare(records.take(np.empty(0, np.int64)))
    assert empty["input_ids"].shape[0] == 0 and empty["y"].shape == (0,)


def test_rows_of_a_stored_batch_are_prepared_as_if_taken_alone() -> None:
    records = TextRecords(Texts.of(TEXTS), Bytes(), 32, labels=[0, 1, 2, 3, 4])
    stored = records.take(np.arange(5))
    chosen = torch.tensor([0, 2])
    part = records.prepare({name: values.index_select(0, chosen) for name, values in stored.items()})
    alone = records.prepare(records.take(np.array([0, 2])))
    assert part.keys() == alone.keys() and all(torch.equal(part[name], alone[name]) for name in part)


def test_pairs_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    import transformers

    folder = word_tokenizer(tmp_path / "words")
    first, second = sentences(40), sentences(80)[40:]
    first[3], second[5] = " ".join(WORDS * 3), ""
    records = TextRecords(Texts.of(first), from_folder(folder), 16, pairs=Texts.of(second))
    batch = records.prepare(records.take(np.arange(40)))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)(
        first, second, truncation=True, max_length=16, padding="max_length", return_tensors="pt"
    )
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], theirs[name]), name


@pytest.mark.parametrize("kind", ["classification", "language"])
def test_padding_changes_no_loss_and_no_clipped_gradient(kind: str) -> None:
    torch.manual_seed(0)
    texts = ["a", "bb cc", "longer than one bucket, by some", "x" * 60]
    labels = [0, 1, 1, 0] if kind == "classification" else None
    records = TextRecords(Texts.of(texts), Bytes(), 64, labels=labels)
    model_config = BERT if kind == "classification" else GPT2
    task = Classification() if kind == "classification" else Language()
    config = load({**base(), "model": {"config": {**model_config, "vocab_size": 259}}, "task": kind})
    dataset = tacit.Dataset("texts", records, records, 2 if labels else 0, (64,), task=kind)
    clipped = ClippedGradient(build_model(config, dataset))
    for bound in (1e9, 0.05):
        total = torch.zeros_like(clipped.flat.grad)
        for i in range(4):
            alone = records.prepare(records.take(np.array([i])))
            clipped(alone, task.losses, bound)
            total += clipped.flat.grad
        together = clipped(records.prepare(records.take(np.arange(4))), task.losses, bound)
        torch.testing.assert_close(clipped.flat.grad, total, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        losses = [
            float(task.losses(clipped.flat.module, records.prepare(records.take(np.array([i])))))
            for i in range(4)
        ]
    assert float(together.loss_sum) == pytest.approx(sum(losses), rel=1e-5)


def test_texts_travel_to_workers_as_the_path_of_their_file(tmp_path: Path) -> None:
    for name, array in (("t", Texts.of(TEXTS * 5000)),):
        np.save(tmp_path / f"{name}.npy", array.data)
        np.save(tmp_path / f"{name}_offsets.npy", array.offsets)
    mapped = Texts(*(np.load(tmp_path / f"t{end}.npy", mmap_mode="r") for end in ("", "_offsets")))
    records = TextRecords(mapped, Bytes(), 32, keep=tmp_path / "tokens")
    records.take(np.arange(100))
    message = pickle.dumps(records)
    assert len(message) < 2000
    assert ids(pickle.loads(message), 12) == ids(records, 12)


def base() -> dict[str, Any]:
    return {
        "rounds": 1,
        "data": {"name": "csv", "path": ".", "partition": {"kind": "iid", "clients": 10}},
        "model": {"config": BERT},
        "cohort": 2,
        "local": {"steps": 2, "batch": 4, "lr": 0.01},
        "engine": {"workers": 0},
    }


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A folder of rows in three formats, with a test part and an author for each row."""
    import datasets

    folder = tmp_path / "reviews"
    for split, count in (("train", 60), ("test", 20)):
        lines = sentences(count)
        rows = {
            "review": lines,
            "verdict": ["good" if "good" in line else "other" for line in lines],
            "author": [f"a{i % 6}" for i in range(count)],
            "title": [line.split()[0] for line in lines],
        }
        table = datasets.Dataset.from_dict(rows)
        for kind in ("csv", "json", "parquet"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            getattr(table, f"to_{kind}")(folder / kind / f"{split}.{kind}")
    return folder


@pytest.mark.parametrize("kind", ["csv", "json", "parquet", "folder"])
def test_files_by_their_columns(kind: str, reviews: Path, tmp_path: Path) -> None:
    words = word_tokenizer(tmp_path / "words")
    path = reviews / ("csv" if kind == "folder" else kind)
    section = {
        "name": kind, "path": str(path), "text": ["title", "review"], "label": "verdict", "user": "author",
        "tokenizer": str(words), "max_length": 16, "partition": {"kind": "natural"},
    }  # fmt: skip
    dataset = build_dataset(load({**base(), "data": section}))
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (60, 20, 2)
    assert dataset.train.users is not None and set(dataset.train.users) == {f"a{i}" for i in range(6)}
    batch = dataset.train.prepare(dataset.train.take(np.arange(60)))
    expected = from_folder(words)([s.split()[0] for s in sentences(60)], sentences(60), 16)
    for row, mask, label, line, tokens in zip(
        batch["input_ids"], batch["attention_mask"], batch["y"], sentences(60), expected, strict=True
    ):
        assert row[mask.bool()].tolist() == tokens.ids
        assert bool(label == 0) == ("good" in line)  # "good" sorts before "other"


@pytest.mark.slow
def test_a_private_run_on_texts_tokenises_only_who_was_drawn(reviews: Path, tmp_path: Path) -> None:
    section = {
        "name": "csv", "path": str(reviews / "csv"), "text": "review", "label": "verdict",
        "tokenizer": str(word_tokenizer(tmp_path / "words")), "max_length": 16,
        "partition": {"kind": "iid", "clients": 10},
    }  # fmt: skip
    values = {**base(), "data": section, "method": "dp-fedavg"}
    values["privacy"] = {"unit": "example", "noise": 1.0, "clip": 0.1, "delta": 1e-4}
    config = load(values, {"engine.workers": 2})
    result = api.run(config, tmp_path / "run")
    assert 0 <= result.last("accuracy") <= 1
    (file,) = (next(cache.root().glob("*/tokens")) / "train").iterdir()
    made = np.fromfile(file, np.uint16).reshape(60, -1)[:, 0] > 0
    job = build_job(config, tmp_path / "again")
    drawn = [c for c in range(10) if made[job.population.train(c)].any()]
    assert 0 < len(drawn) <= 2 and made.sum() == sum(made[job.population.train(c)].sum() for c in drawn)


def test_what_is_missing_is_said_before_any_training(reviews: Path, tmp_path: Path) -> None:
    section = {"name": "csv", "path": str(reviews / "csv"), "text": "review", "label": "verdict",
               "partition": {"kind": "iid", "clients": 10}}  # fmt: skip
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "data.tokenizer: texts need one"),
        ({"tokenizer": str(tmp_path)}, "holds no tokenizer that can be read"),
        ({"tokenizer": "no/where", "offline": True}, "no files for model 'no/where'"),
        ({"tokenizer": "bytes", "text": "body"}, "no column 'body'; they have review, verdict"),
        ({"tokenizer": "bytes", "label": None}, "which column holds the label"),
        ({"tokenizer": "bytes", "size": 32}, "leave out what is for pictures"),
        (
            {"tokenizer": "bytes", "max_length": 16, "augment": {"flip": True}},
            "data.augment: csv is no set of pictures",
        ),
        ({"tokenizer": str(word_tokenizer(tmp_path / "w")), "max_length": 65}, "at most 64 tokens, not 65"),
    ]
    for change, what in cases:
        with pytest.raises(UserError, match=what):
            build_job(load({**base(), "data": {**section, **change}}), tmp_path / "run")
    with pytest.raises(UserError, match="the columns of 'imdb' are fixed"):
        build_dataset(load({**base(), "data": {**section, "name": "imdb", "tokenizer": "bytes"}}))


def test_a_model_that_is_too_small_for_the_tokens_is_refused(reviews: Path, tmp_path: Path) -> None:
    section = {"name": "csv", "path": str(reviews / "csv"), "text": "review", "label": "verdict",
               "tokenizer": "bytes", "partition": {"kind": "iid", "clients": 10}}  # fmt: skip
    config = load({**base(), "data": {**section, "max_length": 64}})
    model = build_job(config, tmp_path / "run").model
    assert model.config.vocab_size == 259 and model.config.pad_token_id == 258  # type: ignore[union-attr]
    with pytest.raises(UserError, match="the tokenizer has 259 tokens and the model 100"):
        small = {**BERT, "vocab_size": 100, "pad_token_id": 0}
        build_job(load({**base(), "data": section, "model": {"config": small}}), tmp_path / "run")
    with pytest.raises(UserError, match="max_length: the model reads at most 64 tokens, not 128"):
        build_job(load({**base(), "data": section}), tmp_path / "run")


def test_no_network_when_all_is_local(reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    section = {"name": "csv", "path": str(reviews / "csv"), "text": "review", "label": "verdict",
               "tokenizer": str(word_tokenizer(tmp_path / "words")), "max_length": 16,
               "partition": {"kind": "iid", "clients": 10}}  # fmt: skip
    api.run(load({**base(), "data": section}), tmp_path / "run")


def test_bytes_keep_both_texts_of_a_pair() -> None:
    for a in range(20):
        for b in range(1, 20):
            (tokens,) = Bytes()(["x" * a], ["y" * b], 12)
            assert len(tokens.ids) == min(12, a + b + 3)
            assert tokens.ids[tokens.second :].count(ord("y")) >= min(b, 4)
            assert tokens.ids[tokens.second - 1] == 257


def test_the_tokenizer_is_the_model_s(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "words")
    config = load({**base(), "model": {"hub": str(folder)}, "data": {**base()["data"], "max_length": 32}})
    assert build_tokenizer(config).vocabulary == len(WORDS) + 5
    assert os.environ["TACIT_CACHE"]


# --- packing ----------------------------------------------------------------------------------------------


def _texts_of(records: TextRecords) -> list[str]:
    return [records.raw(index).decode().removeprefix("\0") for index in range(len(records))]


@pytest.mark.parametrize("seed", range(20))
def test_packed_examples_are_stretches_of_one_user_and_blind_to_all_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lines = [f"{i}{'é' * int(rng.integers(0, 30))}" for i in range(60)]
    users, most = rng.integers(0, 5, 60), int(rng.integers(8, 60))
    packed = TextRecords(Texts.of(lines), Bytes(), 32, users=users).joined(most)
    assert packed.users is not None
    for user in range(5):
        own = [line for line, owner in zip(lines, users, strict=True) if owner == user]
        parts = [text for text, owner in zip(_texts_of(packed), packed.users, strict=True) if owner == user]
        assert "\n".join(parts).split("\n") == own, "each message once, in order, in nobody else's example"
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            assert len(part.encode()) <= most or "\n" not in part
            if following is not None:  # as full as it can be
                assert len(part.encode()) + 1 + len(following.split("\n")[0].encode()) > most
        # The neighbouring data set, without this user: nobody else's examples differ.
        others = users != user
        rest = TextRecords(
            Texts.of([line for line, stays in zip(lines, others, strict=True) if stays]),
            Bytes(),
            32,
            users=users[others],
        ).joined(most)
        kept = [text for text, owner in zip(_texts_of(packed), packed.users, strict=True) if owner != user]
        assert _texts_of(rest) == kept


def test_texts_with_classes_are_not_packed() -> None:
    records = TextRecords(Texts.of(["a", "b"]), Bytes(), 32, labels=np.array([0, 1]))
    with pytest.raises(UserError, match=r"data\.pack: texts with classes or pairs cannot be joined"):
        records.joined(20)
