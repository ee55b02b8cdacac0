"""Checkpoints: a folder for each saved round, written atomically.

A checkpoint is `checkpoint/ROUND/` with the vectors (`state.safetensors`) and a manifest (`state.json`). The
manifest has the plain values, the hashes of everything that belongs to the checkpoint (the vectors, the run's
config and lineage, the clients' states, the metrics so far, the ledger's last line) and a hash of itself.
Everything is written beside its place and then renamed, so a kill at any moment leaves the one before it
intact. A damaged checkpoint is detected, and the newest sound one is used.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tacit.engine import ClientStates
from tacit.engine.states import STATES
from tacit.errors import UserError
from tacit.federation.files import digest, sealed, unsealed, write_atomically
from tacit.reading import read_bytes, read_text
from tacit.system import sync
from tacit.vector import Layout, Vectors, frozen_hash, write_buffers, write_values

VECTORS, FACTS = "state.safetensors", "state.json"
BEST = "best"
"""The folder of the best checkpoint, where `evaluate.keep_best` asks for it."""
CONFIG, LINEAGE = "config.yaml", "lineage.json"
"""The files of a run that never change after its first round begins."""
LABELS, CLIENTS = "labels.json", "clients.json"
"""The names of the classes and, in a run without a guarantee, of the clients."""
Facts = dict[str, Any]
DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)
"""Exceptions that reading a damaged checkpoint may raise."""


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a run between two rounds."""

    round: int
    """Rounds finished."""
    vectors: Vectors
    facts: Facts


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Write a checkpoint atomically and remove all but the newest `keep`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial, place = folder / f"{checkpoint.round:06d}.partial", folder / f"{checkpoint.round:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700)
        save_file({name: _alone(v) for name, v in checkpoint.vectors.items()}, partial / VECTORS)
        (partial / VECTORS).chmod(0o600)
        sync(partial / VECTORS)
        where = {"folder": folder.name, "round": checkpoint.round}
        facts = {**where, "sha256": digest(partial / VECTORS), **checkpoint.facts}
        write_atomically(partial / FACTS, sealed(facts))
        if place.exists():
            _remove(place)
        partial.rename(place)
    except (OSError, SafetensorError):
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder)
    for old in finished(folder)[keep:]:
        _remove(old)


def _remove(place: Path) -> None:
    """Rename a checkpoint before it is deleted: half of one must never be taken for a whole one."""
    gone = place.with_name(f"{place.name}.old.partial")
    shutil.rmtree(gone, ignore_errors=True)
    place.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def tidy(run: Path) -> None:
    """Remove what a killed run was writing. Call this only while holding the run's lock."""
    for left in [*run.glob("*.partial"), *run.glob("ledger*.jsonl.*"), *run.glob(f"{STATES}/**/*.partial")]:
        left.unlink(missing_ok=True)
    for left in [*run.glob("checkpoint/*.partial"), *run.glob(f"{BEST}/*.partial")]:
        shutil.rmtree(left, ignore_errors=True)


def size(vectors: Vectors) -> int:
    """Bytes that a checkpoint of these vectors takes, its manifest aside."""
    return sum(vector.nbytes for vector in vectors.values())


def _alone(vector: Tensor) -> Tensor:
    """The vector, copied if it is part of larger memory: safetensors refuses tensors that share memory."""
    vector = vector.detach()
    whole = vector.untyped_storage().nbytes() == vector.nbytes
    return vector if whole and vector.is_contiguous() else vector.clone().contiguous()


def split_vectors(values: Mapping[str, Any]) -> tuple[Vectors, dict[str, Any]]:
    """Split a mapping into its vectors and its plain values."""
    vectors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return vectors, {name: value for name, value in values.items() if name not in vectors}


def with_prefix(vectors: Vectors, prefix: str) -> Vectors:
    """The vectors whose name begins with `prefix`, under the rest of their name."""
    return {name.removeprefix(prefix): v for name, v in vectors.items() if name.startswith(prefix)}


def newest(
    folder: Path, check: Callable[[Facts], None] = lambda facts: None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint (None if none was ever written), and a note on each damaged one.

    `check` may raise ValueError for a checkpoint that is unsound for other reasons.
    """
    damaged: list[str] = []
    for place in finished(folder):
        try:
            facts = sound_facts(place)
            check(facts)
            return Checkpoint(facts["round"], load_file(place / VECTORS), facts), damaged
        except DAMAGE as error:
            damaged.append(f"checkpoint {place.name} is damaged ({error}); using the one before it")
    if damaged:
        raise UserError(
            f"{folder}: all {len(damaged)} checkpoints are damaged; `tacit verify {folder.parent}` says how; "
            "restore one, or start the run again"
        )
    return None, damaged


def sound_facts(place: Path) -> Facts:
    """A checkpoint's manifest; ValueError if the manifest or a vector is not as it was written."""
    facts = read_facts(place)
    if digest(place / VECTORS) != facts["sha256"]:
        raise ValueError(f"{VECTORS} does not match its hash")
    return facts


def read_facts(place: Path) -> Facts:
    """A checkpoint's manifest; ValueError if it is damaged or belongs elsewhere."""
    facts = unsealed(read_text(place / FACTS))
    _refuse_odd(facts)
    if int(place.name) != facts["round"]:
        raise ValueError(f"it is of round {facts['round']}")
    if facts.get("folder", place.parent.name) != place.parent.name:
        raise ValueError(f"it belongs into the folder {facts['folder']!r}")
    return facts


def _refuse_odd(facts: Facts) -> None:
    """Raise ValueError for a manifest with impossible contents, although its hash is right."""
    parts = ("versions", "states", "belongs", "optimizer", "metrics", "mechanism", "spending", "seen")
    kinds = {"folder": str, "round": int, "sha256": str} | dict.fromkeys((*parts, "best", "watch"), dict)
    inner = {"versions": str, "states": str, "belongs": str}
    ledger = {"charges": int, "head": str}
    known = {"metrics": {"bytes": int, "sha256": str}, "spending": ledger, "seen": ledger}
    known["best"] = {"round": int, "sha256": str}
    known["watch"] = {"metric": str, "round": int, "value": float, "since": int}
    for name, kind in kinds.items():
        value = facts.get(name, kind())
        odd = type(value) is not kind
        odd = odd or (name in inner and any(type(v) is not inner[name] for v in value.values()))
        odd = odd or (name in ("versions", "states") and not all(map(str.isdecimal, value)))
        if not odd and name in known and value:
            odd = {key: type(v) for key, v in value.items()} != known[name]
        if odd:
            raise ValueError(f"{name} is not what a checkpoint has there")


def belongings(run: Path) -> dict[str, str]:
    """Hashes of the run's files that a checkpoint belongs to, for its manifest.

    The hash of the config leaves out `rounds`, because a run may be made longer.
    """
    found = {}
    if (run / CONFIG).exists():
        lines = read_text(run / CONFIG).splitlines()
        kept = [line for line in lines if not line.startswith(("rounds:", "#"))]
        found[CONFIG] = sha256("\n".join(kept).encode()).hexdigest()
    if (run / LINEAGE).exists():
        found[LINEAGE] = digest(run / LINEAGE)
    return found


def refuse_other_files(run: Path, facts: Facts) -> None:
    """Refuse a config or lineage that is not the one a checkpoint was saved with."""
    now = belongings(run)
    for name, known in facts.get("belongs", {}).items():
        if now.get(name) != known:
            raise UserError(
                f"{run / name} is not the one that round {facts['round']} was saved with; restore it, or "
                "start a new run for other settings"
            )


def metrics_match(file: Path, facts: Facts) -> bool:
    """Whether a run's metrics begin with those that a checkpoint was saved with."""
    saved = facts["metrics"]
    kept = read_bytes(file)[: saved["bytes"]]
    return bool(len(kept) == saved["bytes"] and sha256(kept).hexdigest() == saved["sha256"])


def check_states(states: ClientStates, facts: Facts) -> None:
    """Raise ValueError if a client's state is not the one that a checkpoint was saved with."""
    known = facts.get("states", {})
    for client, version in facts.get("versions", {}).items():
        if states.digest(int(client), version) != known[client]:
            raise ValueError(f"client {client}: {version} is not the state that was saved")


def kept(run: Path) -> Checkpoint | None:
    """A run's model: the best one if that is kept, otherwise the newest; None if none was saved."""
    for facts in kept_facts(run / "checkpoint")[:1]:
        if facts.get("best"):
            return _read_best(run, facts["best"])
    return newest(run / "checkpoint")[0]


def save_best(run: Path, checkpoint: Checkpoint) -> Facts:
    """Save the best model so far beside earlier ones; returns what the next checkpoint says about it."""
    save(run / BEST, checkpoint, keep=len(finished(run / BEST)) + 1)
    place = best_place(run, checkpoint.round)
    return {"round": checkpoint.round, "sha256": digest(place / FACTS)}


def best_place(run: Path, round: int) -> Path:
    """The folder of the best model, if it is from this round."""
    return run / BEST / f"{round:06d}"


def tidy_best(run: Path) -> None:
    """Remove former best models: all that no checkpoint names any more.

    Nothing is removed while a checkpoint cannot be read: it may be readable later, and may name any of them.
    """
    if not (run / BEST).exists():
        return
    try:
        facts = [read_facts(place) for place in finished(run / "checkpoint")]
    except DAMAGE:
        return
    named = {one["best"]["round"] for one in facts if one.get("best")}
    for place in finished(run / BEST):
        if int(place.name) not in named:
            _remove(place)


def refuse_other_best(run: Path, best: Facts) -> Facts:
    """The manifest of the best model that a checkpoint names; ValueError if it differs or is damaged."""
    place = best_place(run, best["round"])
    if digest(place / FACTS) != best["sha256"]:
        raise ValueError(f"{FACTS} is not the one that was saved")
    return sound_facts(place)


def read_round(run: Path, round: int) -> Checkpoint:
    """The kept checkpoint of one round; a damaged one is refused."""
    place = run / "checkpoint" / f"{round:06d}"
    try:
        facts = sound_facts(place)
        vectors = load_file(place / VECTORS)
    except DAMAGE as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{place} is damaged ({reason}); `tacit verify {run}` says what can be saved"
        ) from None
    return Checkpoint(round, vectors, facts)


def _read_best(run: Path, best: Facts) -> Checkpoint:
    try:
        facts = refuse_other_best(run, best)
        vectors = load_file(best_place(run, best["round"]) / VECTORS)
    except DAMAGE as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{best_place(run, best['round'])}: the best model is damaged or gone ({reason}); restore it, or "
            "start the run again"
        ) from None
    return Checkpoint(facts["round"], vectors, facts)


def load_model(run: Path, model: nn.Module, personal: Sequence[str] = ()) -> None:
    """Load the kept checkpoint of a run into the run's model, which is rebuilt as it was at the start.

    The server has no `personal` parts, so these stay as they are.
    """
    saved = kept(run)
    if saved is None:
        raise UserError(f"{run}: no round was saved yet, so there is no trained model in it")
    fill(model, Layout.of(model, personal), saved, run)


def fill(model: nn.Module, layout: Layout, saved: Checkpoint, run: Path) -> None:
    """Load a checkpoint of `run` into a model; a different run, model or frozen base is refused."""
    refuse_other_files(run, saved.facts)
    refuse_other_base(saved.facts, frozen_hash(model), run)
    if saved.vectors["theta"].numel() != layout.shared:
        raise UserError(f"{run}: its checkpoint is of another model; give the model that was trained")
    write_values(model, layout, saved.vectors["theta"])
    write_buffers(model, saved.vectors)


def refuse_other_base(facts: Mapping[str, Any], frozen: str | None, run: Path) -> None:
    """Refuse frozen parameters that are not those of the training: a checkpoint holds only trained ones."""
    if facts.get("frozen") != frozen:
        raise UserError(
            f"{run}: the frozen weights are not those that this run was trained on; "
            "give model.hub (or the model) as it was then"
        )


def kept_facts(folder: Path) -> list[Facts]:
    """The manifests of all checkpoints whose manifest is sound, newest first."""
    facts = []
    for place in finished(folder):
        with suppress(OSError, ValueError, KeyError, TypeError):
            facts.append(read_facts(place))
    return facts


def finished(folder: Path) -> list[Path]:
    """The folders of saved rounds, newest first; sorted by number, since names can exceed six digits."""
    places = (p for p in folder.glob("*") if p.name.isascii() and p.name.isdecimal() and p.is_dir())
    return sorted(places, key=lambda p: int(p.name), reverse=True)
