"""`tacit compare`: one table over runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tacit.report.compare import Row, Spread


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs or of sweeps.")],
    picture: Annotated[Path | None, typer.Option(help="Also draw the curves here (.png, .svg).")] = None,
    metric: Annotated[
        str | None, typer.Option(help="What the picture shows; by default what the runs are judged by.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False,
) -> None:
    """Compare runs in one table: accuracy (or error rate), ε, traffic and time.

    Runs that differ only in their seed become one row, as mean ± standard deviation.

    - `tacit compare runs/a runs/b`

    - `tacit compare runs/my-sweep --picture curves.png`
    """
    from tacit.report.compare import find_runs, judged_by, rows, to_json
    from tacit.report.picture import curves

    table = rows(find_runs(runs))
    if picture is not None:
        curves(table, metric or judged_by(table).name, picture)
    if as_json:
        print(json.dumps(to_json(table)))
        return
    console = Console(highlight=False, width=max(80, Console().width))
    console.print(comparison(table))
    if picture is not None:
        console.print(f"Curves drawn in {picture}")


def comparison(table: list[Row]) -> Table:
    """The rows as a table that fits 80 columns, the best first."""
    from tacit.report.compare import judged_by

    metric = judged_by(table)
    what, unit = "" if metric.name == "accuracy" else f"{metric.title} ", " %" if metric.share else ""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    titles = ("", "seeds", f"{what}last{unit}", f"best{unit}", f"own{unit}", "ε", "MB up", "MB down", "s")
    for title in titles:
        shown.add_column(title, justify="left" if not title else "right", no_wrap=title != "")

    def score(row: Row) -> float:
        last = row.last(metric.name)
        return float("-inf") if last is None else metric.score(last.mean)

    for row in sorted(table, key=score, reverse=True):
        epsilon = row.last("epsilon")
        numbers = (row.last(metric.name), row.best(metric), row.own(metric))
        shown.add_row(
            row.label,
            str(len(row.runs)),
            *(_number(spread, len(row.runs), 100 if metric.share else 1) for spread in numbers),
            "–" if epsilon is None else f"{epsilon.mean:.2f}",
            f"{row.total('bytes_up') / 1e6:.0f}",
            f"{row.total('bytes_down') / 1e6:.0f}",
            f"{row.total('seconds'):.3g}",
        )
    return shown


def _number(spread: Spread | None, runs: int, scale: float) -> str:
    if spread is None:
        return "–"
    if runs == 1:  # one run says nothing about the spread
        return f"{scale * spread.mean:.1f}"
    return f"{scale * spread.mean:.1f}±{scale * spread.std:.1f}"
