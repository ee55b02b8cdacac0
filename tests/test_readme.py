"""The README's Python runs, and its config is the quickstart's; `tests/docs` covers links and commands."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tacit.config import load

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert (Path("runs/jobs") / "statement.json").exists()


def test_the_config_shown_is_the_quickstart() -> None:
    (shown,) = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", TEXT, re.S))
    assert load(shown) == load(ROOT / "recipes" / "quickstart.yaml")


def test_it_is_read_in_two_or_three_minutes() -> None:
    assert len(re.sub(r"```.*?```", "", TEXT, flags=re.S).split()) < 650


def test_it_shows_the_commands_that_matter() -> None:
    shown = set(re.findall(r"^tacit (\w+)", TEXT, re.M))
    assert {"run", "resume", "plan", "statement", "methods", "data", "compare", "audit", "board"} <= shown
