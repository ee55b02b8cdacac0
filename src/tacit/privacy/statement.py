"""The statement: what a run guarantees, to whom, against whom, and what it leaves out.

A paragraph for a person and a dictionary for a program, both made from the privacy object and a replay of
the ledger.

>>> from tacit.privacy import Clip, Poisson, Privacy
>>> privacy = Privacy("client", noise=1.0, delta=1e-5, clip=Clip(0.5), sampling=Poisson(0.1))
>>> entry = privacy.charge(0, population=1000)
>>> statement = make_statement(privacy, [entry], population=1000)
>>> print(statement.text().splitlines()[0])
This run is (ε = 1.69, δ = 1e-05)-differentially private for whole clients.

Two observers at example level
------------------------------
Whoever sees each upload knows when a client took part: a record pays for each participation of its client,
without amplification by the sampling of clients. Whoever sees only the released models sees less, so the
same ε holds by post-processing. Is a smaller one true for them? Two ways to argue for it fail in general. The
sampling of clients amplifies only if a round *without* the client looks like a round *with* it but without
the record; these two differ by a whole client's upload, which example-level noise does not hide. The noise
of the other clients helps only where the upload is linear in it, so not after several local steps. Hence
the same ε is reported for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tacit.privacy.ledger import Charge, replay
from tacit.privacy.mechanism import Privacy
from tacit.privacy.sampling import Poisson


@dataclass(frozen=True)
class Observer:
    """Someone who looks at the run, and the ε that holds against them (None: no guarantee)."""

    who: str
    epsilon: float | None
    why: str


@dataclass(frozen=True)
class Statement:
    """All that is claimed. `epsilon` is infinite when there is no noise."""

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
    """Rounds that were played and charged more than once, after crashes."""
    observers: tuple[Observer, ...]
    not_covered: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite ε becomes None, which JSON has a word for."""
        plain = asdict(self)
        for name in ("epsilon", "epsilon_pld", "epsilon_rdp", "rdp_order"):
            if plain[name] is not None and math.isinf(plain[name]):
                plain[name] = None
        for observer in plain["observers"]:
            if observer["epsilon"] is not None and math.isinf(observer["epsilon"]):
                observer["epsilon"] = None
        return plain | {"text": self.text()}

    def text(self) -> str:
        """The same for a person."""
        units = "whole clients" if self.unit == "client" else "single records"
        lines = []
        if self.simulation:
            lines.append(
                "Simulation: coins and noise came from a seed and can be repeated, so nothing is claimed. "
                "With secret entropy the following would hold."
            )
        if math.isinf(self.epsilon):
            lines.append("This run gives no differential privacy: its noise is 0.")
        else:
            lines.append(
                f"This run is (ε = {_up(self.epsilon)}, δ = {self.delta:g})-differentially private "
                f"for {units}."
            )
        lines.append(_RELATIONS[self.unit, self.relation])
        pld = "no bound at hand" if self.epsilon_pld is None else f"ε = {_up(self.epsilon_pld)}"
        again = f", {self.repeated} of them a second time after a crash" if self.repeated else ""
        lines.append(
            f"By privacy-loss distributions (PLD): {pld}; by Rényi divergences (RDP): "
            f"ε = {_up(self.epsilon_rdp)}. Charged: {self.rounds} rounds{again}."
        )
        lines += [self.sampling, self.clipping, self.noise]
        lines.append("Against whom:")
        for observer in self.observers:
            held = "no guarantee" if observer.epsilon is None else f"ε = {_up(observer.epsilon)}"
            lines.append(f"  - {observer.who}: {held}. {observer.why}")
        lines.append("Not covered:")
        lines += [f"  - {item}" for item in self.not_covered]
        return "\n".join(lines)


def make_statement(privacy: Privacy, entries: Sequence[Charge], population: int) -> Statement:
    """What the charges of a ledger add up to."""
    worst = replay(entries).worst(privacy.delta)
    epsilon = worst.epsilon
    charged = sum(entry.times for entry in entries)
    distinct = {number for entry in entries for number in range(entry.round, entry.round + entry.times)}
    sampled = (
        f"each of {population:,} clients with probability {privacy.sampling.rate:g}, every round"
        if isinstance(privacy.sampling, Poisson)
        else f"{privacy.sampling.size:,} of {population:,} clients, without replacement, every round"
    )
    if privacy.unit == "example":
        steps = ", ".join(f"{count:,} steps at rate {event.rate:.3g}" for event, count in worst.profile)
        sampled = (
            f"Poisson batches inside each client; worst client: {steps or 'none yet'} (cohort: {sampled})"
        )
    per = {"global": "over everything", "uniform": "per layer, C/√H each", "dim": "per layer, by size"}
    adaptive = ", following a quantile of the norms" if privacy.adaptive else ""
    target = "a client's upload" if privacy.unit == "client" else "a record's gradient"
    return Statement(
        unit=privacy.unit,
        relation=privacy.relation,
        epsilon=epsilon.value,
        delta=privacy.delta,
        epsilon_pld=epsilon.pld,
        epsilon_rdp=epsilon.rdp,
        rdp_order=epsilon.order,
        budget=privacy.epsilon,
        simulation=privacy.simulated,
        sampling=f"Sampling: {sampled}.",
        clipping=f"Clipping: {target} to norm {privacy.clip.bound:g}, {per[privacy.clip.per]}{adaptive}.",
        noise=_noise(privacy),
        rounds=charged,
        repeated=charged - len(distinct),
        observers=_observers(privacy, epsilon.value),
        not_covered=_not_covered(privacy),
    )


_RELATIONS = {
    ("client", "add-remove"): "Neighbours: two populations that differ in one client, there or not there.",
    ("client", "replace-one"): "Neighbours: two populations in which one client is replaced by another.",
    ("example", "add-remove"): "Neighbours: two populations that differ in one record of one client.",
}


def _noise(privacy: Privacy) -> str:
    what = "every sum" if privacy.unit == "client" else "every sum of a batch's gradients"
    source = "a seed" if privacy.simulated else "the operating system's entropy"
    maker = "each client" if privacy.unit == "example" else "the server"
    if privacy.noise_at == "clients":
        maker = "the clients of the cohort in equal shares, topped up by the server for those who dropped out"
    return (
        f"Noise: Gaussian, {privacy.noise:g} × the clipping bound on {what}, made by {maker}, from {source}."
    )


def _observers(privacy: Privacy, epsilon: float) -> tuple[Observer, ...]:
    if privacy.unit == "example":
        return (
            Observer("whoever sees each upload", epsilon, "The worst client; no help from client sampling."),
            Observer(
                "whoever sees only the released models",
                epsilon,
                "The same bound: they see less, and no smaller one is proved.",
            ),
        )
    models = Observer(
        "whoever sees every released model, but not who took part", epsilon, "The server's coins stay secret."
    )
    if privacy.noise_at == "server":
        why = "It sees uploads before the noise and must be trusted."
        return models, Observer("the server", None, why)
    why = (
        "Only under secure aggregation is each upload hidden from it. Even then it knows who took part, so "
        "this ε, which counts on secret sampling, is not claimed against it; one upload alone carries only "
        "noise ÷ √cohort."
    )
    return models, Observer("the server", None, why)


def _not_covered(privacy: Privacy) -> tuple[str, ...]:
    items = [
        "metrics for the researcher (losses, accuracies, norms, which clients failed): they are exact",
        "choosing hyper-parameters, the clipping bound or a checkpoint by looking at private data",
        "what the run's folder holds beside the model: clients' memories, and which clients wrote one when",
        "a run that ends because a client's code failed: that it did is seen, whatever data it failed on",
        "the model before the first round and any public records: neither may come from protected data",
        "floating-point effects: noise is made of 24-bit uniforms by a generator seeded with true entropy",
    ]
    if privacy.unit == "example":
        items.append("how many records a client has, and which clients took part: both count as public")
        items.append("a person with several records: protection weakens with their number")
    else:
        items.append("how many clients there are: the sampling rate is made from it, so it counts as public")
        items.append("a person who is several clients: protection weakens with their number")
        if privacy.noise_at == "clients":
            items.append("how many clients are in a cohort: each is told, to size its share of the noise")
    return tuple(items)


def _up(value: float) -> str:
    """Three digits, rounded up: a printed ε must not promise more than the number does.

    >>> _up(1.2301), _up(12.0), _up(0.012345)
    ('1.24', '12', '0.0124')
    """
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else "∞"
    scale = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(round(value / scale, 9)) * scale:.3g}"
