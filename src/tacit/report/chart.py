"""Curves as inline SVG: needs no library and no network, and is readable without a script.

A chart is text: axes, a line for each series (with a band if it has several seeds), a letter at the line's
end, a title, and a sentence for readers who cannot see it. Colours are CSS classes, so the page's style sets
them for light and dark.

>>> chart = Chart("accuracy", (Series("fedavg", ((1, 0.25, 0.0), (2, 0.5, 0.0))),), share=True)
>>> "<svg" in chart.svg(), chart.sentence()
(True, 'fedavg: from 25.0% in round 1 to 50.0% in round 2.')
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from tacit.privacy.rounding import rounded_up

WIDTH, HEIGHT = 420, 214
LEFT, RIGHT, TOP, BOTTOM = 46, 44, 12, 30
COLOURS = 8
"""How many colour classes a style has; from the next series on, lines are dashed."""

Point = tuple[int, float, float]
"""Round, mean, and standard deviation over seeds."""


@dataclass(frozen=True)
class Series:
    """One curve."""

    label: str
    points: tuple[Point, ...]
    letter: str = ""
    """The label at its end, and in the table."""
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over rounds that show the same quantity."""

    title: str
    series: tuple[Series, ...]
    share: bool = False
    """Whether values are shares, shown as percentages."""
    unit: str = ""
    upwards: bool = False
    """Whether values are guarantees, which are rounded up."""
    zero: bool = False
    """Whether the axis begins at zero."""
    limit: tuple[float, str] | None = None
    """A level to compare with, such as a budget, and its name."""
    note: str = ""
    """What a reader should know about the chart."""

    def text(self, value: float) -> str:
        """A value as text."""
        if math.isinf(value) or math.isnan(value):
            return "∞" if value > 0 else "–"
        if self.share:
            return f"{value:.1%}"
        return f"{rounded_up(value) if self.upwards else number(value)}{' ' + self.unit if self.unit else ''}"

    def sentence(self) -> str:
        """The chart in words."""
        told = []
        for series in self.series:
            (first, begin, _), (last, end, spread) = series.points[0], series.points[-1]
            among = f" ± {self.text(spread)} over seeds" if spread else ""
            name = f"{series.letter}, {series.label}" if series.letter else series.label
            came = f"{self.text(end)}{among} in round {last}"
            told.append(f"{name}: from {self.text(begin)} in round {first} to {came}.")
        if self.limit is not None:
            told.append(f"{self.limit[1]}: {self.text(self.limit[0])}.")
        return " ".join(told)

    def svg(self, name: str = "chart") -> str:
        """The drawing; `name` makes its ids unique on a page."""
        frame = _Frame.around(self)
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t {name}-d" '
            f'data-x="{frame.x0:g} {frame.x1:g}" data-y="{frame.y0:.10g} {frame.y1:.10g}">',
            f'<title id="{name}-t">{escape(self.title)}</title>',
            f'<desc id="{name}-d">{escape(self.sentence())}</desc>',
            *self._grid(frame),
        ]
        if self.limit is not None and frame.holds(self.limit[0]):
            y = frame.y(self.limit[0])
            parts.append(f'<path class="limit" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text class="limit" x="{LEFT + 4}" y="{y - 4:.1f}">{escape(self.limit[1])}</text>')
        parts += [_band(series, frame) for series in self.series]
        parts += [_line(series, frame) for series in self.series]
        parts += self._ends(frame)
        parts.append(f'<g class="cross" hidden><path d="M0 {TOP}V{HEIGHT - BOTTOM}"/></g></svg>')
        return "".join(parts)

    def _grid(self, frame: _Frame) -> Iterable[str]:
        for value in ticks(frame.y0, frame.y1, 5):
            y = frame.y(value)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            shown = f"{100 * value:g}%" if self.share else number(value)
            yield f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{shown}</text>'
        for value in ticks(frame.x0, frame.x1, 6):
            if value == int(value):
                place = f'x="{frame.x(value):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle"'
                yield f'<text class="tick" {place}>{value:,.0f}</text>'
        yield f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">round</text>'

    def _ends(self, frame: _Frame) -> Iterable[str]:
        """Letters at the lines' ends (for a single line, its last value), moved apart if they overlap."""
        ends = [(*s.points[-1], s) for s in self.series if _finite(s.points[-1])]
        below = -math.inf
        for round, value, _, series in sorted(ends, key=lambda end: -end[1]):
            below = max(frame.y(value), below + 11)
            shown = series.letter or self.text(value).split(" ")[0]
            place = f'x="{frame.x(round) + 5:.1f}" y="{below + 4:.1f}"'
            yield f'<text class="end c{series.colour % COLOURS}" {place}>{escape(shown)}</text>'


@dataclass(frozen=True)
class _Frame:
    """Maps values to positions on the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    @staticmethod
    def around(chart: Chart) -> _Frame:
        points = [p for series in chart.series for p in series.points if _finite(p)] or [(0, 0.0, 0.0)]
        low = min(mean - std for _, mean, std in points)
        high = max(mean + std for _, mean, std in points)
        if (
            chart.limit is not None
            and math.isfinite(chart.limit[0])
            and chart.limit[0] <= 4 * max(high, 1e-12)
        ):
            high = max(high, chart.limit[0] * 1.06)
        if chart.zero:
            low = min(low, 0.0)
        if chart.share:  # bands stay in [0, 1]; curves (a negative correlation) need not
            means = [mean for _, mean, _ in points]
            low, high = max(low, min(0.0, *means)), min(high, max(1.0, *means))
        if high - low < 1e-9 * max(abs(high), 1.0):
            pad = 0.5 * abs(high) or 0.5
            low, high = (low if chart.zero else low - pad), high + pad
        elif not chart.zero:
            low -= 0.04 * (high - low)
        x = [p[0] for p in points]
        return _Frame(min(x), max(max(x), min(x) + 1), low, high)

    def holds(self, value: float) -> bool:
        return self.y0 <= value <= self.y1

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        share = (value - self.y0) / (self.y1 - self.y0)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(max(share, 0.0), 1.0))


def _finite(point: Point) -> bool:
    return math.isfinite(point[1]) and math.isfinite(point[2])


def _line(series: Series, frame: _Frame) -> str:
    points = [p for p in series.points if _finite(p)]
    if not points:
        return ""
    kind = f"line c{series.colour % COLOURS}" + (" dash" if series.dashed or series.colour >= COLOURS else "")
    if len(points) == 1:
        x, y = frame.x(points[0][0]), frame.y(points[0][1])
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    path = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y, _ in points)
    return f'<path class="{kind}" d="M{path}"/>'


def _band(series: Series, frame: _Frame) -> str:
    points = [p for p in series.points if _finite(p)]
    if len(points) < 2 or not any(std for _, _, std in points):
        return ""
    upper = [f"{frame.x(x):.1f} {frame.y(y + s):.1f}" for x, y, s in points]
    lower = [f"{frame.x(x):.1f} {frame.y(y - s):.1f}" for x, y, s in reversed(points)]
    return f'<path class="band c{series.colour % COLOURS}" d="M{"L".join(upper + lower)}Z"/>'


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two values.

    >>> ticks(0, 1, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(1, 40, 6)
    [10.0, 20.0, 30.0, 40.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999), power * 10)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """About three digits, with thousands separators.

    >>> number(1234567), number(0.01234), number(77.0), number(0)
    ('1,234,567', '0.0123', '77', '0')
    """
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """At most this many points, evenly spread, always with the last one."""
    if len(points) <= most:
        return tuple(points)
    step = (len(points) - 1) / (most - 1)
    return tuple(points[round(n * step)] for n in range(most))
