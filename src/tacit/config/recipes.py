"""The experiments that come with the package: a list of them, and copies to run and change.

They are the repository's `recipes/`, which a link in the package's source makes part of the package. They are
not checked as configs here, and nothing large is imported, so that listing them is fast.

>>> about("quickstart").size
'40 rounds × 200 clients'
>>> about("quickstart").needs
'nothing'
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

import yaml

from tacit.config.merging import merged
from tacit.errors import UserError
from tacit.reading import read_bytes, read_text

HERE = Path(__file__).parents[1] / "recipes"
SAMPLE = ("fashion-mnist-slice",)
"""Data sets inside the package."""
SYNTHETIC = ("synthetic-speech", "synthetic-speech-seed")
GGUF = ("smollm2-135m",)
"""Weights that their package has in that form."""


@dataclass(frozen=True)
class Recipe:
    """A recipe's entry in the list."""

    name: str
    text: str
    """The first sentence of its comment."""
    needs: str
    size: str


def names() -> list[str]:
    """Every recipe: the quickstart first, then by folder."""
    found = (file.relative_to(HERE).with_suffix("").as_posix() for file in HERE.rglob("*.yaml"))
    return sorted(found, key=lambda name: (name.count("/"), name))


def find(name: str) -> Path:
    """The file of a recipe, by its name or its path in the repository."""
    bare = name.removeprefix("recipes/").removesuffix(".yaml").strip("/")
    known = names()
    if bare not in known:
        close = get_close_matches(bare, known, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"there is no recipe {name!r}{hint}; `tacit recipes` lists them")
    return HERE / f"{bare}.yaml"


def copied_from(file: Path) -> str:
    """What to do if a config is missing: a recipe of its name can be written there."""
    bare = file.with_suffix("").as_posix().removeprefix("recipes/")
    same = [name for name in names() if name == bare or name.rpartition("/")[2] == file.stem]
    if not same:
        return "`tacit init quickstart` writes a config to start from, and `tacit recipes` lists others"
    return f"`tacit init {bare if bare in same else same[0]}` writes the recipe of that name"


def write(name: str, into: Path) -> list[Path]:
    """Copy a recipe to `into`, under the last part of its name, and the recipes it is based on to
    `into`/recipes.

    Returns the written files, the recipe first. An existing file with other content is never replaced.
    """
    chain = list(_chain(find(name)))
    base = os.path.relpath(chain[1], HERE) if len(chain) > 1 else None
    copies = {into / chain[0].name: _rebased(read_text(chain[0]), base).encode()}
    copies |= {into / "recipes" / file.relative_to(HERE): read_bytes(file) for file in chain[1:]}
    for copy, text in copies.items():
        if copy.exists() and read_bytes(copy) != text:
            raise UserError(f"{copy} exists already, and is another; rename it, or go to another folder")
    new = [copy for copy in copies if not copy.exists()]
    for copy in new:
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("xb") as file:
                file.write(copies[copy])
        except OSError as error:
            raise UserError(f"{copy}: cannot be written ({error.strerror})") from None
    return list(copies)


def about(name: str) -> Recipe:
    """What a recipe is, what it needs that may be missing here, and how large it is."""
    chain = list(_chain(find(name)))
    name = chain[0].relative_to(HERE).with_suffix("").as_posix()
    values: dict[str, Any] = {}
    for file in reversed(chain):
        values = merged(values, _values(file))
    return Recipe(name, _sentence(read_text(chain[0])), _needs(values), _size(values))


def _chain(file: Path) -> Iterator[Path]:
    """A recipe and its chain of bases, nearest first."""
    yield file
    base = _values(file).get("base")
    if base is not None:
        yield from _chain(Path(os.path.normpath(file.parent / base)))


def _values(file: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    values: dict[str, Any] = yaml.load(read_text(file), loader)
    return values


def _rebased(text: str, base: str | None) -> str:
    """The text with `base:` pointing to the base's copy; the rest is unchanged."""
    lines = text.splitlines(keepends=True)
    return "".join(
        f"base: recipes/{Path(base).as_posix()}\n" if base and line.startswith("base:") else line
        for line in lines
    )


def _sentence(text: str) -> str:
    comment = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return f"{' '.join(comment)} ".partition(". ")[0].strip().rstrip(".")


def _needs(values: Mapping[str, Any]) -> str:
    data, model = values["data"], values["model"]
    model = {"name": model} if isinstance(model, str) else model
    name, hub = data["name"], model.get("hub")
    needs = []
    if name == "speech":
        needs.append(f"your copy of {data['path']}")
    elif name.startswith("hf:"):
        needs.append(f"{name[3:]} (hub)")
    elif name not in (*SAMPLE, *SYNTHETIC):
        needs.append(f"{name} (fetched once)")
    if hub is not None:
        needs.append(f"weights of {hub}")
    if model.get("start") is not None:
        needs.append(f"the seed model {model['start']}")
    extras = {
        "speech": name in ("speech", *SYNTHETIC),
        "llm": hub in GGUF,
        "transformers": hub not in GGUF and (hub is not None or model.get("lora") is not None),
        "flower": values.get("engine", {}).get("kind") == "flower",
    }
    needs += [f"tacit[{extra}]" for extra, wanted in extras.items() if wanted]
    return ", ".join(needs) or "nothing"


def _size(values: Mapping[str, Any]) -> str:
    if "pretrain" in values:
        return f"{values['pretrain']['steps']:,} central steps"
    cohort = values["cohort"]
    clients = cohort["size"] if isinstance(cohort, Mapping) else cohort
    runs = _runs(values.get("sweep") or {})
    each = f"{values['rounds']:,} rounds × {clients:,} client{'s' * (clients > 1)}"
    return f"{runs} runs × {each}" if runs > 1 else each


def _runs(sweep: Mapping[str, Any]) -> int:
    """How many runs a sweep compares, without the runs that tune."""
    shared = {k: v for k, v in sweep.items() if v is not None and k not in ("tune", "validation", "cases")}
    families = ({**case, **shared} for case in sweep.get("cases") or [{}])
    return sum(
        prod(len(v) for key, v in family.items() if key != "tune" and isinstance(v, list))
        for family in families
    )
