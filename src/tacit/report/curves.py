"""The page's curves: every quantity that was recorded per round."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from tacit.federation.layers import by_kind
from tacit.privacy.rounding import rounded_down
from tacit.report.chart import COLOURS, Chart, Point, Series, thinned
from tacit.report.compare import Row, Run, Spread, judged_by, keeps_parts
from tacit.report.pieces import legend, letter


def charts(table: Sequence[Row], points: int = 400) -> list[Chart]:
    """All recorded quantities as curves; with several rows, one curve for each, with a band over seeds."""
    metric, alone = judged_by(table).common, len(table) == 1
    found: list[Chart] = []

    def add(title: str, name: str, total: bool = False, factor: float = 1.0, **options: Any) -> None:
        series = _series(table, name, points, total, factor)
        if series:
            found.append(Chart(title, series, **options))

    budget, bound = _budget(table), _clipping_norm(table)
    limit = None if budget is None else (float(budget), f"budget {budget:g}")
    add("Privacy budget spent, ε", "epsilon", upwards=True, zero=True, limit=limit, note=_left(table, budget))
    title = f"{metric.title[0].upper()}{metric.title[1:]}"
    initial = "with the initial personal part, which nobody trains" if keeps_parts(table) else ""
    add(f"{title} on the test set", metric.name, share=metric.share, note=initial)
    for prefix, whose in (("personal", "clients' own records"), ("tuned", "own records, after tuning")):
        add(f"{title}: {whose}", f"{prefix}_{metric.name}", share=metric.share)
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


def _budget(table: Sequence[Row]) -> float | None:
    """The common budget of all private runs, if they have one."""
    found = {
        (run.config.get("privacy") or {}).get("epsilon") for row in table for run in row.runs if run.unit
    }
    return next(iter(found)) if len(found) == 1 else None


def _clipping_norm(table: Sequence[Row]) -> tuple[float, str] | None:
    """The clipping norm, as a line to draw, if all clients have the same fixed one."""
    found = {
        ((run.config.get("privacy") or {}).get("clip") or {}).get("bound")
        for row in table
        for run in row.runs
    }
    norm = next(iter(found))
    same = len(found) == 1 and all(row.runs[0].unit == "client" for row in table)
    if norm is None or not same or _series(table, "clip", 2):
        return None
    return float(norm), f"clip {norm:g}"


def _left(table: Sequence[Row], budget: float | None) -> str:
    spent = table[0].epsilon if len(table) == 1 else None
    if spent is None or budget is None or math.isinf(spent):
        return ""
    return f"{rounded_down(max(budget - spent, 0.0))} of {budget:g} left"


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
    """Mean and deviation over the runs, in the rounds that all of them recorded, thinned to at most this
    many.
    """
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
    """Norms by layer over the rounds: each layer if they are few, otherwise the mean of each kind."""
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


def figure(chart: Chart, n: int) -> str:
    """A chart with its title, its legend and its values for the script."""
    key = ""
    if any(
        s.letter and not s.letter.isupper() for s in chart.series
    ):  # the rows' legend stands once, above all charts
        key = legend([(s.colour, s.dashed, s.letter, s.label) for s in chart.series])
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
