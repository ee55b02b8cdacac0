"""Speech: CTC against a sum over alignments, error rates against jiwer, sums that add up."""

from __future__ import annotations

from itertools import product
from math import isnan

import jiwer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tacit import tasks
from tacit.engine.worker import add_sums
from tacit.tasks.edits import distances
from tacit.tasks.speech import Speech, greedy

LETTERS = "_|abc"


def ids(text: str) -> list[int]:
    return [LETTERS.index(c) for c in text.replace(" ", "|")]


class Recorded(nn.Module):
    """Answers that were written down before, whatever the sound."""

    def __init__(self, scores: Tensor, steps: Tensor) -> None:
        super().__init__()
        self.scores, self.steps = scores, steps

    def forward(self, x: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        chosen = frames  # here the utterance's number
        return self.scores[chosen], self.steps[chosen]


def spoken(pairs: list[tuple[str, str]]) -> tuple[Recorded, dict[str, Tensor]]:
    """A model that hears the second of each pair, and the batch of the first ones."""
    heard = [[k for i in ids(h) for k in (i, i, 0)] for _, h in pairs]  # each letter twice, then a blank
    longest = max([1, *map(len, heard)])
    scores = torch.zeros(len(pairs), longest, len(LETTERS))
    for j, row in enumerate(heard):
        for t in range(longest):  # what follows the last step is nonsense, to be left out
            scores[j, t, row[t] if t < len(row) else 1 + t % 4] = 9.0
    said = [ids(s) for s, _ in pairs]
    width = max([1, *map(len, said)])
    batch = {
        "x": torch.zeros(len(pairs), 1, 1),
        "frames": torch.arange(len(pairs)),
        "tokens": torch.tensor([[*s, *[0] * (width - len(s))] for s in said]),
        "lengths": torch.tensor([len(s) for s in said]),
    }
    return Recorded(scores, torch.tensor([len(row) for row in heard])), batch


HAND_MADE = [
    ("a b c", "a b c"),
    ("a b c", "a c"),
    ("a b c", "a b b c"),
    ("ab bc ca", "ab bb ca"),
    ("abc", ""),
    ("aa bb", "aabb"),
    ("a", "c b a c"),
]


def test_rates_against_jiwer_on_hand_made_cases() -> None:
    task = Speech()
    sums = {k: float(v) for k, v in task.evaluate(*spoken(HAND_MADE)).items()}
    said, heard = (list(side) for side in zip(*HAND_MADE, strict=True))
    rates = task.summarise(sums)
    assert rates["wer"] == pytest.approx(jiwer.wer(said, heard))
    assert rates["cer"] == pytest.approx(jiwer.cer(said, heard))
    assert sums["words"] == 3 * 4 + 1 + 2 + 1 and sums["count"] == 7


texts = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=6).map(" ".join)


@settings(deadline=None, max_examples=50)
@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=5), cut=st.integers(0, 5))
def test_rates_against_jiwer_on_random_strings_in_any_grouping(
    pairs: list[tuple[str, str]], cut: int
) -> None:
    task = Speech()
    parts = [part for part in (pairs[:cut], pairs[cut:]) if part]
    sums = add_sums([{k: float(v) for k, v in task.evaluate(*spoken(part)).items()} for part in parts])
    said, heard = (list(side) for side in zip(*pairs, strict=True))
    rates = task.summarise(sums)
    assert rates["wer"] == pytest.approx(jiwer.wer(said, heard))
    assert rates["cer"] == pytest.approx(jiwer.cer(said, heard))


numbers = st.lists(st.integers(0, 3), max_size=8)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(numbers, numbers), max_size=6))
def test_edit_distance_against_the_definition(pairs: list[tuple[list[int], list[int]]]) -> None:
    def edits(a: list[int], b: list[int]) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(edits(a[1:], b) + 1, edits(a, b[1:]) + 1, edits(a[1:], b[1:]) + (a[0] != b[0]))

    short = [(a[:5], b[:5]) for a, b in pairs]  # the definition takes exponential time
    assert distances([a for a, _ in short], [b for _, b in short]).tolist() == [edits(a, b) for a, b in short]
    for a, b in pairs:
        assert distances([a], [b]).item() == distances([b], [a]).item()


def test_the_loss_is_the_sum_over_all_alignments() -> None:
    torch.manual_seed(0)
    scores, steps = torch.randn(3, 5, 4), torch.tensor([5, 4, 3])
    tokens, lengths = torch.tensor([[2, 2, 0], [1, 2, 3], [1, 0, 0]]), torch.tensor([2, 3, 1])
    batch = {"x": torch.zeros(3, 1, 1), "frames": torch.arange(3), "tokens": tokens, "lengths": lengths}
    losses = Speech().losses(Recorded(scores, steps), batch)
    for j in range(3):
        chances = scores[j].double().softmax(1)
        total = torch.zeros(()).double()
        for path in product(range(4), repeat=int(steps[j])):
            one_hot = torch.eye(4)[list(path)].unsqueeze(0)
            if greedy(one_hot, steps[j : j + 1])[0] == tokens[j, : lengths[j]].tolist():
                total += torch.stack([chances[t, k] for t, k in enumerate(path)]).prod()
        assert losses[j].item() == pytest.approx(-total.log().item(), rel=1e-5)


def test_impossible_and_empty_transcripts_cost_nothing() -> None:
    scores = torch.randn(3, 4, 4, requires_grad=True)
    batch = {
        "x": torch.zeros(3, 1, 1),
        "frames": torch.arange(3),
        "tokens": torch.tensor([[1, 2, 3, 1, 2], [0, 0, 0, 0, 0], [1, 2, 0, 0, 0]]),
        "lengths": torch.tensor([5, 0, 2]),
    }
    losses = Speech().losses(Recorded(scores, torch.tensor([4, 4, 4])), batch)
    assert losses[:2].tolist() == [0.0, 0.0] and losses[2] > 0
    losses.sum().backward()
    assert scores.grad is not None and scores.grad.isfinite().all()
    assert not scores.grad[:2].any() and scores.grad[2].any()


def test_nothing_heard_or_counted_is_no_number() -> None:
    task = tasks.build("speech")
    empty = {
        "loss": 0.0,
        "word_edits": 0.0,
        "words": 0.0,
        "character_edits": 0.0,
        "characters": 0.0,
        "count": 0.0,
    }
    assert all(isnan(value) for value in task.summarise(empty).values())
