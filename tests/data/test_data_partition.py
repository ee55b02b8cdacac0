"""Partitions give every record to exactly one client, with the requested label mix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tacit.data import Partition, Population, classes_per_client, dirichlet, iid, natural
from tacit.data.partition import _apportion, _disjoint
from tacit.data.records import ArrayRecords
from tacit.errors import UserError

Labels = NDArray[np.int64]


def rows(partition: Partition) -> list[NDArray[np.int64]]:
    return np.split(partition.indices, partition.offsets[1:-1])


def histograms(partition: Partition, labels: Labels) -> NDArray[np.int64]:
    classes = int(labels.max()) + 1
    return np.array([np.bincount(labels[r], minlength=classes) for r in rows(partition)])


def assert_each_record_once(partition: Partition, n: int) -> None:
    assert sorted(partition.indices.tolist()) == list(range(n))
    assert partition.offsets[0] == 0 and partition.offsets[-1] == n


labelled = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(lambda y: np.array(y, np.int64))


@given(n=st.integers(1, 200), data=st.data(), seed=st.integers(0, 99))
def test_iid_is_complete_and_balanced(n: int, data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, n))
    partition = iid(n, clients, np.random.default_rng(seed))
    assert_each_record_once(partition, n)
    assert len(partition.offsets) == clients + 1
    assert np.ptp(np.diff(partition.offsets)) <= 1


@settings(deadline=None)
@given(labels=labelled, alpha=st.floats(1e-8, 1e8), data=st.data(), seed=st.integers(0, 99))
def test_dirichlet_is_complete_and_balanced(
    labels: Labels, alpha: float, data: st.DataObject, seed: int
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    partition = dirichlet(labels, clients, alpha, np.random.default_rng(seed))
    assert_each_record_once(partition, len(labels))
    assert np.ptp(np.diff(partition.offsets)) <= 1


@settings(deadline=None)
@given(labels=labelled, data=st.data(), seed=st.integers(0, 99))
def test_classes_per_client_is_complete_and_exact(labels: Labels, data: st.DataObject, seed: int) -> None:
    kinds = len(np.unique(labels))
    clients = data.draw(st.integers(1, len(labels)))
    classes = data.draw(st.integers(1, kinds))
    try:
        partition = classes_per_client(labels, clients, classes, np.random.default_rng(seed))
    except UserError:
        amount = np.unique(labels, return_counts=True)[1]
        too_few_places = clients * classes < kinds
        too_few_records = np.minimum(amount, clients).sum() < clients * classes
        assert too_few_places or too_few_records
        return
    assert_each_record_once(partition, len(labels))
    assert ((histograms(partition, labels) > 0).sum(axis=1) == classes).all()


@given(
    amount=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    data=st.data(),
)
def test_seats_are_shared_in_proportion(amount: list[int], data: st.DataObject) -> None:
    sizes = np.array(amount)
    seats = data.draw(st.integers(len(amount), int(sizes.sum())))
    given_out = _apportion(sizes, seats, sizes)
    assert given_out.sum() == seats and (given_out >= 1).all() and (given_out <= sizes).all()


def test_the_split_of_paper_002_has_equal_clients() -> None:
    labels = np.repeat(np.arange(10), 5000)
    counts = histograms(classes_per_client(labels, 1000, 2, np.random.default_rng(0)), labels)
    assert (counts.sum(axis=1) == 50).all()
    assert set(np.unique(counts)) == {0, 25}
    pairs = {tuple(np.flatnonzero(row)) for row in counts}
    assert len(pairs) == 45, "every pair of classes should occur among a thousand clients"


def test_unequal_classes_get_holders_in_proportion() -> None:
    labels = np.repeat(np.arange(3), [600, 300, 100])
    counts = histograms(classes_per_client(labels, 50, 1, np.random.default_rng(0)), labels)
    assert (counts > 0).sum(axis=0).tolist() == [30, 15, 5]
    assert (counts.sum(axis=1) == 20).all()


def test_large_alpha_is_uniform_and_small_alpha_nearly_one_class() -> None:
    labels = np.repeat(np.arange(10), 2000)
    even = histograms(dirichlet(labels, 100, 1e6, np.random.default_rng(0)), labels)
    # Multinomial counts of 200 records over 10 classes: mean 20, deviation 4.2; 6 deviations over 1000 cells
    # is a false alarm once in a million seeds.
    assert np.abs(even - 20).max() <= 6 * np.sqrt(200 * 0.1 * 0.9)
    uneven = histograms(dirichlet(labels, 100, 1e-3, np.random.default_rng(0)), labels)
    # Supply is fixed, so some clients must take what is left; most hold one class.
    assert np.median(uneven.max(axis=1) / 200) > 0.75
    assert (uneven > 0).sum(axis=1).mean() < 2.5


def test_dirichlet_proportions_have_the_right_spread() -> None:
    """E[p²] = (α+1)/(C(Cα+1)) for a symmetric Dirichlet over C classes; the supply flattens it a bit."""
    labels = np.repeat(np.arange(10), 10_000)
    for alpha in (0.1, 0.6, 5.0):
        counts = histograms(dirichlet(labels, 1000, alpha, np.random.default_rng(1)), labels)
        n = 100
        # Unbiased for p² under multinomial counts.
        second = (counts * (counts - 1)).mean() / (n * (n - 1))
        expected = (alpha + 1) / (10 * (10 * alpha + 1))
        assert 0.9 * expected < second < 1.03 * expected, alpha


def test_clients_do_not_differ_by_their_number() -> None:
    """A sequential splitter would starve late clients; here the first and last half are alike."""
    labels = np.repeat(np.arange(10), 2000)
    counts = histograms(dirichlet(labels, 400, 0.1, np.random.default_rng(3)), labels)
    largest = counts.max(axis=1) / 50
    difference = largest[:200].mean() - largest[200:].mean()
    # Two-sided 5-sigma: a false alarm for one seed in two million.
    assert abs(difference) < 5 * largest.std() * np.sqrt(2 / 200)


def test_natural_clients_are_the_users() -> None:
    users = np.array(["bo", "al", "bo", "cy", "al", "bo"])
    partition = natural(users)
    assert [r.tolist() for r in rows(partition)] == [[1, 4], [0, 2, 5], [3]]
    shuffled = natural(users, np.random.default_rng(0))
    assert [sorted(r.tolist()) for r in rows(shuffled)] == [[1, 4], [0, 2, 5], [3]]


def test_each_clients_records_are_in_random_order() -> None:
    """Or a held-out tail would be one class: the last record's class must not follow from the first's."""
    labels = np.repeat(np.arange(2), 5000)
    for partition in (
        dirichlet(labels, 500, 100.0, np.random.default_rng(0)),
        classes_per_client(labels, 500, 2, np.random.default_rng(0)),
        natural(np.tile(np.arange(500), 20), np.random.default_rng(0)),
    ):
        last = np.array([labels[r[-1]] for r in rows(partition)])
        # Binomial(500, 1/2): outside 250 ± 56 (5 deviations) for one seed in two million.
        assert abs(last.sum() - 250) < 56


@pytest.mark.parametrize(
    "split",
    [
        lambda labels, rng: iid(len(labels), 7, rng),
        lambda labels, rng: dirichlet(labels, 7, 0.3, rng),
        lambda labels, rng: classes_per_client(labels, 7, 3, rng),
    ],
)
def test_the_seed_decides(split: Callable[[Labels, np.random.Generator], Partition]) -> None:
    labels = np.repeat(np.arange(5), 40)
    first, again, other = (split(labels, np.random.default_rng(s)) for s in (1, 1, 2))
    assert np.array_equal(first.indices, again.indices) and np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.indices, other.indices)


def test_a_record_in_two_clients_is_refused() -> None:
    with pytest.raises(AssertionError, match="two clients"):
        _disjoint(Partition(np.array([0, 2, 3]), np.array([0, 1, 1])), 3)


@pytest.mark.parametrize(
    ("split", "what"),
    [
        (lambda y, r: iid(10, 11, r), "11 clients cannot share 10 records"),
        (lambda y, r: iid(10, 0, r), "at least one client"),
        (lambda y, r: dirichlet(y, 11, 0.1, r), "use at most 10 clients"),
        (lambda y, r: dirichlet(y, 2, 0.0, r), "α must be a positive"),
        (lambda y, r: dirichlet(y, 2, -1.0, r), "α must be a positive"),
        (lambda y, r: dirichlet(y, 2, float("nan"), r), "α must be a positive"),
        (lambda y, r: dirichlet(y, 2, float("inf"), r), "α must be a positive"),
        (lambda y, r: classes_per_client(y, 2, 6, r), "between 1 and the data's 5 classes"),
        (lambda y, r: classes_per_client(y, 2, 0, r), "between 1 and the data's 5 classes"),
        (lambda y, r: classes_per_client(y, 2, 2, r), "use at least 3 clients"),
        (lambda y, r: classes_per_client(y, 8, 3, r), "too few"),
        (lambda y, r: natural(None), "user column"),
    ],
)
def test_impossible_splits_are_refused(
    split: Callable[[Labels, np.random.Generator], Partition], what: str
) -> None:
    with pytest.raises(UserError, match=what):
        split(np.repeat(np.arange(5), 2), np.random.default_rng(0))


def records(n: int) -> ArrayRecords:
    return ArrayRecords(np.broadcast_to(np.uint8(0), (n, 1, 1, 1)), np.broadcast_to(np.int64(0), n))


@given(
    sizes=st.lists(st.integers(0, 40) | st.just(100), min_size=1, max_size=12),
    holdout=st.sampled_from([0.0, 0.1, 0.29, 0.5]),
)
def test_train_and_test_share_out_each_clients_records(sizes: list[int], holdout: float) -> None:
    n = sum(sizes)
    order = np.random.default_rng(0).permutation(n)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    population = Population(records(n), offsets, order, holdout)
    assert len(population) == len(sizes)
    for client, size in enumerate(sizes):
        train, test = population.train(client), population.test(client)
        own = order[offsets[client] : offsets[client + 1]]
        assert np.concatenate([train, test]).tolist() == own.tolist()
        assert len(test) == round(100 * holdout) * size // 100
        assert population.sizes[client] == len(train)


def test_ten_million_clients_fit() -> None:
    n = 10_000_000
    population = Population(records(n), np.arange(n + 1), np.arange(n), holdout=0.1)
    held = population.offsets.nbytes + population.indices.nbytes + population.sizes.nbytes
    assert held < 200e6
    assert population.sizes is population.sizes, "computed once"
    assert population.train(n - 1).tolist() == [n - 1] and population.test(n - 1).size == 0


def test_a_population_refuses_nonsense() -> None:
    for offsets, holdout in (([0, 2], 0.0), ([1, 3], 0.0), ([0, 3], 1.0), ([0, 3], -0.1)):
        with pytest.raises(ValueError):
            Population(records(3), np.array(offsets), np.arange(3), holdout)
    with pytest.raises(IndexError, match="client 1 of 1"):
        Population(records(3), np.array([0, 3]), np.arange(3)).train(1)
