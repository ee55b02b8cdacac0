"""`tacit compare`: one table over runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tacit.cli.common import Json, print_json, working

if TYPE_CHECKING:
    from tacit.report.compare import Row, Spread
    from tacit.report.paired import Difference
    from tacit.tasks import Headline


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs or of sweeps.")],
    picture: Annotated[
        Path | None, typer.Option(help="Also draw the curves here (.png, .svg, .pdf).")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="What the picture shows; by default what the runs are judged by.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="LABEL",
            help="Also each row's difference from this one (its label, or how it begins).",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs in one table: accuracy (or error rate), ε, traffic and time.

    Runs that differ only in their seed become one row, as mean ± standard deviation, with the largest ε. All
    others are rows of their own, named by every key that differs; unfinished runs, units and simulations are
    marked.

    - `tacit compare runs/a runs/b`

    - `tacit compare runs/my-sweep --picture curves.png`

    - `tacit compare runs/my-sweep --against dp-fedavg`: paired over the seeds, with a confidence interval
    """
    with working("reading the runs"):
        from tacit.report.compare import against, find_row, find_runs, judged_by, rows, to_json
        from tacit.report.picture import curves

        table = rows(find_runs(runs))
        paired = {}
        if reference is not None:
            base = find_row(table, reference)
            paired, reference = against(table, base), base.label
        if picture is not None:
            curves(table, metric or judged_by(table).name, picture)
    if as_json:
        plain = to_json(table)
        for row in plain if reference is not None else ():
            gaps = paired.get(row["label"], {})
            row["against"] = {
                "label": reference, **{title: _plain(difference) for title, difference in gaps.items()},
            }  # fmt: skip
        print_json(plain)
        return
    console = Console(highlight=False, width=max(80, Console().width))
    console.print(comparison(table))
    for remark in remarks(table):
        console.print(f"[yellow]note:[/yellow] {remark}")
    if reference is not None:
        console.print(_gaps(paired, judged_by(table), reference))
    if picture is not None:
        console.print(f"Curves drawn in {picture}")


def comparison(table: list[Row]) -> Table:
    """The rows as a table that fits 80 columns, the best first; under each label, where its runs are."""
    from tacit.privacy.rounding import rounded_up
    from tacit.report.compare import judged_by

    metric = judged_by(table)
    what, unit = metric.title.removesuffix("accuracy").strip(), " %" if metric.share else ""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    own = any(row.own(metric) for row in table if row.own_name(metric) != metric.name)
    private = any(row.protects for row in table)
    titles = ["", "seeds", "rounds", f"{what} last{unit}".lstrip(), f"best{unit}"]
    titles += [f"own{unit}"] * own + ["ε", "of a"] * private + ["MB", "s"]
    for title in titles:
        side: Literal["left", "right"] = "left" if title in ("", "of a") else "right"
        shown.add_column(title, justify=side, no_wrap=title != "", overflow="fold")

    def score(row: Row) -> float:
        last = row.last(metric.name)
        return float("-inf") if last is None else metric.score(last.mean)

    for row in sorted(table, key=score, reverse=True):
        numbers = [row.last(metric.name), row.best(metric), *([row.own(metric)] if own else [])]
        cells = [f"{escape(row.label)}\n[dim]{escape(row.place)}[/dim]", str(len(row.runs)), row.rounds]
        cells += [_number(spread, len(row.runs), metric.share) for spread in numbers]
        if private:
            nothing = "?" if row.unknown else "–"
            cells += [nothing if row.epsilon is None else rounded_up(row.epsilon), _protected(row)]
        moved = row.total("bytes_up") + row.total("bytes_down")
        shown.add_row(*cells, _compact(moved / 1e6), _compact(row.total("seconds")))
    return shown


def _gaps(paired: dict[str, dict[str, Difference]], metric: Headline, reference: str) -> Table:
    """Differences as a table; a row with one seed in common has no interval."""
    from tacit.report.paired import LEVEL

    title = f"{metric.title}: difference from {reference}, paired over seeds [{LEVEL:.0%} interval]"
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title=escape(title), title_justify="left")
    columns = list(dict.fromkeys(name for gaps in paired.values() for name in gaps))
    for name in ("", "seeds", *columns):
        shown.add_column(name, justify="left" if name == "" else "right")
    for label, gaps in paired.items():
        cells = [gaps[name].text(100 if metric.share else 1) if name in gaps else "–" for name in columns]
        pairs = max(difference.pairs for difference in gaps.values())
        shown.add_row(escape(label), str(pairs), *map(escape, cells))
    return shown


def _plain(difference: Difference) -> dict[str, float | None]:
    """For JSON, which has no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in vars(difference).items()}


def remarks(table: list[Row]) -> list[str]:
    """What the numbers alone would hide."""
    from tacit.report.compare import untrained

    found = []
    if untrained(table):
        found.append(
            "clients of some keep a part of the model to themselves, and these numbers are with its initial "
            "one, which nobody trains; data.holdout and evaluate.clients, in every run, give those of "
            "clients' own models"
        )
    if (unfinished := sum(row.unfinished for row in table)) > 0:
        found.append(
            "1 of these runs is not finished: its row says how far it came"
            if unfinished == 1
            else f"{unfinished} of these runs are not finished: their rows say how far they came"
        )
    endings = [run.ending for row in table for run in row.runs if run.ending is not None]
    if early := [ending.stopped for ending in endings if ending.stopped]:
        found.append(f"{len(early)} of these runs ended before the last round: {early[0]}")
    for reason in dict.fromkeys(row.unknown for row in table if row.unknown):
        found.append(f"ε ?: {reason}")
    if any(row.runs[0].simulated for row in table):
        found.append("simulated: noise from a seed, which can be repeated; its ε is no claim")
    if len({row.runs[0].unit for row in table if row.runs[0].unit}) > 1:
        found.append("an ε of records and one of clients are not the same promise: compare within a unit")
    if any(row.other_weights for row in table):
        found.append("the seeds of a row began with different weights of a model that was passed in")
    return found


def _protected(row: Row) -> str:
    name = {"client": "client", "example": "record"}.get(row.runs[0].unit or "", "")
    return f"{name}, simulated" if name and row.runs[0].simulated else name


def _compact(value: float) -> str:
    """A size in few characters, and never as a power of ten.

    >>> _compact(0.0504), _compact(42.71), _compact(12345.6)
    ('0.05', '42.7', '12,346')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def _number(spread: Spread | None, runs: int, share: bool) -> str:
    """A mean, with its spread if there are several runs and all of them have a number.

    >>> from tacit.report.compare import Spread
    >>> _number(Spread(0.375, 0.125), 2, True), _number(Spread(0.0432, 0.0013), 2, False)
    ('37.5±12.5', '0.0432±0.0013')
    """
    from tacit.tasks.headline import decimals

    if spread is None:
        return "–"
    scale = 100 if share else 1
    digits = 1 if share else decimals(spread.mean, least=1, significant=3)
    mean = f"{scale * spread.mean:.{digits}f}"
    # One run says nothing about the spread, and neither do runs of which some have diverged.
    return mean if runs == 1 or not math.isfinite(spread.std) else f"{mean}±{scale * spread.std:.{digits}f}"
