"""`tacit drift` and `tacit hessian`: why a method works, from the checkpoints of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tacit.cli.common import Json, RunFolder, print_json, working
from tacit.errors import UserError

if TYPE_CHECKING:
    from tacit.engine import Job

Picture = Annotated[Path | None, typer.Option(help="Draw the figure here (.png, .svg).")]


def drift(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs whose checkpoints to look at.")],
    clients: Annotated[int, typer.Option(min=2, help="Clients to train.")] = 10,
    adamw_lr: Annotated[float, typer.Option(help="Rate of Local AdamW.")] = 0.0003,
    sgd_lr: Annotated[float, typer.Option(help="Rate of Local SGD.")] = 0.1,
    steps: Annotated[int, typer.Option(min=1, help="Local steps.")] = 50,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Show how far clients come apart: variance of AdamW's v over them, and drift of AdamW and of SGD.

    From the server's model of every checkpoint that was kept (`checkpoint.keep`). These are exact numbers on
    clients, outside any guarantee: a diagnosis for simulations. Paper 004, Figure 2.

    - `tacit drift runs/my-run --picture drift.png`
    """
    with working("training clients from each checkpoint"):
        from tacit.federation.past import kept_rounds, load_round
        from tacit.report.drift import Drift, draw, measure

        found: dict[str, list[Drift]] = {}
        for folder in runs:
            job = _job(folder)
            found[folder.name] = []
            for round in kept_rounds(folder):
                load_round(job, folder, round)
                found[folder.name].append(measure(job, round, clients, adamw_lr, sgd_lr, steps))
        if picture is not None:
            draw(found, picture)
    if as_json:
        print_json({name: [d.to_json() for d in drifts] for name, drifts in found.items()})
        return
    table = _table("run", "round", "v", "Local AdamW", "Local SGD")
    for name, drifts in found.items():
        for d in drifts:
            table.add_row(name, str(d.round), *(f"{s.relative:.3g}" for s in (d.v, d.adamw, d.sgd)))
    console = Console(highlight=False)
    console.print("Deviation over clients ÷ norm of their mean, after one round of local steps:")
    console.print(table)
    _tell(console, picture)


def hessian(
    folder: RunFolder,
    kind: Annotated[str, typer.Option(help="Blocks: architecture, fine or tensor.")] = "architecture",
    round: Annotated[
        int | None, typer.Option(help="A checkpoint that was kept; the newest if not given.")
    ] = None,
    records: Annotated[int, typer.Option(min=1, help="Training records the loss is taken on.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Products with the Hessian for each block.")] = 10,
    limit: Annotated[int | None, typer.Option(min=1, help="Blocks to look at; all if not given.")] = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Show how curved the loss is along each block of parameters: leading eigenvalues of the Hessian, by
    Lanczos.

    These are exact numbers on training records, outside any guarantee: a diagnosis for simulations. Paper
    004, Figures 3, 7 and 8.

    - `tacit hessian runs/my-run --limit 30 --picture hessian.png`
    """
    with working("multiplying with the Hessian"):
        import numpy as np

        from tacit import randomness
        from tacit.federation.past import kept_rounds, load_round
        from tacit.report.curvature import by_block, draw, hessian_product
        from tacit.vector.blocks import blocks

        job = _job(folder)
        kept = kept_rounds(folder)
        if round is not None and round not in kept:
            raise UserError(f"--round {round}: {folder} keeps rounds {', '.join(map(str, kept))}")
        loaded = kept[-1] if round is None else round
        load_round(job, folder, loaded)
        if kind not in ("architecture", "fine", "tensor"):
            raise UserError(f"--kind {kind}: choose architecture, fine or tensor")
        held = np.concatenate([job.population.train(c) for c in range(len(job.population))])
        rng = randomness.generator(job.seed, "hessian")
        chosen = np.sort(rng.choice(held, min(records, len(held)), replace=False))
        batch = job.population.records.prepare(job.population.records.take(chosen))
        product = hessian_product(job.model, job.layout, job.task, batch)
        spectra = by_block(product, blocks(job.layout, kind), steps, limit)
        if picture is not None:
            draw(spectra, picture, f"round {loaded}, {len(chosen)} training records")
    if as_json:
        print_json({"round": loaded, "blocks": [asdict(s) for s in spectra]})
        return
    table = _table("block", "size", "largest", "next", "smallest found")
    for s in spectra:
        ends = (s.eigenvalues[0], s.eigenvalues[min(1, len(s.eigenvalues) - 1)], min(s.eigenvalues))
        table.add_row(s.block, f"{s.size:,}", *(f"{value:.3g}" for value in ends))
    console = Console(highlight=False)
    console.print(table)
    _tell(console, picture)


def _tell(console: Console, picture: Path | None) -> None:
    if picture is not None:
        console.print(f"Drawn in {picture}", markup=False)


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, justify="left" if title in ("run", "block") else "right")
    return table


def _job(folder: Path) -> Job:
    from tacit.api.folders import recorded_config
    from tacit.config.build import build_job
    from tacit.federation.passed import read_passed

    settings = recorded_config(folder)
    if settings.claimed is not None:
        raise UserError(
            f"{folder} protects its clients; exact numbers on them are outside any guarantee. This is for "
            "runs without privacy, and for simulations (privacy.entropy: seed)"
        )
    for role in read_passed(folder) or {}:
        if role in ("model", "dataset", "algorithm", "task"):
            raise UserError(f"{folder}: its {role} was given from Python, and a command has only the config")
    return build_job(settings, folder)
