"""The worked examples of CONTRIBUTING.md run, one after the other, as a contributor would type them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tacit.optimizers.server import OPTIMIZERS
from tacit.privacy import MECHANISMS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_addition_that_is_shown_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacit.privacy.mechanisms.MECHANISMS", MECHANISMS)
    for registry in (MECHANISMS, OPTIMIZERS):  # what the examples add is gone afterwards
        for name in list(registry):
            monkeypatch.setitem(registry, name, registry[name])
    Path("recipes").symlink_to(ROOT / "recipes")
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 6
    scope: dict[str, object] = {"__name__": "contributing"}
    try:
        for block in blocks:
            exec(compile(block, "CONTRIBUTING.md", "exec"), scope)
    finally:
        MECHANISMS.pop("twice", None)
        OPTIMIZERS.pop("signsgd", None)


def test_every_file_and_registry_that_is_named_exists() -> None:
    for kind, line in re.findall(r"^\| (?:a|an) [\w ]+ \| `(\w+)(?:/\w+)?/` \| (`.*?) \|", TEXT, re.M):
        assert (ROOT / "src" / "tacit" / kind).is_dir()
        registry, *where = re.findall(r"`([\w./]+)`", line)
        place = ROOT / "src" / "tacit"
        rooms = [f for f in place.rglob("*.py") if re.search(rf"^{registry}\b.*=", f.read_text(), re.M)]
        assert rooms, f"{registry} is nowhere"
        assert any(f.name == Path(where[0]).name for f in rooms), (registry, where)
