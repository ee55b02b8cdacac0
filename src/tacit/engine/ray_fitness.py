"""Whether a machine of a cluster may have the job, and whether its results would be the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tacit.engine.ray_settings import RaySettings
from tacit.engine.ray_worker import software

Facts = Mapping[str, Any]
"""What a worker reports about itself (`RayWorker.ready`)."""


def unfit(facts: Facts, first: Facts | None, settings: RaySettings, sees: bool) -> str | None:
    """The reason, in one line, why a worker may not have the job; None if it may. `first`: the worker that
    all others are compared with; `sees`: whether the worker sees the run's folder.
    """
    host = facts["host"]
    if not (facts["authenticated"] or settings.insecure):
        return (
            f"engine: {host} is of a Ray cluster without authentication, where whoever reaches a port can "
            "run code; start it with RAY_AUTH_MODE=token, or set engine.insecure: true"
        )
    for name, here in software().items():
        if facts[name] != here:
            return (
                f"engine: {host} has {name} {facts[name]} where this machine has {here}; install the same "
                "everywhere"
            )
    if settings.state == "shared" and not sees:
        return (
            f"engine.state: {host} does not see this run's folder; put it on a file system that all machines "
            "share, or set engine.state: carried"
        )
    differ = other_results(facts, first)
    if differ is not None and settings.isa != "any":
        ways = "avx2 or any" if settings.isa == "same" else "any"
        return f"engine.isa: {differ}; use equal machines, or set engine.isa: {ways}"
    return None


def other_results(facts: Facts, first: Facts | None) -> str | None:
    """A line that says that a worker's results differ from the first one's, and why."""
    if first is None or facts["processor"] == first["processor"]:
        return None
    return (
        f"{facts['host']} has another processor than {first['host']} ({facts['processor']}; "
        f"{first['processor']}), which changes results in their last bits"
    )
