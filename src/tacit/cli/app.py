"""Commands, and how their errors are told: one line and exit code 2, never a traceback."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer

from tacit.cli.audit import audit
from tacit.cli.client import client
from tacit.cli.common import PipeConsole
from tacit.cli.compare import compare
from tacit.cli.corpus import corpus
from tacit.cli.data import data
from tacit.cli.diagnose import drift, hessian
from tacit.cli.export import export
from tacit.cli.fit import fit
from tacit.cli.layers import layers
from tacit.cli.ledger import ledger
from tacit.cli.methods import blocks, methods
from tacit.cli.plan import plan
from tacit.cli.recipes import init, recipes
from tacit.cli.report import board, report
from tacit.cli.run import INTERRUPTED, pretrain, resume, run
from tacit.cli.server import server
from tacit.cli.statement import statement
from tacit.cli.test import test
from tacit.cli.verify import verify
from tacit.errors import ClientError, UserError

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


app.command()(run)
app.command()(pretrain)
app.command()(resume)
app.command()(data)
app.command()(statement)
app.command()(export)
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
        PipeConsole().on_broken_pipe()
        sys.exit(1)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _refuse(f"{place}{error.strerror or error}; what was saved before is there")
    except ClientError as error:
        _refuse(str(error).splitlines()[0])
    sys.exit(code)


def _refuse(why: str) -> NoReturn:
    """One line, however long what was typed is, and whatever is in it."""
    line = " ".join(why.splitlines())
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
    print(f"tacit: {line}".encode(errors="replace").decode(), file=sys.stderr)
    sys.exit(2)
