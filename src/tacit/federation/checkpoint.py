"""Checkpoints: a folder for each saved round, written whole or not at all.

A checkpoint is `checkpoint/ROUND/` with the vectors (`state.safetensors`) and the plain values
(`state.json`, which also holds the vectors' hash). It is written beside its place and renamed into it, so
a kill at any moment leaves the one before it intact; a damaged one is recognised by its hash, and the
newest sound one is used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tacit.engine import BUFFERS
from tacit.errors import UserError
from tacit.vector import Layout, Vectors, frozen_hash, write_buffers, write_values

VECTORS, FACTS = "state.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a run between two rounds."""

    round: int
    """Rounds finished."""
    vectors: Vectors
    facts: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Write a checkpoint atomically and remove all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{checkpoint.round:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    save_file({name: _alone(v) for name, v in checkpoint.vectors.items()}, partial / VECTORS)
    facts = {"round": checkpoint.round, "sha256": _hash(partial / VECTORS), **checkpoint.facts}
    (partial / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    for file in (VECTORS, FACTS):
        _sync(partial / file)
    _sync(partial)
    place = folder / f"{checkpoint.round:06d}"
    shutil.rmtree(place, ignore_errors=True)
    partial.rename(place)
    _sync(folder)
    for old in _finished(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def _alone(vector: Tensor) -> Tensor:
    """The vector, copied if it is part of a larger memory: safetensors refuses tensors that share one."""
    vector = vector.detach()
    whole = vector.untyped_storage().nbytes() == vector.nbytes
    return vector if whole and vector.is_contiguous() else vector.clone().contiguous()


def split_vectors(values: Mapping[str, Any]) -> tuple[Vectors, dict[str, Any]]:
    """A mapping's vectors, and its plain values."""
    vectors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return vectors, {name: value for name, value in values.items() if name not in vectors}


def with_prefix(vectors: Vectors, prefix: str) -> Vectors:
    """Those whose name begins with `prefix`, under the rest of their name."""
    return {name.removeprefix(prefix): v for name, v in vectors.items() if name.startswith(prefix)}


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint (None if none was ever written), and a line on each damaged one."""
    damaged: list[str] = []
    for place in _finished(folder):
        try:
            facts = json.loads((place / FACTS).read_text(encoding="utf-8"))
            if _hash(place / VECTORS) != facts["sha256"]:
                raise ValueError("its contents do not match its hash")
            return Checkpoint(int(facts["round"]), load_file(place / VECTORS), facts), damaged
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            damaged.append(f"checkpoint {place.name} is damaged ({error}); using the one before it")
    if damaged:
        raise UserError(f"{folder}: all {len(damaged)} checkpoints are damaged; start the run again")
    return None, damaged


def load_model(run: Path, model: nn.Module, personal: Sequence[str] = ()) -> None:
    """Put what the newest checkpoint of a run holds into the run's model, rebuilt as it was at the start.

    `personal` parts are on no server: they stay as they are.
    """
    saved, _ = newest(run / "checkpoint")
    if saved is None:
        raise UserError(f"{run}: no round was saved yet, so there is no trained model in it")
    refuse_other_base(saved.facts, frozen_hash(model), run)
    layout = Layout.of(model, personal)
    if saved.vectors["theta"].numel() != layout.shared:
        raise UserError(f"{run}: its checkpoint is of another model; give the model that was trained")
    write_values(model, layout, saved.vectors["theta"])
    if BUFFERS in saved.vectors:
        write_buffers(model, saved.vectors[BUFFERS])


def refuse_other_base(facts: Mapping[str, Any], frozen: str | None, run: Path) -> None:
    """A checkpoint holds what was trained; the frozen parameters under it must be those of the training."""
    if facts.get("frozen") != frozen:
        raise UserError(
            f"{run}: the frozen weights are not those that this run was trained on; "
            "give model.hub (or the model) as it was then"
        )


def kept_facts(folder: Path) -> list[dict[str, Any]]:
    """The plain values of every readable checkpoint, newest first."""
    facts = []
    for place in _finished(folder):
        try:
            facts.append(json.loads((place / FACTS).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return facts


def _finished(folder: Path) -> list[Path]:
    places = (p for p in folder.glob("*") if p.is_dir() and p.name.isdigit())
    return sorted(places, key=lambda p: p.name, reverse=True)


def _hash(file: Path) -> str:
    digest = sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
