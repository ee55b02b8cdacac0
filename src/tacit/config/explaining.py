"""Explains what is wrong with a section, in one line that its author can act on."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tacit.config.yamls import Key, dotted

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""pydantic's error types for a key that a model, or a dataclass, does not have."""
PLAIN = {
    "int_parsing": "a whole number", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_parsing": "a number", "float_type": "a number", "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false", "string_type": "a text", "tuple_type": "a list", "list_type": "a list",
}  # fmt: skip
"""What a value must be, by pydantic's error type."""


def explain(
    error: ValidationError,
    root: type[BaseModel],
    values: Mapping[str, Any],
    places: Mapping[Key, str],
    where: str,
    overridden: Set[str] = frozenset(),
) -> str:
    """The first error in the `values` of a `root`: where it is, what it is, and what would be valid.

    `places` says where each key was written, `where` is the place of the whole; `overridden` are keys that
    were set elsewhere.
    """
    problems = error.errors(include_url=False)
    # A missing key was often misspelt: reporting the unknown key is more useful.
    first = next((problem for problem in problems if problem["type"] in UNKNOWN), problems[0])
    key = _visible(first["loc"], values)
    if first["type"] == "missing" and key[-1:] != first["loc"][-1:]:
        key = (*key, first["loc"][-1])  # for a section that was written as one word
    name = dotted(key)
    from_flag = any(name == o or name.startswith(o + ".") or o.startswith(name + ".") for o in overridden)
    written = next((places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in places), where)
    place = "--set" if from_flag else written if name else where
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place}: {name + ': ' if name else ''}{_reason(root, first)}{more}"


def _reason(root: type[BaseModel], problem: Any) -> str:
    kind, loc, ctx = problem["type"], problem["loc"], problem.get("ctx", {})
    given = problem.get("input")
    if kind in UNKNOWN:
        return "unknown key" + _nearest(str(loc[-1]), _fields_at(root, loc[:-1]))
    if kind == "missing":
        return "this key is missing" + _choices(root, loc)
    if kind in ("literal_error", "union_tag_invalid"):
        allowed = str(ctx.get("expected") or ctx.get("expected_tags", ""))
        if kind == "union_tag_invalid":
            given = ctx.get("tag")
        names = [name.strip(" '") for name in allowed.replace(" or ", ",").split(",")]
        return f"{short(given)} is not one of {', '.join(names)}" + _nearest(str(given), names, listed=True)
    if kind == "union_tag_not_found":
        return "this section needs a `kind`" + _choices(root, (*loc, "kind"))
    if kind == "value_error":
        told = str(ctx.get("error", problem["msg"]))
        return told if len(told) <= 1000 else f"{told[:999]}…"
    if kind in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
        bare = SHORT.get(".".join(map(str, loc)))
        return f"this is {f'{bare}, or ' if bare else ''}a section of keys, not {short(given)}"
    if kind in ("too_short", "string_too_short"):
        return f"must have at least {ctx['min_length']} {_things(kind, ctx['min_length'])}"
    if kind in ("too_long", "string_too_long"):
        return f"must have at most {ctx['max_length']} {_things(kind, ctx['max_length'])}"
    if kind in PLAIN:
        return f"must be {PLAIN[kind]} (got {short(given)}){_instead(given) if kind == 'string_type' else ''}"
    message: str = problem["msg"][0].lower() + problem["msg"][1:]
    plain = isinstance(given, str | int | float | bool) or given is None
    shown = f" (got {short(given)})" if plain else ""
    return message.replace("input should be", "must be") + shown


def _instead(given: Any) -> str:
    """How to write a value that should be text."""
    if isinstance(given, bool):
        return "; in YAML yes, no, on and off are true or false, so put the text in quotes"
    if isinstance(given, int | float):
        return "; put it in quotes"
    if isinstance(given, Mapping) and "import" in given:
        return "; nothing is imported here: pass the object in Python, to tacit.run"
    return ""


SHORT = {"cohort": "a whole number of clients", "privacy.clip": "the clipping norm, a number"}
"""Short forms of sections whose other keys keep their defaults."""


def _things(kind: str, count: int) -> str:
    one, more = ("character", "characters") if kind.startswith("string") else ("entry", "entries")
    return one if count == 1 else more


def short(value: Any) -> str:
    """A value as written, shortened if nobody would read all of it."""
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


def _fields_at(root: type[BaseModel], loc: Key) -> list[str]:
    """The keys that the schema has at a place."""
    return sorted({name for model in _models_at(root, loc) for name in _fields(model)})


def _choices(root: type[BaseModel], loc: Key) -> str:
    """The allowed words of a key, if it has a fixed choice."""
    fields = [_fields(model) for model in _models_at(root, loc[:-1])]
    kinds = [named[str(loc[-1])].annotation for named in fields if loc[-1] in named]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    return f"; it is one of {', '.join(map(str, dict.fromkeys(words)))}" if words else ""


def _models_at(root: type[BaseModel], loc: Key) -> list[type[Any]]:
    """The schema's sections at a place; several if a `kind` distinguishes them."""
    models: list[type[Any]] = [root]
    for part in loc:
        deeper = [
            m
            for model in models
            if part in _fields(model)
            for m in _models(_fields(model)[str(part)].annotation)
        ]
        if deeper:
            models = deeper
        else:  # a union's tag: keep the member that has it
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
    """A pydantic location without the union tags, which no user writes."""
    key: list[str | int] = []
    here = values
    for n, part in enumerate(loc):
        if isinstance(here, dict) and part in here:
            here = here[part]
        elif n + 1 < len(loc) or not isinstance(here, dict):
            continue
        key.append(part)
    return tuple(key)
