"""A picture of an audit: what is claimed beside what was shown, and what the guesser saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tacit.config.audit import AuditReport
from tacit.errors import UserError


def draw_audit(report: AuditReport, file: Path, title: str = "") -> None:
    """Draw as PNG or SVG by the file's ending."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    audits = [a for a in (report.mechanism, report.run) if a is not None]
    seen = report.scores is not None and report.inside is not None
    figure = Figure(figsize=(9 if seen else 5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2 if seen else 1, squeeze=False)[0]
    places = np.arange(len(audits))
    axes[0].bar(places - 0.2, [a.claimed for a in audits], 0.4, label="claimed ε", color="tab:blue")
    label = f"shown, {report.mechanism.confidence:.0%} confidence"
    axes[0].bar(places + 0.2, [a.lower for a in audits], 0.4, label=label, color="tab:orange")
    axes[0].set_xticks(places, ["the mechanism alone", "a run with canaries"][: len(audits)])
    axes[0].set_ylabel(f"ε at δ = {report.mechanism.delta:g}")
    axes[0].legend(fontsize="small")
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
