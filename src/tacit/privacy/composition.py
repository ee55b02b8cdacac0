"""The total cost of several runs on the same data.

A ledger knows its own identity and its earlier lines, so nothing is counted twice and nothing is lost. Copies
of one ledger count once as far as they agree. Where they continued separately, both continuations count (with
correlated noise, at the most that a round can cost). Charges that a run carried over from another count once,
whether or not the other ledger is there. If another ledger was carried over at different times and is itself
missing, each time counts.

>>> from pathlib import Path
>>> from tacit.privacy.events import PoissonGaussian
>>> part = Part(PoissonGaussian(0.1, 1.0))
>>> header = Header("client", 1e-5, part, data="people")
>>> first = Contents(Path("a"), header, [Charge(0, (part,))], ["h", "0"])
>>> copy = Contents(Path("b"), header, [Charge(0, (part,)), Charge(1, (part,))], ["h", "0", "1"])
>>> len(compose([first, copy]).charges)
2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tacit.errors import UserError
from tacit.privacy.ledger import Charge, Contents, Header, Part, replay


@dataclass(frozen=True)
class Composition:
    """Charges, each counted once, and remarks on what was found."""

    charges: list[Charge]
    notes: list[str]


def compose(ledgers: Sequence[Contents]) -> Composition:
    """The charges of all these ledgers together. Refuses ledgers that cannot be added up (different units or
    relations, simulations).
    """
    _refuse_mixed([ledger.header for ledger in ledgers])
    notes: list[str] = []
    own: list[tuple[str, Charge]] = []
    carried: dict[tuple[str, str], tuple[str, Charge]] = {}
    known: dict[str, set[str]] = {}
    by_id: dict[str, list[Contents]] = {}
    for ledger in ledgers:
        by_id.setdefault(ledger.header.id, []).append(ledger)
        known.setdefault(ledger.header.id, set()).update(ledger.hashes)
    for copies in by_id.values():
        counted: set[str] = set()
        ends: list[Path] = []
        for ledger in sorted(copies, key=lambda copy: -len(copy.charges)):
            fresh = [
                (ledger.header.data, charge if not ends else _branched(ledger.header, charge))
                for digest, charge in zip(ledger.hashes[1:], ledger.charges, strict=True)
                if digest not in counted and charge.carried is None
            ]
            counted.update(ledger.hashes)
            own += fresh
            ends += [ledger.path] if fresh else []
        if len(ends) > 1:
            notes.append(
                f"{' and '.join(map(str, ends))} are copies of one run that both went on: both count"
            )
    for ledger in ledgers:
        for charge in ledger.charges:
            origin = charge.carried
            if origin is None or origin.head in known.get(origin.ledger, ()):
                continue  # its own ledger is here, and has the charge
            # The same run at two times: only its own ledger could tell whether one is a part of the other, or
            # a copy that continued by itself. So both count.
            carried[origin.ledger, origin.head] = ledger.header.data, charge
    if carried:
        total = sum(charge.carried.rounds for _, charge in carried.values() if charge.carried)
        notes.append(
            f"{total} rounds of earlier runs were carried over; their own ledgers are not among these"
        )
    if len({ledger for ledger, _ in carried}) < len(carried):
        notes.append(
            "the same earlier run was carried over at different times, and all of them count; name its own "
            "folder, too, and each of its rounds counts once"
        )
    everything = [*own, *carried.values()]
    if len({data for data, _ in everything}) <= 1:
        return Composition([charge for _, charge in everything], notes)
    notes.append(
        "the runs number their clients differently, so everyone is charged the most that anyone paid"
    )
    return Composition(_for_everyone(everything), notes)


def _branched(header: Header, charge: Charge) -> Charge:
    """A charge of a copy that continued by itself: the most that a round can cost, as for a repeated round.

    Correlated noise charges a round for what it adds to the rounds before it, for the client with the largest
    total. Two continuations of the same rounds may have different such clients, and either may have charged
    the other's client nothing. With independent noise, every round costs the same.
    """
    return replace(charge, parts=(header.costliest,)) if header.unit == "client" else charge


def _for_everyone(charges: Sequence[tuple[str, Charge]]) -> list[Charge]:
    """For each population, one charge to everyone that is at least any of its clients' total."""
    found = []
    for data in dict.fromkeys(data for data, _ in charges):
        most = replay(charge for other, charge in charges if other == data).most()
        found.append(Charge(0, tuple(Part(event, steps) for event, steps in most.items())))
    return found


def _refuse_mixed(headers: Sequence[Header]) -> None:
    if len({(header.unit, header.relation) for header in headers}) > 1:
        raise UserError(
            "these runs protect different units or speak of different neighbours, and their guarantees do "
            "not add up; give runs of one unit and one kind of sampling"
        )
    if len({header.simulation for header in headers}) > 1:
        raise UserError("some of these runs are simulations, which claim nothing; leave them out")
