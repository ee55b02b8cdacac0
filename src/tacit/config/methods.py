"""Methods by name: which algorithm, with which of the papers' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from tacit.algorithms import Algorithm, FedAvg, FedProx
from tacit.errors import UserError


@dataclass(frozen=True)
class Method:
    """A named preset of an algorithm."""

    algorithm: type[Algorithm]
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)


METHODS: dict[str, Method] = {
    "fedavg": Method(FedAvg, "local SGD, averaged (McMahan et al., 2017)"),
    "fedprox": Method(FedProx, "FedAvg with a pull towards the server's model (Li et al., 2020)"),
}


def build_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm that a config's `method` names; an unknown name or option is refused."""
    if name not in METHODS:
        close = get_close_matches(name, METHODS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else f"known methods are {', '.join(METHODS)}"
        raise UserError(f"method: there is no method {name!r}; {hint}")
    method = METHODS[name]
    known = {f.name: f.type for f in fields(method.algorithm)}
    for option, value in options.items():
        if option not in known:
            close = get_close_matches(option, known, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known) or 'none'}"
            raise UserError(f"method.{option}: {name} has no such option; {hint}")
        if known[option] == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"method.{option}: must be a number (got {value!r})")
    return method.algorithm(**{**method.options, **options})
