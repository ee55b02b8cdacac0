"""Partitions: which client gets which record.

Every partition is seeded by a generator, gives no record to two clients, and puts each client's records in
random order (so that a prefix is a random sample). The result is stored as compressed rows: client i owns
`indices[offsets[i] : offsets[i+1]]`.

>>> rng = np.random.default_rng(0)
>>> offsets, indices = dirichlet(np.repeat(np.arange(10), 100), clients=4, alpha=0.1, rng=rng)
>>> np.diff(offsets).tolist(), len(set(indices.tolist()))
([250, 250, 250, 250], 1000)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit import randomness
from tacit.data.records import Indices
from tacit.errors import UserError


class Partition(NamedTuple):
    """Compressed rows: client i owns `indices[offsets[i] : offsets[i+1]]`."""

    offsets: NDArray[np.int64]
    indices: Indices


def iid(n: int, clients: int, rng: np.random.Generator) -> Partition:
    """Records distributed at random; client sizes differ by at most one."""
    sizes = _balanced(n, clients)
    return _disjoint(Partition(_offsets(sizes), rng.permutation(n)), n)


def natural(users: NDArray[Any] | None, rng: np.random.Generator | None = None) -> Partition:
    """One client per distinct user id, in sorted order of the ids.

    Without a generator each client's records stay in the order of the data. If the data are in order of
    time, the held-out tail is then the most recent part.
    """
    if users is None:
        raise UserError(
            "these records do not say whose they are; name a user column, or choose another partition"
        )
    ids, owner = np.unique(users, return_inverse=True)
    return _rows(owner.reshape(-1), len(ids), rng)


def natural_apart(users: NDArray[Any], seed: int) -> Partition:
    """The same clients, each with its records in an order that depends only on its name and their number.

    With one generator for all clients, one record more or less at one client would reorder everybody's
    records, and so change what each of the others holds out and trains on.
    """
    ids, owner = np.unique(users, return_inverse=True)
    rows = _rows(owner.reshape(-1), len(ids), None)
    names, keys = _own_keys(ids, rows.offsets, seed, "partition")
    return Partition(rows.offsets, rows.indices[np.lexsort((keys, names))])


def by_name(names: Sequence[Any] | NDArray[Any], share: float, seed: int, purpose: str) -> NDArray[np.bool_]:
    """Which of these names are drawn: each with this probability, depending on its own name only."""
    return np.array([randomness.key(seed, purpose, str(name)) < share * 2**128 for name in names], np.bool_)


def set_aside(contents: Iterable[bytes], share: float, users: bool = False) -> NDArray[np.bool_]:
    """Which records are for testing: each with this probability, by what is in it alone (`contents`).

    If records were drawn by their places among all, one record more would change which of the others are
    trained on, and no clipping bounds that. Of equal records, one more leaves the others what they are. If
    none is drawn, which of 60 records happens once in 500 times, it is the one that was nearest to it, and
    one more may then exchange it; where records have `users`, it could be another user's, so there they are
    too few.
    """
    seen: Counter[bytes] = Counter()
    keys = []
    for content in contents:
        digest = sha256(content).digest()
        keys.append(int.from_bytes(sha256(digest + seen[digest].to_bytes(8)).digest()[:8]))
        seen[digest] += 1
    drawn = np.array(keys, np.uint64)
    aside: NDArray[np.bool_] = drawn < np.uint64(share * 2**64)
    if not aside.any():
        if users:
            raise UserError(
                f"{len(aside)} records are too few to test on {share:.0%} of them; give a file of others to "
                "test on (data.test)"
            )
        aside[drawn.argmin()] = True
    return aside


def named(users: Sequence[Any]) -> NDArray[Any]:
    """Users' ids as an array in which each keeps the name that it would have without the others.

    In a plain array one id of another type would change all of them: 1 becomes 1.0 beside 2.5.
    """
    found, names = np.asarray(users), [str(user) for user in users]
    return found if [str(user) for user in found] == names else np.asarray(names)


def _own_keys(
    ids: Sequence[Any] | NDArray[Any], offsets: Indices, seed: int, purpose: str
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """For each record, client by client: its owner, and a key from the owner's name and the record's position
    among the owner's records.
    """
    sizes = np.diff(offsets)
    owner = np.repeat(np.arange(len(ids)), sizes)
    names = np.array([randomness.key(seed, purpose, str(name)) & (2**64 - 1) for name in ids], np.uint64)
    return owner, randomness.mixed(names[owner], np.arange(len(owner)) - offsets[owner])


def reassigned(partition: Partition, rng: np.random.Generator) -> Partition:
    """The same clients with the same sizes, but with randomly assigned records.

    A control: it shows how much of a method's result is due to differences between clients, not to their
    sizes.
    """
    return _disjoint(
        Partition(partition.offsets, rng.permutation(partition.indices)), int(partition.indices.max()) + 1
    )


def redrawn(partition: Partition, rng: np.random.Generator) -> Partition:
    """The same clients, but each record goes to a client drawn uniformly at random (the IID of paper 003).

    Sizes are then nearly equal. A client may get no record.
    """
    clients = len(partition.offsets) - 1
    records = np.sort(partition.indices)
    rows = _rows(rng.integers(clients, size=len(records)), clients, rng)
    return _disjoint(Partition(rows.offsets, records[rows.indices]), int(records.max()) + 1)


def some(partition: Partition, clients: int, rng: np.random.Generator) -> Partition:
    """A number of the clients, drawn without replacement, in their old order."""
    there = len(partition.offsets) - 1
    if clients > there:
        raise UserError(f"data.partition.clients: {clients} of {there} users; lower it")
    chosen = np.sort(rng.choice(there, clients, replace=False))
    rows = [partition.indices[partition.offsets[c] : partition.offsets[c + 1]] for c in chosen]
    return Partition(_offsets(np.array([len(row) for row in rows])), np.concatenate(rows))


def dirichlet(labels: NDArray[Any], clients: int, alpha: float, rng: np.random.Generator) -> Partition:
    """Each client's class proportions are drawn from Dirichlet(α, …, α); client sizes differ by at most one.

    With small α a client has few classes; with large α all clients are alike. The data have a fixed number of
    records of each class, so not every request can be met. All clients request records at once, by
    multinomial draws from their proportions. If a class is requested more often than it has records, a fair
    lottery decides. Each client then requests the missing records again, from its proportions over the
    remaining classes (drawn anew if it wanted none of those). Every turn settles everything or empties a
    class, so there are few turns. Some realised proportions are therefore flatter than the drawn ones, the
    more so the fewer clients there are.
    """
    if not (alpha > 0 and np.isfinite(alpha)):
        raise UserError(
            f"Dirichlet's α must be a positive number, not {alpha}; 0.1 is very uneven, 100 is even"
        )
    classes, codes = np.unique(labels, return_inverse=True)
    missing = _balanced(len(codes), clients)
    left = np.bincount(codes, minlength=len(classes))
    wish = rng.dirichlet(np.full(len(classes), alpha), size=clients)
    counts = np.zeros((clients, len(classes)), np.int64)
    sizes = missing.copy()
    while missing.any():
        wish[:, left == 0] = 0
        lost = np.flatnonzero(wish.sum(axis=1) < 1e-9)
        wish[np.ix_(lost, left > 0)] = rng.dirichlet(np.full((left > 0).sum(), alpha), size=len(lost))
        wish /= wish.sum(axis=1, keepdims=True)
        asked = rng.multinomial(missing, wish)
        for c in np.flatnonzero(asked.sum(axis=0) > left):
            asked[:, c] = rng.multivariate_hypergeometric(asked[:, c], left[c], method="marginals")
        counts += asked
        left -= asked.sum(axis=0)
        missing -= asked.sum(axis=1)
    assert (counts.sum(axis=1) == sizes).all()
    return _deal(codes, counts, rng)


def classes_per_client(
    labels: NDArray[Any], clients: int, classes: int, rng: np.random.Generator
) -> Partition:
    """The pathological split (N, S): every client holds records of exactly S classes, chosen at random.

    A class is divided into equal parts, one for each client that holds it, and the number of its holders is
    proportional to its size. With equally large classes client sizes are therefore n/N up to rounding. (A
    class larger than n/S would need more holders than there are clients, so its parts are larger.)
    """
    kinds, codes = np.unique(labels, return_inverse=True)
    _balanced(len(codes), clients)
    if not 1 <= classes <= len(kinds):
        raise UserError(
            f"classes per client must be between 1 and the data's {len(kinds)} classes, not {classes}"
        )
    if clients * classes < len(kinds):
        raise UserError(
            f"{clients} clients with {classes} classes each cannot hold all {len(kinds)} classes; "
            f"use at least {-(-len(kinds) // classes)} clients, or more classes per client"
        )
    amount = np.bincount(codes)
    holders = _apportion(amount, clients * classes, np.minimum(clients, amount))
    member = _memberships(holders, clients, classes, rng)
    # A part has ⌊n_c/m_c⌋ records, and one more for the first n_c mod m_c holders. The order of the holders
    # is random; otherwise low-numbered clients would be larger.
    counts = np.zeros(member.shape, np.int64)
    for c, (n, m) in enumerate(zip(amount, holders, strict=True)):
        counts[rng.permutation(np.flatnonzero(member[:, c])), c] = n // m + (np.arange(m) < n % m)
    return _deal(codes, counts, rng)


def _apportion(amount: NDArray[np.int64], seats: int, most: NDArray[np.int64]) -> NDArray[np.int64]:
    """Divide `seats` in proportion to `amount`: at least one each, at most `most` each."""
    if most.sum() < seats:
        raise UserError(
            f"{amount.sum()} records are too few for {seats} parts of one class each; "
            "use fewer clients or fewer classes per client"
        )
    given: NDArray[np.int64] = np.clip(amount * seats // amount.sum(), 1, most)
    while (gap := seats - given.sum()) != 0:
        # Give to, or take from, the one whose part is furthest from the fair size.
        part = amount / given
        able = given < most if gap > 0 else given > 1
        ranked = np.argsort(np.where(able, -part if gap > 0 else part, np.inf), kind="stable")
        chosen = ranked[: min(abs(gap), int(able.sum()))]
        given[chosen] += np.sign(gap)
    return given


def _memberships(
    holders: NDArray[np.int64], clients: int, classes: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """A random 0/1 matrix with `classes` ones in each row and `holders[c]` ones in column c.

    Row by row, classes are drawn in proportion to their remaining places. A class with as many remaining
    places as there are remaining rows must be taken now; taking it first keeps every later row feasible.
    """
    member = np.zeros((clients, len(holders)), np.bool_)
    left = holders.astype(np.float64)
    races = rng.exponential(size=member.shape)
    with np.errstate(divide="ignore"):
        for row in range(clients):
            finish = np.where(left >= clients - row, -1.0, races[row] / left)
            chosen = np.argpartition(finish, classes - 1)[:classes]
            member[row, chosen] = True
            left[chosen] -= 1
    return rng.permutation(member, axis=0)


def _deal(codes: NDArray[Any], counts: NDArray[np.int64], rng: np.random.Generator) -> Partition:
    """Give client i `counts[i, c]` random records of class c."""
    clients, classes = counts.shape
    by_class = rng.permutation(len(codes))
    by_class = by_class[np.argsort(codes[by_class], kind="stable")]
    owner = np.empty(len(codes), np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(clients), classes), counts.T.reshape(-1))
    return _rows(owner, clients, rng)


def _rows(owner: NDArray[Any], clients: int, rng: np.random.Generator | None) -> Partition:
    """Group records by owner; within a client in random order, or in the data's order without a generator."""
    # int32, where it is large enough, halves the memory, which limits the size of a population.
    order: Indices = np.arange(len(owner), dtype=np.int32 if len(owner) < 2**31 else np.int64)
    if rng is not None:
        rng.shuffle(order)
    indices = order[np.argsort(owner[order], kind="stable")]
    sizes = np.bincount(owner, minlength=clients)
    return _disjoint(Partition(_offsets(sizes), indices), len(owner))


def _balanced(n: int, clients: int) -> NDArray[np.int64]:
    if clients < 1:
        raise UserError(f"a federation needs at least one client, not {clients}")
    if clients > n:
        raise UserError(f"{clients} clients cannot share {n} records; use at most {n} clients")
    return n // clients + (np.arange(clients) < n % clients)


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)])


def _disjoint(partition: Partition, n: int) -> Partition:
    """Refuse a partition that gives a record to two clients: the guarantee would protect neither copy."""
    seen = np.zeros(n, np.bool_)
    seen[partition.indices] = True
    if int(seen.sum()) != len(partition.indices):
        raise AssertionError("a record belongs to two clients")
    return partition
