"""The headline metric: the one number that a run is judged by, and whether higher is better.

A task's `summarise` gives several metrics. Progress lines, tables and tuning use the first metric of this
list that it gives. A custom task that gives none of them is judged by its loss.

If clients keep personal parameters, nobody trains the ones with which the common test set is evaluated. Such
a run is judged by the mean over clients' own models, if that is recorded.

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

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

OWN = "personal_"
"""Prefix of metrics of clients' own models."""
KEPT = "kept_parameters"
"""Key in a metrics record: how many parameters each client keeps; absent if none."""


@dataclass(frozen=True)
class Headline:
    """A metric that runs are judged by."""

    name: str
    title: str
    higher: bool
    """Whether higher is better."""
    share: bool
    """Whether it is shown as a percentage."""

    @property
    def own(self) -> Headline:
        """The same metric for clients' own models, each on its own records."""
        return replace(self, name=f"{OWN}{self.name}", title=f"personal {self.title}")

    @property
    def common(self) -> Headline:
        """The same metric on the common test set."""
        plain = self.name.removeprefix(OWN)
        return next(known for known in HEADLINES if known.name == plain)

    def best(self, values: Iterable[float]) -> float:
        """The best of some values; there must be at least one."""
        return max(values) if self.higher else min(values)

    def score(self, value: float) -> float:
        """A number that is larger for a better value."""
        return value if self.higher else -value

    def text(self, value: float) -> str:
        """Name and value as text."""
        if self.share:
            return f"{self.title} {value:.1%}"
        return f"{self.title} {value:.{decimals(value, least=2, significant=2)}f}"


HEADLINES = (
    Headline("perplexity", "perplexity", higher=False, share=False),
    Headline("matthews", "Matthews", higher=True, share=True),
    Headline("accuracy", "accuracy", higher=True, share=True),
    Headline("wer", "WER", higher=False, share=True),
    Headline("f1", "F1", higher=True, share=True),
    Headline("rmse", "RMSE", higher=False, share=False),
    Headline("loss", "loss", higher=False, share=False),
)
"""From the most informative to the last resort."""


ERRORS = {"loss", "error", "wer", "cer", "mae", "rmse", "perplexity", "bits", "seconds", "norm", "epsilon"}
"""Last words in the names of metrics for which lower is better."""


def decimals(value: float, least: int, significant: int) -> int:
    """Decimals that show at least this many significant digits: a metric may have any scale, and an error of
    0.0043 is not 0.00.

    >>> [decimals(value, least=2, significant=2) for value in (0.0043, -0.51, 224.3, 0.0, float("inf"))]
    [4, 2, 2, 2, 2]
    """
    if not value or not math.isfinite(value):
        return least
    return max(least, significant - 1 - math.floor(math.log10(abs(value))))


def lower_is_better(name: str) -> bool:
    """Whether a metric is an error, also with a prefix.

    >>> [lower_is_better(name) for name in ("personal_loss", "cer", "tuned_accuracy")]
    [True, True, False]
    """
    return name.rpartition("_")[2] in ERRORS


def headline(recorded: Container[str]) -> Headline:
    """The metric to judge by, among the recorded ones; the loss if none is known."""
    return next(iter(headlines(recorded)), HEADLINES[-1])


def headlines(recorded: Container[str]) -> list[Headline]:
    """Every known metric that was recorded, most informative first; those of clients' own models, if clients
    keep parameters and these metrics are recorded.
    """
    own = [known.own for known in HEADLINES if known.own.name in recorded] if KEPT in recorded else []
    return own or [known for known in HEADLINES if known.name in recorded]
