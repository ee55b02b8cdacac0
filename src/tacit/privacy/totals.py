"""Spending per client: totals, and the worst of them, computed cheaply.

At client level everyone pays for every round. At example level a client's records pay only for the rounds in
which it took part: its own participations × local steps, at its own rate B/n_i. The statement reports the
worst client. Computing ε for each of a million clients would take days. So clients with equal totals form one
profile, and dominated profiles are dropped (ε grows with the rate, with the number of events and as the noise
falls). The rest are tried in the order of the fast RDP bound until no other can be worse.

>>> from tacit.privacy.events import PoissonGaussian
>>> often, seldom = PoissonGaussian(rate=0.01, noise=1.0), PoissonGaussian(rate=0.1, noise=1.0)
>>> meter = ClientTotals()
>>> meter.add(often, 400, clients=[1, 2, 3])
>>> meter.add(seldom, 10, clients=[4])
>>> meter.worst(1e-5).profile
((PoissonGaussian(rate=0.1, noise=1.0), 10),)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tacit.privacy.accountants import Epsilon, epsilon, exceeds, rdp_epsilon
from tacit.privacy.events import Event

Profile = tuple[tuple[Event, int], ...]
"""How often each event happened to a client: sorted, so that equal totals compare equal."""

DIGITS = (5, 7, 9)
"""Binary digits to which counts are rounded up while that suffices: first coarsely, then finer."""

Expense = tuple[Event, int, Sequence[int] | None]
"""An event, how often, and which clients pay for it (None: everyone)."""


@dataclass(frozen=True)
class Worst:
    """The client (or group of clients with equal totals) with the largest ε."""

    epsilon: Epsilon
    profile: Profile


class ClientTotals:
    """Totals per client, grouped by equal totals."""

    def __init__(self) -> None:
        self._everyone: Profile = ()
        self._own: dict[int, Profile] = {}
        self._dearest: list[Profile] = []
        """The undominated profiles of one kind of event. Totals only grow, so a profile that is dominated
        once stays dominated, and a charge must be compared only with these.
        """
        self._mixed: Counter[Profile] = Counter()
        """Profiles with several kinds of events, and how many clients have each."""

    def add(self, event: Event, count: int, clients: Iterable[int] | None = None) -> None:
        """Charge `count` events to `clients`, or to everyone."""
        if clients is None:
            self._everyone = _plus(self._everyone, event, count)
            return
        new: set[Profile] = set()
        for client in clients:
            before = self._own.get(client, ())
            after = _plus(before, event, count)
            self._own[client] = after
            new.add(after)
            if len(after) > 1:
                self._mixed[after] += 1
            if len(before) > 1:
                self._mixed[before] -= 1
                if not self._mixed[before]:
                    del self._mixed[before]
        self._dearest = _undominated([*self._dearest, *(profile for profile in new if len(profile) == 1)])

    def expenses(self) -> list[Expense]:
        """Everything that was charged; clients with equal totals are combined."""
        found: list[Expense] = [(event, count, None) for event, count in self._everyone]
        payers: dict[Profile, list[int]] = {}
        for client, profile in sorted(self._own.items()):
            payers.setdefault(profile, []).append(client)
        return found + [(e, n, tuple(who)) for profile, who in payers.items() for e, n in profile]

    def most(self) -> dict[Event, int]:
        """For each event, the most that any one client paid of it: together at least anyone's total."""
        return dict(_most(set(self._own.values())) + Counter(dict(self._everyone)))

    def covering(self, most: int = 3) -> list[Profile]:
        """A few profiles, `most` of a kind plus one: each client's total costs no more than one of them.

        For quantities that are expensive to compute and grow with every total, such as ε of a group: the
        client with the largest ε for one unit need not be the worst for several.
        """
        simple = list(self._dearest)
        while len(simple) > most:  # join the two neighbours, in the order of rates, that lose least
            pairs = list(pairwise(simple))
            closest = min(range(len(pairs)), key=lambda i: _apart(*pairs[i]))
            if type(pairs[closest][0][0][0]) is not type(pairs[closest][1][0][0]):
                break  # no known event dominates two different kinds
            simple[closest : closest + 2] = [_joined(*pairs[closest])]
        if self._mixed:
            simple.append(_merge((), tuple(_most(self._mixed).items())))
        return [_merge(self._everyone, profile) for profile in simple] or [self._everyone]

    def worst(self, delta: float, digits: int | None = None) -> Worst:
        """The largest ε among the clients, and the totals that it comes from.

        `digits`: counts are rounded up to this many binary digits after the first. ε grows with every count,
        so the result is an upper bound (with 5: for up to 3 % more events; exact below 64). A run that asks
        after every round then meets the same few counts, whose ε is cached.
        """
        everyone, holders = self._everyone, {*self._dearest, *self._mixed}
        if digits is not None:
            everyone = _rounded_up(everyone, digits)
            holders = {_rounded_up(profile, digits) for profile in holders}
        candidates = self._candidates(everyone, holders)
        # `Epsilon.value` never exceeds the RDP bound: stop where that is below the largest value.
        candidates.sort(key=lambda profile: rdp_epsilon(dict(profile), delta), reverse=True)
        worst = Worst(epsilon(dict(candidates[0]), delta), candidates[0])
        for profile in candidates[1:]:
            if rdp_epsilon(dict(profile), delta) <= worst.epsilon.value:
                break
            found = epsilon(dict(profile), delta)
            if found.value > worst.epsilon.value:
                worst = Worst(found, profile)
        return worst

    def would_exceed(self, expenses: Sequence[Expense], budget: float, delta: float) -> bool:
        """Whether some client's ε, with `expenses` added, is not proved to be ≤ `budget`."""
        everyone, changed = self._everyone, dict[int, Profile]()
        for event, count, clients in expenses:
            if clients is None:
                everyone = _plus(everyone, event, count)
            for client in clients or ():
                changed[client] = _plus(changed.get(client, self._own.get(client, ())), event, count)
        candidates = self._candidates(everyone, {*self._dearest, *self._mixed, *changed.values()})
        return any(_exceeds(profile, budget, delta) for profile in candidates)

    @staticmethod
    def _candidates(everyone: Profile, own: Iterable[Profile]) -> list[Profile]:
        """Profiles that include the worst one. What everyone pays adds to all alike, so own totals decide."""
        distinct = set(own)
        simple: list[Profile] = [profile for profile in distinct if len(profile) == 1]
        mixed = [profile for profile in distinct if len(profile) > 1]
        return [_merge(everyone, profile) for profile in _undominated(simple) + mixed] or [everyone]


def _exceeds(profile: Profile, budget: float, delta: float) -> bool:
    """Whether a profile is not proved to cost ≤ `budget`.

    Counts are first rounded up, coarsely and then finer. A run that asks before every round meets the same
    few counts again and again, whose ε is cached; only its last rounds are counted exactly.
    """
    for digits in DIGITS:
        if not exceeds(dict(_rounded_up(profile, digits)), budget, delta):
            return False
    return exceeds(dict(profile), budget, delta)


def _plus(profile: Profile, event: Event, count: int) -> Profile:
    if len(profile) == 1 and profile[0][0] == event:  # by far the most common case
        return ((event, profile[0][1] + count),)
    return _merge(profile, ((event, count),))


def _merge(a: Profile, b: Profile) -> Profile:
    totals: Counter[Event] = Counter(dict(a))
    totals.update(dict(b))
    return tuple(sorted(totals.items(), key=lambda item: item[0].key))


def _rounded_up(profile: Profile, digits: int) -> Profile:
    return tuple((event, rounded_count(count, digits)) for event, count in profile)


def rounded_count(count: int, digits: int = 5) -> int:
    """Round a count of 64 or more up to one of 32 values per doubling (of 2^`digits`).

    >>> [rounded_count(n) for n in (1, 63, 65, 2000, 2017)]
    [1, 63, 66, 2016, 2048]
    """
    step = 1 << max(count.bit_length() - 1 - digits, 0)
    return -(-count // step) * step


def _undominated(profiles: list[Profile]) -> list[Profile]:
    """Profiles of one kind of event that no other exceeds in both cost and number."""
    kept: list[Profile] = []
    for profile in sorted(profiles, key=_dearest_first):
        event, count = profile[0]
        if not any(other[0][0].dominates(event) and other[0][1] >= count for other in kept):
            kept.append(profile)
    return kept


def _most(profiles: Iterable[Profile]) -> Counter[Event]:
    """For each event the largest count of any of them."""
    most: Counter[Event] = Counter()
    for profile in profiles:
        for event, count in profile:
            most[event] = max(most[event], count)
    return most


def _joined(one: Profile, other: Profile) -> Profile:
    """A profile that dominates two of one kind of event."""
    return ((one[0][0].joined(other[0][0]), max(one[0][1], other[0][1])),)


def _apart(one: Profile, other: Profile) -> float:
    """How much larger the join of two profiles is than either, roughly: in logarithms of rates and counts."""
    (a, n), (b, m) = one[0], other[0]
    if type(a) is not type(b):
        return math.inf
    rates = math.log(getattr(a, "rate", 1.0) / getattr(b, "rate", 1.0))
    return abs(rates) + abs(math.log(max(n, 1) / max(m, 1)))


def _dearest_first(profile: Profile) -> tuple[Any, ...]:
    event, count = profile[0]
    return -getattr(event, "rate", 0.0), getattr(event, "noise", 0.0), -count, event.key
