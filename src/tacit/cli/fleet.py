"""`tacit plan --mechanism`: correlated noise beside independent noise, for one fleet."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tacit.cli.common import print_json, working
from tacit.cli.options import naming_options
from tacit.errors import UserError


@naming_options()
def show_fleet(
    mechanism: str,
    population: int | None,
    cohort: int | None,
    rounds: int | None,
    delta: float | None,
    epsilon: float | None,
    as_json: bool,
) -> None:
    """Print the noise that each mechanism needs, and what of it a model feels."""
    from tacit.privacy.fleets import compare_mechanisms

    if mechanism not in ("blt", "banded"):
        raise UserError(f"--mechanism {mechanism}: choose blt or banded")
    if population is None or cohort is None or rounds is None or delta is None or epsilon is None:
        raise UserError("--mechanism: give --population, --cohort, --rounds, --delta and --epsilon")
    with working("accounting"):
        rows = compare_mechanisms(population, cohort, rounds, epsilon, delta, [mechanism])
    turn = population // cohort
    if as_json:
        plain = {"population": population, "cohort": cohort, "rounds": rounds, "epsilon": epsilon}
        found = [row.to_dict() for row in rows]
        print_json(plain | {"delta": delta, "separation": turn, "mechanisms": found})
        return
    table = Table(title=f"ε = {epsilon:g} at δ = {delta:g}, whole clients, {rounds:,} rounds")
    for name in ("noise", "who may know who took part", "multiplier", "remembered", "error in a model"):
        table.add_column(name, justify="left" if name.startswith(("noise", "who")) else "right")
    for row in rows:
        who = "nobody" if row.secret_sampling else "everyone"
        remembered = f"{row.buffers} vectors" if row.buffers else "nothing"
        table.add_row(row.kind, who, f"{row.noise:g}", remembered, f"{row.error:.4g} × clip")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"Where everyone may know, clients take turns: each takes part once in {turn:,} rounds. The error is "
        "the noise in a coordinate of the sum of all rounds so far, root mean square over rounds.",
        markup=False,
    )
