"""`tacit fit`: what a run needs in memory, before it is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from tacit.cli.common import ConfigFile, Json, Overrides, print_json, working

if TYPE_CHECKING:
    from tacit.engine.footprint import Need


def fit(
    file: ConfigFile,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Say what a worker and the server need in memory, by part, and what to change if it does not fit.

    Nothing of the model's size is made: a network of many billions of parameters can be asked about on a
    laptop.

    - `tacit fit quickstart.yaml`

    - `tacit fit quickstart.yaml --set model=vit-tiny --set local.batch=256`
    """
    with working("estimating"):
        from tacit.api import fit as estimate
        from tacit.config import parse_overrides
        from tacit.config.sweep import load_one

        found = estimate(load_one(file, parse_overrides(overrides)))
    if as_json:
        print_json(
            {
                "worker": {"parts": dict(found.worker.parts), "peak": found.worker.peak},
                "server": {"parts": dict(found.server.parts), "peak": found.server.peak},
                "workers": found.workers,
                "device": found.compute.device,
                "device_bytes": found.device_bytes,
                "host_bytes": found.host_bytes,
                "host_need": found.host_need,
                "host_most": found.host_most,
                "fits": found.fits,
                "advice": list(found.advice),
            }
        )
        return
    console = Console(highlight=False)
    console.print(f"{found.parameters:,} parameters, of which {found.trained:,} are trained")
    table = Table(box=None, pad_edge=False)
    for title in ("", "a worker", "the server"):
        table.add_column(title, justify="right" if title else "left")
    names = dict.fromkeys([*found.worker.parts, *found.server.parts])
    for name in names:
        table.add_row(name, _cell(found.worker, name), _cell(found.server, name))
    table.add_row("[bold]at once[/bold]", _size(found.worker.peak), _size(found.server.peak))
    console.print(table)
    where = "the CPU" if found.compute.here else found.compute.device
    each = "" if found.device_bytes is None else f", each device {_size(found.device_bytes)}"
    machine = f"this machine has {_size(found.host_bytes)}{each}"
    console.print(f"{found.workers} × a worker on {where}; {machine}")
    console.print(
        f"In use at once on this machine: {_size(found.host_need)}, beside Python and its libraries"
        + (
            f"; up to {_size(found.host_most)} with what the heap keeps"
            if found.host_most > found.host_need
            else ""
        )
    )
    console.print("[green]It fits.[/green]" if found.fits else "[red]It does not fit.[/red]")
    for text in found.advice:
        console.print(f"- {text}", markup=False)
    if not found.fits:
        raise typer.Exit(1)


def _cell(need: Need, name: str) -> str:
    return _size(need.parts[name]) if name in need.parts else ""


def _size(amount: int) -> str:
    from tacit.report.pieces import size

    return size(amount) if amount else "–"
