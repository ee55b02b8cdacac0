"""What a run's ε would be with more clients; the run does not claim it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tacit.api.folders import recorded_config
from tacit.errors import UserError
from tacit.federation.passed import read_passed
from tacit.federation.statements import read_statement
from tacit.privacy.conventions import Scale


def extrapolations(folder: str | Path, more: Sequence[Scale] = ()) -> list[str]:
    """ε of the run so far, if it had more clients: one line for each scale. The run claims none of this."""
    folder = Path(folder)
    config = recorded_config(folder)
    privacy = config.privacy
    asked = [(Scale(s.population, s.cohort), s.rounds) for s in privacy.extrapolate] if privacy else []
    asked += [(scale, None) for scale in more]
    if privacy is None or not asked:
        return []
    own = "sampling" in (read_passed(folder) or {}) or config.cohort.sampling == "fixed"
    other = privacy.adaptive is not None or privacy.mechanism is not None or privacy.noise_by_layer
    if privacy.unit != "client" or other or own:
        raise UserError(
            "an extrapolation needs client-level privacy, Poisson cohorts, a constant clip, and independent "
            "noise that is the same everywhere"
        )
    noise, done = float(privacy.noise or 0.0), read_statement(folder).rounds  # type: ignore[arg-type]
    if not noise:
        return []
    lines = []
    for scale, rounds in asked:
        # A federation that goes on for longer does so in proportion while this run is under way.
        rounds = done if rounds is None else max(1, round(rounds * done / config.rounds))
        epsilon = scale.cost(noise, config.cohort.size, rounds, privacy.delta)
        lines.append(scale.text(epsilon, scale.noise(noise, config.cohort.size), rounds))
    return lines
