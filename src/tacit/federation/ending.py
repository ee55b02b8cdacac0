"""How a run ended: `result.json` in its folder, so that none that was stopped passes for finished."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tacit.federation.files import write_atomically

RESULT = "result.json"


@dataclass(frozen=True)
class Ending:
    """What is known at the end of `run` or `resume`; a run that was killed has none, or an earlier one."""

    round: int
    finished: bool
    """False when it was interrupted, and a resume goes on."""
    stopped: str | None = None
    """Why it ended before its last round, if it did."""


def write_ending(folder: Path, ending: Ending) -> None:
    write_atomically(folder / RESULT, json.dumps(asdict(ending), ensure_ascii=False) + "\n")


def read_ending(folder: Path) -> Ending | None:
    try:
        return Ending(**json.loads((folder / RESULT).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # its metrics say how far it came
