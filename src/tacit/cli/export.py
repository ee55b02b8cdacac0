"""`tacit export`: a run's model, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tacit.cli.common import RunFolder, console_for, working


def export(
    folder: RunFolder,
    into: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder for the model.")],
) -> None:
    """Save a run's trained model for other programs.

    With LoRA it is a peft adapter with the output layers; else a transformers folder, or safetensors for this
    package's own networks. A private run's statement goes with it.

    - `tacit export runs/minilm-20261115-214047 adapter`
    """
    with working("rebuilding the model"):
        from tacit import api

        personal = api.export(folder, into)
    console = console_for(False)
    if personal:
        console.print(
            f"[yellow]{', '.join(personal)}: each client trained its own; exported is the one they all "
            "started from[/yellow]"
        )
    console.print(f"Saved in {escape(str(into))}: {', '.join(sorted(p.name for p in into.iterdir()))}")
    console.print(f"How to load it: {into / 'README.md'}", markup=False)
