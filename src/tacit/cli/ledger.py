"""`tacit ledger`: what several runs on the same data have spent together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tacit.cli.common import Json, narrow, print_json, working


def ledger(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs on the same data.")],
    delta: Annotated[
        float | None, typer.Option(help="δ of the total; the smallest of the runs' own if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what the people in several runs have spent in all: the runs' charges, composed.

    Whoever sees the models of all these runs knows more than from any one of them. Charges that a run
    carried over from the one it started from count once, and so do copies of a run's folder as far as they
    agree.

    - `tacit ledger runs/first runs/second`
    """
    with working("replaying the ledgers"):
        from tacit import api

        found = api.ledger(folders, delta)
    if as_json:
        print_json(found.to_dict())
        return
    console = narrow()
    table = Table(box=None, pad_edge=False)
    for column in ("run", "rounds", "ε alone"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for folder, rounds, alone in found.runs:
        table.add_row(str(folder), f"{rounds:,}", _text(alone))
    console.print(table)
    for note in found.notes:
        console.print(f"[yellow]note:[/yellow] {note}")
    console.print(
        f"Together: [bold]ε = {_text(found.epsilon)}[/bold] at δ = {found.delta:g} for "
        f"{'whole clients' if found.unit == 'client' else 'single records'}"
        + (" (simulations: nothing is claimed)" if found.simulation else "")
    )


def _text(value: float) -> str:
    from tacit.privacy.rounding import rounded_up

    return "∞" if math.isinf(value) else rounded_up(value)
