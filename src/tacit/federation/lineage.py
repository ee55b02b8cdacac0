"""Where a run's model comes from, and what that has cost: `lineage.json` in every run's folder.

It names the run's own data, and for each run before it (`model.start`) that run's data and charges. A
private run that begins with another's model takes along what was spent on anyone both have. A model that
saw some of its people without protection is refused, since no noise added later can take that back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.data.identity import Identity
from tacit.errors import UserError
from tacit.federation.checkpoint import CONFIG, LINEAGE
from tacit.federation.ending import read_ending
from tacit.federation.files import sealed, unsealed, write_atomically
from tacit.federation.start import MODEL, read_weights, state_hash
from tacit.federation.statements import LEDGER, read_ledger
from tacit.privacy import Carried, Charge, Header, Part, replay
from tacit.privacy.events import plain_event, read_event
from tacit.privacy.ledger import Contents
from tacit.reading import read_text


@dataclass(frozen=True)
class Ancestor:
    """A run whose model this one began with: its data (None: not known), and what it spent on them (None:
    it had no guarantee).
    """

    data: Identity | None = None
    unit: str | None = None
    charge: Charge | None = None


def write_lineage(
    folder: Path, data: Identity, ancestors: Sequence[Ancestor], start: str | None = None
) -> None:
    """Write down a run's data and where its model comes from, before its first round; `start` is the hash of
    the weights that `model.start` gave it.
    """
    plain = {
        "data": data.to_json(),
        "ancestors": [_plain(ancestor) for ancestor in ancestors],
        "start": start,
    }
    write_atomically(folder / LINEAGE, sealed(plain))


def read_lineage(folder: Path) -> tuple[Identity, list[Ancestor]]:
    """The data of a run, and the runs before it."""
    try:
        plain = unsealed(read_text(folder / LINEAGE))
        return Identity.from_json(plain["data"]), [_read(ancestor) for ancestor in plain["ancestors"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{folder / LINEAGE} cannot be read ({error}); restore it") from None


def recorded_start(folder: Path) -> str | None:
    """The hash of the weights that a run began with, if they came from elsewhere and it was written down."""
    found: str | None = unsealed(read_text(folder / LINEAGE)).get("start")
    return found


def ancestry(start: str | Path | None) -> list[Ancestor]:
    """All runs that a model from `start` has seen: the run that made it, and those before that.

    `start` may be a run's folder, or the file of weights that the run itself left there. Weights that stand
    alone, exports, and other files put into a run's folder, do not tell what they were trained on: a private
    run takes them only if the config calls them public. Asked after the weights were read, it tells of all
    that they may have seen, also if that run goes on meanwhile.
    """
    if start is None:
        return []
    place = Path(start).expanduser()
    folder = place if place.is_dir() else place.parent
    seed = folder / MODEL if place.is_dir() else place
    a_run = seed.name == MODEL and all((folder / name).exists() for name in (LINEAGE, CONFIG))
    if not a_run or (seed.exists() and not _left_by(folder, seed)):
        return [Ancestor()]
    data, before = read_lineage(folder)
    if not (folder / LEDGER).exists():
        return [*before, Ancestor(data)]
    contents = read_ledger(folder)
    if contents.header.simulation or not contents.rounds:
        unprotected = contents.header.simulation
        return [*before, *([Ancestor(data)] if unprotected else [])]
    return [*before, Ancestor(data, contents.header.unit, _merged(contents))]


def _left_by(folder: Path, seed: Path) -> bool:
    """Whether a run ended with the weights of this file, and nobody put others in their place."""
    ending = read_ending(folder)
    return ending is not None and ending.weights == state_hash(read_weights(seed))


def carried_charges(ancestors: Sequence[Ancestor], data: Identity, header: Header) -> list[Charge]:
    """What a run on `data` must carry in its ledger for the model it begins with; refuses what cannot be
    added.
    """
    charges: dict[tuple[str, str], Charge] = {}
    for ancestor in ancestors:
        if ancestor.data is None:
            raise UserError(
                f"model.start: nothing says which data that model was trained on (there is no {LINEAGE} "
                f"beside it, as in an export, or {MODEL} is not what that run ended with), so nobody can say "
                "what it shows of those that this run protects; start from the run's own folder, or set "
                "model.public: true if its data need no protection"
            )
        if ancestor.data.shows(data):
            raise UserError(
                f"model.start: the run on {ancestor.data.name} behind that model used records as public "
                "(data.public) that this run would protect; keep data.public, start from another "
                "model, or set model.public: true if those records need no protection"
            )
        if not ancestor.data.overlaps(data):
            continue
        if ancestor.charge is None or any(_noiseless(part) for part in ancestor.charge.parts):
            raise UserError(
                f"model.start: that model was trained on {ancestor.data.name} without a guarantee, and this "
                "run would protect some of the same data, which the model may already show; start from "
                "another one, or set model.public: true if those records need no protection"
            )
        if not ancestor.charge.parts:  # nobody was ever drawn
            continue
        relation = ancestor.charge.parts[0].event.relation
        if (ancestor.unit, relation) != (header.unit, header.relation):
            raise UserError(
                f"model.start: that model's guarantee is of {ancestor.unit} level ({relation}) and this "
                f"run's of {header.unit} level ({header.relation}), on some of the same data; the two do not "
                "add up: keep unit and sampling, or start from another model"
            )
        if header.unit == "client" and not ancestor.data.same_clients(data):
            raise UserError(
                "model.start: that model protects clients that hold other records than those of this run "
                "(another data.partition, or seed), so what was spent on one client there says nothing of "
                "one here; keep data and seed, or let clients be people (data.partition: natural) in both"
            )
        carried = ancestor.charge.carried
        assert carried is not None
        same = ancestor.data.fingerprint == data.fingerprint
        # By its last line, too: copies of one run that both went on are two.
        charges[carried.ledger, carried.head] = ancestor.charge if same else _for_everyone(ancestor.charge)
    return list(charges.values())


def _noiseless(part: Part) -> bool:
    return getattr(part.event, "noise", 1.0) == 0


def _merged(contents: Contents) -> Charge:
    """A run's own charges as one, client by client; those it carried itself are in its lineage."""
    own = replay(charge for charge in contents.charges if charge.carried is None)
    parts = tuple(
        Part(event, steps, None if who is None else tuple(who)) for event, steps, who in own.expenses()
    )
    return Charge(-1, parts, carried=Carried(contents.header.id, contents.head, contents.rounds))


def _for_everyone(charge: Charge) -> Charge:
    """The same, where clients are numbered otherwise: everyone pays the most that anyone paid for each
    event.
    """
    totals = replay([charge])
    most = tuple(Part(event, steps) for event, steps in totals.most().items())
    return Charge(charge.round, most, carried=charge.carried)


def _plain(ancestor: Ancestor) -> dict[str, Any]:
    charge = ancestor.charge
    data = None if ancestor.data is None else ancestor.data.to_json()
    plain: dict[str, Any] = {"data": data, "unit": ancestor.unit, "charge": None}
    if charge is not None:
        assert charge.carried is not None
        plain["charge"] = {
            "ledger": charge.carried.ledger,
            "head": charge.carried.head,
            "rounds": charge.carried.rounds,
            "parts": [[plain_event(part.event), part.steps, part.clients] for part in charge.parts],
        }
    return plain


def _read(plain: dict[str, Any]) -> Ancestor:
    charge = plain["charge"]
    data = None if plain["data"] is None else Identity.from_json(plain["data"])
    if charge is None:
        return Ancestor(data, plain["unit"])
    parts = tuple(
        Part(read_event(event), int(steps), None if clients is None else tuple(clients))
        for event, steps, clients in charge["parts"]
    )
    carried = Carried(charge["ledger"], charge["head"], int(charge["rounds"]))
    return Ancestor(data, plain["unit"], Charge(-1, parts, carried=carried))
