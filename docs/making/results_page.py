"""docs/results.md's comparisons: table, differences, figure and verdict, made of the kept cells alone.

Between the two marks of the page everything is written here; what is around them is written by hand.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import yaml

from tacit.report.paired import Difference, paired

BEGIN, END = "<!-- made by docs/making/results.py: begin -->", "<!-- end -->"
SEEDS = 3
"""As many as it takes to say anything about a claim that is about training."""
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F", "#882255",
    "#999933",
)  # fmt: skip
"""Okabe and Ito's and two of Tol's, which the colour-blind tell apart; markers tell them apart in grey."""
MARKS = "osD^vPX*p<"
CURVES = {"own.personal": "personal_accuracy", "own.tuned": "tuned_accuracy"}
Outcome = Literal["as claimed", "the opposite", "open", "not run"]


@dataclass(frozen=True)
class Row:
    """A line of a table: which cells it is made of, what is read from them, what the paper has there."""

    name: str
    where: Mapping[str, Any]
    value: str
    paper: tuple[float | None, ...]

    def printed(self, column: int) -> float | None:
        """The paper's number in a column."""
        return self.paper[column] if column < len(self.paper) else None


@dataclass(frozen=True)
class Table:
    """A comparison: its file, and the cells that are kept for it."""

    name: str
    about: Mapping[str, Any]
    cells: Sequence[Mapping[str, Any]]
    begun: Sequence[Mapping[str, Any]] = ()
    """Runs that are under way, or whose clients are not tested yet."""

    @property
    def rows(self) -> list[Row]:
        value = self.about.get("value", "final.accuracy")
        return [
            Row(row["name"], row["where"], row.get("value", value), tuple(row.get("paper", ())))
            for row in self.about["rows"]
        ]

    @property
    def columns(self) -> list[Mapping[str, Any]]:
        return list(self.about.get("columns", [{"name": "", "where": {}}]))

    @property
    def sign(self) -> int:
        """1 where more is better, −1 where less is (error rates)."""
        return -1 if self.about.get("better") == "lower" else 1

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def chosen(self, row: Row, column: int, begun: bool = False) -> list[Mapping[str, Any]]:
        """The cells of a row in a column, or the runs of it that are under way. What the row says goes first:
        one that is the same in every column says so with a null.
        """
        wanted = {**self.columns[column]["where"], **row.where}
        among = self.begun if begun else self.cells
        return [c for c in among if all(c["point"].get(key) == value for key, value in wanted.items())]

    def shown(self, column: int) -> list[Row]:
        """The rows that have anything in a column: runs, or a number of the paper's."""
        return [
            row
            for row in self.rows
            if row.printed(column) is not None
            or any(self.chosen(row, column, begun) for begun in (False, True))
        ]

    def by_seed(self, row: Row, column: int) -> dict[Hashable, float]:
        """In percent."""
        return {c["point"].get("seed", 0): _value(c, row.value) for c in self.chosen(row, column)}

    def by_client(self, row: Row, column: int) -> dict[Hashable, float]:
        """In percent, for each client of each seed; empty where clients were not tested."""
        kind = row.value.removeprefix("own.")
        return {
            (c["point"].get("seed", 0), client): 100 * value
            for c in self.chosen(row, column)
            for client, value in enumerate(c["own"].get(kind, ()))
        }

    def difference(self, one: str, other: str, column: int) -> tuple[Difference, str] | None:
        """Of two rows, and what it is paired over: seeds, or with too few of them their clients."""
        a, b = self.row(one), self.row(other)
        seeds, others = self.by_seed(a, column), self.by_seed(b, column)
        shared = seeds.keys() & others.keys()
        if not shared:
            return None
        if len(shared) >= SEEDS:
            return paired(seeds, others), f"{len(shared)} seeds"
        clients, theirs = self.by_client(a, column), self.by_client(b, column)
        if clients.keys() & theirs.keys():
            found = paired(clients, theirs)
            return found, f"{found.pairs:,} clients of {_seeds(len(shared))}"
        return paired(seeds, others), _seeds(len(shared))

    def outcome(self, contrast: Mapping[str, Any], column: int) -> tuple[Outcome, int]:
        """What the cells say about a contrast, and from how many seeds."""
        found = self.difference(contrast["one"], contrast["other"], column)
        if found is None:
            return "not run", 0
        difference = found[0]
        seeds = self.by_seed(self.row(contrast["one"]), column).keys()
        count = len(seeds & self.by_seed(self.row(contrast["other"]), column).keys())
        if not difference.settled:
            return "open", count
        return ("as claimed" if self.sign * difference.mean > 0 else "the opposite"), count

    def printed_gap(self, contrast: Mapping[str, Any], column: int) -> float | None:
        """The paper's own difference."""
        one, other = (self.row(contrast[who]).printed(column) for who in ("one", "other"))
        return None if one is None or other is None else one - other

    def beside_the_paper(self, contrast: Mapping[str, Any], column: int) -> str:
        """Whether the interval excludes the paper's own difference: "less" than that, "more", or nothing."""
        found = self.difference(contrast["one"], contrast["other"], column)
        printed = self.printed_gap(contrast, column)
        if found is None or printed is None or found[0].low <= printed <= found[0].high:
            return ""
        return "less" if self.sign * (printed - found[0].mean) > 0 else "more"

    def judged(self) -> list[tuple[Mapping[str, Any], int]]:
        """The paper's claims: contrasts that are not our own, each with a column."""
        return [
            (contrast, n)
            for contrast in self.about["contrasts"] if not contrast.get("ours")
            for n in contrast.get("columns", range(len(self.columns)))
        ]  # fmt: skip


def tables(kept: Path) -> list[Table]:
    """All comparisons, those with something to show first."""
    found = []
    for file in sorted(kept.glob("*.yaml"), key=lambda file: file.stem):
        cells = file.with_suffix(".json")
        made = json.loads(cells.read_text("utf-8")) if cells.exists() else {"cells": [], "under way": []}
        about = yaml.safe_load(file.read_text("utf-8"))
        found.append(Table(file.stem, about, made["cells"], made["under way"]))
    return sorted(found, key=lambda table: not (table.cells or table.begun))


def _value(cell: Mapping[str, Any], name: str) -> float:
    section, key = name.split(".")
    found = cell[section][key]
    return 100 * (statistics.fmean(found) if isinstance(found, list) else float(found))


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def mean(values: Sequence[float]) -> str:
    """Mean ± standard error; one seed has none.

    >>> mean([1.0, 2.0, 3.0]), mean([1.0]), mean([])
    ('2.0 ± 0.6', '1.0', '–')
    """
    if not values:
        return "–"
    middle = f"{statistics.fmean(values):.1f}"
    return f"{middle} ± {statistics.stdev(values) / sqrt(len(values)):.1f}" if len(values) > 1 else middle


def verdict(table: Table) -> str:
    """One sentence that the outcomes allow, and no more."""
    if not table.cells:
        return f"**{'Not finished' if table.begun else 'Not run'} yet.** {table.about['cost']}"
    judged = [(f"{c['say']}{_in(table, n)}", *table.outcome(c, n)) for c, n in table.judged()]
    if not judged:
        return "**None**: the paper claims nothing here."
    enough = [(say, outcome) for say, outcome, seeds in judged if seeds >= SEEDS]
    if opposite := [say for say, outcome in enough if outcome == "the opposite"]:
        return f"**Not reproduced**: the opposite came out of {_quoted(opposite)}."
    if len(enough) == len(judged) and all(outcome == "as claimed" for _, outcome in enough):
        return "**Reproduced.**"
    reasons = []
    if missing := [say for say, outcome, _ in judged if outcome == "not run"]:
        reasons.append(f"not all that it takes was run (for {_quoted(missing)})")
    if few := sorted({seeds for _, outcome, seeds in judged if 0 < seeds < SEEDS}):
        reasons.append(
            f"of some there {'is' if few[0] == 1 else 'are'} {_seeds(few[0])} where it takes {SEEDS}"
        )
    if unclear := [say for say, outcome in enough if outcome == "open"]:
        which = "interval" if len(unclear) == 1 else "intervals"
        reasons.append(f"zero is in the {which} of {_quoted(unclear)}")
    found = f"**Not settled at this size**, because {'; '.join(reasons)}."
    less = [f"{c['say']}{_in(table, n)}" for c, n in table.judged() if _counted(table, c, n) == "open, less"]
    if less:
        found += f" The paper's own difference is too large for {_quoted(less)}."
    settled = [say for say, outcome in enough if outcome == "as claimed"]
    return f"{found} As claimed: {_quoted(settled)}." if settled else found


def _quoted(names: Sequence[str]) -> str:
    """“a”, “b” and “c”."""
    *first, last = (f"“{name}”" for name in names)
    return f"{', '.join(first)} and {last}" if first else last


def _in(table: Table, column: int) -> str:
    name = table.columns[column]["name"]
    return f" ({name})" if name else ""


def part(table: Table) -> str:
    """The page's part on one comparison."""
    about = table.about
    lines = [f"## {about['title']}", "", f"**Claim.** {about['claim'].strip()}", "", about["setting"].strip()]
    lines += [""]
    if table.cells or table.begun:
        lines += [_made(table), "", *_main(table), "", *_gaps(table), "", *_begun(table)]
        lines += [f"![{about['figure'].strip()}](results/{table.name}.png)", ""]
    lines += [f"**Verdict.** {verdict(table)} {about.get('verdict', '').strip()}".rstrip(), ""]
    if about.get("notes"):
        lines += [about["notes"].strip(), ""]
    return "\n".join(lines)


def _made(table: Table) -> str:
    cells = [c for c in table.cells if c["rounds"]]
    dates = sorted({c["date"] for c in table.cells})
    days = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    machines = ", ".join(sorted({c["machine"] for c in table.cells}))
    hours = sum(c["minutes"] for c in cells) / 60
    how = f" ({hours:.1f} hours of running in all); {days}; {machines}" if cells else ""
    return (
        f"`make results-{table.name}` ({table.about['recipe']}); {len(cells)} of {table.about['runs']} runs "
        f"are finished and tested{how}. Mean ± standard error over seeds, in %."
    )


def _main(table: Table) -> list[str]:
    columns = table.columns
    heads = ["method", "seeds"]
    for column in columns:
        name = column["name"]
        heads += [f"{name}, ours" if name else "ours", f"{name}, paper" if name else "paper"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in table.rows:
        apply = [n for n in range(len(columns)) if row in table.shown(n)]
        counts = sorted({len(table.by_seed(row, n)) for n in apply}) or [0]
        begun = any(table.chosen(row, n, begun=True) for n in range(len(columns)))
        none = "under way" if begun else "not run"
        cells = [row.name, "–".join(map(str, counts)) if counts != [0] else none]
        for n in range(len(columns)):
            printed = row.printed(n)
            cells += [mean(list(table.by_seed(row, n).values())), "–" if printed is None else f"{printed:g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _begun(table: Table) -> list[str]:
    """What runs that are under way show so far, each at the last round at which it was looked at."""
    lines = []
    for n in range(len(table.columns)):
        for row in table.rows:
            for run in table.chosen(row, n, begun=True):
                series = run["curves"].get(_curve(row), [])
                if series:
                    far = f"{run['rounds']} of {run['planned']} rounds done"
                    at = ", ".join(f"{100 * value:.1f} after {round}" for round, value in series)
                    seed = f"seed {run['point'].get('seed', 0)}"
                    lines.append(f"- {row.name}{_in(table, n)}, {seed}, {far}: {at}")
    title = f"Under way (dotted in the figure; {table.about['curve']}, in %):"
    return [title, "", *lines, ""] if lines else []


def _curve(row: Row) -> str:
    """The metric that a row's value ends with."""
    return CURVES.get(row.value, row.value.removeprefix("final."))


def _gaps(table: Table) -> list[str]:
    lines = ["| claim | difference | paper | ours [95 %] | paired over | |", "|---|---|---|---|---|---|"]
    for contrast in table.about["contrasts"]:
        one, other = table.row(contrast["one"]), table.row(contrast["other"])
        for n in contrast.get("columns", range(len(table.columns))):
            gap = table.printed_gap(contrast, n)
            printed = "–" if gap is None else f"{gap:+.1f}".replace("-", "\N{MINUS SIGN}")
            found = table.difference(one.name, other.name, n)
            ours, over = ("–", "–") if found is None else (found[0].text(), found[1])
            said: str = table.outcome(contrast, n)[0]
            if said != "the opposite" and (beside := table.beside_the_paper(contrast, n)):
                said = f"{said}, {beside} than the paper's"
            what = f"{one.name} − {other.name}{_in(table, n)}"
            lines.append(f"| {contrast['say']} | {what} | {printed} | {ours} | {over} | {said} |")
    return lines


def _looks() -> Iterator[tuple[str, str]]:
    """Colour and marker of one row after another, the same in every column."""
    return zip(cycle(COLOURS), cycle(MARKS), strict=False)


def draw(table: Table, file: Path) -> None:
    """Left how it ended, ours beside the paper's; right how it came there. A pair for each column."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.ticker import MaxNLocator

    columns, looks = table.columns, dict(zip([row.name for row in table.rows], _looks(), strict=False))
    shown = [table.shown(n) for n in range(len(columns))]
    heights = [max(3.2, 1.4 + 0.36 * len(rows)) for rows in shown]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    axes = figure.subplots(len(columns), 2, squeeze=False, width_ratios=(1, 1.1), height_ratios=heights)
    unit = table.about["unit"]
    for n, column in enumerate(columns):
        (ends, curve), rows = axes[n], shown[n]
        for k, row in enumerate(rows):
            colour, mark = looks[row.name]
            values = list(table.by_seed(row, n).values())
            if values:
                spread = statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
                ends.errorbar(
                    statistics.fmean(values), k, xerr=spread or None, color=colour, marker=mark, ms=8
                )
            if row.printed(n) is not None:
                ends.plot(row.printed(n), k, "|", color="#333333", ms=15, mew=2)
            name = _curve(row)
            label = row.name
            for run in table.chosen(row, n, begun=True):
                if name in run["curves"]:
                    reached, height = zip(*run["curves"][name], strict=True)
                    height = [100 * value for value in height]
                    curve.plot(
                        reached, height, ":", color=colour, marker=mark, ms=5, mfc="white", label=label
                    )
                    label = None
            series = [dict(map(tuple, c["curves"].get(name, ()))) for c in table.chosen(row, n)]
            shared = sorted(set.intersection(*map(set, series))) if series else []
            if shared:
                height = [100 * statistics.fmean(s[r] for s in series) for r in shared]
                curve.plot(shared, height, color=colour, marker=mark, ms=5, label=label)
        ends.set_yticks(range(len(rows)), [row.name for row in rows])
        ends.set_ylim(len(rows) - 0.5, -0.5)
        ends.set_xlabel(unit)
        where = f"{column['name']}: " if column["name"] else ""
        ends.set_title(f"{where}at the end (bar: the paper's)", fontsize="medium", loc="left")
        curve.set_title(f"{where}{table.about['curve']}", fontsize="medium", loc="left")
        curve.set_xlabel("round")
        curve.xaxis.set_major_locator(MaxNLocator(integer=True))
        curve.set_ylabel(unit)
        curve.set_visible(bool(curve.lines))
        if curve.lines:
            # Beside the curves: where lines fan out, no corner is free.
            curve.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        for one in (ends, curve):
            one.grid(alpha=0.25)
            one.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110, metadata={"Software": None})


COUNTED = ("as claimed", "the opposite", "open, less", "open", "not run")
"""Columns of the overview, each with what `_counted` says."""


def overview(found: Sequence[Table]) -> str:
    """A line for each comparison in which the paper claims something: how many of its claims came out how."""
    heads = ["comparison", *COUNTED]
    heads[heads.index("open, less")] = "open, but less than the paper's"
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for table in found:
        said = [_counted(table, contrast, n) for contrast, n in table.judged()]
        if said:
            title = table.about["title"]
            link = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            counts = (str(said.count(what) or "–") for what in COUNTED)
            lines.append(f"| [{title}](#{link}) | {' | '.join(counts)} |")
    return "\n".join(lines)


def _counted(table: Table, contrast: Mapping[str, Any], column: int) -> str:
    outcome, seeds = table.outcome(contrast, column)
    if 0 < seeds < SEEDS:
        return "open"
    less = outcome == "open" and table.beside_the_paper(contrast, column) == "less"
    return "open, less" if less else outcome


def page_text(kept: Path, text: str) -> str:
    """A page with the comparisons between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"the page has lost its marks, {BEGIN} and {END}"
    found = tables(kept)
    made = "\n".join([overview(found), "", *map(part, found)])
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def write_page(kept: Path, page: Path) -> None:
    """Write the comparisons into the page, and draw the figures it shows."""
    page.write_text(page_text(kept, page.read_text("utf-8")), "utf-8")
    for table in tables(kept):
        if table.cells or table.begun:
            draw(table, kept / f"{table.name}.png")
