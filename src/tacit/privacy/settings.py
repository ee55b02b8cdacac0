"""The section `privacy` of a config: what is protected, how far, and by which mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from tacit.privacy.clipping import Clip
from tacit.privacy.conventions import to_sum
from tacit.privacy.metrics import Metrics
from tacit.section import Open, Section, section

Unit = Literal["client", "example"]
Entropy = Literal["os", "seed"]
NoiseAt = Literal["server", "clients"]
BY_OTHER_KEYS = ("client", "example", "adaptive-clip", "secure", "layered")
"""Mechanisms that follow from the section's other keys, so that `mechanism` need not name them."""


@section
class AdaptiveClipping:
    """Let the clip follow a quantile of the clients' norms, within the same budget (`privacy.adaptive`)."""

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """γ."""
    rate: PositiveFloat = 0.2
    """η, the learning rate of the clipping norm."""
    count_noise: PositiveFloat = 5.0
    """σ_b: noise on the number of clients within the clip, in clients; a twentieth of the cohort is usual."""


class CorrelatedNoise(Section):
    """Noise that later rounds take back in part; a bare name is short for its defaults.

    Clients take turns: a round takes the next of population ÷ cohort groups, and nothing about sampling need
    be secret. `banded` with `cohort.sampling: poisson` samples each cohort from a group, in secret.
    """

    kind: Literal["blt", "banded"]
    buffers: PositiveInt | None = None
    """blt: vectors that the server remembers; 2 unless given."""
    bands: PositiveInt | None = None
    """banded: over how many rounds; unless given, the best number (clients in turn only)."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _its_own_option(self) -> Self:
        if (self.bands if self.kind == "blt" else self.buffers) is not None:
            raise ValueError("buffers belong to blt, and bands to banded")
        return self


class OwnMechanism(Open):
    """A mechanism that was added to `tacit.privacy.MECHANISMS`, by its name; other keys are its options."""

    kind: str

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        from tacit.privacy.mechanisms import MECHANISMS

        names = [name for name in MECHANISMS if name not in BY_OTHER_KEYS]
        if kind not in names:
            near = get_close_matches(kind, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{kind!r} is not one of {', '.join(names)}{hint}")
        return kind


def _which(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", value)
    return "correlated" if kind in ("blt", "banded") else "own"


class NoiseStatedOn(Section):
    """Noise in another convention than the multiplier on the sum (`tacit.privacy.conventions`); give one."""

    sum: NonNegativeFloat | None = None
    average: NonNegativeFloat | None = None
    """Paper 003's σ_DP."""
    client: NonNegativeFloat | None = None

    def on_sum(self, cohort: int) -> float:
        """The noise multiplier."""
        name, value = next((name, value) for name, value in self if value is not None)
        return to_sum(value, name, cohort)


class LargerPopulation(Section):
    """A population that is not trained on, for which ε is extrapolated."""

    population: PositiveInt
    """Clients in all."""
    cohort: PositiveInt
    """Clients a round."""
    rounds: PositiveInt | None = None
    """Of the larger federation; left out, the run's own."""


def _bare_bound(value: Any) -> Any:
    return {"bound": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


def _bare_true(value: Any) -> Any:
    return {} if value is True else value


class PrivacySettings(Section):
    """Turns any method into its private version."""

    unit: Unit
    """What is protected: all of a client's data, or each single record."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """The δ of the guarantee: well below one over the number of units."""
    clip: Annotated[Clip, BeforeValidator(_bare_bound)]
    """The clipping norm; a bare number is short for one global bound."""
    noise: NonNegativeFloat | NoiseStatedOn | None = None
    """Noise multiplier σ; left out, it is the smallest that keeps all rounds within `epsilon`.

    At client level also {average: …} or {client: …}; a checked config always has the multiplier.
    """
    epsilon: PositiveFloat | None = None
    """The budget: the run stops before it would be exceeded."""
    noise_by_layer: dict[str, NonNegativeFloat] = Field({})
    """At client level: factors on the noise of layers whose names match (`"*.mlp.*": 0.5`), by the first
    pattern that does; 1 for all others. ε is that of the whole; 0 is for simulations, which claim nothing.
    """
    noise_at: NoiseAt = "server"
    """Who makes the noise at client level: the server on the sum, or each client on its own upload."""
    aggregation: Literal["plain", "secure"] = "plain"
    """`secure`: the server sees masked uploads and their sum, and clients make the noise (client level)."""
    threshold: Annotated[float, Field(gt=0.5, le=1)] | None = None
    """Secure aggregation: the share of a cohort that must stay to a round's end; left out, two thirds."""
    colluding: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Secure aggregation: the share of a cohort that may collude with the server; left out, a tenth."""
    entropy: Entropy = "os"
    """Where sampling and noise come from: the operating system, or the seed (a simulation, no claim)."""
    adaptive: AdaptiveClipping | None = None
    mechanism: (
        Annotated[
            Annotated[CorrelatedNoise, Tag("correlated")] | Annotated[OwnMechanism, Tag("own")],
            Discriminator(_which),
        ]
        | None
    ) = None
    """At client level: correlated noise instead of independent noise on Poisson or fixed-size cohorts. Or a
    mechanism of one's own, by its name.
    """
    metrics: Annotated[Metrics | None, BeforeValidator(_bare_true)] = None
    """Private metrics instead of exact ones, which no guarantee covers; `true` is short for the defaults.

    At example level metrics are made of private gradients and cost nothing, and losses are left out.
    """
    extrapolate: tuple[LargerPopulation, ...] = ()
    """Also say what ε would be with more clients, at the same noise on the average; no claim of the run."""

    @field_validator("noise", mode="before")
    @classmethod
    def _stated_once(cls, noise: Any) -> Any:
        if isinstance(noise, Mapping) and (
            len(noise) != 1 or not noise.keys() <= NoiseStatedOn.model_fields.keys()
        ):
            raise ValueError("state the noise on one of sum, average, client")
        return noise

    @model_validator(mode="after")
    def _noise_or_budget(self) -> Self:
        if self.noise is None and self.epsilon is None:
            raise ValueError("give privacy.noise, or privacy.epsilon to have the noise found for it")
        if self.aggregation == "plain" and (self.threshold, self.colluding) != (None, None):
            raise ValueError(
                "threshold and colluding are of `aggregation: secure`; add it, or leave them out"
            )
        return self
