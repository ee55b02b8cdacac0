"""A spoken language of tones, for tests: a corpus within a moment, with only NumPy.

Every character is a short chord of its own; a speaker has a pitch and a pace. It has the shapes of real
speech, and a tiny recogniser can learn it, as Gaussian clouds stand in for pictures.

>>> data = tiny(speakers=4)
>>> data.task, data.classes, data.shape, len(set(data.train.users))
('speech', 30, (80,), 4)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tacit import randomness
from tacit.data.dataset import Dataset
from tacit.data.speech.features import RATE
from tacit.data.speech.records import Heard, gather, hear
from tacit.data.speech.tokens import alphabet

_WORDS = ("add", "bad", "cab", "dad", "face", "fed", "bee", "cafe", "deaf", "ace")
_CHARACTERS = "'-abcdefghijklmnopqrstuvwxyz"
_SYMBOL = 0.06
"""Seconds of a character at pace 1."""


def wave(text: str, pitch: float = 1.0, pace: float = 1.0) -> NDArray[np.float32]:
    """The text as tones, two for each character, above a faint hiss."""
    samples = int(_SYMBOL * RATE / pace)
    time = 2 * np.pi * np.arange(samples) / RATE
    sound = np.zeros((len(text), samples))
    for row, c in enumerate(text):
        if c != " ":
            rank = _CHARACTERS.index(c)
            low, high = pitch * (250 + 60 * rank), pitch * (2000 + 150 * (rank * 7 % 29))
            sound[row] = 0.3 * np.hanning(samples) * (np.sin(low * time) + np.sin(high * time))
    hiss = 0.001 * np.random.default_rng(0).normal(size=sound.size)
    return (sound.reshape(-1) + hiss).astype(np.float32)


def tiny(speakers: int = 8, utterances: int = 6, words: int = 2, seed: int = 0) -> Dataset:
    """`speakers` for training with about `utterances` each, and two more each for validation and test."""
    english = alphabet("en")

    def part(name: str, count: int) -> Iterator[Heard]:
        for speaker in range(count):
            rng = randomness.generator(seed, "tiny speech", name, speaker)
            pitch, pace = rng.uniform(0.8, 1.25), rng.uniform(0.8, 1.25)
            for _ in range(1 + rng.poisson(utterances - 1)):
                text = " ".join(rng.choice(_WORDS, size=words))
                yield hear(wave(text, pitch, pace), english.encode(text), f"{name}-{speaker}")

    train, validation, test = (
        gather(part(name, count)) for name, count in (("train", speakers), ("validation", 2), ("test", 2))
    )
    return Dataset(
        "tiny-speech",
        train,
        test,
        classes=len(english.tokens),
        shape=(80,),
        licence="none",
        origin="tones, made here",
        task="speech",
        validation=validation,
        tokens=english.tokens,
    )
