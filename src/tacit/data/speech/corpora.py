"""The layouts of corpora: who said what, and where its sound is.

Whatever its layout, a corpus is a list of utterances, each with a speaker and the name of its split in the
corpus. `divide` decides which splits are for training, and refuses a speaker who is in two.

>>> made = [Utterance(f"{i}.wav", Path(f"{i}.wav"), "yes", f"speaker {i % 30}", "") for i in range(300)]
>>> parts = divide(made, {})
>>> {split: len({u.speaker for u in us}) for split, us in parts.items()}
{'train': 26, 'validation': 2, 'test': 2}
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tacit import randomness
from tacit.data.speech.options import Layout
from tacit.data.speech.store import SPLITS
from tacit.errors import UserError

_USUAL = {
    "audio": ("audio", "path", "file", "filename"),
    "text": ("text", "transcript", "transcription", "sentence"),
    "speaker": ("speaker", "speaker_id", "user", "client_id"),
}
_BEGIN = {"train": ("train",), "validation": ("dev", "val"), "test": ("test",)}
_MANIFESTS = ("manifest.csv", "manifest.tsv", "manifest.jsonl")


class Utterance(NamedTuple):
    """An utterance: a name for reports, its sound (a file, or a function that returns its content) …"""

    name: str
    audio: Path | Callable[[], bytes]
    text: str
    speaker: str
    split: str
    """The corpus's own name for the split; empty if none."""


@dataclass(frozen=True)
class SpeechColumns:
    """Names of a table's columns; guessed where None."""

    audio: str | None = None
    text: str | None = None
    speaker: str | None = None

    def among(self, names: Sequence[str], where: str) -> tuple[str, str, str]:
        """The three columns, in a table with these column names."""
        found = []
        for what, usual in _USUAL.items():
            given = getattr(self, what)
            choices = [given] if given else [name for name in usual if name in names]
            if not choices or choices[0] not in names:
                raise UserError(
                    f"{where} has no column {given or what!r}; name one of {', '.join(names)} "
                    f"as data.speech.{what}"
                )
            found.append(choices[0])
        return found[0], found[1], found[2]


def find(path: Path, layout: Layout = "auto", columns: SpeechColumns | None = None) -> list[Utterance]:
    """All utterances of a folder or manifest, in a fixed order."""
    columns = columns or SpeechColumns()
    manifest = path if path.is_file() else next((path / m for m in _MANIFESTS if (path / m).is_file()), None)
    if layout == "manifest" or (layout == "auto" and manifest is not None):
        if manifest is None:
            raise UserError(f"{path} has no {', '.join(_MANIFESTS[:-1])} or {_MANIFESTS[-1]}")
        return list(_manifest(manifest, columns))
    if layout == "common-voice" or (layout == "auto" and (path / "clips").is_dir()):
        return list(_common_voice(path))
    found = list(_librispeech(path))
    if not found:
        kind = "LibriSpeech" if layout == "librispeech" else "corpus of a known layout"
        raise UserError(
            f"{path} holds no {kind}. Expected a manifest.csv (columns path, text, speaker, and split if it "
            "has any), or LibriSpeech's SUBSET/SPEAKER/CHAPTER/*.trans.txt, or Common Voice's tsv and clips/"
        )
    return found


def divide(
    utterances: Iterable[Utterance],
    splits: Mapping[str, Sequence[str]],
    share: tuple[float, float] = (0.0, 1.0),
) -> dict[str, list[Utterance]]:
    """The utterances for training, validation and test.

    `splits` names the corpus's own splits for each; if empty, they are recognised by the start of their
    names. A corpus with training data only has its speakers divided 8 : 1 : 1. Training speakers are kept if
    their place in 0…1 (a hash of the name) lies within `share`: [0, 0.1] and [0.1, 1] make two corpora. No
    speaker may be in two splits.
    """
    utterances = list(utterances)
    known = {u.split: None for u in utterances}
    names = {ours: list(theirs) for ours, theirs in splits.items()} or {
        ours: [name for name in known if name.lower().startswith(_BEGIN[ours])] for ours in SPLITS
    }
    for wanted in (name for theirs in names.values() for name in theirs):
        if wanted not in known:
            raise UserError(f"the corpus has no split {wanted!r}; it has {', '.join(map(repr, known))}")
    if not splits and (len(known) == 1 or not any(names.values())):
        parts = _by_speaker(utterances)
    else:
        if not names.get("train") or not names.get("test"):
            raise UserError(
                f"which of the splits {', '.join(map(repr, known))} are to train on, and which to test on? "
                "Name them: data.speech.splits: {train: […], test: […]}"
            )
        parts = {ours: [u for u in utterances if u.split in names.get(ours, ())] for ours in SPLITS}
    _refuse_shared_speakers(parts)
    low, high = share
    parts["train"] = [u for u in parts["train"] if low <= _place("share", u.speaker) < high]
    return parts


def _by_speaker(utterances: list[Utterance]) -> dict[str, list[Utterance]]:
    """About a fifth of the speakers are not for training: half of them are for testing and half for
    validation.

    Each speaker's own name decides: choosing by number would move other speakers when one comes or goes.
    """
    places = {u.speaker: _place("speakers", u.speaker) for u in utterances}
    apart = sorted((speaker for speaker in places if places[speaker] < 0.2), key=places.__getitem__)
    if not 0 < len(apart) < len(places):
        raise UserError(
            f"{len(places)} speakers, each drawn by its name, cannot be divided into training and test; give "
            "the corpus a split column that says who is for what"
        )
    tests = -(-len(apart) // 2)
    split_of = {speaker: "test" if i < tests else "validation" for i, speaker in enumerate(apart)}
    return {split: [u for u in utterances if split_of.get(u.speaker, "train") == split] for split in SPLITS}


def _place(purpose: str, speaker: str) -> float:
    """A number in 0…1 that depends only on the name: it does not change when other speakers come or go."""
    return randomness.key(0, purpose, speaker) / 2**128


def _refuse_shared_speakers(parts: Mapping[str, list[Utterance]]) -> None:
    seen: dict[str, str] = {}
    for split, utterances in parts.items():
        for speaker in {u.speaker for u in utterances}:
            if speaker in seen:
                raise UserError(
                    f"speaker {speaker!r} is in the {seen[speaker]} and in the {split} part; a speaker "
                    "belongs in one of them. Without a split column, speakers are divided for you"
                )
            seen[speaker] = split


def _manifest(file: Path, columns: SpeechColumns) -> Iterator[Utterance]:
    rows = _jsonl(file) if file.suffix == ".jsonl" else _table(file)
    if not rows:
        raise UserError(f"{file} lists no utterance")
    audio, text, speaker = columns.among(list(rows[0]), str(file))
    for number, row in enumerate(rows, start=1):
        if not row.get(audio) or not row.get(speaker):
            raise UserError(f"{file}: entry {number} lacks its {audio if not row.get(audio) else speaker}")
        name = str(row[audio])
        said = row.get(text)
        split = str(row.get("split") or "")
        yield Utterance(name, file.parent / name, "" if said is None else str(said), str(row[speaker]), split)


def _table(file: Path, quoting: Literal[0, 3] = csv.QUOTE_MINIMAL) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",", quoting=quoting))


def _jsonl(file: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise UserError(f"{file}: line {number} is not JSON ({error.msg})") from None
        if row is not None:
            rows.append(row)
    return rows


def _librispeech(path: Path) -> Iterator[Utterance]:
    for file in sorted(path.rglob("*.trans.txt")):
        subset, speaker = file.parents[2].name, file.parents[1].name
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, text = line.partition(" ")
            audio = file.parent / f"{name}.flac"
            yield Utterance(str(audio.relative_to(path)), audio, text, speaker, subset)


def _common_voice(path: Path) -> Iterator[Utterance]:
    found = [path / f"{split}.tsv" for split in ("train", "dev", "test") if (path / f"{split}.tsv").is_file()]
    if not found:
        raise UserError(f"{path} holds no train.tsv, dev.tsv or test.tsv, as Common Voice has them")
    for file in found:
        for row in _table(file, csv.QUOTE_NONE):
            name = row["path"] if Path(row["path"]).suffix else f"{row['path']}.mp3"
            yield Utterance(name, path / "clips" / name, row["sentence"] or "", row["client_id"], file.stem)
