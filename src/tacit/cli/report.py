"""`tacit report` and `tacit board`: a page to look at, as a file or live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tacit.cli.common import working


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs or of sweeps.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file; of one run its own report.html, of several report.html here."),
    ] = None,
) -> None:
    """Make one HTML page on runs: the guarantee, curves and tables. It needs no network and no server.

    Runs that differ only in their seed become one curve with a band. Every run makes its own page at its end.

    - `tacit report runs/quickstart-20261115-214047`

    - `tacit report runs/my-sweep --out sweep.html`
    """
    with working("reading the runs"):
        from tacit.report.compare import find_runs, rows
        from tacit.report.page import PAGE, write_page

        found = find_runs(runs)
        file = out or (found[0].folder / PAGE if len(found) == 1 else Path(PAGE))
        write_page(rows(found), file)
    Console(highlight=False).print(f"Page: {file}", markup=False, soft_wrap=True)


def board(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where the runs are.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
) -> None:
    """Show the runs in a folder as a live page in the browser, while they train.

    It listens on this machine alone (127.0.0.1), at an address with a secret in it, and only shows. Ctrl-C
    ends it.

    - `tacit board`

    - `tacit board runs/my-sweep --port 8080`
    """
    from tacit.report.board import Board

    console = Console(highlight=False)
    with Board(folder, port) as server:
        console.print(f"The board of {folder} is at", markup=False)
        console.print(server.address, markup=False, soft_wrap=True)
        server.serve_forever()
