"""`tacit data`: what each client of a config holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli.common import ConfigFile, Json, Overrides, console_for, print_json, working
from tacit.errors import UserError


def data(
    file: ConfigFile,
    overrides: Overrides = [],  # noqa: B006
    picture: Annotated[Path, typer.Option(help="Where to draw the label split.")] = Path("data.png"),
    limit: Annotated[int, typer.Option(min=1, help="Clients to list.")] = 20,
    as_json: Json = False,
) -> None:
    """Show what each client of a config holds: a table, and a picture of the label split.

    Of a sweep, the first run's.

    - `tacit data quickstart.yaml`

    - `tacit data quickstart.yaml --set data.partition.alpha=0.1 --picture split.png`
    """
    with working("reading the data"):
        from tacit import config
        from tacit.config.build import build_dataset, build_population
        from tacit.config.sweep import load_one
        from tacit.data import describe

        resolved = load_one(file, config.parse_overrides(overrides))
        if resolved.data.partition.kind == "owners":
            raise UserError(
                "data.partition: owners keep their records, so nothing of them can be shown here; each owner "
                "counts its own with `tacit client check`"
            )
        dataset = build_dataset(resolved)
        population = build_population(resolved, dataset)
        labelled = dataset.train.labels is not None
        if labelled:
            describe.split_picture(population, dataset.classes, picture, names=dataset.label_names)
    console = console_for(as_json)
    if as_json:
        facts = describe.to_json(population, dataset.classes, limit)
        print_json({**facts, "picture": str(picture) if labelled else None})
        return
    console.print(f"[bold]{dataset.name}[/bold] ({dataset.licence}), {dataset.origin}")
    console.print(describe.to_table(population, dataset.classes, limit, dataset.label_names))
    console.print(describe.sizes_told(population).capitalize())
    console.print(f"Label split drawn in {picture}" if labelled else "No labels, so no picture of them.")
