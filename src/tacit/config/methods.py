"""Methods by name: an algorithm with a paper's defaults, and the settings that belong to it.

A method is only a preset. `method: NAME` in a config lays the preset's settings under the config's own, so
every default can be overridden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from tacit.config.imports import made
from tacit.config.merging import merged
from tacit.errors import UserError
from tacit.section import IMPORT

if TYPE_CHECKING:
    from tacit.algorithms import Algorithm


@dataclass(frozen=True)
class Method:
    """A named preset."""

    rule: str
    """A class of `tacit.algorithms`, or of one of its files (`fedavg.FedAvg`); imported when needed."""
    summary: str
    paper: str
    """The paper that uses it (000 to 004, as in the recipes), or its origin."""
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Parts of a config that belong to the method."""

    @property
    def algorithm(self) -> type[Algorithm]:
        file, dot, name = self.rule.rpartition(".")
        found: type[Algorithm] = getattr(import_module(f"tacit.algorithms{dot}{file}"), name)
        return found

    @property
    def unit(self) -> str:
        """The privacy unit it is meant for."""
        return str(self.settings.get("privacy", {}).get("unit", "none"))


PAPERS = {"000": "DP-FedAdamW", "002": "DP²-FedSAM", "003": "user-level DP for speech", "004": "FedAdamW"}
"""The papers by the numbers used in `paper`."""
EXAMPLE = {"privacy": {"unit": "example", "clip": {"bound": 0.1}, "noise": 1.0, "delta": 1e-5}}
"""Paper 000: C 0.1, σ 1."""
CLIENT = {
    "privacy": {"unit": "client", "clip": {"bound": 0.1}, "epsilon": 1.0, "delta": 1e-3},
    "local": {"schedule": {"kind": "factor", "factor": 0.99}},
}
"""Paper 002 on CIFAR-10: C 0.1, ε 1, δ 1/N for its 1000 clients, rates × 0.99 a round."""
HEAVY_BALL = {"momentum": 0.7}
"""Paper 002 on CIFAR-10."""
PER_USER = {
    "privacy": {"unit": "client", "clip": {"bound": 0.01, "per": "dim"}, "noise": 1.536, "delta": 1e-9},
    "server": {
        "optimizer": "lamb",
        "lr": 0.002,
        "schedule": {"kind": "exponential", "rate": 0.6, "every": 750, "start": 750},
    },
    "local": {"clip": 1.0},
}
"""Paper 003: deltas clipped to 0.01 by layer, local gradients to 1, server LAMB at 0.002, then decaying."""
TUNED = {"evaluate": {"tune": {"epochs": 2, "lr": 0.005}}}
"""Our choice, after the rate of paper 002's personal heads and its epochs: the paper gives none for -FT."""
LOCAL_ADAMW = {"aggregate": "none", "alpha": 0.0}
FINE = {"blocks": "fine", "min_block": 512}
"""Paper 004's own blocks, and the 512 that it names for their number (no more than d/512); paper 000 has
other blocks.
"""
DP_ADAMW = {"alpha": 0.5, "debias": True}

METHODS: dict[str, Method] = {
    # Not private
    "fedavg": Method("FedAvg", "local SGD, averaged", "all"),
    "fedprox": Method("FedProx", "FedAvg with a pull towards the server's model", "003"),
    "scaffold": Method("Scaffold", "control variates against client drift", "004"),
    "fedcm": Method("FedCM", "local steps lean on the server's last direction", "004"),
    "fedadam": Method("FedOpt", "FedAvg's clients, Adam on the server", "004", {"rule": "adam"}),
    "fedyogi": Method("FedOpt", "FedAvg's clients, Yogi on the server", "004", {"rule": "yogi"}),
    "fedadagrad": Method("FedOpt", "FedAvg's clients, AdaGrad on the server", "004", {"rule": "adagrad"}),
    "fedlada": Method("FedLADA", "local Adam from the average v, with the global direction", "004"),
    "fafed": Method("FAFED", "adaptive steps with variance-reduced momentum", "004"),
    "fedsam": Method("FedSAM", "sharpness-aware local steps", "002"),
    "local-lars": Method("FedLayerwise", "LARS on each client, from zero each round", "003",
                         {"rule": "lars"}),
    "local-lamb": Method("FedLayerwise", "LAMB on each client, from zero each round", "003",
                         {"rule": "lamb"}),
    "local-adam": Method("FedAdamW", "Adam on each client, from zero each round", "004",
                         {**LOCAL_ADAMW, "decoupled": False}),
    "local-adamw": Method("FedAdamW", "AdamW on each client, from zero each round", "004", LOCAL_ADAMW),
    "fedadamw": Method("FedAdamW", "AdamW with block means of v and the global direction", "004", FINE),
    "fedadamw-alg3": Method("FedAdamWTheory", "FedAdamW as its proof has it", "004", FINE),
    "agg-none": Method("FedAdamW", "Local AdamW, nothing but Δ averaged", "004", LOCAL_ADAMW),
    "agg-m": Method("FedAdamW", "Local AdamW, m averaged", "004", {**LOCAL_ADAMW, "aggregate": "m"}),
    "agg-v": Method("FedAdamW", "Local AdamW, v averaged", "004", {**LOCAL_ADAMW, "aggregate": "v"}),
    "agg-vm": Method("FedAdamW", "Local AdamW, v and m averaged", "004", {**LOCAL_ADAMW, "aggregate": "vm"}),
    "agg-mean-v": Method("FedAdamW", "Local AdamW, block means of v averaged", "004",
                         {**LOCAL_ADAMW, **FINE, "aggregate": "mean-v"}),
    # Example level
    "dp-fedavg": Method("FedAvg", "FedAvg on private gradients", "000", {}, EXAMPLE),
    "dp-scaffold": Method("Scaffold", "SCAFFOLD on private gradients", "000", {}, EXAMPLE),
    "dp-fedavg-ls": Method("FedAvgLS", "private gradients, Laplacian smoothing", "000", {}, EXAMPLE),
    "dp-fedsam": Method("FedSAM", "SAM on private gradients, a fresh batch for the second", "000",
                        {"fresh": True}, EXAMPLE),
    "dp-local-adamw": Method("FedAdamW", "Local AdamW on private gradients", "000", LOCAL_ADAMW, EXAMPLE),
    "dp-fedadamw": Method("FedAdamW", "FedAdamW on private gradients, v debiased", "000", DP_ADAMW, EXAMPLE),
    "dp-fedadamw-no-agg": Method("FedAdamW", "… without block aggregation", "000",
                                 {**DP_ADAMW, "aggregate": "none"}, EXAMPLE),
    "dp-fedadamw-no-bc": Method("FedAdamW", "… without debiasing", "000",
                                {**DP_ADAMW, "debias": False}, EXAMPLE),
    "dp-fedadamw-no-align": Method("FedAdamW", "… without alignment", "000",
                                   {**DP_ADAMW, "alpha": 0.0}, EXAMPLE),
    "dp-fedadamw-agg-v": Method("FedAdamW", "… with v averaged coordinate by coordinate", "000",
                                {**DP_ADAMW, "aggregate": "v"}, EXAMPLE),
    "adadps": Method("AdaDPS", "gradients scaled by public data, then private", "000", {},
                     {**EXAMPLE, "data": {"public": 0.05}}),
    "dp-fedopt": Method("FedOpt", "FedAdam on private gradients", "000", {}, EXAMPLE),
    "dp-fafed": Method("FAFED", "FAFED on private gradients (two a batch)", "000", {}, EXAMPLE),
    "dp-fedlada": Method("FedLADA", "FedLADA on private gradients", "000", {}, EXAMPLE),
    # Client level
    "dp-fedavg-client": Method("FedAvg", "FedAvg, clipped and noised updates", "002", HEAVY_BALL, CLIENT),
    "dp-fedavg-ft": Method("FedAvg", "… then each client tunes for itself", "002", HEAVY_BALL,
                           {**CLIENT, **TUNED}),
    "dp-fedsam-client": Method("FedSAM", "FedSAM, clipped and noised updates", "002",
                               {**HEAVY_BALL, "rho": 0.1}, CLIENT),
    "dp-fedsam-ft": Method("FedSAM", "… then each client tunes for itself", "002", {**HEAVY_BALL, "rho": 0.1},
                           {**CLIENT, **TUNED}),
    "centaur": Method("DP2FedSAM", "personal heads, SGD on the shared body", "002",
                      {**HEAVY_BALL, "rho": 0.0}, CLIENT),
    "dp2-fedsam": Method("DP2FedSAM", "personal heads, SAM on the shared body", "002", HEAVY_BALL, CLIENT),
    "dp-fedlamb": Method("FedAvg", "user-level DP for speech: per-layer clip, LAMB", "003", {}, PER_USER),
}  # fmt: skip


def find(name: str) -> Method:
    """The preset with that name, or an error with the nearest name."""
    if name not in METHODS:
        close = get_close_matches(name, METHODS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else "`tacit methods` lists them"
        raise UserError(f"method: there is no method {name!r}; {hint}")
    return METHODS[name]


def build_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm that a config's `method` names; an unknown name or option is refused."""
    if name.startswith(IMPORT):
        from tacit.algorithms import Algorithm

        own = made(name, "method", dict(options))
        if not isinstance(own, Algorithm):
            raise UserError(f"method.import: {name} gives a {type(own).__name__}, not a tacit.Algorithm")
        return own
    method = find(name)
    algorithm: Any = method.algorithm  # mypy does not see that it is hashable
    known = _declared(algorithm)
    chosen = dict(options)
    for option, value in options.items():
        if option not in known:
            close = get_close_matches(option, known, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known) or 'none'}"
            raise UserError(f"method.{option}: {name} has no such option; {hint}")
        chosen[option] = _checked(option, value, known[option])
    return method.algorithm(**{**method.options, **chosen})


@cache
def _declared(algorithm: Any) -> dict[str, Any]:
    """The options of an algorithm's class with their types; cached, since a sweep asks for every run."""
    hints = get_type_hints(algorithm, include_extras=True)
    return {f.name: hints[f.name] for f in fields(algorithm)}


def _checked(option: str, value: Any, declared: Any) -> Any:
    """An option's value; refused unless it matches the type of the algorithm's field."""
    kind, *limits = get_args(declared) if get_origin(declared) is Annotated else [declared]
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"method.{option}: must be a number (got {value!r})")
        below = min((limit.limit for limit in limits), default=math.inf)
        if not 0 <= value < below:
            raise UserError(f"method.{option}: must be in [0, {below:g}) (got {value!r})")
        return float(value)
    if kind is int and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UserError(f"method.{option}: must be a whole number, 0 or more (got {value!r})")
    if kind is bool and not isinstance(value, bool):
        raise UserError(f"method.{option}: must be true or false (got {value!r})")
    if get_args(kind) and all(isinstance(a, str) for a in get_args(kind)) and value not in get_args(kind):
        raise UserError(f"method.{option}: must be one of {', '.join(get_args(kind))} (got {value!r})")
    if kind == tuple[str, ...]:
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise UserError(f"method.{option}: must be a list of names (got {value!r})")
        return tuple(names)
    return tuple(value) if isinstance(value, list) else value


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config's raw values merged over its method's settings."""
    method = values.get("method", "fedavg")
    name = method.get("name", "fedavg") if isinstance(method, Mapping) else method
    preset = METHODS.get(str(name))
    if preset is None:
        return dict(values)
    settings = {key: dict(value) for key, value in preset.settings.items()}
    given = values.get("privacy")
    if isinstance(given, Mapping) and "privacy" in settings:
        # Noise and budget are one choice: setting either replaces the preset's.
        if given.keys() & {"noise", "epsilon"}:
            settings["privacy"] = {
                k: v for k, v in settings["privacy"].items() if k not in ("noise", "epsilon")
            }
        if not isinstance(given.get("clip"), Mapping | None):
            settings["privacy"].pop("clip")
    return merged(settings, values)
