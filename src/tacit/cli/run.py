"""`tacit run`, `tacit pretrain` and `tacit resume`: train, and say how it went."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from tacit.cli.common import Changes, ConfigFile, Json, Overrides, RunFolder, console_for, print_json, working
from tacit.errors import UserError

if TYPE_CHECKING:
    from tacit.config import Config

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def run(
    file: ConfigFile,
    overrides: Overrides = [],  # noqa: B006 (typer reads the default and never changes it)
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run; a new one under runs/ if not given.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs of a sweep at once; one for each core if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model as a config says.

    Shows progress, saves every round, and ends with how good the model is and the folder of the run.
    Ctrl-C stops after the current round; `tacit resume` goes on from there.

    A config with a `sweep:` section becomes many runs and one table; the same command again continues it.

    Examples:

    - `tacit run quickstart.yaml`

    - `tacit run quickstart.yaml --set method=fedprox --set method.mu=0.1 --set rounds=50`
    """
    with working("reading the config"):
        from tacit import api, config
        from tacit.config.sweep import read_sweep

        sweep = read_sweep(file, config.parse_overrides(overrides))
    console = console_for(as_json)
    if sweep is not None:
        _sweep(sweep, out or api.RUNS / sweep.name, console, jobs, as_json)
        return
    resolved = config.load(file, config.parse_overrides(overrides))
    folder = out or api.new_folder(resolved.name)
    what = f"{resolved.method.name}, {_rounds(resolved.rounds)}"
    console.print(f"[bold]{resolved.name}[/bold]: {what} → {escape(str(folder))}")
    for note in filter(None, (_unit_note(resolved), _weights_note(resolved))):
        console.print(f"[yellow]{note}[/yellow]")
    _finish(api.run(resolved, folder, trackers=_progress(console)), console, as_json)


def pretrain(
    file: ConfigFile,
    overrides: Overrides = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run; a new one under runs/ if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a seed model in one place, on data that needs no protection.

    The config has a `pretrain` section (steps, rate, batches, optimizer) instead of clients. Progress,
    checkpoints, Ctrl-C and `tacit resume` are those of a run. A federated config then starts from its folder:
    `model: {…, start: FOLDER}`.

    - `tacit init small/003/seed`, then `tacit pretrain seed.yaml --out runs/seed`
    """
    from tacit import api, config

    console = console_for(as_json)
    resolved = config.load(file, config.parse_overrides(overrides))
    if resolved.pretrain is None:
        raise UserError(f"{file}: there is no `pretrain` section; `tacit run` trains a federation")
    folder = out or api.new_folder(resolved.name)
    what = f"{resolved.pretrain.optimizer}, {resolved.pretrain.steps:,} central steps"
    console.print(f"[bold]{resolved.name}[/bold]: {what} → {escape(str(folder))}")
    _finish(api.run(resolved, folder, trackers=_progress(console)), console, as_json)
    if not as_json:
        console.print(f"Start from it with --set model.start={escape(str(folder))}", soft_wrap=True)


def resume(
    folder: RunFolder,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Go on to this round instead of the config's.")
    ] = None,
    device: Annotated[
        list[str], typer.Option(help="Compute there instead: cpu, cuda, cuda:1, … Repeatable.")
    ] = [],  # noqa: B006
    overrides: Changes = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Go on with a run from its newest sound checkpoint.

    A run that was killed, interrupted or whose machine failed loses at most the rounds after its last
    checkpoint. Without privacy it ends with the very model it would have had; with it, the round that is
    repeated gets fresh noise and is charged again.

    `--set` takes what may change: rounds; and, for this time only, engine, trackers, checkpoint,
    evaluate.every, evaluate.batch and evaluate.patience.

    - `tacit resume runs/quickstart-20261115-214047`

    - `tacit resume runs/quickstart-20261115-214047 --set rounds=100 --set engine.workers=2`
    """
    from tacit import api, config

    console = console_for(as_json)
    console.print(f"resuming [bold]{escape(str(folder))}[/bold]")
    _finish(
        api.resume(
            folder,
            trackers=_progress(console),
            rounds=rounds,
            device=device or None,
            overrides=config.parse_overrides(overrides),
        ),
        console,
        as_json,
    )


def _progress(console: Console) -> list[Any]:
    from tacit.report.progress import LiveProgress

    return [LiveProgress(console)]


def _sweep(sweep: Any, folder: Path, console: Console, jobs: int | None, as_json: bool) -> None:
    from tacit.cli.compare import comparison
    from tacit.cli.sweep import Bar
    from tacit.report.compare import find_runs, rows, to_json
    from tacit.sweeps import run_sweep

    what = f"{len(sweep.points)} runs"
    if choosing := len(sweep.choosing):
        what = f"{choosing} runs that tune, then {len(sweep.points)} to compare"
    console.print(f"[bold]{sweep.name}[/bold]: {what} → {escape(str(folder))}")
    try:
        for task in run_sweep(sweep, folder, jobs, Bar(console)):
            if task.diverged():
                console.print(f"diverged: {escape(task.folder.name)}; its rounds so far are in the table")
    except KeyboardInterrupt:
        print(
            "tacit: stopped; every round that was finished is saved, the same command goes on",
            file=sys.stderr,
        )
        raise typer.Exit(INTERRUPTED) from None
    from tacit.federation.tracking import troubles

    runs = find_runs([folder])
    for run in runs:
        if (said := troubles(run.metrics)) is not None:
            console.print(f"[yellow]{escape(run.folder.name)}: {said}[/yellow]")
    table = rows(runs)
    if as_json:
        print_json(to_json(table))
        return
    console.print(comparison(table))
    place = quote(str(folder))
    console.print(f"Saved in {place}. Curves: tacit compare {place} --picture curves.png", markup=False)


def _finish(result: Any, console: Console, as_json: bool) -> None:
    from tacit.federation.statements import STATEMENT
    from tacit.federation.tracking import useless
    from tacit.report.page import PAGE
    from tacit.report.traffic import traffic

    last = {k: v for record in result.metrics for k, v in record.items()}
    moved = traffic(result.model, result.metrics)
    if as_json:
        summary = {"path": str(result.path), "finished": result.finished, "last": last}
        if moved is not None:
            summary["traffic"] = moved.to_json()
        print_json(summary)
    elif not result.finished:
        console.print(
            f"Stopped after round {last.get('round', 0)}. Go on with: tacit resume {quote(str(result.path))}"
        )
    if not result.finished:
        raise typer.Exit(INTERRUPTED)  # so that a script does not take it for a finished run
    # Where private metrics are told instead, how many clients took part is not.
    learnt = any(record.get("clients", 1) for record in result.metrics) and not useless(result.metrics)
    if result.trouble is not None:
        console.print(f"[bold red]{result.trouble}[/bold red]")
    if as_json:
        if not learnt:
            raise typer.Exit(1)
        return
    if result.stopped:
        console.print(f"Ended early: {result.stopped}.")
    if result.kept:
        console.print(f"Kept: {result.kept}.")
    from tacit.tasks import headline

    metric = headline(last)
    seconds = sum(record.get("seconds", 0.0) for record in result.metrics)  # lines may have been lost
    done = f"[bold]{metric.text(last[metric.name])}[/bold], " if metric.name in last else ""
    console.print(
        f"Done: {done}{_rounds(last.get('round', 0))} in {seconds:.0f} s, saved in {escape(str(result.path))}"
    )
    if (result.path / STATEMENT).exists():
        from tacit import api

        found = api.statement(result.path)
        console.print(found.summary(), markup=False)
        for text in found.warnings:
            console.print(f"Mind: {text}.", style="yellow", markup=False)
        for line in api.extrapolations(result.path):
            console.print(line, style="dim", markup=False)
        console.print(
            f"The whole statement: tacit statement {quote(str(result.path))}", style="dim", markup=False
        )
    if moved is not None:
        console.print(moved.text(), style="dim")
    if (result.path / PAGE).exists():
        console.print(f"Page: {result.path / PAGE}", markup=False, soft_wrap=True)
    if not learnt:
        raise typer.Exit(1)


def _rounds(number: int) -> str:
    return f"{number:,} round" + "s" * (number != 1)


def _unit_note(config: Config) -> str | None:
    """A word when the config's own privacy section overrules the unit that `tacit methods` lists."""
    from tacit.config.methods import METHODS

    method = METHODS.get(config.method.name)
    if method is None or method.unit == "none":
        return None
    if config.privacy is None:
        return f"{config.method.name} without privacy: the config says privacy: null"
    if config.privacy.unit != method.unit:
        return (
            f"{config.method.name} is meant for privacy.unit {method.unit}; "
            f"this config sets {config.privacy.unit}, which is what is guaranteed"
        )
    return None


def _weights_note(config: Config) -> str | None:
    """A word when most of what a run computes with is, and stays, random."""
    if config.model.lora is None or config.model.hub is not None or config.model.start is not None:
        return None
    return "model.lora: the frozen weights are random ones; model.hub or model.start gives trained ones"
