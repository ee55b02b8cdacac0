"""A run's privacy statement, always made anew from the ledger on disk, after the checks that a resume
makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from tacit.errors import UserError
from tacit.federation import checkpoint
from tacit.federation.files import sealed, unsealed, write_atomically
from tacit.federation.tracking import METRICS, metrics_lines
from tacit.privacy import Ledger, Mechanism, replay
from tacit.privacy.composition import compose
from tacit.privacy.ledger import Contents, Tally
from tacit.privacy.mechanisms import plain_mechanism, read_mechanism
from tacit.privacy.statement import Statement, make_statement, state
from tacit.privacy.totals import Worst
from tacit.reading import read_text

LEDGER, STATEMENT = "ledger.jsonl", "statement.json"
SEEN = "ledger-server.jsonl"
"""What those see who know who took part: the server under secure aggregation; with real clients, whoever
watches the network. It names clients, so it is for the server alone.
"""
SPENT, SEEN_SPENT = "spending", "seen"
"""Where a checkpoint keeps what it knows of the ledger, and of the server's own."""


def write_statement(
    folder: Path,
    mechanism: Mechanism,
    worst: Worst,
    tally: Tally,
    population: int,
    warnings: Sequence[str] = (),
    seen: float | None = None,
) -> None:
    """Say what a run has spent, in `statement.json`, with what it takes to say it again later.

    The totals are the open ledger's own: reading its file would give up the lock on it, and adding them all
    up again would take longer with every round.
    """
    statement = state(mechanism, worst, tally, population, warnings=warnings, seen=seen)
    made_from = {
        "mechanism": plain_mechanism(mechanism),
        "population": population,
        "warnings": list(warnings),
    }
    plain = statement.to_dict() | {"made_from": made_from}
    write_atomically(folder / STATEMENT, sealed(plain, indent=1))


def read_statement(folder: Path, groups: Sequence[int] = ()) -> Statement:
    """The statement of a run, finished or not; ε is a replay of its ledger as it is now.

    `groups`: also say what holds for so many units together, which takes seconds.
    """
    file = folder / STATEMENT
    if not file.exists() and (folder / LEDGER).exists():
        charged = len(read_ledger(folder).charges)
        raise UserError(
            f"{folder}: there is no {STATEMENT} yet; the ledger holds {charged} "
            f"{'charge' if charged == 1 else 'charges'}: `tacit resume {quote(str(folder))}` goes on and "
            "writes one"
        )
    if not file.exists():
        raise UserError(f"{folder}: there is no {STATEMENT}; the run has no `privacy` section, or is no run")
    try:
        made_from = unsealed(read_text(file), indent=1)["made_from"]
        mechanism = read_mechanism(made_from["mechanism"])
        population = int(made_from["population"])
        warnings = [str(warning) for warning in made_from.get("warnings", ())]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{file} is damaged ({error}); resume the run to have it written anew") from None
    contents = read_ledger(folder)
    if (contents.header.unit, contents.header.delta) != (mechanism.unit, mechanism.delta):
        raise UserError(f"{file} and {contents.path} are of different runs; restore them")
    seen = None if mechanism.seen_header("") is None else read_ledger(folder, SEEN).charges
    return make_statement(mechanism, contents.charges, population, groups, warnings, seen)


def read_ledger(folder: Path, name: str = LEDGER) -> Contents:
    """A run's ledger, every line checked, and not shorter than its checkpoints and its metrics say."""
    contents = Ledger.read(folder / name)
    for facts in checkpoint.kept_facts(folder / "checkpoint"):
        refuse_less_than_saved(contents, facts.get(SPENT if name == LEDGER else SEEN_SPENT, {}))
    if name == LEDGER:
        refuse_less_than_told(contents, folder)
    return contents


def refuse_less_than_saved(contents: Contents, saved: Mapping[str, Any]) -> None:
    """Refuse a ledger that is not a continuation of the one a checkpoint was saved with."""
    if not saved:
        return
    known = int(saved["charges"])
    if not 0 <= known <= len(contents.charges):
        raise UserError(
            f"{contents.path} holds {len(contents.charges)} charges where the checkpoint knows of {known}; "
            "restore the newest one, then resume"
        )
    if contents.hashes[known] != saved["head"]:
        raise UserError(
            f"{contents.path} is not the ledger that the checkpoint was saved with (a copy of this run went "
            "on by itself, or another ledger was put here); restore the one that belongs here"
        )


def rounds_told(folder: Path) -> int:
    """How many rounds a run's metrics tell of: each of them was charged before."""
    told = (record.get("round", 0) for record in metrics_lines(folder / METRICS) if record is not None)
    return max((round for round in told if isinstance(round, int)), default=0)


def refuse_less_than_told(contents: Contents, folder: Path) -> None:
    """Refuse a ledger without the last rounds, of which no checkpoint knows yet."""
    charged = max((charge.round + 1 for charge in contents.charges if charge.carried is None), default=0)
    told = rounds_told(folder)
    if told > charged:
        raise UserError(
            f"{contents.path} ends with round {charged}, and {folder / METRICS} tells of {told}: charges are "
            "missing at its end; restore the newest one"
        )


@dataclass(frozen=True)
class Together:
    """What several runs on the same data cost: each alone, and all of them."""

    unit: str
    delta: float
    epsilon: float
    simulation: bool
    runs: list[tuple[Path, int, float]]
    """Folder, rounds charged and ε of each."""
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite ε becomes None."""
        runs = [
            {"run": str(folder), "rounds": rounds, "epsilon": _finite(alone)}
            for folder, rounds, alone in self.runs
        ]
        return {
            "unit": self.unit,
            "delta": self.delta,
            "epsilon": _finite(self.epsilon),
            "simulation": self.simulation,
            "runs": runs,
            "notes": self.notes,
        }


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def read_together(folders: Sequence[Path], delta: float | None = None) -> Together:
    """The charges of several runs, composed; each run's ledger is checked as for its own statement."""
    ledgers = [read_ledger(folder) for folder in folders]
    if delta is None:
        delta = min(contents.header.delta for contents in ledgers)
    composed = compose(ledgers)
    runs = [
        (folder, contents.rounds, replay(contents.charges).worst(delta).epsilon.value)
        for folder, contents in zip(folders, ledgers, strict=True)
    ]
    return Together(
        unit=ledgers[0].header.unit,
        delta=delta,
        epsilon=replay(composed.charges).worst(delta).epsilon.value,
        simulation=ledgers[0].header.simulation,
        runs=runs,
        notes=composed.notes,
    )
