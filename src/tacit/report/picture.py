"""Curves over rounds: the mean over seeds, with a band of one standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tacit.errors import UserError
from tacit.report.compare import Row


def curves(table: Sequence[Row], metric: str, file: Path, title: str = "") -> None:
    """Draw a metric of every row over the rounds, as PNG, SVG or PDF, by the file's extension.

    For a row whose clients fine-tuned, draws the metric after fine-tuning; the row above has it before.
    """
    from matplotlib.figure import Figure  # slow to import, and only needed here
    from matplotlib.ticker import MaxNLocator

    many = len(table) > 6
    figure = Figure(figsize=(9.5 if many else 8, 5), layout="constrained")
    axes = figure.add_subplot()
    lines = ("-", "--", ":")
    drawn = 0
    for n, row in enumerate(table):
        name = f"tuned_{metric}" if row.tuned else metric
        series = [dict(run.series(name)) for run in row.runs]
        shared = sorted(set.intersection(*(set(s) for s in series))) if series else []
        if not shared:
            continue
        values = np.array([[s[r] for r in shared] for s in series])
        mean = values.mean(0)
        label = f"{row.label}, on clients' own records" if row.tuned else row.label
        alone = "o" if len(shared) == 1 else None  # one point makes no line
        (line,) = axes.plot(shared, mean, lines[n // 10 % len(lines)], marker=alone, label=label)
        if len(series) > 1:
            with np.errstate(invalid="ignore"):  # runs that diverged have no band
                std = values.std(0, ddof=1)  # sample standard deviation, as in the table
            axes.fill_between(
                shared,
                mean - std,
                mean + std,
                color=line.get_color(),
                alpha=0.04 if many else 0.15,
                linewidth=0,
            )
        drawn += 1
    if not drawn:
        raise UserError(f"no run recorded {metric!r}; there is no curve to draw")
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(metric.replace("_", " "))
    axes.set_title(title or f"{metric.replace('_', ' ')}, mean over seeds ± one standard deviation")
    axes.grid(alpha=0.3)
    if many:
        figure.legend(fontsize="small", loc="outside right upper")
    else:
        axes.legend(fontsize="small", loc="best")
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: the picture cannot be written ({error})") from None
