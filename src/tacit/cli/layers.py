"""`tacit layers`: how far each layer moved in the clients' hands, how they pulled at it, and what noise did
to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from tacit.cli.common import Json, print_json, working
from tacit.errors import UserError


def layers(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run with `evaluate: {layers: true}`.")],
    what: Annotated[
        Literal["updates", "clipped", "gradients", "server"],
        typer.Option(
            help="Clients' updates before or after clipping, their gradients while they train, or the mean "
            "update before and after noise."
        ),
    ] = "updates",
    picture: Annotated[
        Path | None, typer.Option(help="Draw the norms over the depth here (.png, .svg).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how far each layer of the clients' updates moved: mean ± deviation over clients and rounds.

    `--what clipped` shows them after clipping, `--what gradients` the norms of their gradients, and
    `--what server` those of the mean update before the server's noise and after it, in the mean over rounds.

    These are exact numbers on clients, outside any guarantee: a diagnosis for simulations.

    - `tacit init small/003/table-1`, then `tacit run table-1.yaml --set evaluate.layers=true`

    - `tacit layers runs/speech --picture layers.png`
    """
    with working("reading the rounds"):
        from tacit.api.folders import recorded_config
        from tacit.federation import read_metrics
        from tacit.federation.layers import by_kind, of_server, over_rounds
        from tacit.federation.tracking import METRICS
        from tacit.report.layers import draw

        metrics = read_metrics(folder / METRICS)
        key = "layers" if what == "updates" else {"gradients": "gradient"}.get(what, what) + "_layers"
        found = of_server(metrics) if what == "server" else over_rounds(metrics, key)
        if not found and what == "clipped" and over_rounds(metrics):
            raise UserError(f"{folder} clipped no client's update: it has no guarantee for whole clients")
        if not found:
            claimed = recorded_config(folder).claimed  # a folder without a run is told as one
            also = "" if claimed is None or claimed.unit == "example" else " --set privacy.entropy=seed"
            raise UserError(f"{folder} recorded no layers; run it with --set evaluate.layers=true{also}")
        kinds = {} if what == "server" else by_kind(found)
        if picture is not None:
            draw(found, picture, before_and_after=what == "server")
    if as_json:
        print_json({"layers": found, "kinds": kinds})
        return
    console = Console(highlight=False)
    titles = ("before noise", "after noise") if what == "server" else ("mean norm", "deviation")
    width = max(map(len, (*kinds, *found, "kind of layer")))
    for first, group in (("kind of layer", kinds), ("layer", found)):
        if group:
            console.print(_table(group, (first, *titles), width))
    if picture is not None:
        console.print(f"Drawn in {picture}")


def _table(group: Mapping[str, tuple[float, float]], titles: Sequence[str], width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    first, *others = titles
    table.add_column(first, min_width=width)
    for title in others:
        table.add_column(title, justify="right")
    for name, (mean, std) in group.items():
        table.add_row(name, f"{mean:.3g}", f"{std:.3g}")
    return table
