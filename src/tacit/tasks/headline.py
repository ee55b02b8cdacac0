"""The one number that a run is judged by, and which way is better.

A task's `summarise` gives several metrics; progress lines, tables and tuning look at the first of these that
it gives. A task of one's own that gives none of them is judged by its loss.

Where clients keep parameters to themselves, nobody trains those that the common test set is judged with: such
a run is judged by the mean over clients' own models, as far as that is recorded.

>>> headline({"round", "loss", "wer", "cer"})
Headline(name='wer', title='WER', higher=False, share=True)
>>> headline({"loss", "wer"}).best([0.3, 0.2, 0.4])
0.2
>>> headline(["loss"]).text(0.51), headline(["accuracy"]).text(0.512)
('loss 0.51', 'accuracy 51.2%')
>>> headline({"accuracy", "personal_accuracy", KEPT}).text(0.8)
'personal accuracy 80.0%'
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

OWN = "personal_"
"""What metrics of clients' own models begin with."""
KEPT = "kept_parameters"
"""In a record with metrics: how many parameters each client keeps to itself; not there where that is none."""


@dataclass(frozen=True)
class Headline:
    """A metric that runs are judged by."""

    name: str
    title: str
    higher: bool
    """Whether more of it is better."""
    share: bool
    """Whether it is shown as a percentage."""

    @property
    def own(self) -> Headline:
        """The same of clients' own models, each on its own records."""
        return replace(self, name=f"{OWN}{self.name}", title=f"personal {self.title}")

    @property
    def common(self) -> Headline:
        """The same on the common test set."""
        plain = self.name.removeprefix(OWN)
        return next(known for known in HEADLINES if known.name == plain)

    def best(self, values: Iterable[float]) -> float:
        """The best of some values, of which there is at least one."""
        return max(values) if self.higher else min(values)

    def score(self, value: float) -> float:
        """A number that is larger for a better value."""
        return value if self.higher else -value

    def text(self, value: float) -> str:
        """Name and value, for a person."""
        return f"{self.title} {value:.1%}" if self.share else f"{self.title} {value:.2f}"


HEADLINES = (
    Headline("perplexity", "perplexity", higher=False, share=False),
    Headline("matthews", "Matthews", higher=True, share=True),
    Headline("accuracy", "accuracy", higher=True, share=True),
    Headline("wer", "WER", higher=False, share=True),
    Headline("f1", "F1", higher=True, share=True),
    Headline("rmse", "RMSE", higher=False, share=False),
    Headline("loss", "loss", higher=False, share=False),
)
"""From the most telling to the last resort."""


ERRORS = {"loss", "error", "wer", "cer", "mae", "rmse", "perplexity", "bits", "seconds", "norm", "epsilon"}
"""Last words of metrics of which less is better."""


def lower_is_better(name: str) -> bool:
    """Whether a metric is an error, whoever's it is.

    >>> [lower_is_better(name) for name in ("personal_loss", "cer", "tuned_accuracy")]
    [True, True, False]
    """
    return name.rpartition("_")[2] in ERRORS


def headline(recorded: Container[str]) -> Headline:
    """The metric to judge by, among those that were recorded; the loss if none is known."""
    return next(iter(headlines(recorded)), HEADLINES[-1])


def headlines(recorded: Container[str]) -> list[Headline]:
    """Every known metric that was recorded, the most telling first; of clients' own models, where clients
    keep parameters and these are told.
    """
    own = [known.own for known in HEADLINES if known.own.name in recorded] if KEPT in recorded else []
    return own or [known for known in HEADLINES if known.name in recorded]
