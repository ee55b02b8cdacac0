"""Which clients share masks: all pairs, or in large cohorts each client with k others.

Bell, Bonawitz, Gascón, Lepoint and Raykova 2020 ("Secure single-server aggregation with (poly)logarithmic
overhead", CCS). Clients stand on a ring in random order. Each is a neighbour of the k/2 clients before it and
the k/2 after it (a Harary graph), and its secrets are shared among its neighbours and itself. Let R = n − t +
c be the most clients that drop out or collude. The following can go wrong by chance; its probability is kept
below 2⁻⁴⁰ (a leak) and 2⁻³⁰ (no result):

- the other clients are no longer connected, so the sums of two parts could be told apart. That takes k/2 of
  the R clients in a row; for a given place on the ring the probability is hypergeometric, and there are n
  places;
- some client's neighbourhood has as many colluders as it takes to reconstruct a secret (its threshold);
- so few of a client's neighbours stay that nobody can reconstruct its secret: the round has no result.

>>> plan(100, 67, 10)       # a small cohort: everyone
Plan(degree=99, threshold=67)
>>> plan(1000, 667, 100)
Plan(degree=114, threshold=41)

The complete graph protects from a server that lies. The sparse graph protects from a server that follows the
protocol, and from c clients who tell it all they know. In that case dropouts must not depend on the graph,
and a lying server could arrange that they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256

from tacit.secure.wire import Refused

COMPLETE = 128
"""Cohorts up to this size always use the complete graph."""
INSECURE, INCORRECT = 2.0**-40, 2.0**-30
"""The accepted probabilities that a random graph leaks more than the sum, and that it gives no result."""


@dataclass(frozen=True)
class Plan:
    """`degree` neighbours; `threshold` shares, among those of the neighbours and the client's own, reveal a
    secret.
    """

    degree: int
    threshold: int


@lru_cache(maxsize=256)
def plan(clients: int, staying: int, colluding: int) -> Plan:
    """The sparsest graph for this many clients, of whom `staying` stay and `colluding` collude (they may
    overlap).
    """
    complete = Plan(clients - 1, staying)
    if clients <= COMPLETE:
        return complete
    from scipy.stats import hypergeom  # it takes a second to import, and few cohorts need it

    for degree in range(2, clients - 1, 2):
        half, gone = degree // 2, min(clients, clients - staying + colluding)
        if clients * hypergeom.pmf(half, clients, gone, half) > INSECURE / 2:
            continue
        # The least threshold that colluders miss; the clients who stay must reach it.
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
    """A graph of neighbours among `numbers`, in an order that `seed` decides."""

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
        """The client's neighbours, ascending."""
        if number not in self._place:
            raise Refused(f"client {number} is not in the graph")
        if self.plan.degree >= len(self.numbers) - 1:
            return sorted(set(self.numbers) - {number})
        place, count = self._place[number], len(self._ring)
        steps = [s for s in range(-(self.plan.degree // 2), self.plan.degree // 2 + 1) if s]
        return sorted(self._ring[(place + step) % count] for step in steps)

    def holders(self, number: int) -> list[int]:
        """The holders of shares of the client's secrets, in the order of the shares."""
        return sorted([number, *self.neighbours(number)])


def graph_of(advertisements: Iterable[bytes], numbers: Iterable[int], staying: int, colluding: int) -> Graph:
    """The graph of a round. Its seed is a hash of all clients' keys: nobody chooses it alone."""
    seed = sha256(b"".join(sha256(data).digest() for data in advertisements)).digest()
    found = tuple(sorted(numbers))
    return Graph(found, plan(len(found), staying, colluding), seed)
