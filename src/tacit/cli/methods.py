"""`tacit methods` and `tacit blocks`: what there is to choose from, measured rather than claimed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tacit.cli.common import Json, Overrides, narrow, print_json, working


def methods(as_json: Json = False) -> None:
    """List every method: its paper, its privacy unit, its traffic and what a client keeps.

    Traffic is measured: each method trains one client of a small transformer. 1× is the model, FedAvg's own.
    Choose one with `method: NAME` in a config or `--set method=NAME`:

    - `tacit run quickstart.yaml --set method=scaffold --set privacy=null`
    """
    from tacit.config.methods import METHODS, PAPERS
    from tacit.config.traffic import of_methods

    measured = of_methods()
    if as_json:
        rows = [
            {"method": name, "summary": method.summary, "paper": method.paper, "unit": method.unit}
            | measured[name]
            for name, method in METHODS.items()
        ]
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title, justify in (("method", "left"), ("paper", "left"), ("unit", "left"), ("up", "right"),
                           ("down", "right"), ("keeps", "left"), ("", "left")):  # fmt: skip
        table.add_column(title, justify=justify, no_wrap=title != "")  # type: ignore[arg-type]
    for name, method in METHODS.items():
        found = measured[name]
        up, down, keeps = f"{found['up']:.1f}×", f"{found['down']:.1f}×", " ".join(found["keeps"]) or "–"
        table.add_row(name, method.paper, method.unit, up, down, keeps, method.summary)
    console = narrow()
    console.print(table)
    console.print(" · ".join(f"{number} {name}" for number, name in PAPERS.items()))


def blocks(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The config whose model to cut.")],
    overrides: Overrides = [],  # noqa: B006
    kind: Annotated[
        str, typer.Option(help="architecture (DP-FedAdamW's), fine (FedAdamW's), or one for each tensor.")
    ] = "architecture",
    limit: Annotated[int, typer.Option(min=1, help="Blocks to list.")] = 20,
    as_json: Json = False,
) -> None:
    """Show the blocks of a config's model: the groups of parameters that share one second moment.

    FedAdamW and DP-FedAdamW send one number a block instead of one for each coordinate.

    - `tacit blocks quickstart.yaml --set model=vit-tiny`

    - `tacit blocks quickstart.yaml --set model=vit-tiny --kind fine --limit 5`
    """
    with working("building the model"):
        from tacit import config
        from tacit.config.build import build_dataset, build_model
        from tacit.config.sweep import load_one
        from tacit.errors import UserError
        from tacit.vector import Layout
        from tacit.vector.blocks import blocks as cut

        resolved = load_one(file, config.parse_overrides(overrides))
        if kind not in ("architecture", "fine", "tensor"):
            raise UserError(f"--kind {kind}: choose architecture, fine or tensor")
        layout = Layout.of(build_model(resolved, build_dataset(resolved)))
        parts = cut(layout, kind)
    sizes = parts.sizes.tolist()
    if as_json:
        print_json(
            {
                "kind": kind,
                "parameters": layout.size,
                "blocks": dict(zip(parts.names, sizes, strict=True)),
            }
        )
        return
    console = narrow()
    share = len(parts) / layout.size
    console.print(f"{len(parts):,} blocks ({kind}) of {layout.size:,} parameters: {share:.2%} more traffic")
    table = Table(box=None, pad_edge=False)
    table.add_column("block")
    table.add_column("parameters", justify="right")
    for name, size in list(zip(parts.names, sizes, strict=True))[:limit]:
        table.add_row(name, f"{size:,}")
    if len(parts) > limit:
        table.add_row(f"… and {len(parts) - limit:,} more (--limit)", "")
    console.print(table)
