"""Audio data sets of the Hugging Face hub, as utterances.

`datasets` knows where they are and how they are packed. The sound itself is read here, from the stored bytes,
so `datasets` needs no decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tacit.data.speech.corpora import SpeechColumns, Utterance
from tacit.errors import UserError
from tacit.fetching import hub


def download(name: str, offline: bool) -> Mapping[str, Any]:
    """The splits of `NAME`, or of one configuration of it, `NAME:CONFIGURATION`."""
    repository, _, configuration = name.partition(":")
    if hub.left_out(offline):
        raise UserError(f"data set hf:{name} is on the hub, which was left out (offline)")
    import datasets
    from huggingface_hub import HfApi

    try:
        hub.probe(lambda: HfApi().dataset_info(repository, timeout=hub.TIMEOUT))
        splits: Mapping[str, Any] = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # `datasets` raises a dozen kinds of errors, mostly network errors
        reason = str(error) if isinstance(error, hub.Unavailable) else hub.first_line(error)
        raise UserError(
            f"data set hf:{name} cannot be had: {reason}. Download it and give its folder: data set 'speech' "
            "with a path"
        ) from None
    return splits


def utterances(splits: Mapping[str, Any], columns: SpeechColumns) -> Iterator[Utterance]:
    """Every row of every split; its sound is fetched on request."""
    import datasets

    for split, table in splits.items():
        audio, text, speaker = columns.among(list(table.column_names), f"split {split!r}")
        stored = table.select_columns([audio]).cast_column(audio, datasets.Audio(decode=False))
        for i, (said, who) in enumerate(zip(table[text], table[speaker], strict=True)):
            yield Utterance(f"{split}[{i}]", partial(_content, stored, audio, i), said or "", str(who), split)


def _content(stored: Any, audio: str, row: int) -> bytes:
    sound = stored[row][audio]
    content: bytes = sound["bytes"] if sound["bytes"] is not None else Path(sound["path"]).read_bytes()
    return content
