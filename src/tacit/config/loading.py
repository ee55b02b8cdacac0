"""From a YAML file and `--set` overrides to a checked `Config`, or one clear line about what is wrong.

`base: FILE` at the top of a config (a path from its own folder) lays it over that file: sections, `sweep`
among them, are merged key by key, and everything else replaces what was there. In a sweep, `null` takes a key
out. So experiments that share their setting say it once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tacit.config.merging import merged
from tacit.config.methods import with_preset
from tacit.config.pretrain import expanded
from tacit.config.recipes import copied_from
from tacit.config.schema import Config
from tacit.errors import UserError
from tacit.reading import read_text

Key = tuple[str | int, ...]
BASE = "base"
NAMES = {
    "method": "name", "model": "name", "task": "name", "data": "name",
    "data.partition": "kind", "privacy.mechanism": "kind",
}  # fmt: skip
"""Sections that a bare name stands for, and the key it is the value of."""
SIZES = {"cohort": "size", "privacy.clip": "bound"}
"""Sections that a bare number stands for, and the key it is the value of."""
DEFAULTS = ("privacy.metrics",)
"""Sections that a bare `true` stands for, with all their defaults."""
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls a key that a model, or a dataclass, does not have."""
PLAIN = {
    "int_parsing": "a whole number", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_parsing": "a number", "float_type": "a number", "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false", "string_type": "a text", "tuple_type": "a list", "list_type": "a list",
}  # fmt: skip
"""What values must be, by pydantic's name of what is wrong with them."""
LONGEST, MOST_NODES, DEEPEST = 2_000_000, 100_000, 50
"""Characters, values and depth of the largest config: far beyond any that is meant."""


def load(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, presets: bool = True
) -> Config:
    """A checked config from a YAML file (or a mapping), with dotted overrides such as {"local.lr": 0.1}.

    A method's preset is laid under it, unless the config is already a resolved one.
    """
    places: dict[Key, str] = {}
    if isinstance(source, Mapping):
        values, where = _copy(source), "config"
    else:
        values, places = read_values(Path(source))
        where = str(source)
    if "sweep" in values:
        raise UserError(f"{where}: its `sweep` section makes it many runs; start them with `tacit run`")
    for key, value in (overrides or {}).items():
        override(values, key, value)
    try:
        config = Config.model_validate(with_preset(expanded(values)) if presets else values)
    except ValidationError as error:
        raise UserError(_explain(error, values, places, where, set(overrides or {}))) from None
    given = values.get("privacy")
    unit = given.get("unit") if isinstance(given, Mapping) else None
    config._assumed_unit = config.privacy is not None and unit is None
    return config


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
            raise UserError(f"--set {setting}: the value is not valid YAML") from None
    return overrides


class _Loader(yaml.SafeLoader):
    """YAML without dates: what looks like one is a text, which a section then refuses by its name.

    And `1e-1` is a number in it, as everywhere else; YAML 1.1 wants `1.0e-1`.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > DEEPEST:  # also since PyYAML's time grows with the square of the depth
            raise yaml.MarkedYAMLError(problem="sections lie too deep in each other")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def parse(text: str) -> tuple[Any, yaml.Node | None]:
    """A YAML text's values, and where they stand; `yaml.YAMLError` if it is not one that a config can be.

    Aliases may stand for much, or for themselves: what is written out would be endless is refused before
    anything is built from it.
    """
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"more than {LONGEST:,} characters")
    values, node = _parsed(text)
    return _copy(values), node


@lru_cache(maxsize=4)
def _parsed(text: str) -> tuple[Any, yaml.Node | None]:
    """One command reads a run's config several times, and PyYAML takes longer than all the rest of that."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _refuse_endless(node, [0], 0)
        return loader.construct_document(node), node
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="sections lie too deep in each other") from None
    except (LookupError, AttributeError):  # so PyYAML answers `!!timestamp x`
        raise yaml.MarkedYAMLError(problem="a tag (!!…) that does not fit its value; leave it out") from None
    except (ValueError, OverflowError, TypeError) as error:  # a number of 5,000 digits, a list as a key
        raise yaml.MarkedYAMLError(problem=f"a value that cannot be read ({error})") from None
    finally:
        loader.dispose()


def _refuse_endless(node: yaml.Node, seen: list[int], depth: int) -> None:
    seen[0] += 1
    if seen[0] > MOST_NODES or depth > DEEPEST:
        raise yaml.MarkedYAMLError(problem="aliases that stand for too much, or for themselves")
    if isinstance(node, yaml.ScalarNode) and not _plain(node.value):
        raise yaml.MarkedYAMLError(
            problem="a character that no file and no name has", problem_mark=node.start_mark
        )
    if isinstance(node, yaml.CollectionNode):
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                _refuse_endless(part, seen, depth + 1)


def _plain(text: str) -> bool:
    """Whether a text can be a file's name, and be written to one."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def dump(config: Config) -> str:
    """The resolved config as YAML, every default written out."""
    return to_yaml(config.model_dump(mode="json"))


def to_yaml(values: Mapping[str, Any]) -> str:
    """Plain values as YAML; where PyYAML has its part in C, the same text in a tenth of the time."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True))


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value


def read_values(file: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[Key, str]]:
    """A file's raw values on top of those of its `base`, and where each was written ("FILE, line 3")."""
    values, lines = _read(file)
    places = {key: f"{file}, line {line}" for key, line in lines.items()}
    base = values.pop(BASE, None)
    if base is None:
        return values, places
    if not isinstance(base, str):
        raise UserError(f"{places[BASE,]}: base: give the path of another config (got {_short(base)})")
    below = file.parent / base
    if below.resolve() in (*above, file.resolve()):
        raise UserError(f"{places[BASE,]}: base: {base} is based on this very file")
    if not below.is_file():
        raise UserError(f"{places[BASE,]}: base: there is no {below}")
    under, under_places = read_values(below, (*above, file.resolve()))
    over = merged(under, values)
    if "sweep" in values and values["sweep"] is None:  # one run of what is a sweep below
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
    lines: dict[Key, int] = {}
    try:
        values, node = parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}, line {mark.line + 1}" if mark else str(file)
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise UserError(f"{place}: {problem}; the file may be cut short or badly indented") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: a config is a mapping of keys (rounds, data, model, …); this file has none")
    for key, line in _lines(node, ()):
        if key in lines:
            raise UserError(
                f"{file}, line {line}: {_dotted(key)} is given twice (first on line {lines[key]})"
            )
        lines[key] = line
    return values, lines


def _lines(node: yaml.Node | None, prefix: Key) -> Iterator[tuple[Key, int]]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = (*prefix, str(name.value))
            yield key, name.start_mark.line + 1
            yield from _lines(value, key)


def override(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key of raw config values; a section's short form becomes the section it stands for."""
    *parents, last = dotted.split(".")
    here = values
    for depth, parent in enumerate(parents):
        inner = _section(".".join(parents[: depth + 1]), here.get(parent))
        if not isinstance(inner, dict):
            raise UserError(f"--set {dotted}: {parent} is a value, not a section")
        here[parent] = inner
        here = inner
    here[last] = value


def _section(dotted: str, value: Any) -> Any:
    """The section that a short form stands for: `method: fedprox`, then method.mu=…; others as they are."""
    if value is None or (value is True and dotted in DEFAULTS):
        return {}
    if isinstance(value, str) and dotted in NAMES:
        return {NAMES[dotted]: value}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {SIZES[dotted]: value} if number and dotted in SIZES else value


def _explain(
    error: ValidationError, values: dict[str, Any], places: dict[Key, str], where: str, overridden: set[str]
) -> str:
    problems = error.errors(include_url=False)
    # A key that is missing was often misspelt: that it is unknown says more.
    first = next((problem for problem in problems if problem["type"] in UNKNOWN), problems[0])
    key = _visible(first["loc"], values)
    if first["type"] == "missing" and key[-1:] != first["loc"][-1:]:
        key = (*key, first["loc"][-1])  # of a section that was written as one word
    dotted = _dotted(key)
    from_flag = any(
        dotted == o or dotted.startswith(o + ".") or o.startswith(dotted + ".") for o in overridden
    )
    written = next((places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in places), where)
    place = "--set" if from_flag else written if dotted else where
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place}: {dotted + ': ' if dotted else ''}{_reason(first)}{more}"


def _reason(problem: Any) -> str:
    kind, loc, ctx = problem["type"], problem["loc"], problem.get("ctx", {})
    given = problem.get("input")
    if kind in UNKNOWN:
        return "unknown key" + _nearest(str(loc[-1]), _fields_at(loc[:-1]))
    if kind == "missing":
        return "this key is missing" + _choices(loc)
    if kind in ("literal_error", "union_tag_invalid"):
        allowed = str(ctx.get("expected") or ctx.get("expected_tags", ""))
        if kind == "union_tag_invalid":
            given = ctx.get("tag")
        names = [name.strip(" '") for name in allowed.replace(" or ", ",").split(",")]
        return f"{_short(given)} is not one of {', '.join(names)}" + _nearest(str(given), names, listed=True)
    if kind == "union_tag_not_found":
        return "this section needs a `kind`" + _choices((*loc, "kind"))
    if kind == "value_error":
        told = str(ctx.get("error", problem["msg"]))
        return told if len(told) <= 1000 else f"{told[:999]}…"
    if kind in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
        return f"this is a section of keys, not {_short(given)}"
    if kind in PLAIN:
        return f"must be {PLAIN[kind]} (got {_short(given)})"
    message: str = problem["msg"][0].lower() + problem["msg"][1:]
    plain = isinstance(given, str | int | float | bool) or given is None
    shown = f" (got {_short(given)})" if plain else ""
    return message.replace("input should be", "must be") + shown


def _short(value: Any) -> str:
    """A value as it was written, but for what nobody would read to its end."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _nearest(name: str, names: list[str], listed: bool = False) -> str:
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "" if listed or not names else f"; known keys are {', '.join(names)}"


def _models(annotation: Any) -> list[type[Any]]:
    if isinstance(annotation, type) and (is_dataclass(annotation) or issubclass(annotation, BaseModel)):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _fields_at(loc: Key) -> list[str]:
    """Names of the keys that the schema has at a place."""
    return sorted({name for model in _models_at(loc) for name in _fields(model)})


def _choices(loc: Key) -> str:
    """The words that a key may have, where it is one of a few."""
    fields = [_fields(model) for model in _models_at(loc[:-1])]
    kinds = [named[str(loc[-1])].annotation for named in fields if loc[-1] in named]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    return f"; it is one of {', '.join(map(str, dict.fromkeys(words)))}" if words else ""


def _models_at(loc: Key) -> list[type[Any]]:
    """The sections that the schema has at a place; several where a `kind` tells them apart."""
    models: list[type[Any]] = [Config]
    for part in loc:
        deeper = [
            m
            for model in models
            if part in _fields(model)
            for m in _models(_fields(model)[str(part)].annotation)
        ]
        if deeper:
            models = deeper
        else:  # a union's tag: keep the member that carries it
            models = [
                m for m in models if "kind" in _fields(m) and part in get_args(_fields(m)["kind"].annotation)
            ]
    return models


def _fields(model: type[Any]) -> Mapping[str, FieldInfo]:
    found: Mapping[str, FieldInfo] = (
        model.model_fields if issubclass(model, BaseModel) else model.__pydantic_fields__
    )
    return found


def _visible(loc: Key, values: Any) -> Key:
    """A pydantic location without the union tags that a person never wrote."""
    key: list[str | int] = []
    here = values
    for n, part in enumerate(loc):
        if isinstance(here, dict) and part in here:
            here = here[part]
        elif n + 1 < len(loc) or not isinstance(here, dict):
            continue
        key.append(part)
    return tuple(key)


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)
