"""The server of secure aggregation: it forwards messages, adds up masked uploads, and removes the remaining
masks.

It holds one running sum, never a list of uploads. A message that the stage does not expect is `Refused` and
changes nothing. Its sender may send a better one; otherwise the sender is absent. With fewer than t clients
left, the round has no sum.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tacit.secure.graph import Graph, graph_of
from tacit.secure.identity import Roster
from tacit.secure.masks import (
    add_mask_,
    centred,
    combined,
    commitment,
    lanes,
    mask_private,
    own_key,
    pair_key,
    public_bytes,
    unpacked,
)
from tacit.secure.messages import (
    Advertise,
    Agreed,
    Agreement,
    Delivery,
    Keys,
    Masked,
    Shares,
    Survivors,
    Unmask,
    enough,
    opened,
    view,
)
from tacit.secure.terms import Terms
from tacit.secure.wire import Refused

TRIES = 300
"""How many groups of shares are tried to reconstruct a secret."""


class Stage(IntEnum):
    """What the server is waiting for."""

    ADVERTISE = 0
    SHARES = 1
    MASKED = 2
    AGREED = 3
    UNMASK = 4
    DONE = 5


class Server:
    """One attempt at a round. `receive` takes what clients send; each of the other methods ends a stage."""

    def __init__(self, terms: Terms, roster: Roster) -> None:
        self.terms, self._roster = terms, roster
        self.stage = Stage.ADVERTISE
        self._advertised: dict[int, tuple[bytes, Advertise]] = {}
        self._boxes: dict[int, dict[int, bytes]] = {}
        self._sum = lanes(np.zeros(terms.length, np.int64), terms.bits)
        self._arrived: set[int] = set()
        self._agreed: dict[int, bytes] = {}
        self._unmasked: dict[int, Unmask] = {}
        self._suspects: set[int] = set()
        self._graph: Graph
        self._keys: Keys
        self._view: Agreed

    def receive(self, data: bytes) -> int:
        """Process a client's message of the present stage; returns the client's number."""
        taking: dict[Stage, Callable[[bytes], int]] = {
            Stage.ADVERTISE: self._take_advertisement,
            Stage.SHARES: self._take_shares,
            Stage.MASKED: self._take_masked,
            Stage.AGREED: self._take_agreed,
            Stage.UNMASK: self._take_unmask,
        }
        if self.stage not in taking:
            raise Refused("the round is over")
        return taking[self.stage](data)

    def keys(self) -> Keys:
        """All advertisements, for all clients who advertised."""
        self._end(Stage.ADVERTISE, self._advertised)
        self._advertised = dict(sorted(self._advertised.items()))
        self._keys = Keys(tuple(data for data, _ in self._advertised.values()))
        self._graph = graph_of(
            self._keys.advertisements, self._advertised, self.terms.threshold, self.terms.colluding
        )
        return self._keys

    def deliveries(self) -> dict[int, Delivery]:
        """For each client that sent shares, the shares that others sent to it."""
        self._end(Stage.SHARES, self._boxes)
        numbers = tuple(sorted(self._boxes))
        return {
            to: Delivery(
                numbers,
                tuple((n, self._boxes[n][to]) for n in self._graph.neighbours(to) if n in self._boxes),
            )
            for to in numbers
        }

    def survivors(self) -> Survivors:
        """The clients whose uploads are in the sum."""
        self._end(Stage.MASKED, self._arrived)
        arrived = tuple(sorted(self._arrived))
        self._view = view(self._keys, sorted(self._boxes), arrived)
        return Survivors(arrived)

    def agreement(self) -> Agreement:
        """The clients' signatures under one view."""
        self._end(Stage.AGREED, self._agreed)
        return Agreement(tuple(self._agreed[n] for n in sorted(self._agreed)))

    def result(self) -> NDArray[np.int64]:
        """The sum of the survivors' uploads, modulo 2^bits, between −2^(bits−1) and 2^(bits−1) − 1."""
        self._end(Stage.UNMASK, self._unmasked)
        terms, total = self.terms.digest, self._sum
        for number in sorted(self._boxes):
            if number in self._arrived:
                add_mask_(total, own_key(self._seed_of(number), terms), minus=True)
                continue
            private = mask_private(self._mask_seed_of(number), terms)
            for other in self._graph.neighbours(number):
                if other in self._arrived:  # its upload contains the pair
                    key = pair_key(private, self._advertised[other][1].mask_key, terms)
                    add_mask_(total, key, minus=number > other)
        return centred(total, self.terms.bits)

    # --- what clients send ------------------------------------------------------------------------------

    def _take_advertisement(self, data: bytes) -> int:
        sender, message = opened(Advertise, self.terms, self._roster, data)
        self._refuse_second(sender, self._advertised)
        known = {key for _, one in self._advertised.values() for key in (one.mask_key, one.share_key)}
        if message.mask_key == message.share_key or known & {message.mask_key, message.share_key}:
            raise Refused(f"client {sender} advertises a key a second time, or another's")
        self._advertised[sender] = data, message
        return sender

    def _take_shares(self, data: bytes) -> int:
        sender, message = opened(Shares, self.terms, self._roster, data)
        self._refuse_second(sender, self._boxes)
        self._refuse_absent(sender, self._advertised)
        if [to for to, _ in message.boxes] != self._graph.neighbours(sender):
            raise Refused(f"client {sender}: its shares are not for its neighbours, one each")
        self._boxes[sender] = dict(message.boxes)
        return sender

    def _take_masked(self, data: bytes) -> int:
        sender, message = opened(Masked, self.terms, self._roster, data)
        self._refuse_second(sender, self._arrived)
        self._refuse_absent(sender, self._boxes)
        upload = unpacked(message.vector, self.terms.length, self.terms.bits)
        np.add(self._sum, upload, out=self._sum)
        self._arrived.add(sender)
        return sender

    def _take_agreed(self, data: bytes) -> int:
        sender, message = opened(Agreed, self.terms, self._roster, data)
        self._refuse_second(sender, self._agreed)
        self._refuse_absent(sender, self._arrived)
        if message != self._view:
            raise Refused(f"client {sender} signed something else than it was told")
        self._agreed[sender] = data
        return sender

    def _take_unmask(self, data: bytes) -> int:
        sender, message = opened(Unmask, self.terms, self._roster, data)
        self._refuse_second(sender, self._unmasked)
        self._refuse_absent(sender, self._arrived)
        held = [n for n in self._graph.holders(sender) if n in self._boxes]
        if [n for n, _ in message.seeds] != [n for n in held if n in self._arrived] or [
            n for n, _ in message.keys
        ] != [n for n in held if n not in self._arrived]:
            raise Refused(f"client {sender}: these are not the shares that it was asked for")
        self._unmasked[sender] = message
        return sender

    def _refuse_second(self, sender: int, seen: object) -> None:
        assert isinstance(seen, dict | set)
        if sender in seen:
            raise Refused(f"client {sender} has sent this already")

    def _refuse_absent(self, sender: int, before: object) -> None:
        assert isinstance(before, dict | set)
        if sender not in before:
            raise Refused(f"client {sender} was absent at an earlier stage")

    def _end(self, stage: Stage, heard: object) -> None:
        """End a stage; with too few clients, end the round."""
        assert isinstance(heard, dict | set)
        if self.stage != stage:
            raise Refused(f"the server is at {self.stage.name}, not at {stage.name}")
        self.stage = Stage.DONE
        enough(heard, self.terms)
        self.stage = Stage(stage + 1)

    # --- secrets of clients -----------------------------------------------------------------------------

    def _seed_of(self, number: int) -> bytes:
        """The seed of the own mask of a client whose upload arrived."""
        wanted = self._advertised[number][1].commitment
        shares = self._shares(number, lambda message: message.seeds)
        return self._secret(number, shares, lambda seed: commitment(seed, self.terms.digest) == wanted)

    def _mask_seed_of(self, number: int) -> bytes:
        """The seed of the mask key of a client whose upload did not arrive."""
        wanted = self._advertised[number][1].mask_key
        shares = self._shares(number, lambda message: message.keys)
        return self._secret(
            number, shares, lambda seed: public_bytes(mask_private(seed, self.terms.digest)) == wanted
        )

    def _shares(
        self, number: int, part: Callable[[Unmask], tuple[tuple[int, bytes], ...]]
    ) -> dict[int, bytes]:
        """Shares by their place among the client's holders."""
        holders = enumerate(self._graph.holders(number))
        return {place: dict(part(self._unmasked[h]))[number] for place, h in holders if h in self._unmasked}

    def _secret(self, number: int, shares: dict[int, bytes], fits: Callable[[bytes], bool]) -> bytes:
        """The secret from these shares. Wrong shares are noticed, and other groups are tried; a client that
        sent a wrong share is used last from then on.
        """
        threshold, holders = self._graph.plan.threshold, self._graph.holders(number)
        places = sorted(shares, key=lambda place: (holders[place] in self._suspects, place))
        for tried, chosen in enumerate(_groups(places, threshold)):
            secret = combined({place: shares[place] for place in chosen})
            if fits(secret):
                if tried:
                    self._suspect(holders, shares, chosen, secret)
                return secret
        what = "wrong" if len(shares) >= threshold else "too few"
        raise Refused(
            f"secure aggregation, round {self.terms.round + 1}: the shares of client {number}'s secret are "
            f"{what}; nothing was released"
        )

    def _suspect(
        self, holders: list[int], shares: dict[int, bytes], right: Sequence[int], secret: bytes
    ) -> None:
        """Find the holders whose shares do not lie on the polynomial of the right ones."""
        for place in shares.keys() - set(right):
            swapped = (*right[1:], place)
            if combined({p: shares[p] for p in swapped}) != secret:
                self._suspects.add(holders[place])


def _groups(places: list[int], size: int) -> Iterator[tuple[int, ...]]:
    """Groups of `size` places: the first `size` places, then others in case some shares are wrong. These are
    all groups if there are few, and otherwise `TRIES` random ones, each of which misses w wrong shares of m
    with a chance of about (1 − size/m)ʷ.
    """
    if len(places) < size:
        return
    yield tuple(places[:size])
    if math.comb(len(places), size) <= TRIES:
        yield from itertools.islice(itertools.combinations(places, size), 1, None)
        return
    rng = random.Random(0)  # knowing which groups are tried gives no advantage
    for _ in range(TRIES):
        yield tuple(rng.sample(places, size))
