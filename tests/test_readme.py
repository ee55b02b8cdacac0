"""The README's Python runs, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tacit.cli.app import app
from tacit.config import load

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", TEXT, re.S), ids=lambda c: c.split("\n")[0]
)
def test_python_blocks_run(code: str) -> None:
    Path("recipes").symlink_to(ROOT / "recipes")
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_the_configs_shown_are_valid() -> None:
    whole, *parts = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", TEXT, re.S))
    assert load(whole).privacy is not None
    for part in parts:
        assert load({"rounds": whole["rounds"], **part}).privacy is not None


def test_every_command_shown_exists() -> None:
    shown = set(re.findall(r"^tacit (\w+)", TEXT, re.M))
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    assert shown <= known
    assert {"run", "resume", "plan", "statement", "methods", "data", "compare"} <= shown


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (ROOT / target).exists(), target
