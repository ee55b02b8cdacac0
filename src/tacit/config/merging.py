"""Merges raw config values: a recipe over its base, a config over its method's preset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge raw values over others: sections key by key, everything else as a whole."""
    result = dict(under)
    for key, value in over.items():
        old = result.get(key)
        if not isinstance(value, Mapping) or not isinstance(old, Mapping):
            result[key] = value
        elif any(value[name] != old.get(name) for name in _telling(key) if name in value):
            result[key] = value  # a section of another kind has other keys
        else:
            result[key] = merged(old, value)
    return result


def _telling(section: str) -> tuple[str, ...]:
    """Keys that decide what a section is about: if their value changes, so does the others' meaning."""
    return ("name", "hub", "config") if section in ("model", "method") else ("kind",)
