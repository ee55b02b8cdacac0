"""The first part of the page: what its runs guarantee."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from tacit.errors import UserError
from tacit.federation.files import unsealed
from tacit.federation.statements import STATEMENT, read_statement
from tacit.privacy.rounding import rounded_up
from tacit.reading import read_text
from tacit.report.compare import Row, Run
from tacit.report.pieces import letter, swatch, table_head, warning

Statement = Mapping[str, Any]


def stated(run: Run) -> Statement | str | None:
    """What a run guarantees, by replaying its ledger; a sentence if that fails, None if it guarantees
    nothing.
    """
    if run.unit is None:
        return None
    try:
        return read_statement(run.folder).to_dict()
    except UserError as error:
        return str(error)


def last_stated(run: Run) -> Statement | str | None:
    """The same, as written at the last checkpoint: fast, for a page that is rebuilt all the time."""
    if run.unit is None:
        return None
    try:
        return unsealed(read_text(run.folder / STATEMENT), indent=1)
    except FileNotFoundError:
        return "nothing is saved yet"
    except (OSError, ValueError) as error:
        return f"{STATEMENT} is damaged ({error}); `tacit statement` reads the ledger itself"


def guarantee(row: Row, statement: Callable[[Run], Statement | str | None]) -> str:
    """The card of one row: its ε, in words, and the whole statement."""
    found = [statement(run) for run in row.runs]
    first = found[0]
    if first is None:
        return _plain_card(
            "no guarantee",
            "This run has no privacy section: its models may show anything about anyone's data.",
        )
    worst = _worst(found)
    if isinstance(worst, str) or worst is None:
        return _plain_card("not known", f"What this run guarantees cannot be said: {worst}.")
    epsilon = worst["epsilon"]
    value = "no guarantee" if epsilon is None else f"ε = {rounded_up(epsilon)}"
    unit = "whole client" if worst["unit"] == "client" else "single record"
    kind = " none" if epsilon is None or worst["simulation"] else ""
    simulated = ", simulated" if worst["simulation"] else ""
    warned = "".join(warning(text) for text in worst.get("warnings", ()))
    of_many = f" The largest of {len(found)} seeds." if len(found) > 1 else ""
    return (
        f'<section class="card guarantee{kind}" aria-label="Guarantee"><div class="value">{value}'
        f"<small>δ = {worst['delta']:g}, for each {unit}{simulated}</small></div>"
        f"<p>{escape(_summary(worst))}{of_many}</p>{warned}"
        f'<details id="statement"><summary>The whole statement</summary>{_statement(worst)}</details>'
        "</section>"
    )


def _plain_card(value: str, text: str) -> str:
    return (
        f'<section class="card guarantee none" aria-label="Guarantee"><div class="value">{value}</div>'
        f"<p>{escape(text)}</p></section>"
    )


def _worst(found: Sequence[Statement | str | None]) -> Statement | str | None:
    """The weakest statement; one that cannot be read guarantees nothing."""
    unknown = next((one for one in found if isinstance(one, str)), None)
    if unknown is not None:
        return unknown
    known = [one for one in found if isinstance(one, Mapping)]
    if len(known) < len(found):
        return None
    return max(known, key=lambda one: math.inf if one["epsilon"] is None else one["epsilon"])


def _summary(found: Statement) -> str:
    return str(found.get("summary") or found["text"].splitlines()[0])


def _statement(found: Statement) -> str:
    pld = "no bound at hand" if found["epsilon_pld"] is None else f"ε = {rounded_up(found['epsilon_pld'])}"
    rdp = "∞" if found["epsilon_rdp"] is None else rounded_up(found["epsilon_rdp"])
    against = [
        f"<li>{escape(o['who'])}: {_held(o['epsilon'])}. {escape(o['why'])}</li>" for o in found["observers"]
    ]
    budget = "none set" if found["budget"] is None else f"ε = {found['budget']:g}"
    repeated = f", {found['repeated']} of them a second time" if found["repeated"] else ""
    carried = f", and {found['carried']} of earlier runs on the same data" if found["carried"] else ""
    rounds = f"{found['rounds']:,} {'round' if found['rounds'] == 1 else 'rounds'}"
    rows = [
        ("Neighbours", f"{found['relation']}, of one {'client' if found['unit'] == 'client' else 'record'}"),
        ("Accountants", f"privacy-loss distributions: {pld}; Rényi divergences: ε = {rdp}"),
        ("Budget", budget),
        ("Charged", f"{rounds}{repeated}{carried}"),
        ("Sampling", found["sampling"].partition(": ")[2]),
        ("Clipping", found["clipping"].partition(": ")[2]),
        ("Noise", found["noise"].partition(": ")[2]),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{escape(str(text))}</dd>" for name, text in rows)
    missing = "".join(f"<li>{escape(item)}</li>" for item in found["not_covered"])
    return (
        f"<dl>{listed}<dt>Against whom</dt><dd><ul>{''.join(against)}</ul></dd>"
        f"<dt>Not covered</dt><dd><ul>{missing}</ul></dd></dl>"
    )


def _held(epsilon: float | None) -> str:
    return "no guarantee" if epsilon is None else f"ε = {rounded_up(epsilon)}"


def guarantees(table: Sequence[Row], statement: Callable[[Run], Statement | str | None]) -> str:
    """A table of several rows: each one's ε, in words."""
    rows = []
    for n, row in enumerate(table):
        worst = _worst([statement(run) for run in row.runs])
        known = worst if isinstance(worst, Mapping) else None
        told = "No privacy section: nothing is guaranteed." if worst is None else str(worst)
        epsilon = known["epsilon"] if known else None
        said = _summary(known) if known else told
        warned = "".join(warning(text) for text in (known or {}).get("warnings", ()))
        rows.append(
            f'<tr><td class="t">{swatch(n)}{letter(n)}</td><td class="t">{escape(row.label)}</td>'
            f'<td data-v="{"" if epsilon is None else epsilon}">{_held(epsilon)}</td>'
            f'<td class="t">{escape(said)}{warned}</td></tr>'
        )
    head = table_head(
        "guarantees", (("", True), ("experiment", True), ("ε, at most", False), ("in words", True))
    )
    return (
        '<section class="card first" aria-label="Guarantees"><h2>Guarantees</h2>'
        f'<div class="scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div></section>'
    )
