"""`tacit recipes` and `tacit init`: the experiments that come with the package, and a copy of one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tacit.cli.common import Json, print_json
from tacit.errors import UserError


def recipes(
    part: Annotated[str, typer.Argument(metavar="[PART]", help="Only those with this in their name.")] = "",
    as_json: Json = False,
) -> None:
    """List the recipes: whole experiments, to be copied with `tacit init NAME`.

    Of each: what it is, what it needs, and how much it is (runs of a sweep × rounds × clients a round).
    Those under `small/` run on two cores in minutes.

    - `tacit recipes small/00`
    """
    from tacit.config.recipes import about, names

    found = [about(name) for name in names() if part in name]
    if not found:
        raise UserError(f"no recipe has {part!r} in its name; `tacit recipes` lists all")
    if as_json:
        print_json([asdict(recipe) for recipe in found])
        return
    console = Console(highlight=False)
    for recipe in found:
        console.print(f"[bold]{recipe.name}[/bold]  {recipe.size}")
        console.print(f"  {recipe.text}", markup=False, style="dim", no_wrap=True, overflow="ellipsis")
        if recipe.needs != "nothing":
            console.print(Padding(Text(f"needs {recipe.needs}", style="dim"), (0, 0, 0, 2)))
    console.print(
        "\n`tacit recipes small` lists those for a laptop; copy one with `tacit init NAME`.", markup=False
    )


def init(
    name: Annotated[str, typer.Argument(help="The recipe; `tacit recipes` lists them.")] = "quickstart",
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="The folder for it.")] = Path(),
) -> None:
    """Write a recipe here, to be run and changed.

    What it is laid over (`base:`) is written too, under recipes/. Nothing that is there is replaced.

    - `tacit init quickstart`, then `tacit run quickstart.yaml`
    """
    from tacit.config.recipes import about, write

    recipe, (file, *below) = about(name), write(name, into)
    console = Console(highlight=False)
    console.print(f"Wrote {file}", markup=False, soft_wrap=True)
    if below:
        console.print(f"and what it is laid over: {', '.join(map(str, below))}", markup=False)
    if recipe.needs != "nothing":
        console.print(f"It needs {recipe.needs}.", markup=False)
    command = "pretrain" if "central" in recipe.size else "run"
    console.print(f"Next: tacit {command} {file}", markup=False, soft_wrap=True)
