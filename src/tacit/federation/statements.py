"""A run's privacy statement, always made anew from the ledger on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tacit.errors import UserError
from tacit.federation.files import write_atomically
from tacit.privacy.adaptive import Adaptive
from tacit.privacy.clipping import Clip
from tacit.privacy.ledger import Charge, Ledger
from tacit.privacy.mechanism import Privacy
from tacit.privacy.sampling import FixedSize, Poisson
from tacit.privacy.statement import Statement, make_statement

LEDGER, STATEMENT = "ledger.jsonl", "statement.json"


def write_statement(folder: Path, privacy: Privacy, entries: Sequence[Charge], population: int) -> None:
    """Say what a ledger's entries add up to, in `statement.json`, with what it takes to say it again later.

    The entries are the open ledger's own: reading its file would give up the lock on it.
    """
    statement = make_statement(privacy, entries, population)
    plain = statement.to_dict() | {"made_from": {"privacy": asdict(privacy), "population": population}}
    write_atomically(folder / STATEMENT, json.dumps(plain, indent=1, ensure_ascii=False) + "\n")


def read_statement(folder: Path) -> Statement:
    """The statement of a run, finished or not; ε is a replay of its ledger as it is now."""
    file = folder / STATEMENT
    if not file.exists():
        raise UserError(f"{folder}: there is no {STATEMENT}; the run has no `privacy` section, or is no run")
    try:
        made_from = json.loads(file.read_text(encoding="utf-8"))["made_from"]
        privacy = _privacy(made_from["privacy"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); resume the run to have it written anew") from None
    return make_statement(privacy, Ledger.read(folder / LEDGER)[1], int(made_from["population"]))


def _privacy(plain: dict[str, Any]) -> Privacy:
    sampling = plain["sampling"]
    return Privacy(
        **{
            **plain,
            "clip": Clip(**plain["clip"]),
            "sampling": Poisson(**sampling) if "rate" in sampling else FixedSize(**sampling),
            "adaptive": None if plain["adaptive"] is None else Adaptive(**plain["adaptive"]),
        }
    )
