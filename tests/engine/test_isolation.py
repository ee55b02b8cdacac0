"""Code that leaves something for the next client, or for the next gradient, is caught or undone."""

from __future__ import annotations

import ctypes
import random
import re
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tacit
from conftest import blobs
from tacit.algorithms import FedAvg, Work
from tacit.engine import isolation
from tacit.engine.isolation import Pristine
from tacit.errors import UserError
from tacit.vector import Vectors

CLIENT = {"unit": "client", "clip": 0.5, "noise": 0.0, "delta": 1e-3, "entropy": "seed"}
EXAMPLE = {"unit": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-3}


class Holder:
    """An object as models hold them: a config, a cache."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.slot = 0.0


class Leaky(nn.Module):
    """Scales its answer by what it remembers, and then remembers the batch, in one of many places or in all.

    One batch is all that a client has, so its own memory never reaches its own upload: whatever changes is
    another client's doing. One that does not write is what every client meets if it goes first.
    """

    def __init__(self, *places: str, writes: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places, self.writes = places, writes
        self.body = nn.Linear(16, 4)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("saved", torch.zeros(3))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)
        self.register_buffer("whole", torch.zeros(3, dtype=torch.int64))
        self.number, self.items, self.table = 0.0, [], {"sum": 0.0}
        self.tensor, self.array = torch.zeros(3), np.zeros(3)
        self.nested = {"deep": [deque([0.0]), {0.0}]}
        self.object = Holder()
        self.dice, self.numpy_dice = random.Random(0), np.random.default_rng(0)
        self.torch_dice = torch.Generator().manual_seed(0)
        self.closure = counter()

    def forward(self, x: Tensor) -> Tensor:
        told = sum(RECALL[place](self) for place in self.places)
        logits: Tensor = self.body(x.flatten(1)) * (1 + 0.1 * told)
        if self.writes:
            for place in self.places:
                REMEMBER[place](self, float(x.detach().sum()))
        return logits


class Silent(Leaky):
    """Remembers that a batch came, and never tells: no experiment on its answers finds it out."""

    def forward(self, x: Tensor) -> Tensor:
        for place in self.places:
            REMEMBER[place](self, 1.0)
        logits: Tensor = self.body(x.flatten(1))
        return logits


def counter() -> Callable[[float], float]:
    total = 0.0

    def add(value: float) -> float:
        nonlocal total
        total += value
        return total

    return add


def rolled(model: Leaky) -> float:
    dice = model if model.writes else deepcopy(model)
    return dice.dice.random() + dice.numpy_dice.random() + float(torch.rand((), generator=dice.torch_dice))


RECALL: dict[str, Callable[[Any], float]] = {
    "frozen": lambda m: float(m.frozen[0]),
    "frozen.data": lambda m: float(m.frozen[1]),
    "rebound": lambda m: float(m.frozen[2]),
    "saved.data": lambda m: float(m.saved.sum()),
    "unsaved.data": lambda m: float(m.unsaved[0]),
    "replaced": lambda m: float(m.unsaved[1]),
    "whole.data": lambda m: float(m.whole.sum()),
    "number": lambda m: m.number,
    "items": lambda m: sum(m.items),
    "table": lambda m: m.table["sum"],
    "tensor": lambda m: float(m.tensor.sum()),
    "array": lambda m: float(m.array.sum()),
    "nested": lambda m: m.nested["deep"][0][0] + sum(m.nested["deep"][1]),
    "object": lambda m: m.object.slot,
    "dice": rolled,
    "closure": lambda m: m.closure(0.0),
    "new": lambda m: getattr(m, "later", 0.0),
    "new buffer": lambda m: float(m._buffers.get("extra", 0.0)),
    "gradient": lambda m: float(m.body.weight.grad.sum()),
}


def _frozen(m: Any, value: float) -> None:
    with torch.no_grad():
        m.frozen[0] += value


REMEMBER: dict[str, Callable[[Any, float], object]] = {
    "frozen": _frozen,
    "frozen.data": lambda m, value: m.frozen.data[1].add_(value),
    "rebound": lambda m, value: setattr(m.frozen, "data", torch.full((3,), value)),
    "saved.data": lambda m, value: m.saved.data.add_(value),
    "unsaved.data": lambda m, value: m.unsaved.data[0].add_(value),
    "replaced": lambda m, value: setattr(m, "unsaved", torch.full((3,), value)),
    "whole.data": lambda m, value: m.whole.data.add_(int(100 * value)),
    "number": lambda m, value: setattr(m, "number", value),
    "items": lambda m, value: m.items.append(value),
    "table": lambda m, value: m.table.update(sum=value),
    "tensor": lambda m, value: m.tensor.data.add_(value),
    "array": lambda m, value: m.array.__setitem__(1, value),
    "nested": lambda m, value: (m.nested["deep"][0].__setitem__(0, value), m.nested["deep"][1].add(value)),
    "object": lambda m, value: setattr(m.object, "slot", value),
    "dice": lambda m, value: None,  # it was rolled
    "closure": lambda m, value: m.closure(value),
    "new": lambda m, value: setattr(m, "later", value),
    "new buffer": lambda m, value: m.register_buffer("extra", torch.tensor(value), persistent=False),
    "gradient": lambda m, value: setattr(m.body.weight, "grad", torch.full_like(m.body.weight, value)),
}


def played(config: Any, model: nn.Module, folder: str, workers: int = 0, **given: Any) -> Tensor:
    """θ after two rounds with every client, and evaluations between them."""
    settings = config(
        rounds=2, cohort=12, local={"steps": 1, "batch": 1000, "lr": 0.1}, privacy=CLIENT,
        engine={"workers": workers}, evaluate={"every": 1},
    )  # fmt: skip
    tacit.run(settings, folder, dataset=blobs(), model=model, **given)
    return load_file(max(Path(folder, "checkpoint").glob("*/state.safetensors")))["theta"]


@pytest.mark.parametrize("place", RECALL)
def test_what_one_client_leaves_never_reaches_another(config, place: str, monkeypatch) -> None:
    """Every upload is bit for bit what it is when its client goes first; without isolation it is not."""
    expected = played(config, Leaky(place, writes=False), "clean")
    assert torch.equal(played(config, Leaky(place), "leaky"), expected)
    if place not in ("saved.data", "gradient"):  # these are overwritten whatever happens
        monkeypatch.setattr(Pristine, "restore", lambda self: None)
        assert not torch.equal(played(config, Leaky(place), "without"), expected)


@pytest.mark.slow
def test_nor_between_clients_of_a_process_of_the_pool(config) -> None:
    """Twelve clients on two processes, with every leak at once."""
    expected = played(config, Leaky(*RECALL, writes=False), "clean")
    for workers in (0, 2):
        assert torch.equal(played(config, Leaky(*RECALL), f"leaky-{workers}", workers), expected)


@dataclass(frozen=True)
class Hoarder(FedAvg):
    """An algorithm that keeps what clients sent where it should keep nothing."""

    hoard: Any = field(default_factory=list)

    def client(self, msg: Vectors, memory: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        upload, memory = super().client(msg, memory, work)
        before = sum(self.hoard)
        self.hoard.append(float(upload["delta"].sum()))
        return {"delta": upload["delta"] + before}, memory


def test_an_algorithm_keeps_nothing_of_protected_clients(config) -> None:
    hoarder = Hoarder()
    kept = played(config, Leaky(), "hoarder", algorithm=hoarder)
    assert torch.equal(kept, played(config, Leaky(), "clean")) and hoarder.hoard == []


def test_a_large_frozen_parameter_is_refused_and_not_put_back(config, monkeypatch) -> None:
    monkeypatch.setattr(isolation, "KEPT", 0)
    for place in ("frozen", "frozen.data"):
        with pytest.raises(UserError, match="parameter 'frozen' of the model is not trained, but a client"):
            played(config, Leaky(place), place)
    # What is only read is nobody's business.
    played(config, Leaky("number"), "number")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("frozen.data", "'frozen'"),
        ("unsaved.data", "'unsaved'"),
        ("number", "attribute 'number'"),
        ("items", "attribute 'items'"),
        ("table", "attribute 'table.sum'"),
        ("tensor", "'tensor'"),
        ("array", "attribute 'array'"),
        ("nested", "attribute 'nested.deep.1'"),
        ("object", "attribute 'object.slot'"),
        ("closure", "attribute 'closure.total'"),
        ("new", "attribute 'later'"),
        ("new buffer", "attribute 'extra'"),
    ],
)
def test_at_example_level_whoever_remembers_records_is_named(config, place: str, name: str) -> None:
    settings = config(rounds=1, privacy=EXAMPLE)
    message = re.escape(
        f": {name} of the model changes as records pass, so it remembers them without clipping"
    )
    with pytest.raises(UserError, match=message):
        tacit.run(settings, "run", dataset=blobs(), model=Silent(place))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda t: t.data[70].fill_(1.0),
    "numpy": lambda t: t.detach().numpy().__setitem__(70, 1.0),
    "a numpy array's tensor": lambda t: torch.from_numpy(t.detach().numpy())[70].fill_(1.0),
    "a view's storage": lambda t: t.detach()[9:].untyped_storage().__setitem__(281, 63),
    "a pointer": lambda t: ctypes.memset(t.data_ptr() + 281, 63, 1),
    "other memory": lambda t: setattr(t, "data", torch.full_like(t, 1.0)),
    "in place": lambda t: t.detach()[70].fill_(1.0),
}
"""Ways to change number 70 of a frozen tensor, most of which no counter shows."""
CALLS: list[str] = []
"""Calls of `Late`, where nobody looks: a global."""


class Late(nn.Module):
    """Writes to a frozen tensor from one pass of many on, hidden from the tape, and reads it in all.

    A pass that the tape watches ends at most of these writes, before anything is written, and is repeated.
    """

    def __init__(self, way: str, call: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.call = way, call
        self.body = nn.Linear(16, 4)
        self.frozen = nn.Parameter(torch.zeros(100), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(self.way)
        if len(CALLS) >= self.call:
            with torch._C.DisableTorchFunction():
                WRITES[self.way](self.frozen)
        logits: Tensor = self.body(x.flatten(1)) * (1 + self.frozen[70])
        return logits


@pytest.mark.parametrize("kept", [0, isolation.KEPT])
@pytest.mark.parametrize("way", WRITES)
def test_a_write_past_every_counter_in_a_late_step_is_refused_before_a_release(
    config, way: str, kept: int, monkeypatch
) -> None:
    """By its name, whether the tensor is compared after each gradient or, a large one, at a shard's end."""
    monkeypatch.setattr(isolation, "KEPT", kept)
    settings = config(rounds=1, local={"steps": 4, "batch": 8, "lr": 0.1}, privacy=EXAMPLE)
    CALLS.clear()
    with pytest.raises(UserError, match=r"'frozen' of the model (changes as records|is not trained, but)"):
        tacit.run(settings, "run", dataset=blobs(), model=Late(way, call=25))
    assert len(CALLS) >= 25 and not Path("run/checkpoint").exists()
    assert len(Path("run/ledger.jsonl").read_text().splitlines()) == 2  # what was charged stays charged


@pytest.mark.parametrize("way", WRITES)
def test_whoever_writes_and_takes_it_back_a_step_later_is_seen_in_between(way: str) -> None:
    model = Late(way, call=1)
    first, before = Pristine({"model": model}), model.frozen.detach().clone()
    CALLS.clear()
    model(torch.ones(2, 16))
    with pytest.raises(UserError, match="'frozen' of the model changes as records pass"):
        first.refuse_changes()
    model.frozen.data.copy_(before)
    assert (way == "other memory") == bool(list(first._changed()))
    first.restore()
    first.refuse_changes()


def test_memory_that_was_made_smaller_is_neither_read_beyond_nor_lost() -> None:
    model = Late("data", call=0)
    first = Pristine({"model": model})
    model.frozen.untyped_storage().resize_(8)
    with pytest.raises(UserError, match="'frozen' of the model changes as records pass"):
        first.refuse_changes()
    first.restore()
    assert model.frozen.tolist() == [0.0] * 100


class Words(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits


def test_known_layers_are_refused_by_name_before_anything_is_charged(config) -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    refused: list[tuple[nn.Module, str]] = [
        (nn.Embedding(5, 2, max_norm=1.0), r"'part' \(Embedding\).*without max_norm"),
        (nn.EmbeddingBag(5, 2, max_norm=1.0), r"'part' \(EmbeddingBag\).*without max_norm"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), "'part.*spectral norm"),
        (nn.utils.spectral_norm(nn.Linear(2, 2)), r"'part' \(Linear\).*spectral norm"),
        (scripted, "'part'.*scripted"),
    ]
    for number, (part, message) in enumerate(refused):
        for workers in (0, 2):
            folder = f"run-{number}-{workers}"
            settings = config(rounds=1, privacy=EXAMPLE, engine={"workers": workers})
            with pytest.raises(UserError, match=message):
                tacit.run(settings, folder, dataset=blobs(), model=Words(part))
            assert not list(Path().glob(f"{folder}/ledger*"))
    # Where clients are protected as a whole, what a client writes is undone: only what is hidden is refused.
    tacit.run(config(rounds=1, privacy=CLIENT), "client", dataset=blobs(), model=Words(refused[0][0]))
    with pytest.raises(UserError, match="scripted"):
        tacit.run(config(rounds=1, privacy=CLIENT), "hidden", dataset=blobs(), model=Words(scripted))


class Curious(FedAvg):
    """Sends what it should not know."""

    def client(self, msg: Vectors, memory: Vectors, work: Any) -> tuple[Vectors, Vectors]:
        upload, memory = super().client(msg, memory, work)
        upload["delta"][0] = work.loss
        return upload, memory


def test_an_exact_loss_is_out_of_an_algorithms_hands_at_example_level(config) -> None:
    with pytest.raises(UserError, match=r"work\.loss is an exact number about private records"):
        tacit.run(config(rounds=1, privacy=EXAMPLE), "example", dataset=blobs(), algorithm=Curious())
    result = tacit.run(config(rounds=1, privacy=CLIENT), "client", dataset=blobs(), algorithm=Curious())
    assert result.last("train_loss") > 0


def test_restoring_is_bit_for_bit() -> None:
    model = nn.Module()
    model.register_buffer("odd", torch.tensor([float("nan"), -0.0, float("inf")]))
    model.zero, model.flag, model.view = 0.0, 1, torch.arange(6.0).view(2, 3).t()
    first = Pristine({"model": model})
    first.refuse_changes()
    model.odd.data[1] = 0.0
    model.zero, model.flag = -0.0, True
    model.view.data[0, 0] = 9.0
    with pytest.raises(UserError, match="of the model changes as records pass"):
        first.refuse_changes()
    first.restore()
    first.refuse_changes()
    assert str(model.zero) == "0.0" and model.flag is not True and float(model.view[0, 0]) == 0.0
    assert torch.signbit(model.odd).tolist()[1]


def test_values_that_are_made_again_are_no_change() -> None:
    """Layers may set an attribute to the same value in every pass."""
    model = nn.Module()
    model.scale, model.shape, model.mask = 0.1, (2, 3), torch.ones(3)
    first = Pristine({"model": model})
    model.scale, model.shape, model.mask = 0.3 - 0.2 + 0.0, (2, 3), torch.ones(3)
    with pytest.raises(UserError, match="'scale'"):
        first.refuse_changes()
    model.scale = float("0.1")
    first.refuse_changes()
