"""Update norms over a model's depth, as in paper 003's Figure 5."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tacit.errors import UserError

_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.(.+)$")
MOST_LETTERS = 80
"""How many letters of names fit side by side under the axis."""
MOST_TICKS = 16
"""How many layers are numbered on the axis, for a network with more."""


def draw(layers: Mapping[str, tuple[float, float]], file: Path, before_and_after: bool = False) -> None:
    """One line over the layers for each part of a transformer layer; all other layers are points at their
    place. If no layer has a number (a perceptron, say), one line over the layers, by name.

    With `before_and_after`, the two numbers are norms before and after noise: a solid and a dotted line.
    """
    from matplotlib.figure import Figure  # slow to import, and only needed here

    lines, ticks = _placed(layers)
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
    crowded = sum(map(len, ticks.values())) > MOST_LETTERS
    axes.set_xticks(list(ticks), list(ticks.values()), rotation=90 if crowded else 0)
    axes.set_xlabel("layer")
    axes.set_ylabel("norm")
    title = "mean over clients and rounds ± one standard deviation"
    axes.set_title("mean update, before noise and (dotted) after it" if before_and_after else title)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize="small", ncols=2)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: the picture cannot be written ({error})") from None


def _placed(
    layers: Mapping[str, tuple[float, float]],
) -> tuple[dict[str, list[tuple[int, float, float]]], dict[int, str]]:
    """The lines, each of (place, mean, deviation), and the names of the places.

    >>> _placed({"body.0": (1.0, 0.5), "head": (2.0, 0.5)})
    ({'layers': [(0, 1.0, 0.5), (1, 2.0, 0.5)]}, {0: 'body.0', 1: 'head'})
    >>> names = ["scale", "embed", "layers.0.mlp", "layers.1.mlp", "head"]
    >>> lines, ticks = _placed(dict.fromkeys(names, (1.0, 0.5)))
    >>> {name: [place for place, _, _ in line] for name, line in lines.items()}
    {'scale': [-1], 'embed': [-1], 'mlp': [0, 1], 'head': [2]}
    >>> ticks
    {-1: 'before', 0: '0', 1: '1', 2: 'after'}
    """
    numbers = [int(match[2]) for name in layers if (match := _NUMBERED.match(name))]
    if not numbers:
        line = [(place, mean, std) for place, (mean, std) in enumerate(layers.values())]
        return {"layers": line}, dict(enumerate(layers))
    lines: dict[str, list[tuple[int, float, float]]] = {}
    last, inside = max(numbers), False
    ticks = {place: str(place) for place in range(0, last + 1, 1 + last // MOST_TICKS)}
    for name, (mean, std) in layers.items():
        if (match := _NUMBERED.match(name)) is not None:
            lines.setdefault(match[3], []).append((int(match[2]), mean, std))
            inside = True
        else:
            after = name in ("head", "norm") or inside
            place = last + 1 if after else -1
            ticks[place] = "after" if after else "before"
            lines[name] = [(place, mean, std)]
    return lines, dict(sorted(ticks.items()))
