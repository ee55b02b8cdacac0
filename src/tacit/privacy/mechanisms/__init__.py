"""Mechanisms, one file each. A new one is a file here and a line below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from tacit.privacy.clipping import Clip
from tacit.privacy.mechanisms.adaptive import AdaptiveClip
from tacit.privacy.mechanisms.banded import BandedNoise
from tacit.privacy.mechanisms.base import Aggregation, Arrivals, Mechanism, Observer, Workload
from tacit.privacy.mechanisms.blt import BltNoise
from tacit.privacy.mechanisms.client import ClientLevel
from tacit.privacy.mechanisms.example import ExampleLevel
from tacit.privacy.mechanisms.layered import LayeredNoise
from tacit.privacy.mechanisms.plain import Unprotected
from tacit.privacy.mechanisms.secure import SecureSum
from tacit.privacy.metrics import Metrics
from tacit.privacy.sampling import FixedSize, OwnSampling, Poisson, Sampling

MECHANISMS: dict[str, type[Mechanism]] = {
    cls.kind: cls
    for cls in (
        ClientLevel,
        AdaptiveClip,
        ExampleLevel,
        BltNoise,
        BandedNoise,
        SecureSum,
        LayeredNoise,
    )
}


def plain_mechanism(mechanism: Mechanism) -> dict[str, Any]:
    """A mechanism as plain values for JSON, with its kind first."""
    values = {field.name: getattr(mechanism, field.name) for field in fields(mechanism)}
    clip, sampling = mechanism.clip, mechanism.sampling
    drawn = {"own": sampling.name} if isinstance(sampling, OwnSampling) else asdict(sampling)
    rule: dict[str, Any] = {"bound": clip.bound, "per": clip.per, "mode": clip.mode}
    rule |= {"weights": clip.weights} if clip.weights else {}
    metrics = None if mechanism.metrics is None else asdict(mechanism.metrics)
    return {"kind": mechanism.kind, **values, "clip": rule, "sampling": drawn, "metrics": metrics}


def read_mechanism(plain: Mapping[str, Any]) -> Mechanism:
    """The mechanism that `plain_mechanism` wrote."""
    values = dict(plain)
    cls = MECHANISMS[values.pop("kind")]
    drawn = values.pop("sampling")
    kinds: dict[str, Callable[[Any], Sampling]] = {"rate": Poisson, "size": FixedSize, "own": OwnSampling}
    ((key, value),) = drawn.items()
    metrics = values.pop("metrics", None)
    told = None if metrics is None else Metrics(**metrics)
    return cls(**values | {"clip": Clip(**values["clip"]), "sampling": kinds[key](value), "metrics": told})


__all__ = [
    "MECHANISMS",
    "AdaptiveClip",
    "Aggregation",
    "Arrivals",
    "BandedNoise",
    "BltNoise",
    "ClientLevel",
    "ExampleLevel",
    "LayeredNoise",
    "Mechanism",
    "Observer",
    "SecureSum",
    "Unprotected",
    "Workload",
    "plain_mechanism",
    "read_mechanism",
]
