"""Corpora that tacit makes or fetches: synthetic voices and recordings. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tacit import cli
from tacit.data import load
from tacit.data.speech import recordings, sentences, store, synthesis
from tacit.data.speech.corpora import divide
from tacit.data.speech.tokens import alphabet

SENTENCES = sorted(
    f"{who} {what} {where}"
    for who in ("a man is", "the dogs are", "two women are", "nobody is")
    for what in ("running", "walking", "eating", "playing", "sleeping")
    for where in ("outside", "inside", "nearby", "here", "together", "alone")
)


@pytest.fixture(autouse=True)
def _own_cache_with_sentences(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    sentences._add(set(SENTENCES))


def test_short_sentences_use_the_most_frequent_words_only() -> None:
    assert sentences.short_sentences(6, 100) == sentences.short_sentences(5, 100) == SENTENCES
    few = sentences.short_sentences(5, 16)
    assert 0 < len(few) < len(SENTENCES)
    assert len({word for s in few for word in s.split()}) <= 16
    assert all(len(s.split()) <= 4 for s in sentences.short_sentences(4, 100))


def test_two_domains_of_different_voices() -> None:
    many, few = synthesis.speakers("federated", 240, 20), synthesis.speakers("seed", 8, 150)
    voices = [{(s.accent, s.variant) for s in cast} for cast in (many, few)]
    assert not voices[0] & voices[1]
    assert len(voices[0]) == len(many) and len(voices[1]) == len(few)
    names = {split: {s.name for s in many if s.split == split} for split in store.SPLITS}
    assert [len(names[split]) for split in store.SPLITS] == [240, 24, 40]
    sizes = np.array([s.utterances for s in many if s.split == "train"])
    assert 15 < sizes.mean() < 26 and sizes.min() >= 2 and sizes.max() > 5 * np.median(sizes)
    assert synthesis.speakers("federated", 240, 20) == many


@pytest.mark.slow
def test_synthetic_speech_is_the_same_wherever_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("espeakng_loader")
    data = load("synthetic-speech", speech={"speakers": 3, "utterances": 4})
    texts = {}
    for split, records in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        texts[split] = {alphabet("en").decode(records.transcript(i)) for i in range(len(records))}
        assert texts[split] <= set(SENTENCES)
        assert records.seconds.min() > 0.3 and records.seconds.max() < 4
    assert not (texts["train"] & texts["test"] or texts["train"] & texts["validation"])
    assert len(set(data.train.users)) == 3 and "synthetic" in data.origin

    # Another cache, shards in another order and one of them made before: the very same sound.
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path))
    sentences._add(set(SENTENCES))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    again = load("synthetic-speech", speech={"speakers": 3, "utterances": 4})
    for a, b in ((data.train, again.train), (data.test, again.test)):
        assert np.array_equal(a.users, b.users)
        everything = np.arange(len(a))
        assert all(np.array_equal(a.take(everything)[k], b.take(everything)[k]) for k in ("x", "tokens"))


@pytest.mark.slow
def test_the_command_says_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("espeakng_loader")
    arguments = ["tacit", "corpus", "synthetic", "--speakers", "2", "--utterances", "3", "--json"]
    monkeypatch.setattr("sys.argv", arguments)
    # The seed domain is as large as ever; a smaller one is enough to see the command work.
    monkeypatch.setattr(
        "tacit.data.speech.sources._synthetic", lambda name, given: (synthesis.DOMAINS[name], 2, 3)
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    facts = json.loads(capsys.readouterr().out)
    assert facts["synthetic-speech"]["splits"]["train"]["speakers"] == 2
    assert facts["synthetic-speech"]["options"] == {"speakers": 2, "utterances": 3}
    assert facts["synthetic-speech-seed"]["splits"]["test"]["utterances"] == 100


def test_stamps_pair_each_sound_with_its_own_language(tmp_path: Path) -> None:
    root = tmp_path / "usr/share/tuxpaint/stamps/animals/birds"
    root.mkdir(parents=True)
    (root / "owl.txt").write_text(
        "An owl.\nfr.utf8=Un hibou.\nfr_CA.utf8=Non.\nru.utf8=Сова.\nde.utf8=Eule.\n"
    )
    for language in ("fr", "ru", "de", "el"):
        (root / f"owl_desc_{language}.ogg").touch()
    (root / "owl.ogg").touch()
    found = list(recordings.stamps(tmp_path))
    assert [(u.name, u.text, u.speaker) for u in found] == [
        ("animals/birds/owl_desc_el.ogg", "", "el/animals"),
        ("animals/birds/owl_desc_fr.ogg", "Un hibou.", "fr/animals"),
        ("animals/birds/owl_desc_ru.ogg", "Сова.", "ru/animals"),
    ]


def test_fillets_pair_each_sound_with_its_character(tmp_path: Path) -> None:
    root = tmp_path / "usr/share/games/fillets-ng"
    script, sound = root / "script/city", root / "sound/city/cs"
    script.mkdir(parents=True)
    sound.mkdir(parents=True)
    (script / "dialogs_cs.lua").write_text(
        'dialogId("a1", "font_statue", "Welcome.")\ndialogStr("Vítejte.")\n\n'
        'dialogId("a2", "font_small", "He said \\"no\\".")\ndialogStr("Řekl \\"ne\\".")\n'
        'dialogId("a2", "font_big", "Again.")\ndialogStr("Znovu.")\n'
        'dialogId("a3", "font_big", "No sound.")\ndialogStr("Nic.")\n'
    )
    for name in ("a1", "a2", "noise"):
        (sound / f"{name}.ogg").touch()
    found = list(recordings.fillets(tmp_path))
    assert [(u.name, u.text, u.speaker, u.split) for u in found] == [
        ("city/cs/a1.ogg", "Vítejte.", "cs/statue", "test"),
        ("city/cs/a2.ogg", 'Řekl "ne".', "cs/small", "train"),
    ]
    assert [len(part) for part in divide(found, {}).values()] == [1, 0, 1]
