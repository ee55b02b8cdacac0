"""What the owner of some records allows to be done with them: the `allow` section of `client.yaml`.

The section is in the client's own file, read by the client's own program. Any request of a server beyond it
is refused, before anything is charged or trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from tacit.errors import UserError
from tacit.section import Section

SHARED = ("size", "normalise", "augment", "max_length", "tokenizer")
"""Keys of the data section that say how records are processed, and not where they are."""
SENT = (
    "name",
    "seed",
    "rounds",
    "task",
    "model",
    "method",
    "cohort",
    "weights",
    "local",
    "server",
    "privacy",
)
"""Sections, besides `data`, that clients are sent."""
OWNERS = ("name", "partition")
"""The kind that a server's data section must have; it says that the records are the owners'."""

Number = Literal["examples", "loss", "metrics", "seconds"]


class NotAllowed(UserError):
    """The owner's policy forbids this."""


class Allow(Section):
    """What may be done with the owner's records, over all runs."""

    unit: Literal["client", "example", "none"]
    """What must be protected. `example`: single records, by noise that this client makes itself. `client`:
    all of them together, by noise that the server makes, which sees uploads and must be trusted. `none`:
    nothing."""
    epsilon: PositiveFloat | None = None
    """The budget of all runs together, by this client's own count."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    methods: Annotated[tuple[str, ...], Field(min_length=1)]
    """Methods that may be run here, by name."""
    models: tuple[str, ...] = ()
    """Pretrained models, tokenizers, or Python objects (`import:…`) that a run may name. This package's own
    networks need not be listed. All of them must be installed here: a server sends no code."""
    send: tuple[Number, ...] = ()
    """Exact numbers that may leave beside the update: how many examples, the training loss, the method's
    own metrics and the update's norm, how long it took."""
    aggregation: Literal["plain", "secure"] = "plain"
    """`secure`: where whole clients are protected, updates leave only under masks that the server cannot
    remove from fewer than a threshold of them."""
    colluding: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """The share of a cohort that may be in league with the server, for all this owner knows: a run under
    secure aggregation must count on no fewer."""
    members: Annotated[int, Field(ge=2)] = 2
    """Under secure aggregation, the fewest members of a cohort among whose updates this client's may hide."""
    simulation: bool = False
    """Allow runs whose noise comes from a seed: a rehearsal, in which nothing is protected."""

    @model_validator(mode="after")
    def _budget(self) -> Self:
        if self.unit != "none" and self.epsilon is None:
            raise ValueError("give allow.epsilon, the budget of all runs together")
        if self.unit == "none" and self.epsilon is not None:
            raise ValueError(
                "allow.unit: none lets updates leave without noise, which no ε bounds; leave out "
                "allow.epsilon, or say what must be protected"
            )
        return self


@dataclass(frozen=True)
class Asked:
    """What a run asks of a client."""

    method: str
    unit: str | None
    simulation: bool
    names: tuple[str, ...] = ()
    """What it would load from outside this package."""
    needs: tuple[Number, ...] = ()
    """Exact numbers that it needs."""
    colluding: float | None = None
    """Under secure aggregation, the share of a cohort that may collude under its guarantee; None without
    secure aggregation.
    """


def refuse_other_keys(settings: Mapping[str, Any]) -> None:
    """Raise `NotAllowed` if a server's settings decide more than how records are processed.

    The owner alone decides which records, columns, files and people there are. A server that may name a
    column or a value could probe any cell by whether its order is refused; a server that may declare records
    public would have them.
    """
    for section, known in ((settings, (*SENT, "data")), (settings.get("data", {}), (*OWNERS, *SHARED))):
        beyond = sorted(str(key) for key in section if key not in known)
        if beyond:
            raise NotAllowed(f"the run's settings have {beyond[0]!r}, in which the owner alone has a say")


def refuse_beyond(allow: Allow, asked: Asked) -> None:
    """Raise `NotAllowed` unless the policy allows everything that is asked."""
    if asked.method not in allow.methods:
        raise NotAllowed(f"the method {asked.method} is not among allow.methods")
    if allow.unit != "none" and asked.unit != allow.unit:
        wanted = "no protection" if asked.unit is None else f"protection of each {asked.unit}"
        raise NotAllowed(f"the run offers {wanted}, and allow.unit is {allow.unit}")
    if asked.simulation and not allow.simulation:
        raise NotAllowed("the run's noise comes from a seed (a simulation), which allow.simulation forbids")
    if allow.aggregation == "secure" and asked.unit != "example" and asked.colluding is None:
        raise NotAllowed("updates would leave in the open, and allow.aggregation is secure")
    if asked.colluding is not None and asked.colluding < allow.colluding:
        raise NotAllowed(
            f"the run counts on {asked.colluding:g} of a cohort colluding, and allow.colluding is "
            f"{allow.colluding:g}"
        )
    for name in asked.names:
        if name not in allow.models:
            raise NotAllowed(f"the run names {name!r}, which is not among allow.models")
    for number in asked.needs:
        if number not in allow.send:
            raise NotAllowed(f"the run needs to know {number!r}, which is not among allow.send")
