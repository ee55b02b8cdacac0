"""The page's numbers: tiles, and tables of runs, rounds, layers and settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from tacit.config.yamls import to_yaml
from tacit.federation.checkpoint import CLIENTS, LABELS
from tacit.federation.layers import over_rounds
from tacit.federation.tracking import troubles
from tacit.privacy.rounding import rounded_up
from tacit.reading import from_json, read_text
from tacit.report.chart import number
from tacit.report.compare import Row, Run, Spread, judged_by, untrained
from tacit.report.pieces import duration, letter, size, swatch, table_head
from tacit.tasks.headline import decimals


def warnings(table: Sequence[Row]) -> Iterable[str]:
    """Warnings that a reader must see before the numbers."""
    if untrained(table):
        yield "numbers on the test set are with the initial personal part of the model, which nobody trains"
    for n, row in enumerate(table):
        who = f"{letter(n)}: " if len(table) > 1 else ""
        for run in row.runs:
            if (text := troubles(run.metrics)) is not None:
                yield f"{who}{text} ({run.folder.name})"
        if len(table) > 1 and row.unfinished:
            yield f"{who}not finished, {row.rounds} rounds"
        if row.other_weights:
            yield f"{who}the seeds began with different weights of a model that was passed in"


def tiles(row: Row) -> str:
    """The main numbers of one row."""
    metric = judged_by([row])
    last, best = row.last(metric.name), row.best(metric)

    def shown(spread: Spread | None) -> str:
        if spread is None:
            return "–"
        scale = 100 if metric.share else 1
        digits, unit = (1, "%") if metric.share else (decimals(spread.mean, least=3, significant=3), "")
        among = _among(scale * spread.std, f".{digits}f") if len(row.runs) > 1 else ""
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


def _among(std: float, digits: str) -> str:
    """The spread behind a mean; nothing where some runs have diverged, and there is none."""
    return f" ± {std:{digits}}" if math.isfinite(std) else ""


def runs_table(table: Sequence[Row], address: Callable[[Run], str] | None) -> str:
    """A table line for each row of runs."""
    metric = judged_by(table)
    scale, unit = (100, " %") if metric.share else (1, "")

    def cell(spread: Spread | None, many: bool) -> str:
        if spread is None:
            return '<td data-v="">–</td>'
        among = _among(scale * spread.std, ".2g") if many else ""
        return f'<td data-v="{spread.mean}">{scale * spread.mean:.4g}{among}</td>'

    own = any(row.own(metric) for row in table if row.own_name(metric) != metric.name)
    rows = []
    for n, row in enumerate(table):
        many, epsilon = len(row.runs) > 1, row.epsilon
        where = ", ".join(
            escape(str(run.folder))
            if address is None
            else f'<a href="{escape(address(run))}">{escape(run.folder.name)}</a>'
            for run in row.runs
        )
        spent = ("not known" if row.unknown else "–") if epsilon is None else rounded_up(epsilon)
        rows.append(
            f'<tr><td class="t">{swatch(n)}{letter(n)}</td>'
            f'<td class="t">{escape(row.label)}<small>{where}</small></td><td data-v="{len(row.runs)}">'
            f'{len(row.runs)}</td><td data-v="{min(run.rounds_done for run in row.runs)}">{row.rounds}</td>'
            + cell(row.last(metric.name), many)
            + cell(row.best(metric), many)
            + (cell(row.own(metric), many) if own else "")
            + f'<td data-v="{"" if epsilon is None else epsilon}">{spent}</td>'
            f'<td class="t">{row.protects or "–"}</td>'
            f'<td data-v="{row.total("bytes_up")}">{size(row.total("bytes_up"))}</td>'
            f'<td data-v="{row.total("bytes_down")}">{size(row.total("bytes_down"))}</td>'
            f'<td data-v="{row.total("seconds")}">{duration(row.total("seconds"))}</td></tr>'
        )
    name = f"{metric.title}{unit}"
    titles = ["", "experiment", "seeds", "rounds", f"{name}, last", "best", *(["on own data"] if own else [])]
    titles += ["ε", "unit", "up", "down", "time"]
    columns = [(title, title in ("", "experiment", "unit")) for title in titles]
    inside = f"{table_head('runs', columns)}<tbody>{''.join(rows)}</tbody>"
    return f'<div class="card scroll"><table>{inside}</table></div>'


def runs_of(row: Row, address: Callable[[Run], str] | None) -> str:
    """The places of one row's runs."""
    if len(row.runs) == 1:
        return ""
    links = [
        escape(str(run.folder))
        if address is None
        else f'<a href="{escape(address(run))}">{escape(run.folder.name)}</a>'
        for run in row.runs
    ]
    return f"<h2>Runs</h2><p>{', '.join(links)}</p>"


def rounds_table(run: Run) -> str:
    """All recorded values, round by round."""
    names = list(dict.fromkeys(key for record in run.metrics for key in record))
    names = [
        n for n in names if n != "layers" and any(isinstance(r.get(n), int | float) for r in run.metrics)
    ]
    most = 500
    step = max(1, math.ceil(len(run.metrics) / most))
    records = run.metrics[::-1][::step][::-1]  # always include the last round

    def cell(value: Any) -> str:
        if not isinstance(value, int | float):
            return '<td data-v="">–</td>'
        return f'<td data-v="{value}">{number(float(value))}</td>'

    rows = "".join(f"<tr>{''.join(cell(record.get(name)) for name in names)}</tr>" for record in records)
    head = table_head("rounds", [(name.replace("_", " "), False) for name in names])
    every = f", every {step}th" if step > 1 else ""
    return (
        f'<details id="rounds"><summary>All rounds as a table{every}</summary>'
        f'<div class="card scroll"><table>{head}<tbody>{rows}</tbody></table></div></details>'
    )


def layers_table(run: Run) -> str:
    """Norms by layer, over all rounds."""
    layers = over_rounds(run.metrics)
    if not layers:
        return ""
    rows = "".join(
        f'<tr><td class="t">{escape(name)}</td><td data-v="{mean}">{number(mean)}</td>'
        f'<td data-v="{std}">{number(std)}</td></tr>'
        for name, (mean, std) in layers.items()
    )
    head = table_head("layers", (("layer", True), ("norm, mean", False), ("deviation", False)))
    return (
        '<details id="layers"><summary>Update norms of all layers</summary>'
        f'<div class="card scroll"><table>{head}<tbody>{rows}</tbody></table></div></details>'
    )


def names_of(run: Run) -> str:
    """Names of classes, and of clients whose updates were left out, if they have names."""
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


def settings_of(run: Run) -> str:
    """The whole config, and objects that were passed in."""
    text = to_yaml(run.config)
    given = "".join(
        f"<li>{role}: {escape(one.text())}, {escape(one.kind)}</li>" for role, one in run.passed.items()
    )
    objects = f"<p>Given as objects:</p><ul>{given}</ul>" if given else ""
    return (
        '<details id="settings"><summary>Every setting</summary>'
        f'<div class="card">{objects}<pre tabindex="0">{escape(text)}</pre></div></details>'
    )
