"""The pages that are made from the program itself: every key of a config, and every command.

They are written when the site is built (`hook.py`), never by hand, so they cannot fall behind.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Len, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

SIGNS = {Gt: "> {.gt}", Ge: "≥ {.ge}", Lt: "< {.lt}", Le: "≤ {.le}"}
WORDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "anything",
}
KINDS = {"integer range": "NUMBER", "float range": "NUMBER", "integer": "NUMBER", "float": "NUMBER"}
HEAD = """# Configuration

Every key of a config, as the program itself knows it: made from `tacit.config.schema` when this page was
built. A config is one YAML file (or a mapping given to `tacit.load`), checked whole before anything starts.
Unknown keys, wrong types and impossible values are refused with their line and the nearest right name.
`--set KEY=VALUE` overrides any key: `--set local.lr=0.1`.

Two keys are the file's alone: `base: FILE` lays it over another one, and `sweep:` makes many runs of it.
"""


def config_page() -> str:
    """Every section of a config: its keys, their types, defaults and meaning."""
    from tacit.config.schema import Config
    from tacit.config.sweep import __doc__ as sweeps

    places: dict[Any, list[str]] = {}
    for where, kind in _sections("", Config):
        places.setdefault(kind, []).append(where)
    parts = [HEAD, *(_section(found, kind) for kind, found in places.items())]
    parts.append(f"## `sweep`\n\n{_prose(sweeps)}\n")
    parts.append(_methods())
    return "\n".join(parts)


def _fields(kind: Any) -> dict[str, FieldInfo]:
    if issubclass(kind, BaseModel):
        return dict(kind.model_fields)
    found: dict[str, FieldInfo] = kind.__pydantic_fields__
    return found


def _sections(where: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """A section and those inside it, each by its dotted place in a config."""
    yield where, kind
    for name, field in _fields(kind).items():
        for inner in _inner(field.annotation):
            yield from _sections(f"{where}.{name}".lstrip("."), inner)


def _inner(annotation: Any) -> list[Any]:
    """The sections that a type names."""
    if isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or hasattr(annotation, "__pydantic_fields__")
    ):
        return [annotation]
    found = [inner for part in get_args(annotation) for inner in _inner(part)]
    return [] if get_origin(annotation) is Literal else found


def _section(places: list[str], kind: Any) -> str:
    """One section, under all its places: a schedule is described once."""
    docs, where = _said(kind), places[0]
    tag = _fields(kind).get("kind")
    title = "## " + ", ".join(f"`{place}`" for place in places) if where else "## The whole file"
    if tag is not None and get_origin(tag.annotation) is Literal:
        title += f", `kind: {' | '.join(map(str, get_args(tag.annotation)))}`"
    lines = [
        title,
        "",
        _prose(inspect.getdoc(kind)),
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in _fields(kind).items():
        if name == "kind" and tag is not None and len(get_args(tag.annotation)) == 1:
            continue  # the title has it
        meaning = _meaning(field, docs.get(name, ""))
        lines.append(f"| `{name}` | {_type(field, where, name)} | {_default(field)} | {meaning} |")
    if kind.__dict__.get("model_config", {}).get("extra") == "allow":
        lines.append("| … | | | options of what is named |")
    return "\n".join(lines) + "\n"


def _meaning(field: FieldInfo, said: str) -> str:
    """What is said under a key; of a section, what that says of itself."""
    inner = _inner(field.annotation)
    if said or len(inner) != 1:
        return said
    return (inspect.getdoc(inner[0]) or "").split("\n\n")[0].replace("\n", " ")


def _said(kind: type) -> dict[str, str]:
    """The string under each field of a class and of those it inherits from, on one line."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        if not part.__module__.startswith("tacit"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
        assert isinstance(body, ast.ClassDef)
        for line, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
                assert isinstance(line.target, ast.Name)
                found[line.target.id] = " ".join(str(ast.literal_eval(after.value)).split()).replace(
                    "|", "\\|"
                )
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**must be given**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    elif dataclasses.is_dataclass(value):
        value = {k: v for k, v in dataclasses.asdict(value).items() if k == "kind"}  # type: ignore[arg-type]
    if value in ((), {}, []):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if not isinstance(value, tuple) else f"`{list(value)}`"


def _type(field: FieldInfo, where: str, name: str) -> str:
    known = _text(field.annotation, f"{where}.{name}".lstrip("."))
    return ", ".join([known, *_limits(field.metadata)])


def _limits(metadata: Any) -> list[str]:
    found = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            found += _limits(item.metadata)
        elif (sign := SIGNS.get(type(item))) is not None:
            found.append(sign.format(item))
        elif isinstance(item, MinLen | MaxLen | Len):
            low = getattr(item, "min_length", None)
            high = getattr(item, "max_length", None)
            found.append(f"{low} or more" if high is None else f"at most {high}")
    return found


def _text(annotation: Any, place: str) -> str:
    """A type in words."""
    if annotation in WORDS:
        return WORDS[annotation]
    if _inner(annotation) == [annotation]:
        return f"section `{place}`"
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is Annotated:
        return ", ".join([_text(parts[0], place), *_limits(parts[1:])])
    if origin in (Union, types.UnionType):
        words = [_text(part, place) for part in parts if part is not type(None)]
        return " or ".join(dict.fromkeys(words))
    if origin in (tuple, list):
        kinds = [part for part in parts if part is not Ellipsis]
        if Ellipsis in parts or origin is list:
            return f"list of: {_text(kinds[0], place)}"
        return "[" + ", ".join(_text(kind, place) for kind in kinds) + "]"
    if origin in (dict, Mapping):
        return f"{_text(parts[0], place)}: {_text(parts[1], place)}"
    return f"`{annotation}`"


def _prose(text: str | None) -> str:
    """A docstring as Markdown: indented blocks are YAML, and doctests are for programmers."""
    lines: list[str] = []
    inside = False
    kept = [part for part in inspect.cleandoc(text or "").split("\n\n") if not part.startswith(">>>")]
    for line in "\n\n".join(kept).splitlines():
        if line.startswith("    ") and not inside:
            lines.append("```yaml")
            inside = True
        elif line and not line.startswith("    ") and inside:
            while lines[-1] == "":
                lines.pop()
            lines += ["```", ""]
            inside = False
        lines.append(line.removeprefix("    ") if inside else line)
    return "\n".join([*lines, "```"] if inside else lines)


def _methods() -> str:
    from tacit.config.methods import METHODS

    lines = [
        "## `method`, by name",
        "",
        "`tacit methods` shows the same with what each costs. A method is a preset: its settings lie under",
        "the config's own, so each can be overridden.",
        "",
        "| name | what it is | paper | options and their defaults |",
        "|---|---|---|---|",
    ]
    for name, method in METHODS.items():
        options = {
            field.name: method.options.get(field.name, field.default)
            for field in dataclasses.fields(method.algorithm)
        }
        shown = ", ".join(f"`{key}: {_yaml(value)}`" for key, value in options.items())
        lines.append(f"| `{name}` | {method.summary} | {method.paper} | {shown} |")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(list(value) if isinstance(value, tuple) else value)


def command() -> Any:
    """The program's command line, as click sees it."""
    from typer.main import get_command

    from tacit.cli.app import app

    return get_command(app)


def commands() -> dict[str, Any]:
    """Every command by all its words: `run`, `server init`, …"""
    found: dict[str, Any] = {}
    for name, inner in command().commands.items():
        parts = getattr(inner, "commands", None)
        found |= {name: inner} if parts is None else {f"{name} {n}": c for n, c in parts.items()}
    return found


def command_page() -> str:
    """Every command: its arguments, options and examples."""
    lines = [
        "# Commands",
        "",
        "What `--help` says, made from the program when this page was built. A mistake is one line that says",
        "what, where and what to do, with exit code 2; a stop by Ctrl-C is 130; an audit that refutes a",
        "claim, and a run in which nothing was learnt, are 1.",
        "",
    ]
    for name, found in commands().items():
        lines += [f"## `tacit {name}`", "", inspect.cleandoc(found.help or ""), ""]
        rows = [
            _parameter(parameter) for parameter in found.params if not getattr(parameter, "hidden", False)
        ]
        if rows:
            lines += ["| | | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _parameter(parameter: Any) -> str:
    metavar = parameter.metavar or (parameter.name or "").upper()
    default = parameter.default if isinstance(parameter.default, str | int | float) else None
    if parameter.param_type_name == "argument":
        names = f"`{metavar}`"
    else:
        names = ", ".join(f"`{name}`" for name in parameter.opts)
        if not getattr(parameter, "is_flag", False):
            names += f" `{parameter.metavar or KINDS.get(parameter.type.name, parameter.type.name.upper())}`"
    note = "" if default is None or isinstance(default, bool) else f"default `{default}`"
    return f"| {names} | {(getattr(parameter, 'help', '') or '').replace('|', '/')} | {note} |"
