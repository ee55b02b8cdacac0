"""`tacit plan FILE`: what a config will cost."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from tacit.cli.common import narrow, print_json, working


def plan_config(file: Path, overrides: list[str], as_json: bool, trials: float | None) -> None:
    """What a config will cost: of a sweep, its first run."""
    with working("accounting"):
        from tacit.api.planning import RunPlan
        from tacit.config import parse_overrides
        from tacit.config.sweep import load_one
        from tacit.privacy.rounding import rounded_up
        from tacit.privacy.tuning import Tuned

        plan = RunPlan(load_one(file, parse_overrides(overrides)), trials=trials)
        found = plan.costs
    if as_json:
        print_json(plan.costs | plan.signal)
        return
    console = narrow()
    rows = _rows()
    whom = "whole clients" if found["unit"] == "client" else "single records"
    simulated = " (a simulation: nothing is claimed)" if found["simulation"] else ""
    budget = ""
    if found["budget"] is not None:
        where = "within" if found["epsilon"] <= found["budget"] else "over"
        budget = f", {where} the budget of {found['budget']:g}"
    rows.add_row("ε", f"[bold]{rounded_up(found['epsilon'])}[/bold] for {whom}{budget}{simulated}")
    rows.add_row("δ", f"{found['delta']:g}")
    worth = "" if found["worth"] is None else f"; by layer, worth {found['worth']:.4g} everywhere"
    rows.add_row("noise", f"{found['noise']:g} × the clipping bound{worth}")
    rows.add_row("rounds", f"{found['rounds']:,}")
    when = {"poisson": ", on average", "in turn": ", in turn"}.get(found["sampling"], "")
    rows.add_row("clients", f"{found['cohort']:g} of {found['clients']:,} a round{when}")
    if (worst := found["worst"]) is not None:
        drawn = f"{worst['steps']:,} steps at rate {worst['rate']:.3g}"
        rows.add_row("worst", f"a client of {worst['records']:,} records: {drawn}")
    if found["metrics"] is not None:
        told = found["metrics"]
        alone = rounded_up(told["epsilon_without"])
        own = f"noise {told['noise']:.4g}, and {told['update_noise']:.4g} on the update"
        rows.add_row("metrics", f"{told['share']:g} of each round: {own}; without them ε = {alone}")
    console.print(rows)
    if found["tuned"] is not None:
        console.print(Tuned(**found["tuned"]).text())
    for warning in found["warnings"]:
        console.print(f"[yellow]warning:[/yellow] {warning}")
    with working("looking at the network"):  # last: it takes torch, and so seconds
        signal = plan.signal
    last = _rows()
    if found["unit"] == "client":
        told = f"{signal['signal_to_noise']:.3g} at most: the mean update over the noise on it"
        last.add_row("signal", f"{told}, for {signal['parameters']:,} parameters")
    else:
        last.add_row("network", f"{signal['parameters']:,} parameters are trained and sent")
    console.print(last)


def _rows() -> Table:
    """Names and values, the same width in each."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(min_width=len("clients"))
    return rows
