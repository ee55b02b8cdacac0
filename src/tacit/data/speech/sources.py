"""Speech data sets by name: your own corpus, the hub's, the recordings, and the synthetic ones.

All of them become features in the cache, once, and a `Dataset` for the task `speech`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tacit.data.dataset import Dataset
from tacit.data.speech import corpora, hub, recordings, store, synthesis
from tacit.data.speech.audio import BadAudio, read, soundfile
from tacit.data.speech.corpora import SpeechColumns, Utterance
from tacit.data.speech.features import BANDS
from tacit.data.speech.options import SpeechOptions
from tacit.data.speech.records import hear
from tacit.data.speech.store import Bad, OnBad, Outcome
from tacit.data.speech.tokens import Alphabet, UnknownCharacters, alphabet
from tacit.errors import UserError
from tacit.fetching import cache

FOLDER = "speech"
HUB = "hf:"
NAMES = {
    FOLDER: "a corpus of your own, given as path: a manifest, LibriSpeech's layout, or Common Voice's; yours",
    **{
        name: f"synthetic voices, made by espeak-ng; the {domain} domain"
        for name, domain in synthesis.DOMAINS.items()
    },
    **{name: about.summary for name, about in recordings.KNOWN.items()},
}
"""Every name that `load` accepts besides `hf:NAME`, with licence and origin."""

_Placed = tuple[str, Utterance]
"""An utterance and the split it is for."""
_VERSION = 2
"""The version of reading, features and tokens: increased when the same files would give another corpus."""
_SHARD = 64
"""Utterances in a shard: some ten megabytes of features, a few seconds of work."""
_CORPUS = {"language", "layout", "splits", "share", "audio", "text", "speaker", "resample", "on_bad"}
_TAKES = {
    FOLDER: _CORPUS,
    HUB: _CORPUS - {"layout"},
    **{name: {"speakers", "utterances", "vocabulary"} for name in synthesis.DOMAINS},
    **{name: {"on_bad"} for name in recordings.KNOWN},
}


def check(name: str, path: Path | str | None, options: Mapping[str, Any]) -> None:
    """Refuse at once anything that `load` could not provide."""
    takes = _TAKES[HUB if name.startswith(HUB) else name]
    for option in options:
        if option not in takes:
            raise UserError(
                f"data.speech.{option} does not apply to {name!r}; it takes {', '.join(sorted(takes))}"
            )
    if name == FOLDER and path is None:
        raise UserError("data set 'speech' needs a path: the folder of a corpus, or its manifest")
    if name != FOLDER and path is not None:
        raise UserError(f"{name!r} takes no path; for a corpus of your own use data set 'speech'")
    given = SpeechOptions(**options)
    if name in synthesis.DOMAINS:
        synthesis.speakers(*_synthetic(name, given))
    alphabet(given.language)
    if not 0 <= given.share[0] < given.share[1] <= 1:
        raise UserError(f"data.speech.share is a part of 0…1 such as [0, 0.1], not {list(given.share)}")


def _synthetic(name: str, given: SpeechOptions) -> tuple[synthesis.Domain, int, int]:
    """The domain, the number of speakers, and the utterances of each."""
    domain = synthesis.DOMAINS[name]
    speakers, utterances = (240, 20) if domain == "federated" else (8, 150)
    return domain, given.speakers or speakers, given.utterances or utterances


def load(name: str, path: Path | None, offline: bool, options: Mapping[str, Any]) -> Dataset:
    """The data set called `name`, its features computed if they are not in the cache."""
    check(name, path, options)
    given = SpeechOptions(**options)
    if name in synthesis.DOMAINS:
        key = synthesis.build(*_synthetic(name, given), given.vocabulary)
        return _dataset(name, key, alphabet("en"), "refuse")
    if name in recordings.KNOWN:
        return _recordings(name, given.on_bad or "skip")
    letters, columns = alphabet(given.language), SpeechColumns(given.audio, given.text, given.speaker)
    about = {"licence": "not stated; yours to know", "origin": name if path is None else str(path)}
    with Console(stderr=True).status("looking at the corpus"):
        if path is None:
            found = list(hub.utterances(hub.download(name.removeprefix(HUB), offline), columns))
        else:
            found = corpora.find(path, given.layout, columns)
        parts = corpora.divide(
            found, {str(split): names for split, names in given.splits.items()}, given.share
        )
        listed = [(split, utterance) for split, utterances in parts.items() for utterance in utterances]
        key = _key(name, listed, letters, given.resample)
    _build(key, listed, letters, given.resample, about)
    return _dataset(name, key, letters, given.on_bad or "refuse")


def _recordings(name: str, on_bad: OnBad) -> Dataset:
    known = recordings.KNOWN[name]
    letters = alphabet(known.languages)
    key = f"{name}-{_VERSION}"
    if not cache.has(key):
        soundfile()
        with known.fetched() as found:
            parts = corpora.divide(found, {})
            listed = [(split, utterance) for split, utterances in parts.items() for utterance in utterances]
            _build(key, listed, letters, True, {"licence": known.licence, "origin": known.origin})
    return _dataset(name, key, letters, on_bad)


def _key(name: str, listed: Sequence[_Placed], letters: Alphabet, resampled: bool) -> str:
    """A cache key that changes with any transcript, speaker or file."""
    files = [(split, u.name, u.text, u.speaker, *_stamp(u)) for split, u in listed]
    described = [_VERSION, letters.name, resampled, files]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
    return "".join(c if c.isalnum() else "-" for c in name)[:40] + f"-{digest}"


def _build(
    key: str, listed: Sequence[_Placed], letters: Alphabet, resampled: bool, about: dict[str, Any]
) -> None:
    """Compute the features of all utterances into the cache, unless they are there."""
    if cache.has(key):
        return
    soundfile()  # report a missing library once, before any work
    pieces = [listed[i : i + _SHARD] for i in range(0, len(listed), _SHARD)]
    shards = [partial(_hear, piece, letters, resampled) for piece in pieces]
    sizes = [len(piece) for piece in pieces]
    store.build(key, shards, sizes, "listening", {**about, "language": letters.name})


def _hear(piece: Sequence[_Placed], letters: Alphabet, resampled: bool) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for split, utterance in piece:
        try:
            text = letters.normalise(utterance.text)
            if not text:
                raise UnknownCharacters("no transcript")
            sound = utterance.audio if isinstance(utterance.audio, Path) else utterance.audio()
            wave = read(sound, resampled)
        except (UnknownCharacters, BadAudio) as error:
            outcomes.append(Bad(utterance.name, str(error)))
        else:
            outcomes.append((split, hear(wave, letters.encode(text), utterance.speaker)))
    return outcomes


def _stamp(utterance: Utterance) -> tuple[int, int]:
    """A stamp that changes with the file; a missing file is reported later, with all others."""
    if not isinstance(utterance.audio, Path):
        return 0, 0
    try:
        stat = utterance.audio.stat()
    except OSError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def _dataset(name: str, key: str, letters: Alphabet, on_bad: OnBad) -> Dataset:
    parts, about = store.open_corpus(key, on_bad)
    return Dataset(
        name,
        parts["train"],
        parts["test"],
        classes=len(letters.tokens),
        shape=(BANDS,),
        licence=about["licence"],
        origin=about["origin"],
        task="speech",
        validation=parts.get("validation"),
        tokens=letters.tokens,
    )
