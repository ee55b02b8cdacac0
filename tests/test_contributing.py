"""The worked examples of CONTRIBUTING.md run, one after the other, as a contributor would type them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from tacit.privacy import MECHANISMS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_addition_that_is_shown_works(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("recipes").symlink_to(ROOT / "recipes")
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 7
    Path("contributing.py").write_text("\n\n".join(blocks))
    monkeypatch.syspath_prepend(".")
    try:
        importlib.import_module("contributing")
    finally:
        sys.modules.pop("contributing", None)
        MECHANISMS.pop("with-margin", None)  # what the examples add is gone afterwards


def test_every_file_and_registry_that_is_named_exists() -> None:
    for kind, line in re.findall(r"^\| (?:a|an) [\w ]+ \| `(\w+)(?:/\w+)?/` \| (`.*?) \|", TEXT, re.M):
        assert (ROOT / "src" / "tacit" / kind).is_dir()
        registry, *where = re.findall(r"`([\w./]+)`", line)
        place = ROOT / "src" / "tacit"
        rooms = [f for f in place.rglob("*.py") if re.search(rf"^{registry}\b.*=", f.read_text(), re.M)]
        assert rooms, f"{registry} is nowhere"
        assert any(f.name == Path(where[0]).name for f in rooms), (registry, where)
