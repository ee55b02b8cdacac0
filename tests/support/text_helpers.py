"""Small tokenizers, texts and files for the tests of text data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tacit.data.tokens import Bytes, Tokens

WORDS = [
    *("the", "a", "film", "is", "was", "not", "very", "good", "bad"),
    *("great", "poor", "dull", "fine", "plot", "cast", "!", "."),
]


@dataclass
class Counting:
    """The bytes tokenizer; it records the texts that it was called with."""

    asked: list[str] = field(default_factory=list)
    fingerprint: str = "counting"
    vocabulary: int = 259
    pad: int = 258
    segments: bool = False

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None, most: int) -> list[Tokens]:
        self.asked += texts
        return Bytes()(texts, pairs, most)


def word_tokenizer(folder: Path) -> Path:
    """A folder with a BERT-style tokenizer for `WORDS`, as `save_pretrained` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    import transformers

    numbers = {word: number for number, word in enumerate(vocabulary)}
    transformers.BertTokenizer(vocab=numbers, model_max_length=64).save_pretrained(folder)
    return folder


def sentences(count: int) -> list[str]:
    """Different sentences of different lengths from `WORDS`."""
    products = itertools.product(WORDS, WORDS, WORDS, WORDS)
    return [" ".join(words[: 2 + i % 3]) for i, words in enumerate(itertools.islice(products, count))]
