"""`tacit plan`: one answer, and whatever else was asked about it."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tacit.cli.common import narrow, print_json, working
from tacit.cli.options import naming_options
from tacit.errors import UserError
from tacit.privacy.rounding import rounded_up

if TYPE_CHECKING:
    from tacit.privacy.accountants import Epsilon
    from tacit.privacy.answers import Answer, Question
    from tacit.privacy.conventions import Scale


def show_one(
    question: Question,
    metrics: float | None,
    trials: float | None,
    table: bool,
    at: list[str],
    dropout: float | None,
    parameters: int | None,
    clip: float | None,
    compare_closed_form: bool,
    as_json: bool,
) -> None:
    """One plan, and whatever else was asked about it."""
    with working("accounting"):
        from tacit.privacy.answers import answer, around
        from tacit.privacy.conventions import from_sum
        from tacit.privacy.tuning import tuned_epsilon

        with naming_options():
            found = answer(question)
        split = _split(found, metrics)
        tuned = None if trials is None else tuned_epsilon({found.event: found.times}, question.delta, trials)
        grid = around(found) if table else None
        larger = _larger(found, at)
        vanished = _vanished(found, dropout)
        felt = _felt(found, parameters, clip)
    if as_json:
        plain = found.to_dict() | felt | vanished
        if compare_closed_form:
            plain["closed_form_noise"] = found.closed_form()
        if grid:
            plain["table"] = grid
        if found.unit == "client" and found.question.cohort:
            plain["noise_on"] = dict(from_sum(found.noise, found.question.cohort))
        plain |= split | ({} if tuned is None else {"tuned": asdict(tuned)})
        if larger:
            plain["extrapolations"] = [
                {"population": scale.population, "cohort": scale.cohort, "noise": scaled} | asdict(there)
                for scale, scaled, there in larger
            ]
        print_json(plain)
        return
    console = narrow()
    _show(console, found, compare_closed_form)
    if tuned is not None:
        console.print(tuned.text())
    if split:
        console.print(
            f"Of that, noise {split['update_noise']:.4g} on the update and {split['metrics_noise']:.4g} on "
            "private metrics: together they cost the above."
        )
    for scale, scaled, there in larger:
        console.print(scale.text(there, scaled, found.times))
    if felt:
        shown = "the mean update over the noise on it, at most"
        console.print(
            f"Signal to noise {felt['signal_to_noise']:.3g}: {shown}, for {parameters:,} parameters."
        )
        if clip is not None:
            console.print(f"At clip {clip:g} the noise on the mean is {felt['noise_length']:.3g} long.")
    if vanished:
        _show_vanished(console, found, vanished)
    if grid:
        _show_grid(console, found, grid)


def _felt(found: Answer, dimension: int | None, clip: float | None) -> dict[str, float]:
    """What training feels of the noise."""
    if dimension is None:
        return {}
    from tacit.privacy.tables import signal_to_noise

    cohort = found.question.cohort
    if found.unit != "client" or cohort is None:
        raise UserError(
            "--dimension: signal to noise is of the mean over a cohort; give --population and --cohort"
        )
    strength = signal_to_noise(found.noise, cohort, dimension)
    return {"signal_to_noise": strength} | ({} if clip is None else {"noise_length": clip / strength})


@naming_options()
def _vanished(found: Answer, dropout: float | None) -> dict[str, Any]:
    """Who adds what if a share of the devices vanish, and what drawing more of them instead would cost."""
    if dropout is None:
        return {}
    from tacit.privacy.answers import answer
    from tacit.privacy.tables import shares

    q = found.question
    if found.unit != "client" or q.cohort is None:
        raise UserError("--dropout is about a cohort's devices; give --population and --cohort")
    made = [asdict(share) for share in shares(found.noise, q.cohort, dropout)]
    more = math.ceil(q.cohort / (1 - dropout))
    again = None
    if q.population is not None and more <= q.population:
        solve = found.solved == "noise"
        wider = replace(
            q, cohort=more, rate=None, noise=None if solve else q.noise, target=q.target if solve else None
        )
        there = answer(wider)
        again = {"cohort": more, "noise": there.noise, "epsilon": there.epsilon.value}
    return {"dropout": dropout, "shares": made, "drawing_more": again}


def _show_vanished(console: Console, found: Answer, vanished: dict[str, Any]) -> None:
    share, cohort = vanished["dropout"], found.question.cohort or 0
    grid = Table(title=f"{share:.0%} of {cohort:,} devices vanish: noise in clipping norms")
    for name in ("made by", "a device", "server adds", "published", "signal", "relies on"):
        grid.add_column(name, justify="left" if name in ("made by", "relies on") else "right")
    for row in vanished["shares"]:
        amounts = (f"{row[name]:.3g}" if row[name] else "–" for name in ("client", "server", "published"))
        grid.add_row(row["who"], *amounts, f"× {row['signal']:.2f}", row["trust"])
    console.print(grid)
    if (more := vanished["drawing_more"]) is not None:
        console.print(
            f"To have {cohort:,} left, draw {more['cohort']:,}: noise {more['noise']:g}, ε = "
            f"{rounded_up(more['epsilon'], digits=4)}. Who vanishes counts as if they had come: only the "
            "draw is chance."
        )


def _split(found: Answer, share: float | None) -> dict[str, float]:
    """How the noise is divided between updates and private metrics."""
    if share is None:
        return {}
    from tacit.privacy import Metrics

    if found.unit != "client":
        raise UserError("--metrics: at example level private metrics cost nothing; leave it out")
    try:
        rule = Metrics(share)
    except UserError:
        raise UserError(f"--metrics {share:g}: give a share from 0.0001 to 0.9, such as 0.05") from None
    return {"update_noise": rule.rest(found.noise), "metrics_noise": rule.noise(found.noise)}


def _larger(found: Answer, at: list[str]) -> list[tuple[Scale, float, Epsilon]]:
    from tacit.privacy.conventions import Scale

    q = found.question
    if at and (found.unit != "client" or q.fixed or q.cohort is None):
        raise UserError("--at extrapolates a client-level run with Poisson cohorts; give --cohort")
    scales = [Scale.parse(text) for text in at]
    cohort = float(q.cohort or 1)
    return [
        (scale, scale.noise(found.noise, cohort), scale.cost(found.noise, cohort, found.times, q.delta))
        for scale in scales
    ]


def _show(console: Console, found: Answer, closed_form: bool) -> None:
    from tacit.privacy.conventions import from_sum

    q, epsilon = found.question, found.epsilon
    if found.solved:
        value = {"noise": q.noise, "rounds": q.rounds, "cohort": q.cohort}.get(found.solved, q.participations)
        console.print(f"[bold]{found.solved} {value:,}[/bold] keeps ε ≤ {q.target:g}")
    rows = Table.grid(padding=(0, 2))
    pld = "no bound at hand" if epsilon.pld is None else f"[bold]{rounded_up(epsilon.pld, digits=4)}[/bold]"
    rows.add_row("ε", f"{pld}  by PLD")
    rows.add_row("", f"{rounded_up(epsilon.rdp, digits=4)}  by RDP, order {epsilon.order:g}")
    rows.add_row("δ", f"{epsilon.delta:g}")
    rows.add_row("noise", f"{q.noise:g} × the clipping bound (standard deviation)")
    if found.unit == "client" and q.cohort:
        on = from_sum(found.noise, q.cohort)
        rows.add_row("", f"= {on['average']:.4g} on the average = {on['client']:.4g} on each client")
    if found.unit == "client":
        scale = f" ({q.cohort:,} of {q.population:,} clients)" if q.cohort and q.population else ""
        rows.add_row("rate", f"{found.event.rate:g} per client and round{scale}")
        rows.add_row("rounds", f"{found.times:,}")
        protects = "whole clients, " + ("one replaced by another" if q.fixed else "each there or not there")
    else:
        drawn = f"{q.batch:,} of {q.examples:,}" if found.event.rate < 1 else f"all {q.examples:,}"
        rows.add_row("rate", f"{found.event.rate:g} per record and step ({drawn} records)")
        asked = f", {q.queries} gradients each" if q.queries > 1 else ""
        rows.add_row(
            "steps",
            f"{found.times:,} ({q.participations:,} participations × {q.local_steps:,} local steps{asked})",
        )
        protects = "single records of this client, each there or not there"
    rows.add_row("protects", protects)
    if closed_form:
        rows.add_row("compare", f"noise {found.closed_form():.3g} by DP²-FedSAM's closed form (no guarantee)")
    console.print(rows)
    for warning in found.warnings():
        console.print(f"[yellow]warning:[/yellow] {warning}")


def _show_grid(console: Console, found: Answer, cells: list[dict[str, float]]) -> None:
    lengths = sorted({cell["rounds"] for cell in cells})
    unit = "rounds" if found.unit == "client" else "steps"
    grid = Table(title=f"ε by noise and {unit}, at δ = {found.epsilon.delta:g}")
    grid.add_column("noise", justify="right")
    for length in lengths:
        grid.add_column(f"{length:,.0f} {unit}", justify="right")
    for noise in sorted({cell["noise"] for cell in cells}):
        row = {cell["rounds"]: cell["epsilon"] for cell in cells if cell["noise"] == noise}
        grid.add_row(f"{noise:.3g}", *(rounded_up(row[length]) for length in lengths))
    console.print(grid)
