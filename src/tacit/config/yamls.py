"""YAML for configs: read safely, with the line of every key; and written.

>>> values, node = parse("rounds: 3\\nlocal: {lr: 1e-1}")
>>> values, dict(lines(node))
({'rounds': 3, 'local': {'lr': 0.1}}, {('rounds',): 1, ('local',): 2, ('local', 'lr'): 2})
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tacit.errors import UserError

Key = tuple[str | int, ...]
LONGEST, MOST_NODES, DEEPEST = 2_000_000, 100_000, 50
"""The most characters, values and depth of a config: far beyond any real one."""


class _Loader(yaml.SafeLoader):
    """YAML without dates: text that looks like a date stays text, which the section then refuses by its key.

    `1e-1` is a number here, as everywhere else; YAML 1.1 requires `1.0e-1`.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > DEEPEST:  # PyYAML's time also grows with the square of the depth
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
    """A YAML text's values and their nodes; `yaml.YAMLError` if it cannot be a config.

    Aliases may stand for large values, or for themselves. A text whose expansion would be endless is refused
    before anything is built from it.
    """
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"more than {LONGEST:,} characters")
    values, node = _parsed(text)
    return copied(values), node


@lru_cache(maxsize=4)
def _parsed(text: str) -> tuple[Any, yaml.Node | None]:
    """Cached: one command reads a run's config several times, and PyYAML takes most of that time."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _refuse_endless(node, [0], 0)
        return loader.construct_document(node), node
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="sections lie too deep in each other") from None
    except (LookupError, AttributeError):  # PyYAML raises these for `!!timestamp x`
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
    """Whether a text can be a file name, and be written to a file."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def to_yaml(values: Mapping[str, Any]) -> str:
    """Plain values as YAML; with PyYAML's C part, the same text in a tenth of the time."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True))


def copied(value: Any) -> Any:
    """A deep copy of mappings and lists."""
    if isinstance(value, Mapping):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, list) else value


def located(text: str, file: Path) -> tuple[Any, dict[Key, int]]:
    """A file's values, and the line of each key; one clear line if the file is not valid."""
    found: dict[Key, int] = {}
    try:
        values, node = parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}, line {mark.line + 1}" if mark else str(file)
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise UserError(f"{place}: {problem}; the file may be cut short or badly indented") from None
    for key, line in lines(node):
        if key in found:
            raise UserError(f"{file}, line {line}: {dotted(key)} is given twice (first on line {found[key]})")
        found[key] = line
    return values, found


def lines(node: yaml.Node | None, prefix: Key = ()) -> Iterator[tuple[Key, int]]:
    """Every key of a document, with its line."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = (*prefix, str(name.value))
            yield key, name.start_mark.line + 1
            yield from lines(value, key)


def dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)
