"""The drawings of the documentation: `python docs/making/pictures.py` writes docs/pictures/*.svg.

Each has a background of its own and follows the reader's dark or light, so it can be read on any page.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

PLACE = Path(__file__).parents[1] / "pictures"
STYLE = """
svg { font: 14px system-ui, sans-serif; --ground: #fbfbfd; --ink: #1f2430; --dim: #5b6472; --line: #8a93a3;
  --a: #dbe7ff; --ae: #2f5fb3; --b: #ffe9cf; --be: #a85f06;
  --c: #d9f2df; --ce: #1f7a3d; --d: #f7d9e3; --de: #a3254f; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #1c2029; --ink: #e8ebf2; --dim: #a4adbb; --line: #7a8494;
    --a: #22375f; --ae: #8db4ff; --b: #4b3312; --be: #ffbe6b;
    --c: #173d24; --ce: #7bd796; --d: #4a1c2e; --de: #ff9dbb; }
}
text { fill: var(--ink); } .dim { fill: var(--dim); font-size: 12px; } .head { font-weight: 600; }
.a { fill: var(--a); stroke: var(--ae); } .b { fill: var(--b); stroke: var(--be); }
.c { fill: var(--c); stroke: var(--ce); } .d { fill: var(--d); stroke: var(--de); }
.n { fill: none; stroke: var(--line); } .dash { stroke-dasharray: 5 4; } .tip { fill: var(--line); }
.arrow { fill: none; stroke: var(--line); stroke-width: 1.6; marker-end: url(#tip); }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>'
)


def box(x: float, y: float, w: float, h: float, *lines: str, kind: str = "a", dim: str = "") -> str:
    """A rounded box with centred lines of text, the first of them bold."""
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="7"/>']
    all_lines = [(line, "head" if n == 0 else "dim") for n, line in enumerate(lines)]
    top = y + h / 2 - 9 * (len(all_lines) - 1) + 5
    for n, (line, look) in enumerate(all_lines):
        parts.append(text(x + w / 2, top + 18 * n, line, look, "middle"))
    return "".join(parts) + dim


def text(x: float, y: float, words: str, look: str = "", anchor: str = "start") -> str:
    return f'<text class="{look}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def arrow(*points: tuple[float, float], dash: bool = False) -> str:
    path = " ".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path class="arrow{" dash" if dash else ""}" d="M{path}"/>'


def person(x: float, y: float, kind: str = "a", size: float = 1.0) -> str:
    """A head and shoulders."""
    return (
        f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{7 * size:g}"/>'
        f'<path class="{kind}" d="M{x - 12 * size:g} {y + 24 * size:g}a{12 * size:g} {14 * size:g} 0 0 1 '
        f'{24 * size:g} 0z"/>'
    )


def records(x: float, y: float, number: int, kind: str = "a", odd: int | None = None) -> str:
    """A row of small cards; one of them may stand out."""
    card = '<rect class="{}" x="{:g}" y="{:g}" width="13" height="18" rx="2"/>'
    return "".join(card.format("d" if n == odd else kind, x + 17 * n, y) for n in range(number))


def overview() -> tuple[int, int, str, list[str]]:
    parts = [text(24, 32, "Owners keep their records", "head")]
    for n, y in enumerate((52, 122, 192)):
        parts += [f'<rect class="n" x="24" y="{y}" width="236" height="58" rx="7"/>']
        parts += [
            person(50, y + 18),
            records(78, y + 20, 4 - n % 2),
            text(156, y + 26, "train, then clip", "dim"),
        ]
        parts += [text(156, y + 42, "to norm C", "dim"), arrow((262, y + 29), (352, 150))]
    parts += [text(24, 276, "A cohort, drawn at random, takes part.", "dim")]
    parts += [box(356, 112, 116, 76, "Σ + noise", "whole numbers,", "exact to the bit", kind="b")]
    parts += [arrow((474, 150), (516, 150)), box(520, 112, 108, 76, "new model", "θ ← θ + mean", kind="c")]
    parts += [
        arrow((574, 110), (574, 34), (268, 34)),
        text(430, 26, "to the next round's cohort", "dim", "middle"),
    ]
    parts += [
        arrow((414, 190), (414, 222)),
        box(330, 226, 168, 50, "ledger", "charged before release", kind="d"),
    ]
    parts += [
        arrow((500, 251), (540, 251)),
        text(548, 248, "ε, δ, for whom,", "dim"),
        text(548, 264, "against whom", "dim"),
    ]
    return 672, 300, "A round: clients train and clip, the sum gets noise, the ledger is charged first", parts


def units() -> tuple[int, int, str, list[str]]:
    parts = [
        text(24, 32, "unit: client", "head"),
        text(24, 52, "all that one client holds is there, or not", "dim"),
    ]
    parts += [
        text(356, 32, "unit: example", "head"),
        text(356, 52, "one record of one client is there, or not", "dim"),
    ]
    for n in range(3):
        y = 74 + 54 * n
        parts += [person(44, y + 4, "d" if n == 1 else "a"), records(74, y, 6, "d" if n == 1 else "a")]
        parts += [person(376, y + 4), records(406, y, 6, odd=2 if n == 1 else None)]
    parts += ['<rect class="n dash" x="24" y="116" width="166" height="50" rx="7"/>']
    parts += ['<rect class="n dash" x="434" y="122" width="25" height="26" rx="4"/>']
    parts += [text(24, 248, "Clip: a whole update. Noise: on the sum.", "dim")]
    parts += [text(24, 266, "Hides that somebody took part at all.", "dim")]
    parts += [text(356, 248, "Clip: each record's gradient. Noise: on every step.", "dim")]
    parts += [text(356, 266, "Hides one record; a client's habits may show.", "dim")]
    return 672, 286, "Two units of privacy: a whole client, or one record of a client", parts


def adjacency() -> tuple[int, int, str, list[str]]:
    parts = [text(24, 30, "Two worlds that differ in one unit", "head")]
    for y, name, odd in ((50, "with", True), (130, "without", False)):
        parts += [
            text(24, y + 28, name, "dim"),
            person(100, y + 14),
            person(136, y + 14),
            person(172, y + 14),
        ]
        parts += [
            person(214, y + 14, "d") if odd else f'<circle class="n dash" cx="214" cy="{y + 22}" r="17"/>'
        ]
        parts += [arrow((246, y + 24), (296, y + 24)), box(300, y, 110, 48, "the run", kind="b")]
        parts += [arrow((412, y + 24), (452, y + 24))]
    parts += ['<path class="a" fill-opacity=".6" d="M456 96 C 500 96 508 46 530 46 S 560 96 604 96z"/>']
    parts += ['<path class="d" fill-opacity=".6" d="M456 176 C 510 176 518 126 540 126 S 570 176 614 176z"/>']
    parts += [text(456, 116, "what comes out, how likely", "dim"), text(456, 196, "nearly as likely", "dim")]
    parts += [
        text(24, 222, "P[with ∈ S] ≤ e^ε · P[without ∈ S] + δ, for every set S of outcomes, and vice versa")
    ]
    parts += [
        text(
            24,
            244,
            "Poisson cohorts: there or not there. Fixed ones: replaced by another. The statement says which.",
            "dim",
        )
    ]
    return 672, 262, "Adjacency: two populations that differ in one unit, and what comes out of each", parts


def sampling() -> tuple[int, int, str, list[str]]:
    cases = (
        (
            "poisson",
            "each client by itself, with one probability",
            {1, 4, 6, 11},
            "ε shrinks with the rate: amplification",
        ),
        ("fixed", "so many, without replacement", {0, 5, 8}, "another adjacency: more noise for the same ε"),
        (
            "in turn",
            "groups, one after the other",
            {4, 5, 6, 7},
            "none needed: correlated noise (blt, banded)",
        ),
    )
    parts = []
    for n, (name, how, drawn, what) in enumerate(cases):
        y = 30 + 84 * n
        parts += [text(24, y, name, "head"), text(104, y, how, "dim"), text(404, y + 40, what, "dim")]
        parts += [person(36 + 30 * k, y + 22, "d" if k in drawn else "a", 0.8) for k in range(12)]
        if name == "in turn":
            parts += [
                f'<rect class="n dash" x="{22 + 120 * k}" y="{y + 10}" width="116" height="38" rx="6"/>'
                for k in range(3)
            ]
    parts += [
        text(
            24,
            276,
            "Amplification holds only while who was drawn stays secret: the statement says against whom.",
            "dim",
        )
    ]
    return (
        692,
        294,
        "Three ways to choose a cohort: Poisson, a fixed number, and clients in turn",
        parts,
    )


def threats() -> tuple[int, int, str, list[str]]:
    parts = [box(24, 78, 118, 64, "a client", "records"), arrow((144, 110), (214, 110))]
    parts += [
        text(184, 98, "update", "dim", "middle"),
        box(218, 78, 118, 64, "the server", "sum, noise", kind="b"),
    ]
    parts += [arrow((338, 110), (408, 110)), text(382, 98, "model", "dim", "middle")]
    parts += [box(412, 78, 118, 64, "the world", "all models", kind="c")]
    parts += [
        '<path class="n dash" d="M350 40 V190"/>',
        text(358, 52, "client level: ε holds from here on", "dim"),
    ]
    parts += [
        '<path class="n dash" d="M154 40 V240"/>',
        text(162, 232, "example level, and secure aggregation: from here on", "dim"),
    ]
    parts += [text(24, 32, "Where noise has been added, ε holds against whoever looks", "head")]
    parts += [arrow((277, 144), (277, 172)), text(277, 188, "ledger, who took part", "dim", "middle")]
    parts += [
        text(
            24,
            262,
            "Client level trusts the server with sums and noise; secure aggregation shows it one noised sum.",
            "dim",
        )
    ]
    parts += [
        text(
            24,
            280,
            "A poisoned update is bounded by the clip, not prevented. Time and traffic are not covered.",
            "dim",
        )
    ]
    return 692, 298, "Threat models: behind which line a guarantee holds", parts


ROOMS = {
    "what a person touches": [
        ("cli", "commands"),
        ("sweeps", "many runs"),
        ("api", "tacit.run …"),
        ("report", "pages, tables"),
    ],
    "composes": [("config", "one YAML, checked whole")],
    "the round": [("federation", "run, checkpoints, trackers"), ("deploy", "real clients")],
    "where clients run": [("engine", "in process, pool, Ray: the same bits on each")],
    "what is computed": [
        ("algorithms", "pseudo-code"),
        ("data", "records, users"),
        ("models", "networks, LoRA"),
        ("tasks", "losses"),
    ],
    "what is claimed": [
        ("privacy", "mechanisms, ledger, statement"),
        ("secure", "masks, shares"),
    ],
    "numbers and files": [
        ("gradients", "clipped, proved"),
        ("optimizers", "LAMB, LARS, …"),
        ("vector", "flat parameters"),
        ("fetching", "registries, cache"),
    ],
}
"""The rooms, row by row: what each is called and what lives there."""


def architecture() -> tuple[int, int, str, list[str]]:
    parts = []
    for n, (name, rooms) in enumerate(ROOMS.items()):
        y = 24 + 66 * n
        parts.append(text(24, y + 28, name, "dim"))
        width = (500 - 12 * (len(rooms) - 1)) / len(rooms)
        for k, (room, what) in enumerate(rooms):
            kind = "ccbbada"[n]
            parts.append(box(168 + k * (width + 12), y, width, 48, room, what, kind=kind))
        if n:
            parts.append(arrow((684, y - 44), (684, y + 22)))
    parts += [text(24, 502, "A row may know the rows below it, never one above: a test says so.", "dim")]
    return 704, 520, "The rooms of the program, from what a person touches down to numbers and files", parts


DRAWINGS: dict[str, Callable[[], tuple[int, int, str, list[str]]]] = {
    drawing.__name__: drawing for drawing in (overview, units, adjacency, sampling, threats, architecture)
}


def svg(name: str) -> str:
    """One drawing as a file's text."""
    width, height, title, parts = DRAWINGS[name]()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="t"><title id="t">{escape(title)}</title>'
        f"<style>{STYLE}</style>{TIP}"
        f'<rect width="{width}" height="{height}" rx="10" fill="var(--ground)"/>'
        + "\n".join(["", *parts, "</svg>", ""])
    )


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name in DRAWINGS:
        (PLACE / f"{name}.svg").write_text(svg(name), encoding="utf-8")
