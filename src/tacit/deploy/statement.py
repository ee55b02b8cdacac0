"""What an owner's records have paid, for the owner to read: `tacit client ledger`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tacit.deploy.client import LEDGERS
from tacit.deploy.ledgers import Account, read_accounts, spent
from tacit.deploy.policy import Allow
from tacit.privacy.rounding import rounded_up


@dataclass(frozen=True)
class OwnStatement:
    """ε by the client's own count."""

    unit: str
    epsilon: float
    delta: float
    budget: float | None
    rounds: int
    runs: int
    unprotected: int
    """Rounds in which an update left without any guarantee."""
    narrower: int
    """Rounds that protected single records, although the owner wants all of them protected together."""
    simulated: int
    """Rounds of rehearsals, whose noise anybody can repeat."""
    observers: tuple[tuple[str, float | None, str], ...]

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["epsilon"] = None if math.isinf(self.epsilon) else self.epsilon
        return plain

    def text(self) -> str:
        what = {"example": "each of its records", "client": "all of its records together"}.get(
            self.unit, "nothing"
        )
        allowed = "anything" if self.budget is None else f"{self.budget:g}"
        lines = [
            f"By its own ledger this client has spent ε = {rounded_up(self.epsilon)} at δ = {self.delta:g} "
            f"for {what}, in {_of(self.rounds, 'round')} of {_of(self.runs, 'run')}; allowed is {allowed}."
        ]
        if self.unprotected:
            lines.append(f"In {self.unprotected} of them its update left without any guarantee.")
        if self.narrower:
            lines.append(
                f"{self.narrower} of them protected single records, which bounds nothing for all together."
            )
        if self.simulated:
            lines.append(
                f"{self.simulated} rounds were rehearsals: their noise can be repeated and protects nothing."
            )
        lines.append("Against whom:")
        for who, epsilon, why in self.observers:
            held = "no guarantee" if epsilon is None else f"ε = {rounded_up(epsilon)}"
            lines.append(f"  - {who}: {held}. {why}")
        return "\n".join(lines)


def _of(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def own_statement(state: Path, allow: Allow, ledgers: Path | None = None) -> OwnStatement:
    """What an owner's records have paid, replayed from its ledgers: the client's own, or those that the
    owner's clients of several federations share.
    """
    ledgers = ledgers or state / LEDGERS
    unit = "example" if allow.unit == "none" else allow.unit
    accounts = read_accounts(ledgers) if ledgers.is_dir() else []
    epsilon = spent(accounts, allow).value if accounts else 0.0
    return OwnStatement(
        unit=unit,
        epsilon=epsilon,
        delta=allow.delta,
        budget=allow.epsilon,
        rounds=sum(account.contents.rounds for account in accounts),
        runs=len(accounts),
        unprotected=sum(account.contents.rounds for account in accounts if account.unprotected),
        narrower=sum(account.contents.rounds for account in accounts if account.narrower(unit)),
        simulated=sum(a.contents.rounds for a in accounts if a.contents.header.simulation),
        observers=_observers(unit, epsilon, accounts),
    )


def _observers(
    unit: str, epsilon: float, accounts: list[Account]
) -> tuple[tuple[str, float | None, str], ...]:
    if unit == "example" and all(account.contents.header.unit == "example" for account in accounts):
        return (
            ("the server, and whoever runs it", epsilon, "The noise was made here, before anything left."),
            ("other clients, and whoever gets the model", epsilon, "They see less."),
            (
                "whoever watches the network",
                epsilon,
                "That this client took part, and when, is plain to them; it is no part of what is protected.",
            ),
        )
    if accounts and all(account.secure for account in accounts):
        why = (
            "It saw sums of masked updates alone, with the clients' noise in them, and who took part. If no "
        )
        why += (
            "more of a cohort collude with it than the runs counted on; neighbours: what this client sent, "
        )
        why += "or zeros in its place."
        return (
            ("the server, and whoever runs it", epsilon, why),
            ("other clients, and whoever gets the model", epsilon, "They see less."),
            ("whoever watches the network and gets the model", epsilon, "They see less."),
        )
    return (
        ("the server, and whoever runs it", None, "It sees updates before its noise and must be trusted."),
        (
            "other clients, and whoever gets the model",
            epsilon,
            "If the server adds the noise that it promises. Its own statement may say less: it counts on "
            "secret sampling.",
        ),
        (
            "whoever watches the network and gets the model",
            epsilon,
            "They know who took part, so nothing is counted on sampling here.",
        ),
    )
