"""Row names: built from every setting that may change a result and that differs between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tacit.config.methods import METHODS

if TYPE_CHECKING:
    from tacit.report.compare import Run


SPEED = ("engine", "checkpoint", "trackers", "name")
"""Parts of a config that cannot change a result."""
LOOKING = ("every", "batch", "layers")
"""Keys of `evaluate` that cannot change a result either."""
UNSAID = ("bound", "name", "size", "kind", "class", "code")
"""Last parts of a key that are less informative than the part before them."""
_MISSING = object()
_CODE = " object.code"
_OBJECT = "algorithm object.class"
"""Comes first, as the row's method."""


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted keys that may change a result and differ between two resolved configs, with both values.

    >>> differences({"seed": 0, "local": {"lr": 0.1}, "name": "a"}, {"seed": 0, "local": {"lr": 0.2}})
    ['local.lr 0.1, not 0.2']
    """
    a, b = (_flat({k: v for k, v in c.items() if k not in SPEED}) for c in (one, other))
    return [f"{key} {a.get(key)}, not {b.get(key)}" for key in {**a, **b} if a.get(key) != b.get(key)]


def settings_of(run: Run) -> dict[str, Any]:
    """Everything that may change a result, except the seed: settings, objects, and the records."""
    compared = {key: value for key, value in run.config.items() if key not in (*SPEED, "seed")}
    looked = compared.get("evaluate") or {}
    compared["evaluate"] = {key: value for key, value in looked.items() if key not in LOOKING}
    for role, one in run.passed.items():
        section = {"algorithm": "method", "dataset": "data"}.get(role, role)
        if role != "dataset":  # a data set's partition is in the config; a network is not
            compared.pop(section, None)
        compared[f"{role} object"] = {"class": one.name, "options": one.options, "code": one.fingerprint}
    if run.content is not None:
        compared["records"] = run.content
    return compared


def without_noise(run: Run) -> dict[str, Any]:
    """The same without noise that calibration found for a budget: that depends on the cohorts that a seed
    draws.
    """
    compared = settings_of(run)
    privacy = compared.get("privacy")
    if privacy and privacy.get("epsilon") is not None:
        compared["privacy"] = {key: value for key, value in privacy.items() if key != "noise"}
    return compared


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, Mapping):
        return {prefix: values}
    return {
        k: v for key, value in values.items() for k, v in _flat(value, f"{prefix}.{key}".strip(".")).items()
    }


def named(runs: Sequence[Run]) -> list[str]:
    """Row names: the method's name, then every key whose value distinguishes rows.

    Redundant parts are left out: a preset's own settings beside its name, noise that was found for a budget,
    and keys of a section that some rows have and share (rows without the section say so).
    """
    flat = [_flat(settings_of(run)) for run in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    absent = [key for key in keys if any(other.startswith(f"{key}.") for other in keys)]  # a null section

    def differs(key: str) -> bool:
        section = next((s for s in absent if key.startswith(f"{s}.")), None)
        having = [values for values in flat if section is None or section not in values]
        return len({json.dumps(values.get(key), default=str) for values in having}) > 1

    said = (*absent, "method.name", _OBJECT)
    shown = [key for key in keys if key not in said and differs(key)]
    labels = _written(runs, flat, [key for key in shown if not key.endswith(_CODE)], absent)
    # A fingerprint means nothing to a reader: show it only if nothing else distinguishes two rows.
    return labels if len(set(labels)) == len(labels) else _written(runs, flat, shown, absent)


def _written(
    runs: Sequence[Run], flat: Sequence[Mapping[str, Any]], shown: Sequence[str], absent: Sequence[str]
) -> list[str]:
    words = _words(shown)
    labels = []
    for run, values in zip(runs, flat, strict=True):
        algorithm = run.passed.get("algorithm")
        method = algorithm.name if algorithm else str((run.config.get("method") or {}).get("name", "fedavg"))
        preset = {} if algorithm or method not in METHODS else _flat(dict(METHODS[method].settings))
        parts = [method]
        for key in shown:
            value = values.get(key)
            if value is None or preset.get(key, _MISSING) == value:
                continue
            if key == "privacy.noise" and values.get("privacy.epsilon") is not None:
                continue
            parts.append(f"{words[key]} {_value(key, value)}")
        parts += [f"no {key}" for key in absent if key in values and _tells(key, flat)]
        labels.append(", ".join(parts))
    return labels


def _tells(section: str, flat: Sequence[Mapping[str, Any]]) -> bool:
    return len({section in values for values in flat}) > 1


def _words(keys: Sequence[str]) -> dict[str, str]:
    """Short names for keys: the last informative part, or the whole key if that part is not unique.

    >>> _words(["privacy.clip.bound", "local.lr", "server.lr", "cohort.size"])
    {'privacy.clip.bound': 'clip', 'local.lr': 'local.lr', 'server.lr': 'server.lr', 'cohort.size': 'cohort'}
    """

    def short(key: str) -> str:
        parts = key.split(".")
        while len(parts) > 1 and parts[-1] in UNSAID:
            parts.pop()
        return parts[-1]

    known = [short(key) for key in keys]
    return {
        key: word if known.count(word) == 1 else key.removesuffix(".bound")
        for key, word in zip(keys, known, strict=True)
    }


def _value(key: str, value: Any) -> str:
    if key in ("records",) or key.endswith(_CODE):
        return str(value)[:6]
    return f"{value:g}" if isinstance(value, float) else str(value)
