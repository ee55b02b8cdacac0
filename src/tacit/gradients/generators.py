"""The generators that a model's draws come from: torch's for the CPU, and its device's own if it has one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

State = tuple[Tensor, Tensor | None]


def state(device: torch.device) -> State:
    """What both generators will go on from."""
    own = _module(device)
    return torch.get_rng_state(), None if own is None else own.get_rng_state(*_number(device))


def set_state(saved: State, device: torch.device) -> None:
    torch.set_rng_state(saved[0])
    own = _module(device)
    if own is not None and saved[1] is not None:
        own.set_rng_state(saved[1], *_number(device))


def same(one: State, other: State) -> bool:
    """Whether nothing was drawn between the two."""
    return torch.equal(one[0], other[0]) and (
        one[1] is None or (other[1] is not None and torch.equal(one[1], other[1]))
    )


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Whatever is drawn meanwhile was never drawn."""
    before = state(device)
    try:
        yield
    finally:
        set_state(before, device)


def seeds(device: torch.device) -> tuple[int, ...]:
    """What both generators were last seeded with."""
    own = _module(device)
    return (torch.initial_seed(), *((own.initial_seed(),) if hasattr(own, "initial_seed") else ()))


def seed_unlike_any(device: torch.device) -> None:
    """Seed both with a number that no model has written down."""
    seed = int.from_bytes(os.urandom(7))
    torch.default_generator.manual_seed(seed)
    own = _module(device)
    if hasattr(own, "initial_seed"):
        own.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed the generators of every device that is in use, but not the CPU's."""
    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind)
        if module.is_available() and module.is_initialized():
            module.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def _module(device: torch.device) -> Any:
    module = None if device.type in ("cpu", "meta") else getattr(torch, device.type, None)
    return module if hasattr(module, "get_rng_state") else None


def _number(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which there is one
