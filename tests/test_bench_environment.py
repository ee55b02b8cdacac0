"""The benchmarks can still run: their pins fit tacit and the other libraries, and the names they import
exist.
"""

from __future__ import annotations

import ast
import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def demands(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = list(project["dependencies"])
    for extra in extras:
        listed += project["optional-dependencies"][extra]
    return [Requirement(line) for line in listed]


def test_one_version_of_everything_suits_us_and_the_peers() -> None:
    """The pins were resolved together with the peers, so the peers' own demands hold as long as they do."""
    pinned = pins("bench/constraints.txt")
    peers = (ROOT / "bench/requirements.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in peers if not line.startswith("#")]
    assert {"opacus", "pfl", "flwr", "opake"} <= {canonicalize_name(r.name) for r in wanted}
    for requirement in [*wanted, *demands("transformers")]:
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}, but bench pins {version}"


def test_the_main_environment_has_room_for_flower() -> None:
    """Flower 1.41's upper bounds: one environment must serve both."""
    pinned = pins("constraints.txt")
    for line in ("typer<0.21", "rich<15", "protobuf<7", "packaging<26", "cryptography>=50,<51", "click<9"):
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned[requirement.name]), line
    for requirement in demands("transformers", "tensorboard", "speech"):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("file", sorted(ROOT.glob("bench/*.py")), ids=lambda file: file.name)
def test_what_a_benchmark_imports_of_ours_exists(file: Path) -> None:
    """Benchmarks take minutes and are run by hand: a name that is gone must be noticed before."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tacit":
            home = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                inside = (
                    importlib.util.find_spec(f"{node.module}.{name}") if hasattr(home, "__path__") else None
                )
                assert hasattr(home, name) or inside, f"{file.name} imports {name} from {node.module}"
