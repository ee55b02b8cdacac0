"""`tacit statement`: what a run guarantees."""

from __future__ import annotations

from typing import Annotated

import typer

from tacit.cli.common import Json, RunFolder, console_for, print_json, working


def statement(
    folder: RunFolder,
    at: Annotated[
        list[str],
        typer.Option(
            "--at",
            metavar="POPULATION:COHORT",
            help="Also what ε would be with so many clients; no claim of this run.",
        ),
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Say what a run guarantees: to whom, against whom, and what is not covered.

    ε is a replay of the run's ledger, so this also works for a run that is still going or was killed.

    - `tacit statement runs/quickstart-20261115-214047`

    - `tacit statement runs/speech --at 1737650:51200`
    """
    with working("replaying the ledger"):
        from tacit import api
        from tacit.privacy.conventions import Scale
        from tacit.privacy.groups import SIZES

        found = api.statement(folder, SIZES)
        larger = api.extrapolations(folder, [Scale.parse(text) for text in at])
    if as_json:
        print_json(found.to_dict() | {"extrapolations": larger})
    else:
        console_for(False).print("\n".join([found.text(), *larger]), markup=False)
