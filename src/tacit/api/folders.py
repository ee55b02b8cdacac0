"""The folders of runs, and the config in a run's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tacit import config as configs
from tacit.config import Config
from tacit.errors import UserError
from tacit.federation.checkpoint import CONFIG
from tacit.federation.verify import refuse_changed_config

RUNS = Path("runs")
"""Where runs are saved by default."""


def no_run(folder: Path) -> str:
    """The error for a folder that is not a run's: it says where runs are, or that the folder has several."""
    inside = sorted(file.parent for file in folder.glob(f"*/{CONFIG}"))
    if inside:
        one = f"name one of them, such as '{inside[0]}'"
        all_of_them = f"a sweep goes on with `tacit run FILE.yaml --out {folder}`"
        return f"{folder} is no run, but has {len(inside):,} in it; {one} ({all_of_them})"
    return f"{folder} holds no run (there is no {CONFIG} in it); runs are under {RUNS}/"


def recorded_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config that a run was started with, as it is recorded in its folder."""
    if not (folder / CONFIG).exists():
        raise UserError(no_run(folder))
    refuse_changed_config(folder)
    return configs.load(folder / CONFIG, overrides, presets=False)


def new_folder(name: str) -> Path:
    """A new folder under runs/, named after the config and the time; created exclusively."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = [RUNS / f"{name}-{stamp}", *(RUNS / f"{name}-{stamp}-{n}" for n in range(2, 1000))]
    try:
        RUNS.mkdir(exist_ok=True)
        for folder in candidates:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                return folder
    except OSError as error:
        raise UserError(
            f"{RUNS}/: cannot be written ({error.strerror}); choose a folder with --out"
        ) from None
    raise UserError(f"{RUNS}/ has a thousand runs of this name and second; choose a folder with --out")
