"""The architecture: each room may import the rooms before it, never one after it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import tacit
from conftest import blobs
from tacit.federation.run import Federation

ORDER = [
    {"errors"},
    {"system"},
    {"lazy", "randomness", "reading", "section"},
    {"vector", "fetching"},
    {"optimizers", "gradients"},
    {"privacy"},
    {"secure"},
    {"algorithms"},
    {"data"},
    {"models", "tasks"},
    {"engine"},
    {"federation"},
    {"deploy"},
    {"config"},
    {"report"},
    {"api"},
    {"sweeps"},
    {"cli"},
    {"__main__"},
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
ROOT = Path(tacit.__file__).parent


def imports(file: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "tacit":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tacit."):
            rooms.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {a.name.split(".")[1] for a in node.names if a.name.startswith("tacit.")}
    return rooms & RANK.keys()


def test_every_module_has_a_room_and_arrows_point_one_way() -> None:
    wrong = []
    for file in ROOT.rglob("*.py"):
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in RANK, f"{file} is in no room"
        wrong += [f"{room} → {o} ({file.name})" for o in imports(file) if o != room and RANK[o] >= RANK[room]]
    assert not wrong, wrong


# --- how often a round goes from room to room ---------------------------------------------------------------

FOUNDATION = {"errors", "system", "lazy", "randomness", "reading", "section", "vector"}
"""Rooms that are to the others what torch is: they know none of them, and nobody follows a call into them."""
NO_CALLS = ("__torch_function__", "<genexpr>")
"""Torch looking at an operation, and the next value of what an earlier call gave: nobody looks these up."""
MOST = 20
SECTIONS = {
    "rounds": 3,
    "data": {"name": "blobs", "partition": {"kind": "iid", "clients": 8}},
    "model": {"name": "mlp", "hidden": [4]},
    "cohort": 4,
    "local": {"steps": 2, "batch": 5, "lr": 0.1},
    "engine": {"workers": 0},
    "evaluate": {"every": 10},
}


@cache
def room_of(code: CodeType) -> str | None:
    file = Path(code.co_filename)
    if ROOT not in file.parents or code.co_name == "__len__":
        return None  # a property like any other
    found = file.relative_to(ROOT).parts[0].removesuffix(".py")
    return None if found in FOUNDATION else found


def name_of(code: CodeType) -> str:
    """The function; what is written inside of it (a lambda, a comprehension) counts as itself."""
    return f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname.split('.<locals>')[0]}"


def is_property(frame: FrameType) -> bool:
    owner: Any = type(frame.f_locals["self"]) if "self" in frame.f_locals else None
    found = getattr(owner, frame.f_code.co_name, None)
    return owner is not None and not callable(found)


def crossings(function: Callable[..., Any], *arguments: Any) -> set[tuple[str, str, str, str]]:
    """Every call from one room into another, as caller → callee, however often it is made."""
    found: set[tuple[str, str, str, str]] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        here = room_of(frame.f_code) if event == "call" else None
        if here is None or frame.f_code.co_name in NO_CALLS:
            return
        above = frame.f_back
        while above is not None and room_of(above.f_code) is None:  # through torch, and back again
            above = above.f_back
        if above is None or room_of(above.f_code) == here or is_property(frame):
            return
        before = room_of(above.f_code)
        assert before is not None
        found.add((before, here, name_of(above.f_code), name_of(frame.f_code)))

    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    ("method", "unit", "by_name", "together"),
    [
        ("fedavg", None, 20, 20),
        ("fedavg", "client", 20, 24),
        ("dp2-fedsam", "client", 20, 27),
        ("fedavg", "example", 20, 30),
    ],
)
def test_a_round_crosses_few_rooms(
    method: str, unit: str | None, by_name: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that somebody who follows a round has to look up in another room.

    At most twenty are of rooms that the caller knows by name, of the server's side and of a client's at most
    twenty each. The others are answers through what was handed over: an algorithm's `load`, `steps`,
    `gradient` and `step`, a task's losses, progress. Together they may not become more.
    """
    seen: list[set[tuple[str, str, str, str]]] = []
    run = Federation._round

    def watched(self: Federation, engine: Any) -> bool:
        if self.server.round != 1:  # in the first some things are done once, and in the last one more
            return run(self, engine)
        seen.append(crossings(run, self, engine))
        return True

    monkeypatch.setattr(Federation, "_round", watched)
    private = {"unit": unit, "delta": 1e-3, "clip": 1.0, "noise": 1.0, "entropy": "seed"}
    config = tacit.load(SECTIONS | {"method": method, "privacy": private if unit else None})
    tacit.run(config, "run", dataset=blobs(80), progress=False)
    (found,) = seen
    down = {(a, b) for one, other, a, b in found if RANK[one] > RANK[other]}
    assert 10 < len(down) <= by_name, sorted(down)
    assert len(found) <= together, sorted(found)
    for room in ("federation", "engine"):
        assert 5 < len({(a, b) for one, other, a, b in found if room in (one, other)}) <= MOST, sorted(found)


# --- the tests' own tree ------------------------------------------------------------------------------------


def test_every_room_has_its_tests() -> None:
    here = Path(__file__).parent
    rooms = {folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists()}
    assert rooms <= RANK.keys()
    missing = [room for room in sorted(rooms) if not any((here / room).glob("test_*.py"))]
    assert not missing, f"no tests of {missing}"
    others = {"adversarial", "docs", "faults", "integration", "support"}
    strange = {folder.name for folder in here.iterdir() if any(folder.glob("*.py"))} - rooms - others
    assert not strange, f"no room is called {strange}"
