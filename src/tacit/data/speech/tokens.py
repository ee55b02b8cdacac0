"""Characters as tokens: converts transcripts to numbers and back.

Token 0 is CTC's blank, followed by the word boundary `|`, the apostrophe, the hyphen, and the letters.
English has 29 characters and the blank; French and German keep their own letters (Pelikan et al., 2025). An
alphabet is stated here in full, never collected from transcripts: the letters that people used would be a
release of private data.

>>> english = alphabet("en")
>>> len(english.tokens), english.normalise("“It’s a half-open café,” – she said.")
(30, "it's a half-open cafe she said")
>>> english.decode(english.encode("it's open"))
"it's open"
>>> alphabet("fr").normalise("Garçon, l’œuf !")
"garçon l'œuf"
>>> english.normalise("room 5")
Traceback (most recent call last):
tacit.data.speech.tokens.UnknownCharacters: characters unknown in 'en': '5'
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.errors import UserError

BLANK, BOUNDARY = 0, 1
"""The indices of CTC's blank and of the word boundary; they are the same in every alphabet."""
_BAR = "|"

_LATIN = string.ascii_lowercase
_CYRILLIC = "абвгдежзийклмнопрстуфхцчшщъыьэюя"
LETTERS = {
    "en": _LATIN,
    "fr": _LATIN + "àâæçéèêëîïôœùûüÿ",
    "de": _LATIN + "äöüß",
    "be": "абвгдеёжзійклмнопрстуўфхцчшыьэюя",
    "bg": "абвгдежзийклмнопрстуфхцчшщъьюя",
    "ca": _LATIN + "àçèéíïòóúü·",
    "cs": _LATIN + "áčďéěíňóřšťúůýž",
    "el": "αάβγδεέζηήθιίϊΐκλμνξοόπρσςτυύϋΰφχψωώ",
    "es": _LATIN + "áéíñóúü",
    "nl": _LATIN + "áèéëíïóöúü",
    "ro": _LATIN + "ăâîșț",
    "ru": _CYRILLIC + "ё",
}
"""The letters of each language, lower case."""

_QUOTES = "’‘ʼ＇´`"
_SPLITTING = re.compile(r"[–—―…/]|--+|\.\.\.")
_SPELT_OUT = str.maketrans(
    {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"}
    | {"ş": "ș", "ţ": "ț"}  # Romanian typed with cedillas
)


class UnknownCharacters(ValueError):
    """A transcript has characters without a token in the alphabet."""


@dataclass(frozen=True)
class Alphabet:
    """The tokens of one or more languages, and the conversion to and from them."""

    name: str
    letters: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """Every output of a recogniser, in order; the first is the blank, which means no character."""
        return ("", _BAR, "'", "-", *self.letters)

    def normalise(self, text: str) -> str:
        """The transcript in these characters and spaces; `UnknownCharacters` if others remain.

        Lower case. Punctuation is removed, except apostrophes and hyphens inside words. A letter outside the
        alphabet loses its accent if the remaining letter is in the alphabet.
        """
        text = unicodedata.normalize("NFC", text).lower()
        # A typographic apostrophe counts only between letters; anywhere else it was a quotation mark.
        text = re.sub(rf"(?<=\w)[{_QUOTES}](?=\w)", "'", text)
        text = "".join(self._spelled(c) for c in _SPLITTING.sub(" ", text))
        words = [word.strip("-") for word in text.split()]
        text = " ".join(word for word in words if word.strip("'"))
        unknown = sorted(set(text) - self._known)
        if unknown:
            listed = " ".join(map(repr, unknown))
            raise UnknownCharacters(f"characters unknown in {self.name!r}: {listed}")
        return text

    def encode(self, text: str) -> NDArray[np.int64]:
        """Tokens of a normalised transcript."""
        return np.array([self._index[c] for c in text.replace(" ", _BAR)], np.int64)

    def decode(self, tokens: Iterable[Any]) -> str:
        """The transcript of tokens; blanks are dropped."""
        return "".join(self.tokens[int(t)] for t in tokens).replace(_BAR, " ").strip()

    def _spelled(self, c: str) -> str:
        if c in self._known:
            return c
        if c.isspace():
            return " "
        plain = "".join(p for p in unicodedata.normalize("NFKD", c) if not unicodedata.combining(p))
        for candidate in (c.translate(_SPELT_OUT), plain):
            if candidate and set(candidate) <= self._known:
                return candidate
        return "" if unicodedata.category(c)[0] in "PSCM" else c

    @cached_property
    def _index(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens) if token}

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.letters + "'- ")


def alphabet(languages: str) -> Alphabet:
    """The alphabet of a language, or of several joined by plus signs: `fr+de`.

    >>> len(alphabet("de").tokens), len(alphabet("fr").tokens), len(alphabet("en+fr+de").tokens)
    (34, 46, 49)
    """
    letters = ""
    for language in languages.split("+"):
        if language not in LETTERS:
            near = get_close_matches(language, LETTERS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(
                f"no alphabet for language {language!r}; {hint}there are {', '.join(LETTERS)}, "
                "and several joined by +"
            )
        letters += "".join(c for c in LETTERS[language] if c not in letters)
    return Alphabet(languages, letters)
