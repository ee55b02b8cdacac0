"""From a YAML file and `--set` overrides to a checked `Config`, or to one clear line about an error.

`base: FILE` at the top of a config (a path relative to its own folder) lays the config over that file.
Sections, including `sweep`, are merged key by key; everything else replaces the base's value. In a sweep,
`null` removes a key. So experiments with common settings state them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tacit.config.explaining import explain, short
from tacit.config.merging import merged
from tacit.config.methods import with_preset
from tacit.config.pretrain import expanded
from tacit.config.recipes import copied_from
from tacit.config.schema import Config
from tacit.config.yamls import Key, copied, located, parse, to_yaml
from tacit.errors import UserError
from tacit.reading import read_text

BASE = "base"
NAMES = {
    "method": "name", "model": "name", "task": "name", "data": "name",
    "data.partition": "kind", "privacy.mechanism": "kind",
}  # fmt: skip
"""Sections for which a bare name may stand, and the key whose value it is."""
SIZES = {"cohort": "size", "privacy.clip": "bound"}
"""Sections for which a bare number may stand, and the key whose value it is."""
DEFAULTS = ("privacy.metrics",)
"""Sections for which a bare `true` may stand, with all their defaults."""


def load(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, presets: bool = True
) -> Config:
    """A checked config from a YAML file (or a mapping), with dotted overrides such as {"local.lr": 0.1}.

    The method's preset is laid under the config, unless the config is already resolved.
    """
    places: dict[Key, str] = {}
    if isinstance(source, Mapping):
        values, where = copied(source), "config"
    elif not isinstance(source, str | Path):
        raise UserError(f"config: give a file or a mapping (got {source!r})")
    else:
        values, places = read_values(Path(source))
        where = str(source)
    if "sweep" in values:
        raise UserError(f"{where}: its `sweep` section makes it many runs; start them with `tacit run`")
    if not isinstance(overrides, Mapping | None):
        raise UserError(f"overrides: give keys and values, such as {{'local.lr': 0.1}} (got {overrides!r})")
    for key, value in (overrides or {}).items():
        override(values, key, value)
    try:
        config = Config.model_validate(with_preset(expanded(values)) if presets else values)
    except ValidationError as error:
        raise UserError(explain(error, Config, values, places, where, set(overrides or {}))) from None
    given = values.get("privacy")
    unit = given.get("unit") if isinstance(given, Mapping) else None
    config._assumed_unit = config.privacy is not None and unit is None
    return config


def refuse_no_config(config: object) -> None:
    """Raise unless this is a checked config: it is easily confused with a file or a mapping."""
    if not isinstance(config, Config):
        made = "tacit.load(…) makes one of a file or a mapping"
        raise UserError(f"config: this is a {type(config).__name__}; {made}")


def parse_overrides(settings: list[str]) -> dict[str, Any]:
    """`a.b=c` arguments as a mapping; values are read as YAML, so numbers, lists and null work."""
    overrides = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {setting}: write it as key=value, for example --set local.lr=0.1")
        try:
            overrides[key.strip()] = parse(value)[0]
        except yaml.YAMLError:
            mend = "put a text in quotes"
            if "'" not in setting and '"' not in setting:
                mend = f"for a text write --set '{key}=\"{value}\"'"
            raise UserError(f"--set {setting}: the value is not valid YAML; {mend}") from None
    return overrides


def dump(config: Config) -> str:
    """The resolved config as YAML, with every default written out."""
    return to_yaml(config.model_dump(mode="json"))


def read_values(file: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[Key, str]]:
    """A file's raw values on top of those of its `base`, and where each was written ("FILE, line 3")."""
    values, lines = _read(file)
    places = {key: f"{file}, line {line}" for key, line in lines.items()}
    base = values.pop(BASE, None)
    if base is None:
        return values, places
    if not isinstance(base, str):
        raise UserError(f"{places[BASE,]}: base: give the path of another config (got {short(base)})")
    below = file.parent / base
    if below.resolve() in (*above, file.resolve()):
        raise UserError(f"{places[BASE,]}: base: {base} is based on this very file")
    if not below.is_file():
        raise UserError(f"{places[BASE,]}: base: there is no {below}")
    under, under_places = read_values(below, (*above, file.resolve()))
    over = merged(under, values)
    if "sweep" in values and values["sweep"] is None:  # a single run on top of a base with a sweep
        del over["sweep"]
    if isinstance(over.get("sweep"), Mapping):
        over["sweep"] = {key: value for key, value in over["sweep"].items() if value is not None}
    return over, {**under_places, **places}


def _read(file: Path) -> tuple[dict[str, Any], dict[Key, int]]:
    try:
        text = read_text(file)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {copied_from(file)}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"{file}: cannot be read ({reason})") from None
    values, lines = located(text, file)
    if not isinstance(values, dict):
        raise UserError(f"{file}: a config is a mapping of keys (rounds, data, model, …); this file has none")
    return values, lines


def override(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key of raw config values; a section's short form is first expanded."""
    *parents, last = dotted.split(".")
    here = values
    for depth, parent in enumerate(parents):
        inner = _section(".".join(parents[: depth + 1]), here.get(parent))
        if not isinstance(inner, dict):
            raise UserError(f"--set {dotted}: {parent} is a value, not a section")
        here[parent] = inner
        here = inner
    here[last] = copied(value)  # a copy, since a later key may be set inside it


def _section(dotted: str, value: Any) -> Any:
    """The section that a short form stands for (`method: fedprox`, then method.mu=…); others unchanged."""
    if value is None or (value is True and dotted in DEFAULTS):
        return {}
    if isinstance(value, str) and dotted in NAMES:
        return {NAMES[dotted]: value}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {SIZES[dotted]: value} if number and dotted in SIZES else value
