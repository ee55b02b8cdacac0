"""Speech recognition: CTC, greedy decoding, word and character error rates.

A batch is `x` [B, T, bands], `frames` [B], `tokens` [B, U] and `lengths` [B]. The model returns a score for
each token and step, and each utterance's number of steps. Token 0 is CTC's blank. Error rates are edits
divided by transcript length, both summed over all utterances, so a long utterance counts more.

>>> Speech(boundary=1).words([2, 3, 1, 4, 1, 1])
[(2, 3), (4,)]
>>> greedy(torch.eye(4)[[0, 2, 2, 0, 2, 3]].unsqueeze(0), torch.tensor([6]))
[[2, 2, 3]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.data.records import Batch
from tacit.tasks.edits import distances, numbered

BLANK = 0


@dataclass(frozen=True)
class Speech:
    """Transcripts as tokens; `boundary` tokens separate words."""

    boundary: int = 1

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """−log of the transcript's probability; not divided by its length, as in paper 003.

        Zero for an utterance that is too short for its transcript, or has none: no alignment exists, and an
        infinite loss would only spoil the batch.
        """
        scores, steps = model(batch["x"], batch["frames"])
        return _losses(scores, steps, batch)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        scores, steps = model(batch["x"], batch["frames"])
        heard = greedy(scores, steps)
        said = [row[:n] for row, n in zip(batch["tokens"].tolist(), batch["lengths"].tolist(), strict=True)]
        words_said, words_heard = numbered([self.words(s) for s in said], [self.words(h) for h in heard])
        return {
            "loss": _losses(scores, steps, batch).sum(dtype=torch.float64),
            "word_edits": distances(words_said, words_heard).sum(),
            "words": torch.tensor(sum(map(len, words_said))),
            "character_edits": distances(said, heard).sum(),
            "characters": torch.tensor(sum(map(len, said))),
            "count": torch.tensor(len(said)),
        }

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        def rate(part: str, whole: str) -> float:
            return sums[part] / (sums[whole] or float("nan"))

        return {
            "loss": rate("loss", "count"),
            "wer": rate("word_edits", "words"),
            "cer": rate("character_edits", "characters"),
        }

    def words(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """The words of a transcript; consecutive boundaries, or boundaries at its ends, add no words."""
        grouped = groupby(tokens, lambda token: token == self.boundary)
        return [tuple(group) for is_boundary, group in grouped if not is_boundary]


def greedy(scores: Tensor, steps: Tensor) -> list[list[int]]:
    """The best token of each step, with repeats merged and blanks removed."""
    best = scores.argmax(2)
    kept = best != BLANK
    kept[:, 1:] &= best[:, 1:] != best[:, :-1]
    kept &= torch.arange(best.shape[1], device=best.device) < steps.unsqueeze(1)
    return [row[keep].tolist() for row, keep in zip(best, kept, strict=True)]


def _losses(scores: Tensor, steps: Tensor, batch: Batch) -> Tensor:
    # In float32, whatever the model's precision: probabilities of long alignments underflow in half.
    chances = scores.float().log_softmax(2).transpose(0, 1)
    lengths = batch["lengths"]
    each = F.ctc_loss(
        chances, batch["tokens"], steps, lengths, blank=BLANK, reduction="none", zero_infinity=True
    )
    return torch.where(lengths > 0, each, 0.0)
