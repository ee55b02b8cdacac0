"""Words with a class each, sounds, and polars: users' own data that is not a plain table of numbers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tacit
from command import tacit as run_command
from tacit.data.speech.features import RATE
from tacit.data.speech.tiny import wave
from tacit.data.tokens import Bytes, FromFolder
from tacit.data.words import NOTHING, WordRecords
from tacit.errors import UserError
from tacit.federation import read_metrics

SENTENCES = [
    {"words": ["Ann", "met", "Bob"], "tags": ["PER", "O", "PER"], "who": "a"},
    {"words": ["it", "rains"], "tags": ["O", "O"], "who": "b"},
    {"words": ["Zoë", "left", "Rome", "late"], "tags": ["PER", "O", "LOC", "O"], "who": "c"},
] * 10


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def words(**options: object) -> tacit.Dataset:
    given = {
        "text": "words",
        "label": "tags",
        "user": "who",
        "task": "token-classification",
        "max_length": 32,
    }
    return tacit.dataset(options.pop("source", SENTENCES), tokenizer="bytes", **{**given, **options})


def test_every_word_has_its_class_at_its_first_token_and_nothing_else_has_one() -> None:
    data = words()
    assert (data.classes, data.label_names, data.shape) == (3, ("LOC", "O", "PER"), (32,))
    for index in range(len(data.train)):
        batch = data.train.prepare(data.train.take(np.array([index])))
        ids, y = batch["input_ids"][0].tolist(), batch["y"][0].tolist()
        text = bytes(i for i in ids if i < 256).decode()
        row = next(row for row in SENTENCES if " ".join(row["words"]) == text)
        at, want = 1, [NOTHING] * len(ids)
        for word, tag in zip(row["words"], row["tags"], strict=True):
            want[at] = data.label_names.index(tag)
            at += len(word.encode()) + 1
        assert y == want
    again = pickle.loads(pickle.dumps(data.train))
    assert torch.equal(again.take(np.arange(5))["classes"], data.train.take(np.arange(5))["classes"])


def test_a_fast_tokenizer_aligns_as_its_word_ids_say() -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "ann", "ra", "##n", "##s", "home"]
    model = tokenizers.models.WordPiece({p: n for n, p in enumerate(pieces)}, unk_token="[UNK]")
    raw = tokenizers.Tokenizer(model)
    raw.normalizer = tokenizers.normalizers.Lowercase()
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = FromFolder(
        transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    )
    records = WordRecords.made([["Ann", "rans", "home"], ["home"]], [[1, 2, 0], [0]], fast, 16)
    batch = records.prepare(records.take(np.array([0, 1])))
    assert batch["input_ids"][0, :7].tolist() == [2, 4, 5, 6, 7, 8, 3]
    assert batch["y"][0].tolist() == [NOTHING, 1, 2, NOTHING, NOTHING, 0] + [NOTHING] * 10
    assert batch["y"][1, :3].tolist() == [NOTHING, 0, NOTHING]
    cut = WordRecords.made([["Ann", "rans", "home"]], [[1, 2, 0]], fast, 4)
    assert cut.take(np.array([0]))["classes"][0].tolist() == [NOTHING, 1, 2, NOTHING], "cut, not shifted"


class Tagger(nn.Module):
    """Sees each byte and the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Embedding(259, 8), nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        seen = self.one(input_ids)
        before = torch.nn.functional.pad(seen, (0, 0, 1, 0))[:, :-1]
        logits: torch.Tensor = self.head(torch.cat([seen, before], 2))
        return logits


def test_words_are_learnt_privately_by_example_too() -> None:
    config = tacit.load({
        "rounds": 25, "data": {"name": "x", "partition": {"kind": "natural"}}, "model": "mlp", "cohort": 3,
        "local": {"steps": 4, "batch": 8, "lr": 2.0}, "engine": {"workers": 0}, "evaluate": {"every": 25},
    })  # fmt: skip
    assert tacit.run(config, "run", dataset=words(), model=Tagger()).last("accuracy") > 0.9
    private = {"unit": "example", "noise": 0.5, "delta": 1e-3, "clip": 1.0, "entropy": "seed"}
    few = config.model_copy(update={"rounds": 1})
    few = tacit.load({**few.model_dump(mode="json"), "privacy": private})
    assert tacit.run(few, "private", dataset=words(), model=Tagger()).finished


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"words": "Ann ran", "tags": ["O", "O"], "who": "a"}, "row 1: a class for each word needs a list"),
        ({"words": ["Ann"], "tags": ["O", "O"], "who": "a"}, "row 1: 2 classes for 1 words"),
        ({"words": [], "tags": [], "who": "a"}, "row 1: there is no word in it"),
    ],
)
def test_a_sentence_that_does_not_fit_is_named(row: dict[str, object], said: str) -> None:
    rows = [SENTENCES[0], row]
    with pytest.raises(UserError, match=said):
        words(source=rows, test=SENTENCES)
    assert len(words(source=[*SENTENCES, row], test=SENTENCES, on_bad="skip").train) == len(SENTENCES)


def test_words_from_a_file_and_a_model_of_transformers() -> None:
    pytest.importorskip("transformers")
    Path("s.jsonl").write_text("\n".join(json.dumps(row) for row in SENTENCES), encoding="utf-8")
    small = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 8, "max_position_embeddings": 40}  # fmt: skip
    config = tacit.load({
        "rounds": 1, "task": "token-classification", "model": {"config": small}, "cohort": 2,
        "data": {"name": "table", "path": "s.jsonl", "text": "words", "label": "tags", "user": "who",
                 "tokenizer": "bytes", "max_length": 32, "partition": {"kind": "natural"}},
        "local": {"steps": 1, "batch": 4, "lr": 0.1}, "engine": {"workers": 0},
    })  # fmt: skip
    result = tacit.run(config, "run")
    assert type(result.model).__name__ == "BertForTokenClassification"
    assert 0 <= result.last("accuracy") <= 1
    assert json.loads(Path("run/labels.json").read_text()) == ["LOC", "O", "PER"]


# --- sounds ---------------------------------------------------------------------------------------------


def tone(hertz: float, seconds: float = 0.5, rate: int = RATE) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate).astype(np.float32)


def test_a_sound_is_the_same_however_it_is_given() -> None:
    soundfile = pytest.importorskip("soundfile")
    soundfile.write("a.wav", tone(500), RATE, subtype="FLOAT")
    forms = ["a.wav", {"bytes": Path("a.wav").read_bytes(), "path": None}, tone(500).tolist(),
             {"array": tone(500), "sampling_rate": RATE}]  # fmt: skip
    rows = [{"clip": form, "kind": "x"} for form in forms]
    data = tacit.dataset(rows, test=rows, audio="clip", label="kind", classes=["x", "y"], seconds=1.0)
    assert data.shape == (1, 98, 80)
    x = data.train.take(np.arange(4))["x"]
    assert all(torch.equal(x[0], other) for other in x[1:])
    assert bool(x[0, :, 48:].eq(0).all()) and bool(x[0, :, :48].ne(0).any()), "what is beyond its end is zero"
    half = [{"clip": {"array": tone(500, rate=8000), "sampling_rate": 8000}, "kind": "x"}]
    near = tacit.dataset(
        half, test=half, audio="clip", label="kind", classes=["x", "y"], seconds=1.0
    ).train.take(np.arange(1))["x"]
    assert (near - x[:1]).abs().mean() < 0.3, "another rate, the same sound"


def test_sounds_are_learnt_from_a_table_of_files(monkeypatch, capsys) -> None:
    soundfile = pytest.importorskip("soundfile")
    lines = ["clip,pitch,who"]
    for n in range(40):
        high = n % 2
        soundfile.write(f"{n}.wav", tone(2000 if high else 400, 0.3), RATE)
        lines.append(f"{n}.wav,{'high' if high else 'low'},p{n % 4}")
    Path("sounds.csv").write_text("\n".join(lines), encoding="utf-8")
    Path("c.yaml").write_text("""
rounds: 5
data: {name: table, path: sounds.csv, audio: clip, seconds: 0.3, label: pitch, user: who,
       partition: {kind: natural}}
model: {name: mlp, hidden: [8]}
cohort: 4
local: {steps: 5, batch: 5, lr: 0.05}
engine: {workers: 0}
""", encoding="utf-8")  # fmt: skip

    def command(*arguments: str):
        return run_command(*arguments, monkeypatch=monkeypatch, capsys=capsys)

    code, _, err = command("run", "c.yaml", "--out", "run", "--json")
    assert code == 0, err
    assert json.loads(Path("run/labels.json").read_text()) == ["high", "low"]
    assert read_metrics(Path("run/metrics.jsonl"))[-1]["accuracy"] > 0.9
    Path("7.wav").write_bytes(b"RIFF0000WAVE")
    code, _, err = command("run", "c.yaml", "--out", "other")
    assert code == 2 and len(err.splitlines()) == 1 and "sounds.csv, line 9: '7.wav' is no sound" in err
    code, _, err = command("run", "c.yaml", "--out", "other", "--set", "data.seconds=null")
    assert code == 2 and "say how much of each sound is heard" in err


def test_speech_of_ones_own_is_transcribed() -> None:
    rows = [{"clip": wave(text), "said": text, "who": f"p{n % 3}"}
            for n, text in enumerate(["add bad", "cab dad", "face fed", "bee ace"] * 3)]  # fmt: skip
    data = tacit.dataset(rows, audio="clip", label="said", user="who", task="speech")
    assert (data.task, data.classes, data.shape) == ("speech", 30, (80,))
    assert sorted(set(data.train.users)) == ["p0", "p1", "p2"]
    config = tacit.load({
        "rounds": 1, "data": {"name": "x", "partition": {"kind": "natural"}}, "cohort": 2,
        "model": {"name": "ctc-transformer", "size": "tiny", "depth": 1, "width": 8, "hidden": 8, "heads": 2},
        "local": {"steps": 1, "seconds": 5, "lr": 0.1}, "engine": {"workers": 0},
    })  # fmt: skip
    assert tacit.run(config, "run", dataset=data).last("wer") > 0
    with pytest.raises(UserError, match=r"label: row \d: characters unknown in 'en': '5'"):
        tacit.dataset(
            [{"clip": wave("add"), "said": "room 5"}] * 2, audio="clip", label="said", task="speech"
        )


def test_polars_frames_are_read() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(
        {"age": [1.5, 2.5, None, 4.5] * 5, "job": ["a", "b"] * 10, "who": ["p", "q"] * 10}
    )
    with pytest.raises(UserError, match="column 'age' is missing"):
        tacit.dataset(frame, features=["age"], label="job", user="who")
    data = tacit.dataset(frame, features=["age"], label="job", user="who", on_bad="skip")
    assert len(data.train) + len(data.test) == 15 and data.label_names == ("a", "b")
    tagged = polars.DataFrame(SENTENCES)
    assert words(source=tagged).label_names == ("LOC", "O", "PER")
    assert isinstance(words(source=tagged).tokenizer, Bytes)
