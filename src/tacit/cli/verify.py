"""`tacit verify`: is a run's folder as it was written?"""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.console import Console

from tacit.cli.common import Json, RunFolder, print_json, working

DAMAGED = 2
"""The exit code when something is not as it was written."""


def verify(
    folder: RunFolder,
    as_json: Json = False,
) -> None:
    """Check every file of a run: hashes, the ledger's chain, and that all of them belong together.

    Says what is damaged and what can still be used; changes nothing. Exit code 0 if all is sound, else 2.
    Without keys, this finds accidents and mix-ups, not somebody who forges a whole folder.

    - `tacit verify runs/quickstart-20261115-214047`
    """
    with working("checking the files"):
        from tacit import api

        found = api.verify(folder)
    damaged = [finding for finding in found if finding.problem]
    if as_json:
        print_json({"sound": not damaged, "files": [asdict(finding) for finding in found]})
    else:
        console = Console(highlight=False)
        for finding in found:
            state = "damaged" if finding.problem else "sound"
            told = ": ".join(filter(None, [finding.problem, finding.advice]))
            console.print(f"{state:<8} {finding.name}" + (f"\n         {told}" if told else ""), markup=False)
    if damaged:
        raise typer.Exit(DAMAGED)
