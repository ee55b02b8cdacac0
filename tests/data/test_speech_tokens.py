"""Transcripts to tokens and back: the paper's character sets and its normalisation."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tacit.data.speech.tokens import BLANK, BOUNDARY, LETTERS, UnknownCharacters, alphabet
from tacit.errors import UserError


def test_english_has_29_characters_and_the_blank() -> None:
    """The paper's linear layer has 30 outputs: its parameter counts have 30e + 30."""
    tokens = alphabet("en").tokens
    assert len(tokens) == 30
    assert tokens[BLANK] == "" and tokens[BOUNDARY] == "|"
    assert set(tokens[1:]) == set(string.ascii_lowercase) | {"'", "-", "|"}


@pytest.mark.parametrize("language", LETTERS)
def test_alphabets_are_sound(language: str) -> None:
    tokens = alphabet(language).tokens
    assert len(set(tokens)) == len(tokens)
    assert all(len(t) == 1 and t == t.lower() for t in tokens[1:])
    assert tokens[:4] == ("", "|", "'", "-")


@pytest.mark.parametrize(
    ("language", "text", "wanted"),
    [
        ("en", "Don't STOP, well-known Mr. Smith!", "don't stop well-known mr smith"),
        ("en", "“Naïve” façade; Ærø's æther", "naive facade aero's aether"),
        ("en", "it’s ‘quoted’ – and - dashed--twice", "it's quoted and dashed twice"),
        ("en", "  spaced \t out\nlines ", "spaced out lines"),
        ("en", "yes/no… maybe... & so", "yes no maybe so"),
        ("fr", "L’été, où êtes-vous ? Çà et là : cœur", "l'été où êtes-vous çà et là cœur"),
        ("fr", "mañana", "manana"),
        ("de", "Größe, Übermaß, Äpfel", "größe übermaß äpfel"),
        ("de", "Café", "cafe"),
        ("ro", "Şi ţara", "și țara"),
        ("ru", "Съешь ещё этих!", "съешь ещё этих"),
        ("be", "сям’я", "сям'я"),
        ("cs", "Příliš žluťoučký kůň", "příliš žluťoučký kůň"),
        ("el", "Καλημέρα, κόσμε·", "καλημέρα κόσμε"),
        ("ca", "col·legi", "col·legi"),
        ("en", "!!! …", ""),
    ],
)
def test_normalisation(language: str, text: str, wanted: str) -> None:
    assert alphabet(language).normalise(text) == wanted


@pytest.mark.parametrize(("language", "text", "named"), [("en", "route 66", "6"), ("en", "да ok", "д")])
def test_unknown_characters_are_named(language: str, text: str, named: str) -> None:
    with pytest.raises(UnknownCharacters, match=named):
        alphabet(language).normalise(text)


@given(st.text(max_size=40), st.sampled_from(sorted(LETTERS)))
def test_normalisation_is_idempotent_and_what_it_leaves_can_be_encoded(text: str, language: str) -> None:
    letters = alphabet(language)
    try:
        clean = letters.normalise(text)
    except UnknownCharacters:
        return
    assert letters.normalise(clean) == clean
    tokens = letters.encode(clean)
    assert BLANK not in tokens
    assert letters.decode(tokens) == clean


def test_alphabets_can_be_joined_and_a_wrong_name_is_refused() -> None:
    both = alphabet("fr+de")
    assert set(both.letters) == set(LETTERS["fr"]) | set(LETTERS["de"])
    assert len(set(both.tokens)) == len(both.tokens)
    with pytest.raises(UserError, match="no alphabet for language 'eng'; did you mean 'en'"):
        alphabet("eng")
