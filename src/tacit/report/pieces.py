"""Small pieces of the page: letters and colours of experiments, table heads, amounts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tacit.report.chart import COLOURS


def letter(n: int) -> str:
    """A, B, …, Z, then AA, AB, ….

    >>> letter(0), letter(25), letter(26)
    ('A', 'Z', 'AA')
    """
    return chr(65 + n) if n < 26 else letter(n // 26 - 1) + letter(n % 26)


def swatch(n: int) -> str:
    """The colour of the n-th curve."""
    return f'<i class="c{n % COLOURS}{" dash" if n >= COLOURS else ""}"></i>'


def legend(entries: Iterable[tuple[int, bool, str, str]]) -> str:
    """The legend of a chart: colour, whether it is dashed, letter and label of each curve."""
    items = [
        f'<li><i class="c{colour % COLOURS}{" dash" if dashed or colour >= COLOURS else ""}"></i>'
        f"<b>{escape(mark)}</b> {escape(label)}</li>"
        for colour, dashed, mark, label in entries
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def table_head(name: str, columns: Sequence[tuple[str, bool]]) -> str:
    """The head of a table that can be sorted: titles, and whether a column holds text."""
    cells = "".join(
        f'<th scope="col"{" class=t" if text else ""}>'
        + (f'<button type="button" id="{name}-{n}">{escape(title)}</button>' if title else "<span></span>")
        + "</th>"
        for n, (title, text) in enumerate(columns)
    )
    return f"<thead><tr>{cells}</tr></thead>"


def warning(text: str) -> str:
    """A highlighted sentence."""
    return f'<p class="warn">{escape(text)}</p>'


def size(amount: float) -> str:
    """Bytes in readable units.

    >>> size(1.9e9), size(430e6), size(2e3)
    ('1.9 GB', '430 MB', '2 kB')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if amount >= factor:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount / 1e3:.3g} kB"


def duration(seconds: float) -> str:
    """Time in readable units.

    >>> duration(4.2), duration(200), duration(9000)
    ('4.2 s', '3 min 20 s', '2 h 30 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
