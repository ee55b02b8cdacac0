"""Speech: from sound and transcripts to batches of features and tokens."""

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
