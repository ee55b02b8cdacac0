"""A picture of an audit: the claimed ε beside the demonstrated one, and what the guesser saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tacit.errors import UserError
from tacit.privacy.audit import AuditReport, percent
from tacit.privacy.rounding import rounded_down, rounded_up


def draw_audit(report: AuditReport, file: Path, title: str = "") -> None:
    """Draw as PNG or SVG, by the file's extension."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    alone, run, seen = report.mechanism, report.run, report.scores is not None and report.inside is not None
    bars = [(f"mechanism alone\nδ = {alone.delta:g}", alone.claimed, alone.lower)]
    if alone.curve is not None:
        point = alone.curve
        bars.append((f"where most doubtful\nδ = {point.delta:g}", point.claimed, point.lower))
    if run is not None:
        bars.append((f"run with canaries\nδ = {run.delta:g}", run.claimed, run.lower))
    figure = Figure(figsize=(10 if seen else 5.5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2 if seen else 1, squeeze=False)[0]
    names, claimed, shown = zip(*bars, strict=True)
    places, label = np.arange(len(bars)), f"shown, {percent(alone.confidence)} confidence"
    for offset, values, name, colour, rounded in (
        (-0.2, claimed, "claimed ε", "tab:blue", rounded_up),
        (0.2, shown, label, "tab:orange", rounded_down),
    ):
        drawn = axes[0].bar(places + offset, values, 0.4, label=name, color=colour)
        axes[0].bar_label(drawn, [rounded(value) for value in values], fontsize="small")
    axes[0].set_xticks(places, names, fontsize="small")
    axes[0].set_ylabel("ε")
    axes[0].margins(y=0.12)
    # Above the bars: inside, it would cover one bar's number.
    axes[0].legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    if report.scores is not None and report.inside is not None:
        edges = np.histogram_bin_edges(report.scores, bins=30)
        for coin, name in ((True, "canary there"), (False, "not there")):
            axes[1].hist(report.scores[report.inside == coin], edges, alpha=0.6, label=name)
        axes[1].set_xlabel("the guesser's score")
        axes[1].set_ylabel("canaries")
        axes[1].legend(fontsize="small")
    if title:
        figure.suptitle(title, fontsize="medium")
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: the picture cannot be written ({error})") from None
