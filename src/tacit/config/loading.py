"""From a YAML file and `--set` overrides to a checked `Config`, or one clear line about what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tacit.config.methods import with_preset
from tacit.config.pretrain import expanded
from tacit.config.schema import Config
from tacit.errors import UserError

Key = tuple[str | int, ...]


class Loader(yaml.SafeLoader):
    """YAML in which `1e-1` is a number, as everywhere else; YAML 1.1 wants `1.0e-1`."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
SHORT = {"cohort": "size", "clip": "bound"}
"""Sections that a bare number stands for, and the key it is the value of."""


def load(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, presets: bool = True
) -> Config:
    """A checked config from a YAML file (or a mapping), with dotted overrides such as {"local.lr": 0.1}.

    A method's preset is laid under it, unless the config is already a resolved one.
    """
    lines: dict[Key, int] = {}
    if isinstance(source, Mapping):
        values, where = _copy(source), "config"
    else:
        values, lines = _read(Path(source))
        where = str(source)
    if "sweep" in values:
        raise UserError(f"{where}: its `sweep` section makes it many runs; start them with `tacit run`")
    for key, value in (overrides or {}).items():
        override(values, key, value)
    try:
        config = Config.model_validate(with_preset(expanded(values)) if presets else values)
    except ValidationError as error:
        raise UserError(_explain(error, values, lines, where, set(overrides or {}))) from None
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
            overrides[key.strip()] = yaml.load(value, Loader)
        except yaml.YAMLError:
            raise UserError(f"--set {setting}: the value is not valid YAML") from None
    return overrides


def dump(config: Config) -> str:
    """The resolved config as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value


def _read(file: Path) -> tuple[dict[str, Any], dict[Key, int]]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; `tacit run --help` shows how a config is named") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"{file}: cannot be read ({reason})") from None
    lines: dict[Key, int] = {}
    try:
        node = yaml.compose(text, Loader=Loader)
        values = yaml.load(text, Loader)
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


def _lines(node: yaml.Node, prefix: Key) -> Iterator[tuple[Key, int]]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = (*prefix, str(name.value))
            yield key, name.start_mark.line + 1
            yield from _lines(value, key)


def override(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key of raw config values; a section's short form becomes the section it stands for."""
    *parents, last = dotted.split(".")
    here = values
    for parent in parents:
        inner = here.get(parent)
        if isinstance(inner, str):  # `method: fedprox` then method.mu=…: the name keeps its place
            inner = {"name": inner}
        elif inner is None:
            inner = {}
        elif isinstance(inner, int | float) and parent in SHORT:
            inner = {SHORT[parent]: inner}
        if not isinstance(inner, dict):
            raise UserError(f"--set {dotted}: {parent} is a value, not a section")
        here[parent] = inner
        here = inner
    here[last] = value


def _explain(
    error: ValidationError, values: dict[str, Any], lines: dict[Key, int], where: str, overridden: set[str]
) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    key = _visible(first["loc"], values)
    dotted = _dotted(key)
    from_flag = any(
        dotted == o or dotted.startswith(o + ".") or o.startswith(dotted + ".") for o in overridden
    )
    line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
    place = "--set" if from_flag else where + (f", line {line}" if line and dotted else "")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place}: {dotted + ': ' if dotted else ''}{_reason(first)}{more}"


def _reason(problem: Any) -> str:
    kind, loc, ctx = problem["type"], problem["loc"], problem.get("ctx", {})
    given = problem.get("input")
    if kind == "extra_forbidden":
        return "unknown key" + _nearest(str(loc[-1]), _fields_at(loc[:-1]))
    if kind == "missing":
        return "this key is missing"
    if kind in ("literal_error", "union_tag_invalid"):
        allowed = str(ctx.get("expected") or ctx.get("expected_tags", ""))
        if kind == "union_tag_invalid":
            given = ctx.get("tag")
        names = [name.strip(" '") for name in allowed.replace(" or ", ",").split(",")]
        return f"{given!r} is not one of {', '.join(names)}" + _nearest(str(given), names, listed=True)
    if kind == "union_tag_not_found":
        return "this section needs a `kind`"
    if kind == "value_error":
        return str(ctx.get("error", problem["msg"]))
    message: str = problem["msg"][0].lower() + problem["msg"][1:]
    shown = f" (got {given!r})" if isinstance(given, str | int | float | bool) or given is None else ""
    return message.replace("input should be", "must be") + shown


def _nearest(name: str, names: list[str], listed: bool = False) -> str:
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "" if listed or not names else f"; known keys are {', '.join(names)}"


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _fields_at(loc: Key) -> list[str]:
    """Names of the keys that the schema has at a place."""
    models: list[type[BaseModel]] = [Config]
    for part in loc:
        deeper = [
            m
            for model in models
            if part in model.model_fields
            for m in _models(model.model_fields[str(part)].annotation)
        ]
        if deeper:
            models = deeper
        else:  # a union's tag: keep the member that carries it
            models = [
                m
                for m in models
                if "kind" in m.model_fields and part in get_args(m.model_fields["kind"].annotation)
            ]
    return sorted({name for model in models for name in model.model_fields})


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
