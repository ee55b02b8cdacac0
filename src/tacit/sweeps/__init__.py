"""Many runs as one experiment, from the command line or from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tacit.api import RUNS, compare
from tacit.config.sweep import read_sweep
from tacit.errors import UserError
from tacit.sweeps.schedule import SweepRun, SweepWatch, run_sweep


def sweep(
    file: str | Path,
    overrides: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    *,
    jobs: int | None = None,
    watch: SweepWatch | None = None,
) -> list[dict[str, Any]]:
    """Run every point of a config with a `sweep:` section.

    Each run has its own process, so a script that calls this needs `if __name__ == "__main__":`. Finished
    runs are not repeated and interrupted runs continue: call it again to continue a sweep.

    Args:
        file: the YAML file.
        overrides: dotted keys, such as {"rounds": 5, "sweep.seed": [0, 1]}.
        folder: where the runs are saved; by default under runs/, by the sweep's name.
        jobs: how many runs at once; by default one for each core.
        watch: called with the progress.

    Returns:
        The rows that `tacit.compare` gives for them.

    Raises:
        UserError: the config has no `sweep:` section, or a run failed.
    """
    found = read_sweep(Path(file), dict(overrides or {}))
    if found is None:
        raise UserError(f"{file}: it has no `sweep:` section, so it is one run; use tacit.run(tacit.load(…))")
    place = Path(folder) if folder is not None else RUNS / found.name
    run_sweep(found, place, jobs, watch)
    return compare(place)


__all__ = ["SweepRun", "SweepWatch", "run_sweep", "sweep"]
