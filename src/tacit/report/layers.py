"""Update norms over a model's depth, as in paper 003's Figure 5."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tacit.errors import UserError

_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.(.+)$")


def draw(layers: Mapping[str, tuple[float, float]], file: Path, before_and_after: bool = False) -> None:
    """One line for each part of a transformer layer, over the layers; all others as points at their place.

    With `before_and_after` the two numbers are norms before and after noise: a line and a dotted one.
    """
    from matplotlib.figure import Figure  # slow to import, and only needed here

    lines: dict[str, list[tuple[int, float, float]]] = {}
    last = max((int(m[2]) for name in layers if (m := _NUMBERED.match(name))), default=-1)
    for name, (mean, std) in layers.items():
        if (match := _NUMBERED.match(name)) is not None:
            lines.setdefault(match[3], []).append((int(match[2]), mean, std))
        else:  # before the first layer, or after the last
            place = last + 1 if name in ("head", "norm") or any(lines.values()) else -1
            lines[name] = [(place, mean, std)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for part, points in lines.items():
        depth, means, stds = zip(*points, strict=True)
        if before_and_after:
            (line,) = axes.plot(depth, means, marker="o", markersize=3, linewidth=1, label=part)
            axes.plot(depth, stds, ":", marker="x", markersize=3, linewidth=1, color=line.get_color())
            continue
        axes.errorbar(depth, means, yerr=stds, marker="o", markersize=3, capsize=2, linewidth=1, label=part)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("norm")
    title = "mean over clients and rounds ± one standard deviation"
    axes.set_title("mean update, before noise and (dotted) after it" if before_and_after else title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: the picture cannot be written ({error})") from None
