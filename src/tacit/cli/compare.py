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
    picture: Annotated[
        Path | None, typer.Option(help="Also draw the accuracy curves here (.png, .svg).")
    ] = None,
    metric: Annotated[str, typer.Option(help="What the picture shows.")] = "accuracy",
    as_json: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False,
) -> None:
    """Compare runs in one table: accuracy, ε, traffic and time.

    Runs that differ only in their seed become one row, as mean ± standard deviation.

    - `tacit compare runs/a runs/b`

    - `tacit compare runs/my-sweep --picture curves.png`
    """
    from tacit.report.compare import find_runs, rows, to_json
    from tacit.report.picture import curves

    table = rows(find_runs(runs))
    if picture is not None:
        curves(table, metric, picture)
    if as_json:
        print(json.dumps(to_json(table)))
        return
    console = Console(highlight=False, width=max(80, Console().width))
    console.print(comparison(table))
    if picture is not None:
        console.print(f"Curves drawn in {picture}")


def comparison(table: list[Row]) -> Table:
    """The rows as a table that fits 80 columns."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("", "seeds", "last %", "best %", "own %", "ε", "MB up", "MB down", "s"):
        shown.add_column(title, justify="left" if not title else "right", no_wrap=title != "")
    for row in sorted(table, key=lambda r: -(r.last("accuracy").mean if r.last("accuracy") else 0)):  # type: ignore[union-attr]
        epsilon = row.last("epsilon")
        shown.add_row(
            row.label,
            str(len(row.runs)),
            *(_percent(s, len(row.runs)) for s in (row.last("accuracy"), row.best("accuracy"), row.own())),
            "–" if epsilon is None else f"{epsilon.mean:.2f}",
            f"{row.total('bytes_up') / 1e6:.0f}",
            f"{row.total('bytes_down') / 1e6:.0f}",
            f"{row.total('seconds'):.3g}",
        )
    return shown


def _percent(spread: Spread | None, runs: int) -> str:
    if spread is None:
        return "–"
    if runs == 1:  # one run says nothing about the spread
        return f"{100 * spread.mean:.1f}"
    return f"{100 * spread.mean:.1f}±{100 * spread.std:.1f}"
