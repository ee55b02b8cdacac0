"""How a run ended: `result.json` in its folder, so that none that was stopped passes for finished."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tacit.errors import UserError
from tacit.federation.files import sealed, unsealed, write_atomically
from tacit.reading import read_text

RESULT = "result.json"


@dataclass(frozen=True)
class Ending:
    """What is known at the end of `run` or `resume`; a run that was killed has none, or an earlier one."""

    round: int
    finished: bool
    """False when it was interrupted, and a resume goes on."""
    stopped: str | None = None
    """Why it ended before its last round, if it did."""
    weights: str | None = None
    """The hash of the weights that it left for others to start from, if it did."""


def write_ending(folder: Path, ending: Ending) -> None:
    write_atomically(folder / RESULT, sealed(asdict(ending)))


def read_ending(folder: Path) -> Ending | None:
    """How a run ended; None of one that was killed before that: its metrics say how far it came."""
    file = folder / RESULT
    try:
        return Ending(**unsealed(read_text(file)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); `tacit resume {folder}` writes it anew") from None
