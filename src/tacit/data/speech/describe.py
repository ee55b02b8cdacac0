"""How much speech there is, and how evenly speakers contribute to it.

>>> from tacit.data.speech.tiny import tiny
>>> facts = statistics(tiny(speakers=3).train)
>>> facts["speakers"], sorted(facts)
(3, ['hours', 'max', 'mean', 'min', 'speakers', 'std', 'utterances'])
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.data.dataset import Dataset


def statistics(records: Any) -> dict[str, float]:
    """Hours, speakers, utterances, and minutes per speaker: mean, standard deviation, minimum and maximum."""
    _, owner = np.unique(records.users, return_inverse=True)
    minutes = np.bincount(owner, weights=records.seconds) / 60
    return {
        "hours": round(float(minutes.sum()) / 60, 4),
        "speakers": len(minutes),
        "utterances": len(records),
        "mean": round(float(minutes.mean()), 4),
        "std": round(float(minutes.std()), 4),
        "min": round(float(minutes.min()), 4),
        "max": round(float(minutes.max()), 4),
    }


def splits(dataset: Dataset) -> dict[str, dict[str, float]]:
    """The statistics of training, validation (if there is one) and test."""
    parts = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    return {split: statistics(records) for split, records in parts.items() if records is not None}
