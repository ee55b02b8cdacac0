"""One page on one run or many: a single HTML file that needs no network and no script to be read.

The guarantee comes first. Everything is in the HTML itself (tables, drawings, sentences for screen readers).
The script adds sorting, values under the pointer or arrow keys, and a choice of light or dark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from tacit.errors import UserError
from tacit.federation.files import write_atomically
from tacit.report.compare import Row, Run
from tacit.report.curves import charts, figure
from tacit.report.guarantee import Statement, guarantee, guarantees, stated
from tacit.report.numbers import (
    layers_table,
    names_of,
    rounds_table,
    runs_of,
    runs_table,
    settings_of,
    tiles,
    warnings,
)
from tacit.report.pieces import legend, letter, warning

PAGE = "report.html"
LARGEST = 1_000_000
"""The most bytes of a page: drawings are thinned until it fits."""


def write_page(table: Sequence[Row], file: Path, title: str | None = None) -> None:
    """Save the page on some runs."""
    try:
        write_atomically(file, page(table, title))
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror})") from None


def page(
    table: Sequence[Row],
    title: str | None = None,
    statement: Callable[[Run], Statement | str | None] | None = None,
    address: Callable[[Run], str] | None = None,
) -> str:
    """The whole page, under `LARGEST` bytes.

    Args:
        table: rows of runs, as `tacit compare` has them.
        title: the page's title; the run's name by default.
        statement: finds a run's statement; by default, replays its ledger.
        address: gives the address of each run's own page, on a live board.
    """
    statement = statement or stated
    text = ""
    first = min(400, max(25, 2000 // len(table)))
    for points in (first, *(p for p in (200, 100, 50, 25, 10) if p < first)):
        text = _whole(table, title, points, statement, address)
        if len(text.encode()) <= LARGEST:
            return text
    raise UserError(f"a page on {len(table)} rows of runs would be larger than 1 MB; give fewer runs")


def body(
    table: Sequence[Row],
    points: int = 400,
    statement: Callable[[Run], Statement | str | None] = stated,
    address: Callable[[Run], str] | None = None,
) -> str:
    """The content of `<main>`: guarantee, numbers, curves, tables."""
    parts = [guarantee(table[0], statement) if len(table) == 1 else guarantees(table, statement)]
    parts += [warning(text) for text in warnings(table)]
    if len(table) == 1:
        parts.append(tiles(table[0]))
    else:
        parts += ["<h2>Runs</h2>", runs_table(table, address)]
    parts.append("<h2>Over the rounds</h2>")
    if len(table) > 1:
        parts.append(legend((n, False, letter(n), row.label) for n, row in enumerate(table)))
        if any(len(row.runs) > 1 for row in table):
            parts.append('<p class="note">Lines are means over seeds, bands one standard deviation.</p>')
    drawn = [figure(chart, n) for n, chart in enumerate(charts(table, points))]
    parts.append(f'<div class="charts">{"".join(drawn)}</div>' if drawn else "<p>No round has ended yet.</p>")
    if len(table) == 1:
        parts += [layers_table(table[0].runs[0]), rounds_table(table[0].runs[0]), runs_of(table[0], address)]
        parts += [names_of(table[0].runs[0]), settings_of(table[0].runs[0])]
    return "".join(parts)


def _whole(
    table: Sequence[Row],
    title: str | None,
    points: int,
    statement: Callable[[Run], Statement | str | None],
    address: Callable[[Run], str] | None,
) -> str:
    inside = body(table, points, statement, address)
    return shell(title or _title(table), _about(table), inside, live=address is not None)


def shell(title: str, about: str, inside: str, live: bool = False) -> str:
    """The page around its `<main>`: style, script, and a content policy that forbids any other address."""
    connect = "connect-src 'self'; " if live else ""
    policy = (
        f"default-src 'none'; {connect}style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
    made = time.strftime("%Y-%m-%d %H:%M")
    lost = (
        '<p id="lost" class="warn" role="status" hidden>The board does not answer; is it still running?</p>'
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · tacit</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{_asset('page.css')}</style></head><body>"
        '<a class="skip" href="#main">To the results</a>'
        f'<header><h1>{escape(title)}</h1><div class="about">{about}</div>'
        '<button id="theme" class="theme" type="button">light / dark</button></header>'
        f'<main id="main"{" data-live=1" if live else ""}>{inside}</main>'
        f"<footer>{lost if live else ''}Made by tacit on {made}. Losses, accuracies and norms are exact and "
        "for the researcher: they are outside of any guarantee. In a chart, arrow keys read out its values."
        f"</footer><script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (resources.files("tacit.report") / "assets" / name).read_text(encoding="utf-8")


def _title(table: Sequence[Row]) -> str:
    runs = [run for row in table for run in row.runs]
    if len(runs) == 1:
        return runs[0].folder.name or str(runs[0].config.get("name", "run"))
    names = sorted({str(run.config.get("name", "run")) for run in runs})
    return f"{len(runs)} runs of {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"


def _about(table: Sequence[Row]) -> str:
    if len(table) > 1:
        return f"{len(table)} experiments, the curves marked A to {letter(len(table) - 1)}"
    row, run = table[0], table[0].runs[0]
    data, model = run.config.get("data") or {}, run.config.get("model") or {}
    network = run.passed["model"].name if "model" in run.passed else model.get("name") or model.get("hub")
    facts = [row.label, data.get("name"), network or "a transformers model"]
    badge = "finished" if not row.unfinished else f"unfinished: {row.rounds} rounds"
    if run.ending is not None and run.ending.stopped:
        badge = f"ended early: {run.ending.stopped}"
    told = f'<span class="badge{" open" if row.unfinished else ""}">{escape(badge)}</span>'
    if run.simulated:
        told += ' <span class="badge open">simulation</span>'
    seeds = f" · {len(row.runs)} seeds" if len(row.runs) > 1 else ""
    return f"{escape(' · '.join(str(f) for f in facts if f))}{seeds} {told}"
