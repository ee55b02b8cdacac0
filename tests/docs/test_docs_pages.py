"""Everything in the documentation exists: commands, flags, links, pictures, keys, and Python that runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tacit.config import load
from tacit.config.schema import Config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "making"))

import pictures  # noqa: E402
import reference  # noqa: E402

PAGES = [
    *sorted(DOCS.rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes/README.md",
]
ELSEWHERE = {"contributing.md", "changes.md", "recipes.md", "reference/config.md", "reference/commands.md"}
"""Pages that the site has and docs/ has not (`docs/making/hook.py`), beside those of the notebooks."""
CHEAP = ("howto/data.md", "howto/model.md", "howto/planning.md")
"""Pages whose Python runs here: together a few seconds. The others' is compiled."""
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    return [code for named, code in found if named == language]


def shown(text: str) -> Iterator[list[str]]:
    """Every `tacit …` of a page, in a block, in an indented line or between backticks, as words."""
    fenced = "\n".join(blocks(text, "") + blocks(text, "sh"))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    typed = re.findall(r"^(?:\$ )?(tacit .+)", fenced, re.M) + re.findall(r"^    (tacit .+)", prose, re.M)
    for command in [*typed, *re.findall(r"`(tacit [^`]+)`", prose)]:
        command = re.split(r"\s{2,}|\s#|[;|]", " ".join(command.splitlines()))[0]
        try:
            words = shlex.split(command.replace("…", "x"))
        except ValueError:  # an apostrophe in prose
            words = command.split()
        yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_and_flag_shown_exists(page: Path) -> None:
    known = reference.commands()
    groups = {name.split()[0] for name in known if " " in name}
    for words in shown(page.read_text("utf-8")):
        if not words or not words[0].isalpha():
            continue  # `tacit --version`
        name = words[0]
        if name in groups and len(words) > 1 and f"{name} {words[1]}" in known:
            name = f"{name} {words[1]}"
        assert name in known or name in groups, f"{page.name}: tacit {' '.join(words)}"
        if name in known:
            options = {flag for parameter in known[name].params for flag in parameter.opts} | {"--help", "-h"}
            given = {word.split("=")[0] for word in words if word.startswith("--")}
            assert given <= options, f"{page.name}: tacit {' '.join(words)} has no {given - options}"


def test_a_command_that_is_not_there_would_be_noticed() -> None:
    found = list(
        shown("    tacit runn a.yaml\n`tacit plan\n--epsilom 1`\n```sh\n$ tacit run x   # why\n```\n")
    )
    assert found == [["run", "x"], ["runn", "a.yaml"], ["plan", "--epsilom", "1"]]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_and_picture_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("https://", "#")):
            continue
        place = (page.parent / target.split("#")[0]).resolve()
        made = place.is_relative_to(DOCS) and str(place.relative_to(DOCS)) in ELSEWHERE
        assert place.exists() or made or place.with_suffix(".ipynb").exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_compiles_and_yaml_is_yaml(page: Path) -> None:
    text = page.read_text("utf-8")
    for code in blocks(text, "python"):
        compile(code, page.name, "exec")
    for part in blocks(text, "yaml"):
        yaml.safe_load(part)


@pytest.mark.parametrize("page", CHEAP)
def test_cheap_python_runs(page: str) -> None:
    Path("recipes").symlink_to(ROOT / "recipes")
    for code in blocks((DOCS / page).read_text("utf-8"), "python"):
        exec(compile(code, page, "exec"), {"__name__": "shown"})


@pytest.mark.parametrize("page", sorted((DOCS / "howto").glob("*.md")), ids=lambda page: page.name)
def test_whole_configs_shown_are_valid(page: Path) -> None:
    for part in map(yaml.safe_load, blocks(page.read_text("utf-8"), "yaml")):
        if "rounds" in part:
            load(part)


def _keys(kind: Any) -> Iterator[str]:
    for name, field in reference._fields(kind).items():
        yield name
        for inner in reference._inner(field.annotation):
            yield from _keys(inner)


def test_the_configs_page_has_every_key_and_the_commands_page_every_command() -> None:
    page = reference.config_page()
    assert {key for key in _keys(Config) if key != "kind"} <= set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert "> 0, ≤ 100000000 | **must be given** |" in page  # rounds: type, bounds, and no default
    assert "`uniform` or `examples` | `uniform`" in page
    said = reference.command_page()
    for name, command in reference.commands().items():
        assert f"## `tacit {name}`" in said
        assert all(f"`{flag}`" in said for p in command.params for flag in p.opts if flag.startswith("--"))


@pytest.mark.parametrize("name", pictures.DRAWINGS)
def test_pictures_are_as_drawn(name: str) -> None:
    """`python docs/making/pictures.py` draws them anew."""
    assert (DOCS / "pictures" / f"{name}.svg").read_text("utf-8") == pictures.svg(name)


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | ELSEWHERE
    pages |= {str(book.relative_to(DOCS).with_suffix(".md")) for book in DOCS.rglob("*.ipynb")}
    assert set(re.findall(r"[\w/-]+\.md", menu)) == pages
