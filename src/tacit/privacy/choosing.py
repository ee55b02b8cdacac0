"""From the section `privacy` to its mechanism; what does not go together is refused, with the fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from tacit.errors import UserError
from tacit.privacy.mechanisms import MECHANISMS, Mechanism
from tacit.privacy.mechanisms.layered import by_layer
from tacit.privacy.sampling import Sampling
from tacit.privacy.settings import NoiseStatedOn, OwnMechanism, PrivacySettings

if TYPE_CHECKING:
    from tacit.vector import Layout

Uploads = Callable[[], "tuple[Mapping[str, int], Layout]"]
"""Names and lengths of what a client sends, and what is where in the parameters: asked where noise differs by
layer.
"""


def chosen(
    section: PrivacySettings, sampling: Sampling, rounds: int, uploads: Uploads, deployed: bool
) -> Mechanism:
    """The mechanism of a run, at the noise that the section gives, or at 1 where it is still to be found.

    Args:
        section: what a person set.
        sampling: how cohorts are drawn.
        rounds: of the run, for which correlated noise is made.
        uploads: asked only if the noise differs by layer.
        deployed: whether clients are other people's machines.

    Raises:
        UserError: settings that do not go together.
    """
    assert not isinstance(section.noise, NoiseStatedOn)  # a checked config has made a multiplier of it
    kind, options = _kind(section, rounds, uploads)
    if section.unit == "client" and deployed:
        options["deployed"] = True
    known = [field.name for field in fields(MECHANISMS[kind])]
    for name in options:
        if name not in known:
            raise UserError(f"privacy.mechanism.{name}: {kind} has no such option; it has {', '.join(known)}")
    return MECHANISMS[kind](
        noise=1.0 if section.noise is None else section.noise,
        delta=section.delta,
        clip=section.clip,
        sampling=sampling,
        epsilon=section.epsilon,
        entropy=section.entropy,
        metrics=section.metrics,
        **options,
    )


def _own(section: PrivacySettings, own: OwnMechanism) -> tuple[str, dict[str, Any]]:
    """A mechanism that somebody added: it has the section's common keys, and options of its own."""
    unit = MECHANISMS[own.kind].unit
    if unit != section.unit:
        raise UserError(f"privacy.mechanism: {own.kind} protects units of {unit}; set privacy.unit to {unit}")
    if section.adaptive or section.noise_by_layer or section.aggregation == "secure":
        raise UserError(
            f"privacy.mechanism: {own.kind} bounds and noises by itself; leave out privacy.adaptive, "
            "privacy.noise_by_layer and privacy.aggregation"
        )
    if section.noise_at != "server":
        return own.kind, own.options | {"noise_at": section.noise_at}
    return own.kind, own.options


def _kind(section: PrivacySettings, rounds: int, uploads: Uploads) -> tuple[str, dict[str, Any]]:
    """The mechanism's name in the registry, and its own options."""
    if isinstance(section.mechanism, OwnMechanism):
        return _own(section, section.mechanism)
    options: dict[str, Any] = {} if section.noise_at == "server" else {"noise_at": section.noise_at}
    if section.adaptive is not None:
        options |= asdict(section.adaptive)
    kind: str = section.unit if section.adaptive is None else "adaptive-clip"
    if section.aggregation == "secure":
        if section.unit == "example" or section.adaptive is not None or section.mechanism is not None:
            raise UserError(
                "privacy.aggregation: secure is for whole clients, with independent noise and one clipping "
                "norm; set unit: client, and leave out privacy.adaptive and privacy.mechanism"
            )
        shares = {"threshold": section.threshold, "colluding": section.colluding}
        kind, options = "secure", options | {name: v for name, v in shares.items() if v is not None}
    if section.mechanism is not None:
        if section.adaptive is not None:
            raise UserError(
                "privacy.adaptive: correlated noise of earlier rounds was sized by the clipping norm they "
                "had, so it must not move; leave out privacy.adaptive or privacy.mechanism"
            )
        given = section.mechanism.model_dump(exclude_none=True)
        kind = given.pop("kind")
        options |= given | {"rounds": rounds}
    if section.unit == "example" and (options or section.noise_by_layer):
        raise UserError(
            "privacy.noise_at, privacy.adaptive, privacy.mechanism and privacy.noise_by_layer are for whole "
            "clients; at example level each client noises its own gradients: leave them out, or set unit: "
            "client"
        )
    if section.noise_by_layer:
        if kind != "client":
            raise UserError(
                "privacy.noise_by_layer goes with independent noise and one clipping norm that stays; leave "
                "out privacy.adaptive, privacy.mechanism and privacy.aggregation"
            )
        groups = by_layer(section.noise_by_layer, section.clip, *uploads())
        kind, options = "layered", options | {"factors": section.noise_by_layer, "groups": groups}
    return kind, options
