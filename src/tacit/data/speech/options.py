"""The section `data.speech` of a config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from tacit.section import Section

Layout = Literal["auto", "manifest", "librispeech", "common-voice"]
OnBad = Literal["refuse", "skip"]


class SpeechOptions(Section):
    """How a corpus of speech is read; `tacit.data.speech.sources` says which keys a corpus takes."""

    language: str = "en"
    """Whose letters are the tokens: en, fr, de, be, bg, ca, cs, el, es, nl, ro, ru, or several: fr+de."""
    layout: Layout = "auto"
    splits: dict[Literal["train", "validation", "test"], tuple[str, ...]] = Field({})
    """The corpus's own names ({train: [train-clean-100], …}); left out, by how they begin."""
    share: tuple[float, float] = (0.0, 1.0)
    """Which part of the training speakers: [0, 0.1] for a seed model and [0.1, 1] for the federation."""
    audio: str | None = None
    """Columns of a manifest or a hub data set, where their names cannot be guessed."""
    text: str | None = None
    speaker: str | None = None
    resample: bool = True
    """Bring other sample rates to 16 kHz; otherwise such a file counts as bad."""
    on_bad: OnBad | None = None
    """What to do about unusable files and transcripts; left out, recordings skip and all others refuse."""
    speakers: PositiveInt | None = None
    """Of a synthetic corpus: training speakers, utterances of each on average, and different words."""
    utterances: PositiveInt | None = None
    vocabulary: PositiveInt = 100
