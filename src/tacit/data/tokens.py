"""Tokenizers: they turn text into tokens.

A tokenizer belongs to a model, so it comes from the model's own folder (`from_folder`). `Bytes` needs no
files; it is for models that are trained from scratch.

>>> tokenizer = Bytes()
>>> tokenizer(["hé", ""], None, most=8)
[Tokens(ids=[256, 104, 195, 169, 257], second=0), Tokens(ids=[256, 257], second=0)]
>>> tokenizer(["good morning"], None, most=4)[0].ids
[256, 103, 111, 257]
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tacit.errors import UserError

BYTES = "bytes"
"""The name of the tokenizer that needs no files."""


BYTES_AROUND = "after 256 and before 257; 258 fills up"
"""The tokens around a text's bytes."""


class Tokens(NamedTuple):
    """One text, or two texts that belong together, in the form that a model reads."""

    ids: list[int]
    second: int
    """Where the second text starts; 0 if there is only one text."""


class Tokenizer(Protocol):
    """Turns texts into tokens. Any object with these members will do; the same text must always give the same
    tokens.
    """

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever any token may change, so cached tokens never come from another
        tokenizer.
        """

    @property
    def vocabulary(self) -> int:
        """An upper bound (exclusive) of all ids."""

    @property
    def pad(self) -> int:
        """The id that pads a batch; attention masks hide it from the model."""

    @property
    def segments(self) -> bool:
        """Whether the model gets the segment of each token (`token_type_ids`)."""

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None, most: int) -> list[Tokens]:
        """At most `most` tokens of each text (with the second one of `pairs`), truncated at the end."""
        ...


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes between a start (256) and an end (257); padding is 258."""

    fingerprint: str = BYTES
    vocabulary: int = 259
    pad: int = 258
    segments: bool = False

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None, most: int) -> list[Tokens]:
        seconds = [""] * len(texts) if pairs is None else pairs
        return [self._one(a, b, most) for a, b in zip(texts, seconds, strict=True)]

    def split(self, words: Sequence[str], most: int) -> tuple[list[int], list[int | None]]:
        """The words, separated by spaces; a space belongs to no word."""
        ids: list[int] = [256]
        places: list[int | None] = [None]
        for number, word in enumerate(words):
            if number:
                ids.append(32)
                places.append(None)
            own = word.encode()
            ids += own
            places += [number] * len(own)
        return [*ids[: most - 1], 257], [*places[: most - 1], None]

    def _one(self, text: str, pair: str, most: int) -> Tokens:
        first, second = text.encode()[: most - 2], pair.encode()
        if not second:
            return Tokens([256, *first, 257], 0)
        # Both are shortened, the longer one first, so that neither vanishes.
        room = most - 3
        keep = min(len(second), max(room // 2, room - len(first)))
        first = first[: room - keep]
        return Tokens([256, *first, 257, *second[:keep], 257], len(first) + 2)


class FromFolder:
    """A transformers tokenizer, without its many options."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Computed now: a tokenizer's own description changes once it has truncated something.
        self.fingerprint: str = _fingerprint(tokenizer)
        self.vocabulary: int = len(tokenizer)
        self.segments: bool = "token_type_ids" in tokenizer.model_input_names
        # GPT-2's kind of tokenizer has no padding id; since masks hide padding, any id will do.
        self.pad: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.longest: int = tokenizer.model_max_length

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None, most: int) -> list[Tokens]:
        encoded = self._tokenizer(
            list(texts),
            None if pairs is None else list(pairs),
            truncation=True,
            max_length=most,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=self.segments,
        )
        ids: list[list[int]] = encoded["input_ids"]
        if pairs is None or not self.segments:
            return [Tokens(one, 0) for one in ids]
        return [
            Tokens(one, kinds.index(1) if 1 in kinds else 0)
            for one, kinds in zip(ids, encoded["token_type_ids"], strict=True)
        ]

    def split(self, words: Sequence[str], most: int) -> tuple[list[int], list[int | None]]:
        """The tokenizer itself says which word a token belongs to; only fast tokenizers can."""
        if not getattr(self._tokenizer, "is_fast", False):
            raise UserError("tokenizer: a class for each word needs a fast tokenizer (tokenizer.json)")
        self._tokenizer.add_prefix_space = True  # GPT-2's kind requires it for separate words
        encoded = self._tokenizer(list(words), is_split_into_words=True, truncation=True, max_length=most)
        return list(encoded["input_ids"]), list(encoded.word_ids())


def from_object(given: Any) -> Tokenizer:
    """A tokenizer given as an object: one with what `Tokenizer` has, or a copy of one of transformers."""
    if all(hasattr(given, name) for name in ("vocabulary", "segments", "pad", "fingerprint")):
        own: Tokenizer = given
        return own
    if hasattr(given, "model_input_names") and hasattr(given, "model_max_length"):
        return FromFolder(copy.deepcopy(given))  # reading texts changes how it truncates
    raise UserError(
        f"tokenizer: a {type(given).__name__} is not known as one; give bytes, a folder, a name on the hub, "
        "or a tokenizer of transformers"
    )


def from_folder(folder: Path) -> FromFolder:
    """The tokenizer next to a model's weights; uses no network."""
    try:
        import transformers  # seconds of imports that runs on pictures do not need
    except ImportError:
        raise UserError(
            "texts need a tokenizer of transformers; install it with `pip install 'tacit[transformers]'`"
        ) from None
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        return FromFolder(found)
    except Exception as error:  # transformers raises several kinds for missing or wrong files
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{folder} holds no tokenizer that can be read ({lines[0][:120]}); put the model's "
            "tokenizer.json (or vocab.txt, with tokenizer_config.json) there, or set data.tokenizer"
        ) from None


def _fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        body = backend.to_str()
    else:
        body = json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()
