"""Arguments that several commands take, where they speak, and a sign that they are at work."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The config; `tacit init` writes one.")]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. `--set local.lr=0.1`. Repeatable."),
]
Changes = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change what may, e.g. `--set rounds=100`. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, e.g. runs/quickstart-…")]


def print_json(value: Any) -> None:
    """One JSON value for a program to read; a number that JSON has no word for is null."""
    print(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


class PipeConsole(Console):
    """A console whose reader may leave (`| head -1`): what is under way goes on, in silence."""

    def on_broken_pipe(self) -> None:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, self.file.fileno())
        os.close(silence)


def console_for(quiet: bool) -> Console:
    """Where people read: standard error when standard output is for a program."""
    return PipeConsole(stderr=quiet, highlight=False, soft_wrap=False)


def narrow() -> Console:
    """A console for sentences: 80 columns at most, on any terminal."""
    return Console(highlight=False, width=min(80, Console().width))


@contextmanager
def working(what: str) -> Iterator[None]:
    """Tell a person who watches that something goes on which may take seconds; nothing of it stays.

    Answers are printed after it, not inside. Where standard output or standard error is no terminal, nothing
    is written at all, whatever `FORCE_COLOR` says: programs and logs read there.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield
        return
    with Console(stderr=True).status(f"{what}…"):
        yield
