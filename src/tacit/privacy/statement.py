"""The statement: what a run guarantees, to whom, against whom, and what it leaves out.

It is a text for users and a dictionary for programs, both made from the mechanism and a replay of the ledger.

>>> import numpy as np
>>> from tacit.privacy import ClientLevel, Clip, Poisson, Workload
>>> mechanism = ClientLevel(noise=1.0, delta=1e-5, clip=Clip(0.5), sampling=Poisson(0.1))
>>> charge = mechanism.charge(0, np.array([7]), Workload(population=1000))
>>> statement = make_statement(mechanism, [charge], population=1000)
>>> print(statement.text().splitlines()[0])
This run is (ε = 1.69, δ = 1e-05)-differentially private for whole clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tacit.privacy.ledger import Charge, Tally, replay
from tacit.privacy.mechanisms.base import Mechanism, Observer
from tacit.privacy.rounding import rounded_up
from tacit.privacy.totals import Worst

_NONE = "This run gives no differential privacy: what it releases, or a part of it, has no noise."
WEAK = 20.0
"""An ε above this gets a warning: e²⁰ is half a billion."""


@dataclass(frozen=True)
class Statement:
    """Everything that is claimed. `epsilon` is infinite if something is released without noise."""

    unit: str
    relation: str
    epsilon: float
    delta: float
    epsilon_pld: float | None
    epsilon_rdp: float
    rdp_order: float
    budget: float | None
    simulation: bool
    sampling: str
    clipping: str
    noise: str
    rounds: int
    repeated: int
    """Repetitions of rounds after crashes, each charged again."""
    carried: int
    """Rounds of earlier runs on the same data, if the model started from them."""
    observers: tuple[Observer, ...]
    not_covered: tuple[str, ...]
    groups: tuple[tuple[int, float], ...] = ()
    """ε for groups of units of these sizes: a person with several records, or who is several clients."""
    warnings: tuple[str, ...] = ()
    """Claims that mean little."""
    metrics: str = ""
    """What was released besides the model, and what it cost; empty if metrics are exact."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite ε becomes None, because JSON has no infinity."""
        plain = asdict(self)
        for name in ("epsilon", "epsilon_pld", "epsilon_rdp", "rdp_order"):
            if plain[name] is not None and math.isinf(plain[name]):
                plain[name] = None
        for observer in plain["observers"]:
            if observer["epsilon"] is not None and math.isinf(observer["epsilon"]):
                observer["epsilon"] = None
        plain["groups"] = {str(k): None if math.isinf(e) else e for k, e in self.groups}
        return plain | {"summary": self.summary(), "text": self.text()}

    def summary(self) -> str:
        """Two sentences: ε and δ, for whom, and against whom."""
        if math.isinf(self.epsilon):
            return f"{_NONE} Its models may show anything."
        units = "whole clients" if self.unit == "client" else "single records"
        claim = f"(ε = {rounded_up(self.epsilon)}, δ = {self.delta:g})-differentially private for {units}"
        finite = [(o.who, o.epsilon) for o in self.observers if o.epsilon is not None]
        against = " and ".join(who for who, epsilon in finite if epsilon <= self.epsilon)
        exposed = " and ".join(o.who for o in self.observers if o.epsilon is None)
        held = f"It holds against {against or 'nobody'}"
        for who, epsilon in finite:
            if self.epsilon < epsilon < math.inf:
                held += f"; against {who}, ε = {rounded_up(epsilon)}"
        held += f"; {exposed} must be trusted." if exposed else "."
        if self.simulation:
            return f"A simulation, which claims nothing: with secret noise it would be {claim}. {held}"
        return f"This run is {claim}. {held}"

    def text(self) -> str:
        """The full statement as text."""
        units = "whole clients" if self.unit == "client" else "single records"
        lines = []
        if self.simulation:
            lines.append(
                "Simulation: sampling and noise came from a seed and can be repeated, so nothing is claimed. "
                "With secret entropy the following would hold."
            )
        if math.isinf(self.epsilon):
            lines.append(_NONE)
        else:
            lines.append(
                f"This run is (ε = {rounded_up(self.epsilon)}, δ = {self.delta:g})-differentially private "
                f"for {units}."
            )
        lines += [f"Mind: {warning}." for warning in self.warnings]
        lines.append(_RELATIONS[self.unit, self.relation])
        pld = "no bound at hand" if self.epsilon_pld is None else f"ε = {rounded_up(self.epsilon_pld)}"
        again = f", {self.repeated} of them a second time after a crash" if self.repeated else ""
        before = f", and {self.carried} of earlier runs on the same data" if self.carried else ""
        charged = f"{self.rounds} {'round' if self.rounds == 1 else 'rounds'}{again}{before}"
        lines.append(
            f"By privacy-loss distributions (PLD): {pld}; by Rényi divergences (RDP): "
            f"ε = {rounded_up(self.epsilon_rdp)}. Charged: {charged}."
        )
        lines += [self.sampling, self.clipping, self.noise, *filter(None, [self.metrics])]
        if self.groups and not math.isinf(self.epsilon):
            several = "records" if self.unit == "example" else "clients"
            told = ", ".join(f"{k} {several} ε = {rounded_up(e)}" for k, e in self.groups)
            lines.append(f"Somebody with several of them: {told}.")
        lines.append("Against whom:")
        for observer in self.observers:
            held = "no guarantee" if observer.epsilon is None else f"ε = {rounded_up(observer.epsilon)}"
            lines.append(f"  - {observer.who}: {held}. {observer.why}")
        lines.append("Not covered:")
        lines += [f"  - {item}" for item in self.not_covered]
        return "\n".join(lines)


def make_statement(
    mechanism: Mechanism,
    charges: Sequence[Charge],
    population: int,
    groups: Sequence[int] = (),
    warnings: Sequence[str] = (),
    seen: Sequence[Charge] | None = None,
) -> Statement:
    """The statement from the charges of a ledger, also for `groups` of these sizes (which takes seconds).

    `warnings`: the mechanism's warnings about its settings. `seen`: charges of the server's own ledger.
    """
    tally = Tally()
    for charge in charges:
        tally.add(charge)
    totals = replay(charges)
    worst = totals.worst(mechanism.delta)
    against = None if seen is None else replay(seen).worst(mechanism.delta).epsilon.value
    # The worst client alone need not be the worst in a group.
    profiles = totals.covering() if groups else []
    together = [(k, max(mechanism.group_epsilon(profile, k) for profile in profiles)) for k in groups]
    return state(mechanism, worst, tally, population, together, warnings, against)


def state(
    mechanism: Mechanism,
    worst: Worst,
    tally: Tally,
    population: int,
    groups: Sequence[tuple[int, float]] = (),
    warnings: Sequence[str] = (),
    seen: float | None = None,
) -> Statement:
    """The statement of a run whose worst client has these totals. `groups`: sizes of groups, with the ε of
    the worst group of each size. `seen`: the run's ε against the server.
    """
    epsilon = worst.epsilon
    said = mechanism.describe(population, epsilon.value, worst.profile)
    server = mechanism.against_server(seen)
    return Statement(
        unit=mechanism.unit,
        relation=mechanism.relation,
        epsilon=epsilon.value,
        delta=mechanism.delta,
        epsilon_pld=epsilon.pld,
        epsilon_rdp=epsilon.rdp,
        rdp_order=epsilon.order,
        budget=mechanism.epsilon,
        simulation=mechanism.simulated,
        sampling=said.sampling,
        clipping=said.clipping,
        noise=said.noise,
        rounds=tally.rounds,
        repeated=tally.rounds - len(tally.attempts),
        carried=tally.carried,
        observers=said.observers if server is None else (*said.observers, server),
        not_covered=said.not_covered,
        groups=tuple(groups),
        warnings=(*warnings, *weak(epsilon.value)),
        metrics=said.metrics,
    )


def weak(epsilon: float) -> list[str]:
    """A warning if ε bounds next to nothing."""
    if not WEAK < epsilon < math.inf:
        return []
    return [f"ε above {WEAK:g} bounds next to nothing: raise the noise, or run fewer rounds"]


_RELATIONS = {
    ("client", "add-remove"): "Neighbours: two populations that differ in one client, there or not there.",
    ("client", "replace-one"): "Neighbours: two populations in which one client is replaced by another.",
    ("example", "add-remove"): "Neighbours: two populations that differ in one record of one client.",
}
