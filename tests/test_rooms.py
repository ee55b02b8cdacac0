"""The architecture: each room may know the rooms before it, never one after it."""

from __future__ import annotations

import ast
from pathlib import Path

import tacit

ORDER = [
    {"errors"},
    {"system"},
    {"lazy", "randomness", "reading", "section"},
    {"vector"},
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
