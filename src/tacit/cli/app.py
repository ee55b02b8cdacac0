"""Commands, and how their errors are told: one line and exit code 2, never a traceback."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from tacit.cli.audit import audit
from tacit.cli.client import client
from tacit.cli.compare import compare
from tacit.cli.corpus import corpus
from tacit.cli.diagnose import drift, hessian
from tacit.cli.fit import fit
from tacit.cli.layers import layers
from tacit.cli.ledger import ledger
from tacit.cli.methods import blocks, methods
from tacit.cli.plan import plan
from tacit.cli.recipes import init, recipes
from tacit.cli.report import board, report
from tacit.cli.server import server
from tacit.cli.test import test
from tacit.cli.verify import verify
from tacit.errors import UserError

if TYPE_CHECKING:
    from tacit.config import Config

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
LONGEST = 1200
"""Characters of an error that a person is told."""
UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a wrong command, option or argument; it has no public name for it."""

app = typer.Typer(
    name="tacit",
    help="Differentially private federated learning for large models.\n\n"
    "Start with `tacit init quickstart` and `tacit run quickstart.yaml`; `tacit recipes` lists more.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from tacit import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass


ConfigFile = Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The config; `tacit init` writes one.")]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. `--set local.lr=0.1`. Repeatable."),
]
Changes = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change what may, e.g. `--set rounds=100`. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for a program to read.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, e.g. runs/quickstart-…")]


@app.command()
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
    from tacit import api, config
    from tacit.config.sweep import read_sweep

    console = _console(as_json)
    sweep = read_sweep(file, config.parse_overrides(overrides))
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


@app.command()
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

    console = _console(as_json)
    resolved = config.load(file, config.parse_overrides(overrides))
    if resolved.pretrain is None:
        raise UserError(f"{file}: there is no `pretrain` section; `tacit run` trains a federation")
    folder = out or api.new_folder(resolved.name)
    what = f"{resolved.pretrain.optimizer}, {resolved.pretrain.steps:,} central steps"
    console.print(f"[bold]{resolved.name}[/bold]: {what} → {escape(str(folder))}")
    _finish(api.run(resolved, folder, trackers=_progress(console)), console, as_json)
    if not as_json:
        console.print(f"Start from it with --set model.start={escape(str(folder))}", soft_wrap=True)


@app.command()
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

    console = _console(as_json)
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


@app.command()
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
    from tacit import config
    from tacit.config.build import build_dataset, build_population
    from tacit.config.sweep import load_one
    from tacit.data import describe

    console = _console(as_json)
    resolved = load_one(file, config.parse_overrides(overrides))
    dataset = build_dataset(resolved)
    population = build_population(resolved, dataset)
    labelled = dataset.train.labels is not None
    if labelled:
        describe.split_picture(population, dataset.classes, picture, names=dataset.label_names)
    if as_json:
        facts = describe.to_json(population, dataset.classes, limit)
        print(json.dumps({**facts, "picture": str(picture) if labelled else None}))
        return
    console.print(f"[bold]{dataset.name}[/bold] ({dataset.licence}), {dataset.origin}")
    console.print(describe.to_table(population, dataset.classes, limit, dataset.label_names))
    console.print(f"Label split drawn in {picture}" if labelled else "No labels, so no picture of them.")


@app.command()
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
    from tacit import api
    from tacit.privacy.conventions import Scale
    from tacit.privacy.groups import SIZES

    found, larger = (
        api.statement(folder, SIZES),
        api.extrapolations(folder, [Scale.parse(text) for text in at]),
    )
    if as_json:
        print(json.dumps(found.to_dict() | {"extrapolations": larger}))
    else:
        _console(False).print("\n".join([found.text(), *larger]), markup=False)


@app.command()
def export(
    folder: RunFolder,
    into: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder for the model.")],
) -> None:
    """Save a run's trained model for other programs.

    With LoRA it is a peft adapter with the output layers; else a transformers folder, or safetensors for this
    package's own networks. A private run's statement goes with it.

    - `tacit export runs/minilm-20261115-214047 adapter`
    """
    from tacit import api

    console = _console(False)
    with console.status("rebuilding the model…"):
        personal = api.export(folder, into)
    if personal:
        console.print(
            f"[yellow]{', '.join(personal)}: each client trained its own; exported is the one they all "
            "started from[/yellow]"
        )
    console.print(f"Saved in {escape(str(into))}: {', '.join(sorted(p.name for p in into.iterdir()))}")
    if (into / "adapter_config.json").exists():
        console.print(f"Load it with peft: PeftModel.from_pretrained(base, {str(into)!r})", markup=False)


app.command()(recipes)
app.command()(init)
app.command()(compare)
app.command()(report)
app.command()(board)
app.command()(test)
app.command()(layers)
app.command()(drift)
app.command()(hessian)
app.command()(ledger)
app.command()(audit)
app.command()(verify)
app.command()(plan)
app.command()(fit)
app.command()(methods)
app.command()(blocks)
app.add_typer(corpus, name="corpus")
app.add_typer(server, name="server")
app.add_typer(client, name="client")


class _Console(Console):
    """A console whose reader may leave (`| head -1`): what is under way goes on, in silence."""

    def on_broken_pipe(self) -> None:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, self.file.fileno())
        os.close(silence)


def _console(quiet: bool) -> Console:
    """Where people read: standard error when standard output is for a program."""
    return _Console(stderr=quiet, highlight=False, soft_wrap=False)


def _progress(console: Console) -> list[Any]:
    from tacit.report.progress import LiveProgress

    return [LiveProgress(console)]


def _sweep(sweep: Any, folder: Path, console: Console, jobs: int | None, as_json: bool) -> None:
    from tacit.cli.compare import comparison
    from tacit.cli.sweep import Bar
    from tacit.report.compare import find_runs, rows, to_json
    from tacit.sweeps import run_sweep

    console.print(f"[bold]{sweep.name}[/bold]: {len(sweep.points)} runs → {escape(str(folder))}")
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
        print(json.dumps(to_json(table)))
        return
    console.print(comparison(table))
    console.print(f"Saved in {folder}. Curves: tacit compare {folder} --picture curves.png")


def _finish(result: Any, console: Console, as_json: bool) -> None:
    from tacit.report.traffic import traffic

    last = {k: v for record in result.metrics for k, v in record.items()}
    moved = traffic(result.model, result.metrics)
    if as_json:
        summary = {"path": str(result.path), "finished": result.finished, "last": last}
        if moved is not None:
            summary["traffic"] = moved.to_json()
        print(json.dumps(summary))
    elif not result.finished:
        console.print(f"Stopped after round {last.get('round', 0)}. Go on with: tacit resume {result.path}")
    if not result.finished:
        raise typer.Exit(INTERRUPTED)  # so that a script does not take it for a finished run
    # Where private metrics are told instead, how many clients took part is not.
    learnt = any(record.get("clients", 1) for record in result.metrics)
    if as_json:
        if not learnt:
            raise typer.Exit(1)
        return
    if result.trouble is not None:
        console.print(f"[bold red]{result.trouble}[/bold red]")
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
    if (result.path / "statement.json").exists():
        from tacit import api

        found = api.statement(result.path)
        console.print(found.summary(), markup=False)
        for text in found.warnings:
            console.print(f"Mind: {text}.", style="yellow", markup=False)
        for line in api.extrapolations(result.path):
            console.print(line, style="dim", markup=False)
        console.print(f"The whole statement: tacit statement {result.path}", style="dim", markup=False)
    if moved is not None:
        console.print(moved.text(), style="dim")
    if (result.path / "report.html").exists():
        console.print(f"Page: {result.path / 'report.html'}", markup=False, soft_wrap=True)
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


def main() -> None:
    """The entry point: errors that are the user's to mend are one line."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        code = app(prog_name="tacit", standalone_mode=False)
    except UserError as error:
        _refuse(str(error))
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "tacit"
        _refuse(f"{error.format_message().rstrip('.')}; see `{command} --help`")
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of the answer has left
        _Console().on_broken_pipe()
        sys.exit(1)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _refuse(f"{place}{error.strerror or error}; what was saved before is there")
    except RuntimeError as error:
        if (
            type(error).__name__ != "ClientError"
        ):  # its room is not imported for commands that train no client
            raise
        _refuse(str(error).splitlines()[0])
    sys.exit(code)


def _refuse(why: str) -> NoReturn:
    """One line, however long what was typed is, and whatever is in it."""
    line = " ".join(why.splitlines())
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
    print(f"tacit: {line}".encode(errors="replace").decode(), file=sys.stderr)
    sys.exit(2)
