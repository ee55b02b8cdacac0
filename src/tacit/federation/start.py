"""Where a model starts from: a saved file, or the model of another run.

A saved file is safetensors with a tensor for each name of the module's state. Of a run, the newest sound
checkpoint is taken.

>>> import tempfile, torch
>>> file = Path(tempfile.mkdtemp()) / MODEL
>>> one, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
>>> save_weights(one, file)
>>> start_from(other, file)
>>> torch.equal(one.weight, other.weight)
True
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.federation.checkpoint import CONFIG, load_model
from tacit.system import sync

MODEL = "model.safetensors"
HASH = "sha256"


def save_weights(model: nn.Module, file: Path) -> None:
    """Write a module's whole state, by name, with a hash of it among the file's own notes."""
    state = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    partial = file.with_name(file.name + ".partial")
    try:
        save_file(state, partial, {HASH: state_hash(state)})
        sync(partial)
        partial.replace(file)
        sync(file.parent)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{file}: cannot be written ({error}); make room, then resume") from None


def weights_hash(model: nn.Module) -> str:
    """A hash of all that a module's state holds."""
    return state_hash(
        {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    )


def state_hash(state: dict[str, Tensor]) -> str:
    """A hash of tensors by name."""
    found = sha256()
    for name, tensor in sorted(state.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def start_from(model: nn.Module, place: str | Path) -> None:
    """Overwrite `model` with what `place` holds: a .safetensors file, a folder with one, or a run."""
    place = Path(place).expanduser()
    file = place / MODEL if place.is_dir() else place
    if file.is_file():
        _copy(model, read_weights(file), file)
    elif (place / CONFIG).is_file():
        _of_run(model, place)
    else:
        raise UserError(
            f"model.start: {place} is neither a run nor a .safetensors file; make a seed model with "
            "`tacit pretrain`, or leave it out to start from scratch"
        )


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a file; refuses one that is damaged. A file by others has no hash to go by."""
    try:
        saved: dict[str, Tensor] = load_file(file)
        with safe_open(file, "pt") as opened:
            known = (opened.metadata() or {}).get(HASH)
    except (OSError, SafetensorError) as error:
        raise UserError(f"model.start: {file} cannot be read ({error})") from None
    if known is not None and known != state_hash(saved):
        raise UserError(f"model.start: {file} is damaged: its contents do not match its hash; restore it")
    return saved


@torch.no_grad()
def _copy(model: nn.Module, saved: dict[str, Tensor], file: Path) -> None:
    state = model.state_dict()
    for name in [*state, *saved]:
        if name not in saved or name not in state:
            has, lacks = ("this model", "the file") if name in state else ("the file", "this model")
            raise UserError(
                f"model.start: {has} has {name!r} and {lacks} has not ({file}); give `model` the settings "
                "that the file was made with"
            )
        if state[name].shape != saved[name].shape:
            there, here = tuple(saved[name].shape), tuple(state[name].shape)
            raise UserError(
                f"model.start: {name!r} is {there} in {file} and {here} in this model; give `model` the same "
                "sizes, and the data the same classes or alphabet"
            )
    for name, tensor in state.items():
        tensor.copy_(saved[name])


def _of_run(model: nn.Module, folder: Path) -> None:
    try:
        load_model(folder, model)
    except UserError as error:
        raise UserError(f"model.start: {error}") from None
