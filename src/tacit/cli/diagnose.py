"""`tacit drift` and `tacit hessian`: why a method works, from the checkpoints of a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tacit.errors import UserError

if TYPE_CHECKING:
    from tacit.engine import Job

Picture = Annotated[Path | None, typer.Option(help="Draw the figure here (.png, .svg).")]
Json = Annotated[bool, typer.Option("--json", help="For a program to read.")]


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
    from tacit.report.drift import draw, measure

    found = {}
    for folder in runs:
        job = _job(folder)
        found[folder.name] = [
            measure(job, _load(job, folder, round), clients, adamw_lr, sgd_lr, steps)
            for round in _rounds(folder)
        ]
    if picture is not None:
        draw(found, picture)
    if as_json:
        print(json.dumps({name: [d.to_json() for d in drifts] for name, drifts in found.items()}))
        return
    table = _table("run", "round", "v", "Local AdamW", "Local SGD")
    for name, drifts in found.items():
        for d in drifts:
            table.add_row(name, str(d.round), *(f"{s.relative:.3g}" for s in (d.v, d.adamw, d.sgd)))
    console = Console(highlight=False)
    console.print("Deviation over clients ÷ norm of their mean, after one round of local steps:")
    console.print(table)


def hessian(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
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
    import numpy as np

    from tacit import randomness
    from tacit.report.curvature import by_block, draw, hessian_product
    from tacit.vector.blocks import blocks

    job = _job(folder)
    kept = _rounds(folder)
    if round is not None and round not in kept:
        raise UserError(f"--round {round}: {folder} keeps rounds {', '.join(map(str, kept))}")
    loaded = _load(job, folder, kept[-1] if round is None else round)
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
        print(json.dumps({"round": loaded, "blocks": [asdict(s) for s in spectra]}))
        return
    table = _table("block", "size", "largest", "next", "smallest found")
    for s in spectra:
        ends = (s.eigenvalues[0], s.eigenvalues[min(1, len(s.eigenvalues) - 1)], min(s.eigenvalues))
        table.add_row(s.block, f"{s.size:,}", *(f"{value:.3g}" for value in ends))
    Console(highlight=False).print(table)


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, justify="left" if title in ("run", "block") else "right")
    return table


def _job(folder: Path) -> Job:
    from tacit import config
    from tacit.config.build import build_job
    from tacit.federation.checkpoint import CONFIG
    from tacit.federation.verify import refuse_changed_config

    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no run (there is no {CONFIG} in it)")
    refuse_changed_config(folder)
    settings = config.load(folder / CONFIG, presets=False)
    if settings.privacy is not None and settings.privacy.entropy == "os":
        raise UserError(
            f"{folder} protects its clients; exact numbers on them are outside any guarantee. This is for "
            "runs without privacy, and for simulations (privacy.entropy: seed)"
        )
    return build_job(settings, folder)


def _rounds(folder: Path) -> list[int]:
    from tacit.federation.checkpoint import finished

    kept = [int(place.name) for place in reversed(finished(folder / "checkpoint"))]
    if not kept:
        raise UserError(f"{folder}: no checkpoint is there yet")
    return kept


def _load(job: Job, folder: Path, round: int) -> int:
    """Put the model of a kept round into the job; the round."""
    from tacit.federation.checkpoint import read_round
    from tacit.vector import write_buffers, write_values

    saved = read_round(folder, round).vectors
    if saved["theta"].numel() != job.layout.shared:
        raise UserError(f"{folder}: its checkpoint is of another model")
    write_values(job.model, job.layout, saved["theta"])
    write_buffers(job.model, saved)
    return round
