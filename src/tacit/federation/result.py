"""What a run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from tacit.federation.tracking import Record, troubles
from tacit.tasks import headline
from tacit.tasks.headline import lower_is_better


@dataclass(frozen=True)
class Result:
    """What a run leaves: the trained model, every round's metrics, and where it is all saved."""

    path: Path
    model: nn.Module
    metrics: list[Record]
    finished: bool
    """False when the run was interrupted; `tacit resume` goes on."""
    stopped: str | None = None
    """Why it ended before its last round, if it did."""
    kept: str | None = None
    """Which round's model this is, where the best is kept."""

    @property
    def trouble(self) -> str | None:
        """A sentence, if in most rounds clients sent nothing of use."""
        return troubles(self.metrics)

    def last(self, name: str) -> float:
        """A metric's newest value.

        Args:
            name: the metric, for example `accuracy`.

        Returns:
            The value of the last round that recorded it.

        Raises:
            KeyError: no round recorded it; the message lists those that there are.
        """
        return self._values(name)[-1]

    def best(self, name: str | None = None) -> float:
        """A metric's best value: the largest, or the smallest of an error.

        Choosing a round by looking at private data is not covered by the run's guarantee.

        Args:
            name: the metric; by default the task's headline metric.

        Returns:
            The best value of all rounds.

        Raises:
            KeyError: no round recorded it.
        """
        metric = headline({name} if name else {key for record in self.metrics for key in record})
        if name and metric.name != name:
            return min(self._values(name)) if lower_is_better(name) else max(self._values(name))
        return metric.best(self._values(metric.name))

    def _values(self, name: str) -> list[float]:
        values = [float(record[name]) for record in self.metrics if name in record]
        if not values:
            known = sorted({key for record in self.metrics for key in record})
            raise KeyError(f"no round recorded {name!r}; there is {', '.join(known) or 'nothing'}")
        return values
