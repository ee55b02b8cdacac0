"""Graphs of large cohorts: degrees, connectivity, and the probabilities that determined them."""

from __future__ import annotations

import itertools
import math
import time
from fractions import Fraction

import networkx
import numpy as np
import pytest

from tacit.secure import graph as graphs
from tacit.secure.graph import COMPLETE, INCORRECT, INSECURE, Graph, Plan, plan
from tacit.secure.masks import add_mask_, own_key, packed
from tacit.secure.wire import Refused


def _networkx(graph: Graph) -> networkx.Graph:
    return networkx.Graph((n, m) for n in graph.numbers for m in graph.neighbours(n))


@pytest.mark.parametrize(("n", "k"), [(9, 4), (40, 10), (41, 6)])
def test_neighbours_are_a_harary_graph_on_a_permutation(n: int, k: int) -> None:
    numbers = tuple(range(100, 100 + n))
    graph = Graph(numbers, Plan(k, 2), b"seed")
    made = _networkx(graph)
    assert all(m != a and a in graph.neighbours(m) for a in numbers for m in graph.neighbours(a))
    assert {d for _, d in made.degree} == {k}
    assert networkx.node_connectivity(made) == k  # what makes Harary's graphs special
    assert networkx.faster_could_be_isomorphic(made, networkx.circulant_graph(n, range(1, k // 2 + 1)))
    assert Graph(numbers, Plan(k, 2), b"other").neighbours(100) != graph.neighbours(100)
    with pytest.raises(Refused):
        graph.neighbours(5)


def test_small_cohorts_are_complete() -> None:
    graph = Graph(tuple(range(7)), plan(7, 5, 1), b"")
    assert networkx.utils.graphs_equal(_networkx(graph), networkx.complete_graph(7))
    assert plan(COMPLETE, 90, 5) == Plan(COMPLETE - 1, 90)


def _chance(good: int, total: int) -> float:
    return float(Fraction(good, total))


def test_probabilities_are_those_of_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """With modest demands on a ring of 14, the plan's own bounds hold when all choices are counted."""
    monkeypatch.setattr(graphs, "COMPLETE", 2)
    monkeypatch.setattr(graphs, "INSECURE", 0.8)
    monkeypatch.setattr(graphs, "INCORRECT", 0.8)
    n, staying, colluding = 14, 11, 2
    found = plan.__wrapped__(n, staying, colluding)
    assert found.degree < n - 1
    made = _networkx(Graph(tuple(range(n)), found, b"s"))
    gone = n - staying + colluding
    cut = all_ways = 0
    for removed in itertools.combinations(range(n), gone):
        all_ways += 1
        cut += not networkx.is_connected(made.subgraph(set(range(n)) - set(removed)))
    assert _chance(cut, all_ways) <= 0.4
    bad = unlucky = 0
    for chosen in itertools.combinations(range(n), colluding):
        bad += any(len(set(made[i]) & set(chosen)) >= found.threshold for i in set(range(n)) - set(chosen))
    assert _chance(bad, math.comb(n, colluding)) <= 0.4
    for stay in itertools.combinations(range(n), staying):
        unlucky += any(len(set(made[i]) & set(stay)) + (i in stay) < found.threshold for i in range(n))
    assert _chance(unlucky, math.comb(n, staying)) <= 0.8


@pytest.mark.parametrize(("n", "t", "c"), [(500, 334, 25), (1000, 667, 100), (3000, 2000, 300)])
def test_large_cohorts_keep_their_promises(n: int, t: int, c: int) -> None:
    """The hypergeometric sums again, in whole numbers."""
    found = plan(n, t, c)
    k, half, gone = found.degree, found.degree // 2, n - t + c
    assert k < n // 3
    row = Fraction(math.comb(n - half, gone - half), math.comb(n, gone))

    def at_least(least: int, marked: int) -> Fraction:
        ways = sum(math.comb(marked, i) * math.comb(n - 1 - marked, k - i) for i in range(least, k + 1))
        return Fraction(ways, math.comb(n - 1, k))

    assert n * row + n * at_least(found.threshold, c) <= INSECURE * 1.0001
    assert n * (1 - at_least(found.threshold, t - 1)) <= INCORRECT * 1.0001


def test_masks_are_cheap() -> None:
    """CPU seconds for a million coordinates and one neighbour: about 0.003 here; 0.1 is a mistake."""
    into, key = np.zeros(1_000_000, np.uint32), own_key(bytes(16), bytes(32))
    add_mask_(into, key)
    start = time.process_time()
    for _ in range(5):
        add_mask_(into, key)
    assert (time.process_time() - start) / 5 < 0.1
    start = time.process_time()
    packed(into, 28)
    assert time.process_time() - start < 1.0
