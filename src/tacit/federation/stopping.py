"""The best test so far: for keeping that model, and for stopping when it is long ago.

Both choose by looking at records, which no guarantee covers: they are for runs without one.

>>> watch = Watch(patience=2)
>>> [watch.hear({"round": n, "accuracy": a}) for n, a in enumerate([0.5, 0.7, 0.6, 0.7], start=1)]
[True, True, False, False]
>>> watch.stalled
'accuracy has not improved for 2 tests: the best, accuracy 70.0%, was after round 2'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tacit.federation.tracking import Record
from tacit.tasks import Headline, headline
from tacit.tasks.headline import KEPT


@dataclass
class Watch:
    """What is remembered of a run's tests. A checkpoint holds it; it also follows from their records, as long
    as none of those was damaged.
    """

    patience: int | None = None
    """Tests without a better one until it is time to stop; None: never."""
    round: int = 0
    """After which the best model was tested."""
    value: float = math.nan
    since: int = 0
    metric: Headline | None = None

    def recall(self, records: Iterable[Record | None]) -> None:
        """Hear again what a run's metrics have."""
        for record in records:
            if record is not None:
                self.hear(record)

    def saved(self) -> dict[str, Any]:
        """For a checkpoint's manifest: nothing, as long as no test was the best."""
        if self.metric is None or not self.round:
            return {}
        return {"metric": self.metric.name, "round": self.round, "value": self.value, "since": self.since}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint holds."""
        if saved:
            self.metric = headline({saved["metric"], KEPT})
            self.round, self.value, self.since = saved["round"], saved["value"], saved["since"]

    def hear(self, record: Record) -> bool:
        """Whether this record has a test, and it is the best so far. A metric that is no number never is."""
        metric = self.metric or headline(record)
        if metric.name not in record:
            return False
        self.metric, value = metric, float(record[metric.name])
        if math.isnan(value) or (self.round and metric.score(value) <= metric.score(self.value)):
            self.since += 1
            return False
        self.round, self.value, self.since = int(record["round"]), value, 0
        return True

    @property
    def stalled(self) -> str | None:
        """Why to stop, if it is time to."""
        if self.patience is None or self.since < self.patience or self.metric is None:
            return None
        tests = "1 test" if self.since == 1 else f"{self.since} tests"
        return f"{self.metric.title} has not improved for {tests}: the best, {self.text}"

    @property
    def text(self) -> str:
        """The best test, for a person."""
        if self.metric is None or not self.round:
            return "a number, was never reached"
        return f"{self.metric.text(self.value)}, was after round {self.round}"
