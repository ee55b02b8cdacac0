"""One page on one run or many: a single HTML file that needs no network and can be read without a script.

The guarantee comes first. Everything is in the HTML itself (tables, drawings, sentences for screen readers);
the script adds sorting, values under the pointer or the arrow keys, and the choice of light or dark.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tacit.config.loading import to_yaml
from tacit.errors import UserError
from tacit.federation.checkpoint import CLIENTS, LABELS
from tacit.federation.files import unsealed, write_atomically
from tacit.federation.layers import by_kind, over_rounds
from tacit.federation.statements import STATEMENT, read_statement
from tacit.federation.tracking import troubles
from tacit.privacy.statement import rounded_up
from tacit.reading import from_json, read_text
from tacit.report.chart import COLOURS, Chart, Point, Series, number, thinned
from tacit.report.compare import Row, Run, Spread, judged_by

PAGE = "report.html"
LARGEST = 1_000_000
"""Bytes of a page: what is drawn is thinned out until it fits."""

Statement = Mapping[str, Any]


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
        title: what it is called; the run's name by default.
        statement: how a run's statement is found; a replay of its ledger by default.
        address: of each run's own page, on a live board.
    """
    statement = statement or stated
    text = ""
    first = min(400, max(25, 2000 // len(table)))
    for points in (first, *(p for p in (200, 100, 50, 25, 10) if p < first)):
        text = _whole(table, title, points, statement, address)
        if len(text.encode()) <= LARGEST:
            return text
    raise UserError(f"a page on {len(table)} rows of runs would be larger than 1 MB; give fewer runs")


def stated(run: Run) -> Statement | str | None:
    """What a run guarantees, by a replay of its ledger; a sentence where that fails, None if nothing is."""
    if run.unit is None:
        return None
    try:
        return read_statement(run.folder).to_dict()
    except UserError as error:
        return str(error)


def last_stated(run: Run) -> Statement | str | None:
    """The same as it was written at the last checkpoint: quick, for a page that is made anew all the time."""
    if run.unit is None:
        return None
    try:
        return unsealed(read_text(run.folder / STATEMENT), indent=1)
    except FileNotFoundError:
        return "nothing is saved yet"
    except (OSError, ValueError) as error:
        return f"{STATEMENT} is damaged ({error}); `tacit statement` reads the ledger itself"


def body(
    table: Sequence[Row],
    points: int = 400,
    statement: Callable[[Run], Statement | str | None] = stated,
    address: Callable[[Run], str] | None = None,
) -> str:
    """What is inside `<main>`: guarantee, numbers, curves, tables."""
    parts = [_guarantee(table[0], statement) if len(table) == 1 else _guarantees(table, statement)]
    parts += [_warning(text) for text in _warnings(table)]
    if len(table) == 1:
        parts.append(_tiles(table[0]))
    else:
        parts += ["<h2>Runs</h2>", _runs(table, address)]
    parts.append("<h2>Over the rounds</h2>")
    if len(table) > 1:
        parts.append(_key((n, False, letter(n), row.label) for n, row in enumerate(table)))
        if any(len(row.runs) > 1 for row in table):
            parts.append('<p class="note">Lines are means over seeds, bands one standard deviation.</p>')
    drawn = [_figure(chart, n) for n, chart in enumerate(charts(table, points))]
    parts.append(f'<div class="charts">{"".join(drawn)}</div>' if drawn else "<p>No round has ended yet.</p>")
    if len(table) == 1:
        parts += [_layers(table[0].runs[0]), _rounds(table[0].runs[0]), _runs_of(table[0], address)]
        parts += [_names(table[0].runs[0]), _settings(table[0].runs[0])]
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
    """The page around its `<main>`: style, script, and a policy that forbids any other address."""
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


def letter(n: int) -> str:
    """A, B, …, Z, then AA, AB, ….

    >>> letter(0), letter(25), letter(26)
    ('A', 'Z', 'AA')
    """
    return chr(65 + n) if n < 26 else letter(n // 26 - 1) + letter(n % 26)


# --- the guarantee ------------------------------------------------------------------------------------------


def _guarantee(row: Row, statement: Callable[[Run], Statement | str | None]) -> str:
    found = [statement(run) for run in row.runs]
    first = found[0]
    if first is None:
        return _plain_card(
            "no guarantee",
            "This run has no privacy section: its models may show anything about anyone's data.",
        )
    worst = _worst(found)
    if isinstance(worst, str) or worst is None:
        return _plain_card("not known", f"What this run guarantees cannot be said: {worst}.")
    epsilon = worst["epsilon"]
    value = "no guarantee" if epsilon is None else f"ε = {rounded_up(epsilon)}"
    unit = "whole client" if worst["unit"] == "client" else "single record"
    kind = " none" if epsilon is None or worst["simulation"] else ""
    simulated = ", simulated" if worst["simulation"] else ""
    warned = "".join(_warning(text) for text in worst.get("warnings", ()))
    of_many = f" The largest of {len(found)} seeds." if len(found) > 1 else ""
    return (
        f'<section class="card guarantee{kind}" aria-label="Guarantee"><div class="value">{value}'
        f"<small>δ = {worst['delta']:g}, for each {unit}{simulated}</small></div>"
        f"<p>{escape(_summary(worst))}{of_many}</p>{warned}"
        f'<details id="statement"><summary>The whole statement</summary>{_statement(worst)}</details>'
        "</section>"
    )


def _plain_card(value: str, text: str) -> str:
    return (
        f'<section class="card guarantee none" aria-label="Guarantee"><div class="value">{value}</div>'
        f"<p>{escape(text)}</p></section>"
    )


def _worst(found: Sequence[Statement | str | None]) -> Statement | str | None:
    """The statement that promises least; one that cannot be read promises nothing."""
    unknown = next((one for one in found if isinstance(one, str)), None)
    if unknown is not None:
        return unknown
    known = [one for one in found if isinstance(one, Mapping)]
    if len(known) < len(found):
        return None
    return max(known, key=lambda one: math.inf if one["epsilon"] is None else one["epsilon"])


def _summary(found: Statement) -> str:
    return str(found.get("summary") or found["text"].splitlines()[0])


def _statement(found: Statement) -> str:
    pld = "no bound at hand" if found["epsilon_pld"] is None else f"ε = {rounded_up(found['epsilon_pld'])}"
    rdp = "∞" if found["epsilon_rdp"] is None else rounded_up(found["epsilon_rdp"])
    against = [
        f"<li>{escape(o['who'])}: {_held(o['epsilon'])}. {escape(o['why'])}</li>" for o in found["observers"]
    ]
    budget = "none set" if found["budget"] is None else f"ε = {found['budget']:g}"
    repeated = f", {found['repeated']} of them a second time" if found["repeated"] else ""
    carried = f", and {found['carried']} of earlier runs on the same data" if found["carried"] else ""
    rows = [
        ("Neighbours", f"{found['relation']}, of one {'client' if found['unit'] == 'client' else 'record'}"),
        ("Accountants", f"privacy-loss distributions: {pld}; Rényi divergences: ε = {rdp}"),
        ("Budget", budget),
        ("Charged", f"{found['rounds']:,} rounds{repeated}{carried}"),
        ("Sampling", found["sampling"].partition(": ")[2]),
        ("Clipping", found["clipping"].partition(": ")[2]),
        ("Noise", found["noise"].partition(": ")[2]),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{escape(str(text))}</dd>" for name, text in rows)
    missing = "".join(f"<li>{escape(item)}</li>" for item in found["not_covered"])
    return (
        f"<dl>{listed}<dt>Against whom</dt><dd><ul>{''.join(against)}</ul></dd>"
        f"<dt>Not covered</dt><dd><ul>{missing}</ul></dd></dl>"
    )


def _held(epsilon: float | None) -> str:
    return "no guarantee" if epsilon is None else f"ε = {rounded_up(epsilon)}"


def _guarantees(table: Sequence[Row], statement: Callable[[Run], Statement | str | None]) -> str:
    rows = []
    for n, row in enumerate(table):
        worst = _worst([statement(run) for run in row.runs])
        known = worst if isinstance(worst, Mapping) else None
        told = "No privacy section: nothing is guaranteed." if worst is None else str(worst)
        epsilon = known["epsilon"] if known else None
        said = _summary(known) if known else told
        warned = "".join(_warning(text) for text in (known or {}).get("warnings", ()))
        rows.append(
            f'<tr><td class="t">{_swatch(n)}{letter(n)}</td><td class="t">{escape(row.label)}</td>'
            f'<td data-v="{"" if epsilon is None else epsilon}">{_held(epsilon)}</td>'
            f'<td class="t">{escape(said)}{warned}</td></tr>'
        )
    head = _head("guarantees", (("", True), ("experiment", True), ("ε, at most", False), ("in words", True)))
    return (
        '<section class="card first" aria-label="Guarantees"><h2>Guarantees</h2>'
        f'<div class="scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div></section>'
    )


# --- numbers ------------------------------------------------------------------------------------------------


def _warnings(table: Sequence[Row]) -> Iterable[str]:
    for n, row in enumerate(table):
        who = f"{letter(n)}: " if len(table) > 1 else ""
        for run in row.runs:
            if (text := troubles(run.metrics)) is not None:
                yield f"{who}{text} ({run.folder.name})"
        if len(table) > 1 and row.unfinished:
            yield f"{who}not finished, {row.rounds} rounds"
        if row.other_weights:
            yield f"{who}the seeds began with different weights of a model that was passed in"


def _warning(text: str) -> str:
    return f'<p class="warn">{escape(text)}</p>'


def _tiles(row: Row) -> str:
    metric = judged_by([row])
    last, best = row.last(metric.name), row.best(metric)

    def shown(spread: Spread | None) -> str:
        if spread is None:
            return "–"
        scale = 100 if metric.share else 1
        digits, unit = (1, "%") if metric.share else (3, "")
        among = f" ± {scale * spread.std:.{digits}f}" if len(row.runs) > 1 else ""
        return f"{scale * spread.mean:.{digits}f}{among}{unit}"

    run = row.runs[0]
    sizes = [
        record["clients"] + len(record.get("skipped", ()))
        if "clients" in record
        else float(record.get("private_clients", 0))
        for record in run.metrics
    ]
    up, down, seconds = (row.total(name) for name in ("bytes_up", "bytes_down", "seconds"))
    tiles = [
        (shown(last), f"{metric.title}, last round"),
        (shown(best), f"{metric.title}, best round (choosing it is outside of the guarantee)"),
        (row.rounds, "rounds"),
        (number(float(np.mean(sizes))) if sizes else "–", "clients a round, on average"),
        (f"{size(up)} ↑ {size(down)} ↓", "sent by and to clients, in all"),
        (duration(seconds), "training and testing"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in tiles)
        + "</div>"
    )


def size(amount: float) -> str:
    """Bytes as a person says them.

    >>> size(1.9e9), size(430e6), size(2e3)
    ('1.9 GB', '430 MB', '2 kB')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if amount >= factor:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount / 1e3:.3g} kB"


def duration(seconds: float) -> str:
    """Time as a person says it.

    >>> duration(4.2), duration(200), duration(9000)
    ('4.2 s', '3 min 20 s', '2 h 30 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _head(name: str, columns: Sequence[tuple[str, bool]]) -> str:
    cells = "".join(
        f'<th scope="col"{" class=t" if text else ""}>'
        + (f'<button type="button" id="{name}-{n}">{escape(title)}</button>' if title else "<span></span>")
        + "</th>"
        for n, (title, text) in enumerate(columns)
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _swatch(n: int) -> str:
    return f'<i class="c{n % COLOURS}{" dash" if n >= COLOURS else ""}"></i>'


def _runs(table: Sequence[Row], address: Callable[[Run], str] | None) -> str:
    metric = judged_by(table)
    scale, unit = (100, " %") if metric.share else (1, "")

    def cell(spread: Spread | None, many: bool) -> str:
        if spread is None:
            return '<td data-v="">–</td>'
        among = f" ± {scale * spread.std:.2g}" if many else ""
        return f'<td data-v="{spread.mean}">{scale * spread.mean:.4g}{among}</td>'

    own = any(row.own(metric) for row in table)
    rows = []
    for n, row in enumerate(table):
        many, epsilon = len(row.runs) > 1, row.last("epsilon")
        where = ", ".join(
            escape(str(run.folder))
            if address is None
            else f'<a href="{escape(address(run))}">{escape(run.folder.name)}</a>'
            for run in row.runs
        )
        spent = "–" if epsilon is None else rounded_up(epsilon.mean)
        rows.append(
            f'<tr><td class="t">{_swatch(n)}{letter(n)}</td>'
            f'<td class="t">{escape(row.label)}<small>{where}</small></td><td data-v="{len(row.runs)}">'
            f'{len(row.runs)}</td><td data-v="{min(run.rounds_done for run in row.runs)}">{row.rounds}</td>'
            + cell(row.last(metric.name), many)
            + cell(row.best(metric), many)
            + (cell(row.own(metric), many) if own else "")
            + f'<td data-v="{"" if epsilon is None else epsilon.mean}">{spent}</td>'
            f'<td class="t">{row.protects or "–"}</td>'
            f'<td data-v="{row.total("bytes_up")}">{size(row.total("bytes_up"))}</td>'
            f'<td data-v="{row.total("bytes_down")}">{size(row.total("bytes_down"))}</td>'
            f'<td data-v="{row.total("seconds")}">{duration(row.total("seconds"))}</td></tr>'
        )
    name = f"{metric.title}{unit}"
    titles = ["", "experiment", "seeds", "rounds", f"{name}, last", "best", *(["on own data"] if own else [])]
    titles += ["ε", "unit", "up", "down", "time"]
    columns = [(title, title in ("", "experiment", "unit")) for title in titles]
    inside = f"{_head('runs', columns)}<tbody>{''.join(rows)}</tbody>"
    return f'<div class="card scroll"><table>{inside}</table></div>'


def _runs_of(row: Row, address: Callable[[Run], str] | None) -> str:
    if len(row.runs) == 1:
        return ""
    links = [
        escape(str(run.folder))
        if address is None
        else f'<a href="{escape(address(run))}">{escape(run.folder.name)}</a>'
        for run in row.runs
    ]
    return f"<h2>Runs</h2><p>{', '.join(links)}</p>"


def _rounds(run: Run) -> str:
    names = list(dict.fromkeys(key for record in run.metrics for key in record))
    names = [
        n for n in names if n != "layers" and any(isinstance(r.get(n), int | float) for r in run.metrics)
    ]
    most = 500
    step = max(1, math.ceil(len(run.metrics) / most))
    records = run.metrics[::-1][::step][::-1]  # the last round is always there

    def cell(value: Any) -> str:
        if not isinstance(value, int | float):
            return '<td data-v="">–</td>'
        return f'<td data-v="{value}">{number(float(value))}</td>'

    rows = "".join(f"<tr>{''.join(cell(record.get(name)) for name in names)}</tr>" for record in records)
    head = _head("rounds", [(name.replace("_", " "), False) for name in names])
    every = f", every {step}th" if step > 1 else ""
    return (
        f'<details id="rounds"><summary>All rounds as a table{every}</summary>'
        f'<div class="card scroll"><table>{head}<tbody>{rows}</tbody></table></div></details>'
    )


def _layers(run: Run) -> str:
    layers = over_rounds(run.metrics)
    if not layers:
        return ""
    rows = "".join(
        f'<tr><td class="t">{escape(name)}</td><td data-v="{mean}">{number(mean)}</td>'
        f'<td data-v="{std}">{number(std)}</td></tr>'
        for name, (mean, std) in layers.items()
    )
    head = _head("layers", (("layer", True), ("norm, mean", False), ("deviation", False)))
    return (
        '<details id="layers"><summary>Update norms of all layers</summary>'
        f'<div class="card scroll"><table>{head}<tbody>{rows}</tbody></table></div></details>'
    )


def _names(run: Run) -> str:
    """Classes by name, and clients whose updates were left out, as far as they have names."""
    classes, clients = (_listed(run.folder / name) for name in (LABELS, CLIENTS))
    lines = [("Classes", ", ".join(classes[:100]) + " …" * (len(classes) > 100))] if classes else []
    left = Counter(client for record in run.metrics for client in record.get("skipped", ()))
    if left:
        told = [
            f"{clients[client] if client < len(clients) else client} ({rounds})"
            for client, rounds in left.most_common(30)
        ]
        more = " …" * (len(left) > len(told))
        lines.append(("Clients whose update was no number (rounds)", ", ".join(told) + more))
    return "".join(f"<p><b>{what}:</b> {escape(text)}</p>" for what, text in lines)


def _listed(file: Path) -> list[str]:
    try:
        found = from_json(read_text(file))
    except (OSError, ValueError):
        return []
    return [str(name) for name in found] if isinstance(found, list) else []


def _settings(run: Run) -> str:
    text = to_yaml(run.config)
    given = "".join(
        f"<li>{role}: {escape(one.text())}, {escape(one.kind)}</li>" for role, one in run.passed.items()
    )
    objects = f"<p>Given as objects:</p><ul>{given}</ul>" if given else ""
    return (
        '<details id="settings"><summary>Every setting</summary>'
        f'<div class="card">{objects}<pre tabindex="0">{escape(text)}</pre></div></details>'
    )


# --- curves -------------------------------------------------------------------------------------------------


def charts(table: Sequence[Row], points: int = 400) -> list[Chart]:
    """Everything that was recorded, as curves; of several rows one curve each, with a band over seeds."""
    metric, alone = judged_by(table), len(table) == 1
    found: list[Chart] = []

    def add(title: str, name: str, total: bool = False, factor: float = 1.0, **options: Any) -> None:
        series = _series(table, name, points, total, factor)
        if series:
            found.append(Chart(title, series, **options))

    budgets = {
        (run.config.get("privacy") or {}).get("epsilon") for row in table for run in row.runs if run.unit
    }
    budget = next(iter(budgets)) if len(budgets) == 1 else None
    limit = None if budget is None else (float(budget), f"budget {budget:g}")
    add("Privacy budget spent, ε", "epsilon", upwards=True, zero=True, limit=limit, note=_left(table, budget))
    add(f"{metric.title[0].upper()}{metric.title[1:]} on the test set", metric.name, share=metric.share)
    for prefix, whose in (("personal", "clients' own records"), ("tuned", "own records, after tuning")):
        add(
            f"{metric.title[0].upper()}{metric.title[1:]}: {whose}",
            f"{prefix}_{metric.name}",
            share=metric.share,
        )
    if alone:
        both = [
            Series(label, series[0].points, word, 0 if word == "test" else 1, word != "test")
            for name, label, word in (
                ("loss", "test set", "test"),
                ("train_loss", "clients, while training", "train"),
            )
            if (series := _series(table, name, points)) and metric.name != "loss"
        ]
        if both:
            found.append(Chart("Loss", tuple(both)))
    else:
        if metric.name != "loss":
            add("Loss on the test set", "loss")
        add("Loss of clients while training", "train_loss")
    clips = {
        ((run.config.get("privacy") or {}).get("clip") or {}).get("bound")
        for row in table
        for run in row.runs
    }
    clip = (
        next(iter(clips)) if len(clips) == 1 and all(row.runs[0].unit == "client" for row in table) else None
    )
    bound = None if clip is None or _series(table, "clip", 2) else (float(clip), f"clip {clip:g}")
    add("Norm of a client's update, mean", "update_norm", zero=True, limit=bound, note="before clipping")
    add("Clipping norm", "clip", zero=True, note="it follows the clients' norms, within the budget")
    add("Share of clients clipped", "clipped", share=True, zero=True)
    if alone:
        found += _layer_charts(table[0].runs[0], points)
    add("Clients in a round", "clients", zero=True, note="those whose update counted")
    add("Clients that failed", "failed", zero=True)
    noisy = "private: a noisy sum, within the budget"
    add("Loss of clients while training", "private_loss", note=noisy)
    add("Accuracy on clients' own records", "private_accuracy", share=True, note=noisy)
    add("Norm of a client's update, mean", "private_norm", zero=True, limit=bound, note=noisy)
    add("Share of clients clipped", "private_clipped", share=True, zero=True, note=noisy)
    add("Clients in a round", "private_clients", zero=True, note=noisy)
    add("Clients that failed", "private_failed", zero=True, note=noisy)
    add("Traffic so far, up and down, in MB", "bytes", total=True, factor=1e-6, zero=True, unit="MB")
    add("Seconds a round", "seconds", zero=True, unit="s")
    return found


def _left(table: Sequence[Row], budget: float | None) -> str:
    spent = table[0].last("epsilon") if len(table) == 1 else None
    if spent is None or budget is None or math.isinf(spent.mean):
        return ""
    return f"{number(max(budget - spent.mean, 0.0))} of {budget:g} left"


def _series(
    table: Sequence[Row], name: str, points: int, total: bool = False, factor: float = 1.0
) -> tuple[Series, ...]:
    found = []
    for n, row in enumerate(table):
        curve = _curve(row, name, points, total, factor)
        if curve:
            found.append(Series(row.label, curve, letter(n) if len(table) > 1 else "", n))
    return tuple(found)


def _curve(row: Row, name: str, points: int, total: bool, factor: float) -> tuple[Point, ...]:
    """Mean and deviation over the runs, in (at most so many of) the rounds that all of them recorded."""
    runs = []
    for run in row.runs:
        if name == "bytes":
            pairs = [
                (r["round"], r["bytes_up"] + r["bytes_down"])
                for r in run.metrics
                if "bytes_up" in r and "bytes_down" in r
            ]
        elif name == "failed":
            pairs = [(r["round"], len(r.get("skipped", ()))) for r in run.metrics]
            pairs = pairs if any(count for _, count in pairs) else []
        else:
            pairs = run.series(name)
        if total:
            pairs = list(zip([n for n, _ in pairs], np.cumsum([v for _, v in pairs]).tolist(), strict=True))
        runs.append({int(n): float(value) for n, value in pairs})
    if not any(runs):
        return ()
    shared = sorted(set.intersection(*(set(values) for values in runs)))
    curve: list[Point] = []
    for n, _, _ in thinned([(n, 0.0, 0.0) for n in shared], points):
        spread = Spread.of([factor * values[n] for values in runs])
        assert spread is not None
        curve.append((n, spread.mean, spread.std))
    return tuple(curve)


def _layer_charts(run: Run, points: int) -> list[Chart]:
    """Norms by layer over the rounds: each layer where they are few, else the mean of each kind."""
    rounds = [(record["round"], record["layers"]) for record in run.metrics if record.get("layers")]
    if not rounds:
        return []
    few = len(rounds[0][1]) <= COLOURS
    curves: dict[str, list[Point]] = {}
    for n, layers in rounds:
        pairs = {name: (float(mean), float(std)) for name, (mean, std) in layers.items()}
        for name, (mean, _) in (pairs if few else by_kind(pairs)).items():
            curves.setdefault(name, []).append((n, mean, 0.0))
    series = tuple(
        Series(name, thinned(curve, points), letter(n).lower(), n)
        for n, (name, curve) in enumerate(curves.items())
    )
    title = "Update norms by layer" if few else "Update norms by kind of layer"
    return [Chart(title, series, zero=True, note="mean over a round's clients, before clipping")]


def _key(entries: Iterable[tuple[int, bool, str, str]]) -> str:
    items = [
        f'<li><i class="c{colour % COLOURS}{" dash" if dashed or colour >= COLOURS else ""}"></i>'
        f"<b>{escape(mark)}</b> {escape(label)}</li>"
        for colour, dashed, mark, label in entries
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _figure(chart: Chart, n: int) -> str:
    """A chart with its title, its key and its values for the script."""
    key = ""
    if any(
        s.letter and not s.letter.isupper() for s in chart.series
    ):  # rows are named once, above all charts
        key = _key([(s.colour, s.dashed, s.letter, s.label) for s in chart.series])
    values = [
        {
            "name": s.letter or s.label,
            "x": [x for x, _, _ in s.points],
            "text": [chart.text(y) + (f" ± {chart.text(d)}" if d else "") for _, y, d in s.points],
        }
        for s in chart.series
    ]
    data = json.dumps(values, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="card chart" tabindex="0" id="chart-{n}" aria-label="{escape(chart.title)}">'
        f"<h3>{escape(chart.title)}</h3>{note}{key}{chart.svg(f'chart-{n}')}"
        f'<script type="application/json">{data}</script></figure>'
    )
