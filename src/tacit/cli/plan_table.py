"""`tacit plan` with lists: plans side by side, as text, CSV and picture."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tacit.cli.common import narrow, print_json, working
from tacit.cli.options import as_options, naming_options
from tacit.errors import UserError
from tacit.privacy.rounding import rounded_up

if TYPE_CHECKING:
    from tacit.privacy.answers import Question

Cell = Mapping[str, Any]
Axes = Mapping[str, Sequence[Any]]

COLUMNS = {
    "sampling": "sampling",
    "population": "clients",
    "cohort": "cohort",
    "rounds": "rounds",
    "noise": "noise",
    "epsilon": "ε",
    "error": "error × clip",
    "signal_to_noise": "signal",
}
"""The values of a cell, and what they are called."""


def numbers(text: str, name: str, whole: bool = False) -> list[Any]:
    """The numbers of a list such as `1e3,5e3`; whole ones if they must be.

    >>> numbers("1e3, 5e3", "cohort", whole=True)
    [1000, 5000]
    """
    found: list[Any] = []
    for n, part in enumerate(text.split(",")):
        if n and re.fullmatch(
            "0[0-9]{2}", part
        ):  # taken for a list, 300,000 would be plans for 300 and for 0
            meant = text.replace(",", "")
            raise UserError(f"--{name} {text}: commas stand between several numbers; write {meant}")
        try:
            value = float(part.strip().replace("_", ""))
        except ValueError:
            raise UserError(f"--{name} {text}: give a number, or several with commas between them") from None
        if whole:
            if not math.isfinite(value) or value != int(value):
                raise UserError(f"--{name} {part.strip()}: give a whole number ≥ 1")
            value = int(value)
        found.append(value)
    if len(set(found)) < len(found):
        raise UserError(f"--{name} {text}: a value is there twice; leave one out")
    return found


@naming_options()
def show_table(
    question: Question,
    axes: Axes,
    stated: str,
    dimension: int | None,
    clip: float | None,
    csv_file: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Print a plan for every combination; also as CSV, and drawn."""
    with working("accounting"):
        from tacit.privacy.tables import table

        cells = table(question, axes, stated, dimension)
    for cell in cells:
        cell["why"] = as_options(cell["why"])
    if all(cell["why"] for cell in cells):
        raise UserError(cells[0]["why"])
    if dimension is not None and clip is not None:
        for cell in cells:
            signal = cell["signal_to_noise"]
            cell["noise_length"] = None if signal is None else clip / signal
    answered = _answered(question, axes)
    if csv_file is not None:
        _write_csv(cells, csv_file)
    if picture is not None:
        with working("drawing"):
            _draw(cells, axes, _compared(axes, answered), question, picture)
    if as_json:
        print_json({"answered": answered, "delta": question.delta, "cells": cells})
        return
    console = narrow()
    title = f"at δ = {question.delta:g}" + (f", ε ≤ {question.target:g}" if question.target else "")
    if len(axes) == 1:
        console.print(_list(cells, axes, title, dimension))
    else:
        extra = ["error"] if "sampling" in axes else []
        for value in dict.fromkeys([answered, *extra, *(["signal_to_noise"] if dimension else [])]):
            console.print(_matrix(cells, axes, value, title))
    for why in dict.fromkeys(cell["why"] for cell in cells if cell["why"]):
        console.print(f"–: {why}", markup=False)
    _explain(console, axes)


def _answered(question: Question, axes: Axes) -> str:
    """What the cells of a table are asked for: ε, or what is solved for."""
    if question.target is None and "epsilon" not in axes:
        return "epsilon"
    for name in ("noise", "rounds"):
        if getattr(question, name) is None and name not in axes:
            return name
    return "cohort"


def _compared(axes: Axes, answered: str) -> str:
    """What plans are judged by: where noise is partly taken back later, the noise of a round says nothing."""
    from tacit.privacy.tables import TURNS

    return "error" if answered == "noise" and set(axes.get("sampling", ())) & set(TURNS) else answered


def _text(value: Any, name: str = "") -> str:
    """A cell for a person: the ε that was found, rounded up; other numbers to the nearest."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if name == "epsilon":
        return rounded_up(value, digits=4)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _list(cells: Sequence[Cell], axes: Axes, title: str, dimension: int | None) -> Table:
    """One list: a row for each of its values, and the settings that differ or were found."""
    grid = Table(title=f"Plans {title}")
    (axis,) = axes
    shown = [axis, *(name for name in COLUMNS if name != axis)]
    shown = [n for n in shown if n == axis or (n != "sampling" and any(c[n] is not None for c in cells))]
    for name in shown:
        grid.add_column(COLUMNS[name], justify="left" if name == "sampling" else "right")
    for value, cell in zip(axes[axis], cells, strict=True):
        target = axis == "epsilon"
        grid.add_row(*(_text(value if n == axis and not target else cell[n], n) for n in shown))
    return grid


def _matrix(cells: Sequence[Cell], axes: Axes, value: str, title: str) -> Table:
    """Two lists: the longer one goes down."""
    (first, down), (second, across) = axes.items()
    turned = len(across) > len(down)
    name, other = (second, first) if turned else (first, second)
    grid = Table(title=f"{COLUMNS[value]} by {COLUMNS[name]} and {COLUMNS[other]}, {title}")
    grid.add_column(COLUMNS[name], justify="right")
    rows, columns = (across, down) if turned else (down, across)
    for column in columns:
        grid.add_column(
            column if other == "sampling" else f"{COLUMNS[other]} {_text(column)}", justify="right"
        )
    found = dict(zip(product(down, across), cells, strict=True))
    for row in rows:
        there = [found[(column, row) if turned else (row, column)] for column in columns]
        grid.add_row(_text(row), *(_text(cell[value], value) for cell in there))
    return grid


def _explain(console: Console, axes: Axes) -> None:
    kinds = set(axes.get("sampling", ()))
    if "poisson" in kinds:
        console.print("poisson: nobody may know who took part; a client is there or not there.", markup=False)
    if "fixed" in kinds:
        told = "fixed: nobody may know who took part; a client is replaced by another; bounded by RDP alone."
        console.print(told, markup=False)
    if kinds & {"blt", "banded"}:
        console.print(
            "blt, banded: no sampling, everyone may know: clients take turns. Later rounds take noise back, "
            "so compare the error: the noise in a coordinate of the sum of all rounds so far, as a root mean "
            "square over rounds.",
            markup=False,
        )


def _write_csv(cells: Sequence[Cell], file: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(cells[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    try:
        file.write_text(text.getvalue(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror})") from None


def _draw(cells: Sequence[Cell], axes: Axes, shown: str, question: Question, file: Path) -> None:
    """What is compared along the longest list of numbers, a curve for each value of the other."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    numeric = [name for name in axes if name != "sampling"]
    if not numeric:
        raise UserError("--picture: samplings alone make no curve; give a list of numbers too")
    along = max(numeric, key=lambda name: len(axes[name]))
    other = next((name for name in axes if name != along), None)
    figure = Figure(figsize=(8, 5), layout="constrained")
    plot = figure.add_subplot()
    for value in axes[other] if other else [None]:
        points = [
            (at, cell[shown])
            for (at, mine), cell in zip(_keys(axes, along, other), cells, strict=True)
            if mine == value and cell[shown] is not None
        ]
        label = (
            None if other is None else value if other == "sampling" else f"{COLUMNS[other]} {_text(value)}"
        )
        plot.plot(*zip(*sorted(points), strict=True) if points else ([], []), "o-", label=label)
    low, high = min(axes[along]), max(axes[along])
    plot.set_xscale("log" if low > 0 and high / low >= 10 else "linear")
    plot.set_xlabel(COLUMNS[along])
    plot.set_ylabel(COLUMNS[shown])
    plot.set_title(f"{COLUMNS[shown]} at δ = {question.delta:g}")
    plot.grid(alpha=0.3)
    if other is not None:
        plot.legend(fontsize="small")
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: the picture cannot be written ({error})") from None


def _keys(axes: Axes, along: str, other: str | None) -> list[tuple[Any, Any]]:
    """Of each cell, its value of the two axes, in the order of the table."""
    names = list(axes)
    return [
        (at[names.index(along)], None if other is None else at[names.index(other)])
        for at in product(*axes.values())
    ]
