"""Who shares masks with whom: everyone with everyone, or in large cohorts each client with k others.

Bell, Bonawitz, Gascón, Lepoint and Raykova 2020 ("Secure single-server aggregation with (poly)logarithmic
overhead", CCS): clients stand on a ring in random order, each is a neighbour of the k/2 before and the k/2
behind it (a Harary graph), and its secrets are shared among its neighbours and itself. Let R = n − t + c be
the most clients that drop out or collude. What can go wrong by chance, and is kept below 2⁻⁴⁰ (a leak) and
2⁻³⁰ (no result):

- the others are no longer connected, so that the sums of two parts could be told apart. For that, k/2 in a
  row must be among the R; for a given place on the ring that is hypergeometric, and there are n places;
- some client's neighbourhood has as many colluders as it takes to reconstruct a secret (its threshold);
- or so few who stay that nobody can: then the round has no result.

>>> plan(100, 67, 10)       # a small cohort: everyone
Plan(degree=99, threshold=67)
>>> plan(1000, 667, 100)
Plan(degree=114, threshold=41)

The complete graph protects from a server that lies. The sparse one protects from a server that follows the
protocol, and from c clients who tell it all they know: who drops out must not depend on the graph, which a
lying server could arrange.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256

from tacit.secure.wire import Refused

COMPLETE = 128
"""Cohorts up to this size are always complete."""
INSECURE, INCORRECT = 2.0**-40, 2.0**-30
"""Probabilities of a random graph that leaks more than the sum, or that gives none."""


@dataclass(frozen=True)
class Plan:
    """`degree` neighbours; `threshold` shares, of the neighbours' and a client's own, give a secret away."""

    degree: int
    threshold: int


@lru_cache(maxsize=256)
def plan(clients: int, staying: int, colluding: int) -> Plan:
    """The sparsest graph for so many, of whom `staying` stay and `colluding` collude (they may overlap)."""
    complete = Plan(clients - 1, staying)
    if clients <= COMPLETE:
        return complete
    from scipy.stats import hypergeom  # a second to import, for cohorts that few have

    for degree in range(2, clients - 1, 2):
        half, gone = degree // 2, min(clients, clients - staying + colluding)
        if clients * hypergeom.pmf(half, clients, gone, half) > INSECURE / 2:
            continue
        # The least threshold that colluders miss; it must be one that those who stay reach.
        corrupt, alive = (
            hypergeom(clients - 1, colluding, degree),
            hypergeom(clients - 1, staying - 1, degree),
        )
        low = next(t for t in range(1, degree + 2) if clients * corrupt.sf(t - 1) <= INSECURE / 2)
        if clients * alive.cdf(low - 1) <= INCORRECT:
            return Plan(degree, low)
    return complete


@dataclass(frozen=True)
class Graph:
    """The neighbours among `numbers`, in an order that `seed` decides."""

    numbers: tuple[int, ...]
    plan: Plan
    seed: bytes

    @cached_property
    def _ring(self) -> list[int]:
        return sorted(self.numbers, key=lambda n: sha256(self.seed + n.to_bytes(4)).digest())

    @cached_property
    def _place(self) -> dict[int, int]:
        return {number: place for place, number in enumerate(self._ring)}

    def neighbours(self, number: int) -> list[int]:
        """Ascending."""
        if number not in self._place:
            raise Refused(f"client {number} is not in the graph")
        if self.plan.degree >= len(self.numbers) - 1:
            return sorted(set(self.numbers) - {number})
        place, count = self._place[number], len(self._ring)
        steps = [s for s in range(-(self.plan.degree // 2), self.plan.degree // 2 + 1) if s]
        return sorted(self._ring[(place + step) % count] for step in steps)

    def holders(self, number: int) -> list[int]:
        """Who holds a share of the client's secrets, in the order of the shares."""
        return sorted([number, *self.neighbours(number)])


def graph_of(advertisements: Iterable[bytes], numbers: Iterable[int], staying: int, colluding: int) -> Graph:
    """The graph of a round. Its seed is a hash of all clients' keys: nobody chooses it alone."""
    seed = sha256(b"".join(sha256(data).digest() for data in advertisements)).digest()
    found = tuple(sorted(numbers))
    return Graph(found, plan(len(found), staying, colluding), seed)
