"""One run on trial: canaries among its clients or records, each there by a fair coin.

Some of a run's clients (or, at example level, some records of its clients) are canaries. They take part when
the mechanism draws them, like everybody else, but what they send is chosen for being recognized: as much as
the clip lets through, on coordinates of their own, the same every time. Half of them, by fair coins, send
nothing at all (where the guarantee is about replacing a client: the opposite). Whoever sees every release
then guesses the coins: `tacit.privacy.audit` turns correct guesses into a lower bound on ε of the whole run.

The guesser is the guarantee's own adversary: it knows everything but the canaries' coins and the noise, so
what all others sent is taken off before it looks. (Not where cohorts have a fixed size: who else was drawn
would tell whether a canary was, and that is part of what is protected.)

Random directions of clients as canaries: Andrew, Kairouz, Oh, Oprea, McMahan and Suriyakumar 2024
(arXiv:2302.03098); fair coins and the bound: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846).

Clients' canaries go through the run's own `sample`, `bounding(…).add_` and `release`; records' through its
own `batches` and `privatize_`, after the clip, whose trial is in `tacit.privacy.games`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from tacit.privacy import (
    Arrivals,
    Bits,
    Bounding,
    Charge,
    ClientLevel,
    ExampleLevel,
    Ids,
    Workload,
)
from tacit.privacy.ahead import Drawn
from tacit.privacy.audit import Bools, Floats
from tacit.privacy.matrices import dense
from tacit.privacy.mechanisms.base import State
from tacit.privacy.mechanisms.correlated import Correlated
from tacit.vector import Layout, Vectors

HUGE = 1e6
"""How much a client's canary sends, in clipping norms."""


class WatchedClients:
    """A mechanism with canaries among its clients; an `Aggregation` like the one it wraps."""

    def __init__(self, inner: ClientLevel, workload: Workload, canaries: int) -> None:
        rng = np.random.default_rng()
        self.inner, self.population = inner, workload.population
        self.ids = np.sort(rng.choice(workload.population, canaries, replace=False))
        self.inside: Bools = rng.random(canaries) < 0.5
        self._rng, self._rounds = rng, list[Floats]()
        self._drawn = np.empty(0, np.int64)
        self._bounding: Bounding | None = None
        self._places: list[Ids] = []
        self._values: list[Tensor] = []

    @property
    def clients_release(self) -> bool:
        return self.inner.clients_release

    def sample(self, round: int, attempt: int, workload: Workload) -> Ids:
        cohort = self.inner.sample(round, attempt, workload)
        watched = np.isin(cohort, self.ids)
        drawn = np.searchsorted(self.ids, cohort[watched])
        # A canary that is not there is not drawn; where one takes another's place, it is the other.
        self._drawn = drawn if self._replaces else drawn[self.inside[drawn]]
        return cohort[~watched]

    def charge(self, round: int, cohort: Ids, workload: Workload, attempt: int = 0) -> Charge:
        return self.inner.charge(round, cohort, workload, attempt)

    def init(self) -> State:
        return self.inner.init()

    def expected(self, population: int) -> float:
        return self.inner.expected(population)

    def bounding(self, state: State, sizes: Mapping[str, int], layout: Layout, drawn: int) -> Bounding:
        self._bounding = self.inner.bounding(state, sizes, layout, drawn + len(self._drawn))
        if not self._places:
            self._place(self._bounding, sizes)
        return self._bounding

    def release(
        self, total: Vectors, arrivals: Arrivals, state: State, round: int, attempt: int, workload: Workload
    ) -> tuple[Vectors, State]:
        assert self._bounding is not None
        others = self._known(total)
        for canary in self._drawn:
            bits = self.inner.bits(workload.seed, round, attempt, int(self.ids[canary]), 1)
            self._bounding.add_(self._upload(int(canary), total), total, bits)
        drawn, arrived = arrivals.drawn + len(self._drawn), arrivals.arrived + len(self._drawn)
        everyone, norm = replace(arrivals, drawn=drawn, arrived=arrived), self.inner.clipping_norm(state)
        mean, state = self.inner.release(total, everyone, state, round, attempt, workload)
        flat = torch.cat([vector.double() for vector in mean.values()]) * self.inner.expected(self.population)
        flat -= others
        found = [float(flat[p] @ v) for p, v in zip(self._places, self._values, strict=True)]
        self._rounds.append(np.array(found) / norm)
        return mean, state

    def scores(self, workload: Workload) -> Floats:
        """For each canary, how much of it is in all that was released."""
        seen = np.array(self._rounds)
        inner, rounds = self.inner, len(self._rounds)
        if not isinstance(inner, Correlated):
            total: Floats = seen.sum(axis=0)
            return total
        # Correlated noise is white again after C, and a canary's turns are known.
        c = dense(inner.matrix(workload.population).coefficients(rounds), rounds)
        turns = np.array([np.isin(self.ids, inner.group(t, workload)) for t in range(rounds)], float)
        whitened: Floats = ((c @ turns) * (c @ seen)).sum(axis=0)
        return whitened

    def _known(self, total: Vectors) -> Tensor | float:
        """What all others sent, in the units of uploads."""
        if self._replaces:
            return 0.0
        grid = None if self._bounding is None else self._bounding.grid
        return torch.cat([v.double() for v in total.values()]) * (1.0 if grid is None else grid.unit)

    @property
    def _replaces(self) -> bool:
        return self.inner.relation == "replace-one"

    def _place(self, bounding: Bounding, sizes: Mapping[str, int]) -> None:
        """Coordinates of each canary's own, and what is left of it after the clip, in clipping norms."""
        order = self._rng.permutation(sum(sizes.values()))
        self._signs = torch.from_numpy(self._rng.choice([-1.0, 1.0], len(order)))
        self._places = [np.sort(order[i :: len(self.ids)]) for i in range(len(self.ids))]
        template = {name: torch.zeros(size) for name, size in sizes.items()}
        for canary in range(len(self.ids)):
            bounded, _ = bounding.bound.apply(self._upload(canary, template, sign=1.0))
            flat = torch.cat([vector.double() for vector in bounded.values()])
            self._values.append(flat[self._places[canary]] / bounding.bound.bound)

    def _upload(self, canary: int, like: Vectors, sign: float | None = None) -> Vectors:
        if sign is None:
            sign = 1.0 if self.inside[canary] else -1.0
        flat = torch.zeros(sum(vector.numel() for vector in like.values()))
        places = self._places[canary]
        flat[places] = (self._signs[places] * sign * HUGE * self.inner.clip.bound).float()
        parts = torch.split(flat, [vector.numel() for vector in like.values()])
        return dict(zip(like, parts, strict=True))


class RecordCanaries:
    """Which records are canaries, and what was seen of them."""

    def __init__(
        self, mechanism: ExampleLevel, workload: Workload, layout: Layout, rounds: int, canaries: int
    ) -> None:
        rng = np.random.default_rng()
        times = np.zeros(workload.population, np.int64)
        for round in range(rounds):
            times[mechanism.sample(round, 0, workload)] += 1
        self.positions: dict[int, Ids] = {}
        self.first: dict[int, int] = {}
        made = 0
        # Those who pay most, as the statement speaks of them; a third of each one's records at most.
        for client in np.argsort(-times / np.maximum(workload.sizes, 1), kind="stable"):
            most = int(min(workload.sizes[client] // 3, layout.size, canaries - made))
            if most > 0 and times[client]:
                chosen = rng.choice(int(workload.sizes[client]), most, replace=False)
                self.positions[int(client)] = np.sort(chosen)
                self.first[int(client)] = made
                made += most
        self.inside: Bools = rng.random(made) < 0.5
        self.scores: Floats = np.zeros(made)
        self.client, self._asked = -1, 0
        self._queries = workload.queries
        self._batches: list[list[int]] = []
        bounds = torch.zeros(layout.size, dtype=torch.float64)
        group = torch.zeros(layout.size, dtype=torch.int64)
        for number, (slices, bound) in enumerate(mechanism.clip.groups(layout)):
            for part in slices:
                bounds[part], group[part] = bound, number
        # Coordinates of their own among a client's canaries: no two clients share a gradient.
        self.places: list[Ids] = []
        self.values: list[Tensor] = []
        for positions in self.positions.values():
            order = rng.permutation(layout.size)
            for i in range(len(positions)):
                places = np.sort(order[i :: len(positions)])
                signs = torch.from_numpy(rng.choice([-1.0, 1.0], len(places)))
                counts = torch.bincount(group[places], minlength=int(group.max()) + 1).double()
                self.places.append(places)
                self.values.append(signs * bounds[places] / counts[group[places]].sqrt())

    def begins(self, client: int) -> None:
        """A client begins: no batch was drawn yet."""
        self.client, self._asked, self._batches = client, 0, []

    def drawn(self, canaries: list[int]) -> None:
        """One more batch has these canaries; batches are drawn ahead of the gradients."""
        self._batches.append(canaries)

    def asked(self) -> list[int]:
        """The canaries in the gradient that is asked for now."""
        batch = self._asked // self._queries
        self._asked += 1
        return self._batches[batch] if batch < len(self._batches) else []

    def own(self) -> range:
        """The canaries of the client that is being trained."""
        start = self.first.get(self.client, 0)
        return range(start, start + len(self.positions.get(self.client, ())))


class WatchedExamples(ExampleLevel):
    """Example level with canaries among the records; run in one process."""

    watch: RecordCanaries

    @staticmethod
    def of(inner: ExampleLevel, watch: RecordCanaries) -> WatchedExamples:
        made = WatchedExamples(**{field.name: getattr(inner, field.name) for field in fields(inner)})
        object.__setattr__(made, "watch", watch)
        return made

    def bits(self, *name: int) -> Bits:
        if len(name) == 5 and not name[4]:  # seed, round, attempt, client, its batches: it begins
            self.watch.begins(name[3])
        return super().bits(*name)

    def batches(self, records: int, workload: Workload, bits: Bits) -> Iterator[Ids]:
        watch = self.watch
        canaries = watch.positions.get(watch.client, np.empty(0, np.int64))
        start = watch.first.get(watch.client, 0)
        for rows in super().batches(records, workload, bits):
            drawn = start + np.flatnonzero(np.isin(canaries, rows))
            watch.drawn([int(i) for i in drawn if watch.inside[i]])
            yield rows[~np.isin(rows, canaries)]

    def privatize_(self, gradients: Tensor, bits: Bits | Drawn, batch: float) -> Tensor:
        watch = self.watch
        others = gradients.double()
        for canary in watch.asked():
            gradients[watch.places[canary]] += watch.values[canary].float()
        super().privatize_(gradients, bits, batch)
        for canary in watch.own():
            places = watch.places[canary]
            seen = gradients[places].double() * batch - others[places]
            watch.scores[canary] += float(seen @ watch.values[canary]) / self.clip.bound**2
        return gradients
