"""Speech: from sound and transcripts to batches of features and tokens."""

from typing import TYPE_CHECKING

from tacit.lazy import lazily

if TYPE_CHECKING:
    from tacit.data.speech.features import BANDS, HOP, RATE, WINDOW, log_mel
    from tacit.data.speech.records import SpeechRecords
    from tacit.data.speech.tokens import BLANK, BOUNDARY, Alphabet, alphabet

__all__ = [
    "BANDS",
    "BLANK",
    "BOUNDARY",
    "HOP",
    "RATE",
    "WINDOW",
    "Alphabet",
    "SpeechRecords",
    "alphabet",
    "log_mel",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tacit.data.speech.features": "BANDS HOP RATE WINDOW log_mel",
        "tacit.data.speech.records": "SpeechRecords",
        "tacit.data.speech.tokens": "BLANK BOUNDARY Alphabet alphabet",
    },
)
