"""`tacit corpus`: corpora of speech that are made or fetched here, ready for a config to name."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tacit.cli.common import Json, print_json

corpus = typer.Typer(
    help="Make or fetch a corpus of speech, once; configs then use it by name.", no_args_is_help=True
)


@corpus.command()
def synthetic(
    speakers: Annotated[int, typer.Option(min=1, help="Training speakers of the federated domain.")] = 240,
    utterances: Annotated[int, typer.Option(min=2, help="Utterances a speaker, on average.")] = 20,
    vocabulary: Annotated[int, typer.Option(min=50, help="Different words.")] = 100,
    as_json: Json = False,
) -> None:
    """Speak a synthetic corpus of two domains (about two minutes): few voices, then many others.

    `synthetic-speech-seed` is for a seed model; `synthetic-speech` is the federation, a client a speaker.
    Killed, the same command goes on where it was.

    - `tacit corpus synthetic`

    - `tacit corpus synthetic --speakers 300 --vocabulary 200`
    """
    given = {"speakers": speakers, "utterances": utterances, "vocabulary": vocabulary}
    usual = {"speakers": 240, "utterances": 20, "vocabulary": 100}
    changed = {name: value for name, value in given.items() if value != usual[name]}
    seed = {name: value for name, value in changed.items() if name == "vocabulary"}
    _show({"synthetic-speech-seed": seed, "synthetic-speech": changed}, as_json)


@corpus.command()
def recordings(as_json: Json = False) -> None:
    """Fetch real recordings with transcripts (about 300 MB, GPL, from Debian) and keep their features.

    `speech-stamps`: eight languages, a client is a language's theme. `speech-fillets`: acted dialogue in
    Czech and Dutch, a client is a character.

    - `tacit corpus recordings`
    """
    from tacit.data.speech.recordings import KNOWN

    _show({name: {} for name in KNOWN}, as_json)


def _show(wanted: dict[str, dict[str, int]], as_json: bool) -> None:
    """Load each data set with its options, and say what it holds and how a config names it."""
    from tacit.data import check, load
    from tacit.data.speech import describe

    console = Console(stderr=as_json, highlight=False)
    facts: dict[str, Any] = {}
    for name, options in wanted.items():
        check(name, speech=options or None)
    for name, options in wanted.items():
        dataset = load(name, speech=options or None)
        facts[name] = {
            "licence": dataset.licence,
            "origin": dataset.origin,
            "tokens": dataset.classes,
            "options": options,
            "splits": describe.splits(dataset),
        }
        if not as_json:
            console.print(f"[bold]{name}[/bold]: {dataset.origin}; {dataset.licence}")
            console.print(_table(facts[name]["splits"]))
            listed = ", ".join(f"{key}: {value}" for key, value in options.items())
            also = f", speech: {{{listed}}}" if options else ""
            console.print(
                f"data: {{name: {name}{also}, partition: {{kind: natural}}}}\n", markup=False, soft_wrap=True
            )
    if as_json:
        print_json(facts)


def _table(splits: dict[str, dict[str, float]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "hours", "speakers", "utterances", "minutes each: mean", "std", "min", "max"):
        table.add_column(title, justify="left" if not title else "right")
    for split, s in splits.items():
        minutes = (f"{s[name]:.2f}" for name in ("mean", "std", "min", "max"))
        table.add_row(split, f"{s['hours']:.2f}", f"{s['speakers']:,}", f"{s['utterances']:,}", *minutes)
    return table
