"""`tacit audit`: try to refute what a config claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tacit.cli.common import ConfigFile, Json, Overrides, print_json, working

REFUTED = 1
"""The exit code when more leaks than is claimed."""


def audit(
    file: ConfigFile,
    overrides: Overrides = [],  # noqa: B006
    canaries: Annotated[int, typer.Option(min=10, help="Clients or records that are canaries.")] = 200,
    trials: Annotated[int, typer.Option(min=256, help="Trials of the mechanism alone.")] = 20_000,
    confidence: Annotated[float, typer.Option(min=0.5, max=1 - 1e-9, help="That the bounds hold.")] = 0.95,
    fast: Annotated[bool, typer.Option("--fast", help="The mechanism alone, without a run.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw it here (.png, .svg).")] = None,
    as_json: Json = False,
) -> None:
    """Try to refute a config's claim: a lower bound on ε, with confidence, beside the claimed one.

    First the mechanism alone, with worst-case canaries through the code that a run uses; then one run in
    which some clients (or records) are canaries, each there by a fair coin. The run is made with fresh
    entropy and thrown away. Exit code 1 if more leaks than is claimed. An audit can say no, never yes.

    - `tacit audit quickstart.yaml --fast`

    - `tacit audit quickstart.yaml --canaries 400 --picture audit.png`
    """
    with working("auditing"):
        from tacit import config
        from tacit.api import audit as run_audit
        from tacit.config.sweep import load_one

        resolved = load_one(file, config.parse_overrides(overrides))
        report = run_audit(resolved, canaries, trials, confidence, run=not fast)
    console = Console(stderr=as_json, highlight=False)
    if picture is not None:
        from tacit.report.audit import draw_audit

        draw_audit(report, picture, resolved.name)
    if as_json:
        print_json(report.to_dict() | {"picture": None if picture is None else str(picture)})
    else:
        console.print(report.text(), markup=False)
        if picture is not None:
            console.print(f"Drawn in {picture}", markup=False)
    if report.refuted:
        raise typer.Exit(REFUTED)
