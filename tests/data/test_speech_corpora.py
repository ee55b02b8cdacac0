"""Speech corpora: their layouts, errors in their files, and which client gets which utterance."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tacit.config import load as load_config
from tacit.config.build import build_dataset, build_population
from tacit.data import check, load, partition
from tacit.data.speech import corpora, hub, sources
from tacit.data.speech.audio import BadAudio, read, resample
from tacit.data.speech.corpora import SpeechColumns, Utterance, divide
from tacit.data.speech.features import log_mel
from tacit.data.speech.tiny import wave
from tacit.data.speech.tokens import alphabet
from tacit.errors import UserError
from tacit.fetching import cache

soundfile = pytest.importorskip("soundfile")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path_factory.mktemp("cache")))


NAMES = [27, 6, 0, 1, 2, 3, 4, 5, 8, 10, 11, 12, 26, 9, 13, 14, 15, 16, 17, 18]
"""Speakers of whom, each drawn by its name, the first is for tests, the second validates, and most train."""


def corpus(folder: Path, speakers: int = 6, each: int = 3, rate: int = 16_000) -> list[dict[str, str]]:
    """Tones as files, and the rows of a manifest for them."""
    (folder / "clips").mkdir(parents=True)
    rows = []
    for speaker in NAMES[:speakers]:
        for i in range(each):
            name = f"clips/{speaker}-{i}.wav"
            soundfile.write(folder / name, wave("bad cafe", pitch=0.8 + 0.05 * speaker), rate)
            rows.append({"path": name, "text": "Bad café!", "speaker": f"s{speaker}"})
    return rows


def write_manifest(folder: Path, rows: list[dict[str, Any]], kind: str = "csv") -> None:
    file = folder / f"manifest.{kind}"
    if kind == "jsonl":
        file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        return
    sep = "," if kind == "csv" else "\t"
    lines = [sep.join(rows[0]), *(sep.join(row.values()) for row in rows)]
    file.write_text("\n".join(lines) + "\n")


def speakers_of(dataset: Any) -> list[set[str]]:
    return [set(part.users.tolist()) for part in (dataset.train, dataset.validation, dataset.test)]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_a_manifest(tmp_path: Path, kind: str) -> None:
    rows = corpus(tmp_path)
    write_manifest(tmp_path, rows, kind)
    data = load("speech", path=tmp_path)
    assert (data.task, data.classes, data.shape) == ("speech", 30, (80,))
    train, validation, test = speakers_of(data)
    assert len(train) == 4 and len(validation) == len(test) == 1
    assert train | validation | test == {f"s{i}" for i in NAMES[:6]}
    assert len(data.train) + len(data.validation) + len(data.test) == 18
    assert alphabet("en").decode(data.train.transcript(0)) == "bad cafe"
    # The features are those of the file, read again by hand.
    speaker = data.train.users[0]
    samples, _ = soundfile.read(tmp_path / f"clips/{speaker[1:]}-0.wav", dtype="float32")
    wanted, _ = log_mel(torch.from_numpy(samples)[None])
    first = data.train.take(np.array([0]))
    torch.testing.assert_close(first["x"][0, : int(first["frames"])].float(), wanted[0], atol=2e-3, rtol=1e-3)
    assert data.train.seconds[0] == pytest.approx(len(samples) / 16_000)


def test_librispeech(tmp_path: Path) -> None:
    for subset, speaker in (
        ("train-clean-100", 19),
        ("train-other-500", 7),
        ("dev-clean", 84),
        ("test-clean", 61),
    ):
        chapter = tmp_path / "LibriSpeech" / subset / str(speaker) / "198"
        chapter.mkdir(parents=True)
        lines = []
        for i in range(2):
            name = f"{speaker}-198-{i:04d}"
            soundfile.write(chapter / f"{name}.flac", wave("a bee"), 16_000)
            lines.append(f"{name} A BEE\n")
        (chapter / f"{speaker}-198.trans.txt").write_text("".join(lines))
    data = load("speech", path=tmp_path)
    assert speakers_of(data) == [{"19", "7"}, {"84"}, {"61"}]
    chosen = {"train": ("train-clean-100",), "test": ("test-clean",)}
    data = load("speech", path=tmp_path / "LibriSpeech", speech={"splits": chosen})
    assert set(data.train.users) == {"19"} and data.validation is None
    with pytest.raises(UserError, match="no split 'train-clean-360'; it has 'dev-clean', 'test-clean'"):
        load("speech", path=tmp_path, speech={"splits": {"train": ("train-clean-360",)}})


def test_common_voice(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    for split in ("train", "dev", "test"):
        soundfile.write(tmp_path / "clips" / f"cv_{split}.mp3", wave("a face"), 16_000)
        rows = f'client_id\tpath\tsentence\tup_votes\nid-{split}\tcv_{split}.mp3\tDu « cœur" !\t2\n'
        (tmp_path / f"{split}.tsv").write_text(rows)
    data = load("speech", path=tmp_path, speech={"language": "fr"})
    assert speakers_of(data) == [{"id-train"}, {"id-dev"}, {"id-test"}]
    assert data.classes == 46
    assert alphabet("fr").decode(data.test.transcript(0)) == "du cœur"


def test_a_data_set_of_the_hub_is_read_from_its_bytes() -> None:
    datasets = pytest.importorskip("datasets")

    def content(pitch: float) -> bytes:
        file = io.BytesIO()
        soundfile.write(file, wave("dad", pitch), 16_000, format="FLAC")
        return file.getvalue()

    def table(names: list[str]) -> Any:
        sound = [{"bytes": content(1 + i / 10), "path": None} for i in range(len(names))]
        columns = {"audio": sound, "sentence": ["Dad."] * len(names), "client_id": names}
        return datasets.Dataset.from_dict(columns).cast_column("audio", datasets.Audio())

    found = list(hub.utterances({"train": table(["a", "b"]), "test": table(["c"])}, SpeechColumns()))
    assert [(u.name, u.speaker, u.split, u.text) for u in found] == [
        ("train[0]", "a", "train", "Dad."),
        ("train[1]", "b", "train", "Dad."),
        ("test[0]", "c", "test", "Dad."),
    ]
    audio = found[1].audio
    assert callable(audio) and np.abs(read(audio()) - wave("dad", 1.1)).max() < 1e-3
    with pytest.raises(UserError, match=r"no column 'speaker'; name one of .* as data.speech.speaker"):
        list(hub.utterances({"train": table(["a"]).remove_columns("client_id")}, SpeechColumns()))


def damaged(folder: Path) -> list[dict[str, str]]:
    """A corpus with one of each mistake."""
    rows = corpus(folder, speakers=12)

    def row(name: str, text: str = "a bee") -> None:
        rows.append({"path": name, "text": text, "speaker": "s0"})

    soundfile.write(folder / "number.wav", wave("a bee"), 16_000)
    row("number.wav", "room 101")
    row("silent.wav", "...")
    soundfile.write(folder / "silent.wav", wave("a bee"), 16_000)
    soundfile.write(folder / "empty.wav", np.zeros(0), 16_000)
    row("empty.wav")
    (folder / "nothing.wav").touch()
    row("nothing.wav")
    whole = (folder / "number.wav").read_bytes()
    (folder / "cut.wav").write_bytes(whole[: len(whole) // 2])
    row("cut.wav")
    soundfile.write(folder / "telephone.wav", wave("a bee")[::2], 8_000)
    row("telephone.wav")
    (folder / "text.wav").write_text("this is no sound" * 9)
    row("text.wav")
    row("missing.wav")
    return rows


def test_bad_utterances_are_refused_or_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = damaged(tmp_path)
    write_manifest(tmp_path, rows)
    with pytest.raises(
        UserError, match=r"7 of 44 utterances cannot be used \(number.wav: characters unknown"
    ):
        load("speech", path=tmp_path)
    data = load("speech", path=tmp_path, speech={"on_bad": "skip"})
    assert len(data.train) + len(data.validation) + len(data.test) == 37
    assert "skipped: 7 of 44" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(UserError, match="8 of 44"):  # 8 kHz is a mistake only where it is said to be
        load("speech", path=tmp_path, speech={"resample": False})
    key = next(p.name for p in cache.root().iterdir() if len(cache.read(p.name)[1]["bad"]) == 8)
    reasons = dict(cache.read(key)[1]["bad"])
    assert reasons == {
        "number.wav": "characters unknown in 'en': '0' '1'",
        "silent.wav": "no transcript",
        "empty.wav": "empty",
        "nothing.wav": "empty",
        "cut.wav": "truncated",
        "telephone.wav": "8000 Hz instead of 16000",
        "text.wav": reasons["text.wav"],
        "missing.wav": "No such file or directory",
    }
    assert "cannot be decoded" in reasons["text.wav"]


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
def test_whole_files_are_read_and_truncated_ones_are_not(tmp_path: Path, kind: str) -> None:
    sound = np.concatenate([wave("a bad cafe", pitch=p) for p in (0.9, 1.0, 1.1)])
    file = tmp_path / f"sound.{kind}"
    soundfile.write(file, np.stack([sound, sound], axis=1), 16_000)
    found = read(file)
    assert abs(len(found) - len(sound)) < 3000  # mp3 pads
    if kind in ("wav", "flac"):
        assert np.abs(found - sound).max() < 1e-3
    content = file.read_bytes()
    with pytest.raises(BadAudio, match=r"truncated|cannot be decoded"):
        read(content[: int(0.6 * len(content))])


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_resampling_keeps_what_both_rates_can_carry(rate: int) -> None:
    def tones(at: int) -> np.ndarray:
        time = np.arange(at) / at
        return np.sin(2 * np.pi * 440 * time) + 0.5 * np.sin(2 * np.pi * 3100 * time + 1)

    found = resample(tones(rate), rate)
    assert len(found) == 16_000
    assert np.abs(found - tones(16_000))[800:-800].max() < 5e-3
    too_high = np.sin(2 * np.pi * 9_500 * np.arange(48_000) / 48_000)
    assert np.abs(resample(too_high, 48_000))[800:-800].max() < 5e-3


def test_a_changed_file_or_transcript_is_another_corpus(tmp_path: Path) -> None:
    rows = corpus(tmp_path, speakers=3, each=1)
    write_manifest(tmp_path, rows)
    load("speech", path=tmp_path)
    load("speech", path=tmp_path)
    assert len(list(cache.root().iterdir())) == 1
    soundfile.write(tmp_path / rows[0]["path"], wave("dad"), 16_000)
    load("speech", path=tmp_path)
    write_manifest(tmp_path, [{**row, "text": "dad"} for row in rows])
    load("speech", path=tmp_path)
    assert len(list(cache.root().iterdir())) == 3


def made(splits: dict[str, str]) -> list[Utterance]:
    return [Utterance(f"{i}", Path(f"{i}"), "a", who, split) for i, (who, split) in enumerate(splits.items())]


def test_a_speaker_in_two_splits_is_refused() -> None:
    rows = [*made({"ann": "train", "bob": "test"}), Utterance("x", Path("x"), "a", "ann", "test")]
    with pytest.raises(UserError, match="speaker 'ann' is in the train and in the test part"):
        divide(rows, {})
    with pytest.raises(UserError, match="which of the splits 'first', 'second'"):
        divide(made({"ann": "first", "bob": "second"}), {"train": ["first"]})
    with pytest.raises(UserError, match="2 speakers, each drawn by its name, cannot be divided"):
        divide(made({"ann": "", "bob": ""}), {})


@pytest.mark.parametrize("speakers", [20, 30, 40, 100])
def test_a_speaker_less_brings_no_other_into_training(speakers: int) -> None:
    """A share of their number would: of 20 two were for tests and two validated, of 19 one and one."""

    def training(names: list[str]) -> set[str]:
        return {u.speaker for u in divide(made(dict.fromkeys(names, "")), {})["train"]}

    names = [f"{i}" for i in range(speakers)]
    for gone in names:
        assert training([name for name in names if name != gone]) == training(names) - {gone}


def test_shares_of_the_speakers_are_disjoint_and_complete() -> None:
    rows = made({f"speaker {i}": "train" if i % 5 else "test" for i in range(1000)})
    seed, rest, everyone = (divide(rows, {}, share) for share in ((0.0, 0.1), (0.1, 1.0), (0.0, 1.0)))
    names = [{u.speaker for u in part["train"]} for part in (seed, rest, everyone)]
    assert not names[0] & names[1] and names[0] | names[1] == names[2]
    assert 50 < len(names[0]) < 110  # binomial(800, 0.1)
    assert seed["test"] == rest["test"] == everyone["test"]


def config_for(folder: Path, **partition_options: Any) -> Any:
    return load_config(
        {
            "rounds": 1,
            "data": {
                "name": "speech",
                "path": str(folder),
                "partition": {"kind": "natural", **partition_options},
            },
            "model": "mlp",
            "cohort": 2,
            "local": {"steps": 1, "batch": 2, "lr": 0.1},
        }
    )


def test_each_speaker_is_one_client_and_reassigning_keeps_the_sizes(tmp_path: Path) -> None:
    rows = corpus(tmp_path, speakers=20, each=4)
    rng = np.random.default_rng(0)
    write_manifest(tmp_path, [rows[i] for i in rng.permutation(len(rows))[:60]])
    natural = config_for(tmp_path)
    dataset = build_dataset(natural)
    own = build_population(natural, dataset)
    owners = [set(dataset.train.users[own.train(c)]) for c in range(len(own))]
    assert all(len(speakers) == 1 for speakers in owners)
    assert len(set.union(*owners)) == len(own) == len(set(dataset.train.users))

    mixed = build_population(config_for(tmp_path, iid="same-sizes"), dataset)
    assert np.array_equal(mixed.sizes, own.sizes)
    assert sorted(mixed.indices.tolist()) == list(range(len(dataset.train)))
    assert sum(len(set(dataset.train.users[mixed.train(c)])) > 1 for c in range(len(mixed))) > len(mixed) / 2


def test_a_user_drawn_for_every_record_evens_the_sizes_out(tmp_path: Path) -> None:
    """Paper 003, Figure 4: "choosing a user id uniformly and randomly from the set of user ids for each data
    point".
    """
    users = np.repeat(np.arange(50), np.r_[np.full(25, 2), np.full(25, 98)])
    mixed = partition.redrawn(partition.natural(users, np.random.default_rng(1)), np.random.default_rng(0))
    assert sorted(mixed.indices.tolist()) == list(range(len(users)))
    sizes = np.diff(mixed.offsets)
    # Binomial(2500, 1/50): mean 50, deviation 7; 50 clients beyond six deviations happens once in 10 million.
    assert len(sizes) == 50 and np.abs(sizes - 50).max() < 42
    write_manifest(tmp_path, corpus(tmp_path, speakers=6, each=4))
    dataset = build_dataset(config_for(tmp_path))
    few = build_population(config_for(tmp_path, clients=3), dataset)
    assert len(few) == 3
    assert all(len(set(dataset.train.users[few.train(c)])) == 1 for c in range(3)), "whole users, unmixed"
    with pytest.raises(UserError, match="99 of 4 users"):
        build_population(config_for(tmp_path, clients=99), dataset)


def test_reassigning_is_uniform() -> None:
    users = np.repeat([0, 1], [3, 1])
    counts = np.zeros(4)
    for seed in range(4000):
        rng = np.random.default_rng(seed)
        counts[partition.reassigned(partition.natural(users, rng), rng).indices[-1]] += 1
    assert np.abs(counts / 4000 - 0.25).max() < 0.04  # about six deviations


KILLED = """
import os, sys, time
from pathlib import Path
import numpy as np
from tacit.data.speech import store
from tacit.data.speech.records import Heard

def shard(n):
    with open(sys.argv[1], "a") as log:
        print(n, file=log)
    time.sleep(float(sys.argv[2]))
    x = np.random.default_rng(n).normal(size=(5 + n, 80)).astype(np.float16)
    split = "train" if n % 3 else "test"
    return [(split, Heard(x, np.arange(1 + n), f"s{n}", 0.1 * n)), store.Bad(f"bad {n}", "so")]

store.build("corpus", [lambda n=n: shard(n) for n in range(12)], [2] * 12, "working", {"licence": "none"})
"""


@pytest.mark.slow
def test_a_killed_build_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, log = tmp_path / "build.py", tmp_path / "log"
    script.write_text(KILLED)

    def start(pause: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, script, log, str(pause)])

    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    parts = cache.root() / ".corpus.parts"
    first = start(0.2)
    deadline = time.monotonic() + 60
    while len(list(parts.glob("*.npz"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = {int(p.stem) for p in parts.glob("*.npz")}
    assert 4 <= len(done) < 12 and not cache.has("corpus")
    begun = len(log.read_text().split())
    assert start(0.0).wait() == 0
    again = [int(n) for n in log.read_text().split()[begun:]]
    assert sorted(again) == sorted(set(range(12)) - done)
    assert not parts.exists()
    (cache.root() / "corpus").rename(tmp_path / "first")
    begun = len(log.read_text().split())
    both = [start(0.05), start(0.05)]  # two processes that ask at once share one corpus and its work
    assert [process.wait() for process in both] == [0, 0]
    assert sorted(map(int, log.read_text().split()[begun:])) == list(range(12))
    assert not parts.exists()

    from tacit.data.speech import store

    records, about = store.open_corpus("corpus", "skip")
    assert len(about["bad"]) == 12 and about["licence"] == "none"
    assert records["train"].users.tolist() == [f"s{n}" for n in range(12) if n % 3]
    assert "validation" not in records
    for row, n in enumerate(n for n in range(12) if n % 3):
        wanted = np.random.default_rng(n).normal(size=(5 + n, 80)).astype(np.float16)
        batch = records["train"].take(np.array([row]))
        assert np.array_equal(batch["x"][0, : 5 + n].numpy(), wanted)
        assert batch["tokens"][0].tolist() == list(range(1 + n))


@pytest.mark.parametrize(
    ("name", "path", "options", "message"),
    [
        ("speech", None, None, "needs a path"),
        ("speech", ".", {"speakers": 3}, "data.speech.speakers does not apply to 'speech'"),
        ("speech", ".", {"language": "xx"}, "no alphabet for language 'xx'"),
        ("speech", ".", {"share": (0.5, 0.2)}, "data.speech.share is a part of 0…1"),
        ("synthetic-speech", None, {"speakers": 5000}, "5000 federated speakers"),
        ("synthetic-speech", ".", None, "takes no path"),
        ("speech-stamps", None, {"language": "fr"}, "does not apply"),
        ("mnist", None, {"language": "fr"}, "data.speech is for corpora of speech, which 'mnist' is not"),
        ("spech", None, None, "did you mean 'speech'"),
    ],
)
def test_impossible_settings_are_refused_at_once(name: str, path: Any, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(name, path, speech=options)


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no corpus of a known layout"):
        corpora.find(tmp_path)
    (tmp_path / "manifest.csv").write_text("file,words\na.wav,hello\n")
    with pytest.raises(UserError, match=r"no column 'text'; name one of file, words as data.speech.text"):
        corpora.find(tmp_path)
    with pytest.raises(UserError, match="no column 'speaker'"):
        corpora.find(tmp_path, columns=SpeechColumns(text="words"))
    (tmp_path / "manifest.csv").write_text("file,words,user\na.wav,hello,\n")
    with pytest.raises(UserError, match="entry 1 lacks its user"):
        corpora.find(tmp_path, columns=SpeechColumns(text="words"))
    (tmp_path / "bad.jsonl").write_text('{"path": "a.wav"\n')
    with pytest.raises(UserError, match="line 1 is not JSON"):
        corpora.find(tmp_path / "bad.jsonl")


def test_every_name_says_licence_and_origin() -> None:
    assert all(";" in text for text in sources.NAMES.values())
