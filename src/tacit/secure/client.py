"""A client of secure aggregation: it takes five steps, in this order, once.

Bonawitz et al. 2017 ("Practical secure aggregation for privacy-preserving machine learning", CCS), the
variant for a server that may lie, on the graphs of Bell et al. 2020. For the upload x_i the server gets

    y_i = x_i + own_i + Σ_{j > i} pair_ij − Σ_{j < i} pair_ij      modulo 2ᵇ,

where pair_ij comes from a key that only i and j can compute, and own_i from a seed of i's. In the sum over
all clients the pairs cancel. For a client whose upload arrived, the others reveal shares of its seed. For one
whose upload did not arrive, they reveal shares of its mask key, with which the server removes the pairs that
did not cancel. Nobody reveals both.

Why a lying server learns either one sum of at least t uploads or nothing (complete graph, at most c
colluders, 2t > n + c):

1. A client signs one view (advertisements, participants, survivors) and unmasks only if t members signed the
   same. Two views would need 2t signatures from n members, of whom honest ones sign once: 2t ≤ n + c. So all
   that honest clients give away belongs to one view, of participants P and survivors S ⊆ P, |S| ≥ t.
2. No honest survivor's mask key is ever reconstructed: it takes t shares, and only c < t are given away. So
   pairs of honest survivors stay secret, and a sum of y's shows something only if they cancel in it.
3. Let T be the honest clients who signed: |T| ≥ t − c, and each masked itself with all of P. Another honest
   survivor i may have been told of other participants; it demanded t of them, itself included, so t − c
   honest ones. These and T together are more than the n − c honest clients there are, so one of T is among
   them: i shares a pair with it, and their uploads show up together or not at all. So do those of T.

A refusal ends the client's part in the round, and its secrets are forgotten, so a server cannot try twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from tacit.secure.graph import Graph, graph_of
from tacit.secure.identity import PrivateKey, Roster
from tacit.secure.masks import (
    SECRET,
    add_mask_,
    commitment,
    lanes,
    mask_private,
    own_key,
    packed,
    pair_key,
    pieces,
    public_bytes,
    seal,
    split,
    unseal,
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
    checked_numbers,
    enough,
    opened,
    opened_keys,
    signed,
    view,
)
from tacit.secure.terms import Terms
from tacit.secure.wire import Refused

STEPS = ("advertise", "share_keys", "masked_input", "consistency", "unmask")


class Client:
    """One member's part in one attempt at a round. Each step takes the server's message and returns the
    signed bytes to send back.
    """

    def __init__(
        self,
        number: int,
        identity: PrivateKey,
        roster: Roster,
        terms: Terms,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`identity` and `roster` are the client's own; `terms` come from the server. The caller has checked
        those terms that are a matter of policy (the run, the config, the threshold).
        """
        if number not in terms.members:
            raise Refused(f"client {number} is not a member of the cohort")
        self.number, self.terms = number, terms
        self._identity, self._roster = identity, roster
        self._seed, self._mask_seed = entropy(SECRET), entropy(SECRET)
        self._mask_key = mask_private(self._mask_seed, terms.digest)
        self._share_key = X25519PrivateKey.from_private_bytes(entropy(32))
        self._held: dict[int, tuple[bytes, bytes]] = {}
        self._step: int | None = 0
        self._keys: Keys
        self._others: dict[int, Advertise]
        self._graph: Graph
        self._participants: frozenset[int]
        self._survivors: frozenset[int]
        self._view: Agreed

    @property
    def due(self) -> str | None:
        """The next step; None if the client's part has ended."""
        return None if self._step is None else STEPS[self._step]

    def advertise(self) -> bytes:
        """Fresh public keys, signed."""
        with self._in_step("advertise"):
            return self._signed(self._advertised)

    def share_keys(self, keys: Keys) -> bytes:
        """Shares of both secrets, sealed for each neighbour. Checks every advertisement's signature."""
        with self._in_step("share_keys"):
            others = opened_keys(keys, self.terms, self._roster)
            if others.get(self.number) != self._advertised:
                raise Refused(f"client {self.number}: the server does not pass on what it advertised")
            self._keys, self._others = keys, others
            self._graph = graph_of(keys.advertisements, others, self.terms.threshold, self.terms.colluding)
            holders = self._graph.holders(self.number)
            threshold = self._graph.plan.threshold
            seeds = split(self._seed, threshold, len(holders))
            masks = split(self._mask_seed, threshold, len(holders))
            boxes = []
            for holder, seed, mask in zip(holders, seeds, masks, strict=True):
                if holder == self.number:
                    self._held[holder] = seed, mask
                    continue
                theirs = others[holder].share_key
                boxes.append((holder, seal(self._share_key, theirs, self.terms.digest, seed + mask)))
            return self._signed(Shares(tuple(boxes)))

    def masked_input(self, delivery: Delivery, vector: NDArray[np.int64]) -> bytes:
        """The masked upload."""
        with self._in_step("masked_input"):
            terms = self.terms
            self._participants = checked_numbers(delivery.participants, self._others, terms)
            neighbours = [n for n in self._graph.neighbours(self.number) if n in self._participants]
            if self.number not in self._participants or [n for n, _ in delivery.boxes] != neighbours:
                raise Refused(f"client {self.number}: the server holds shares back, or makes some up")
            for sender, box in delivery.boxes:
                content = unseal(self._share_key, self._others[sender].share_key, terms.digest, box)
                seed, mask = pieces(content, (SECRET, SECRET))
                self._held[sender] = seed, mask
            masked = lanes(_checked(vector, terms), terms.bits)
            add_mask_(masked, own_key(self._seed, terms.digest))
            for other in neighbours:
                key = pair_key(self._mask_key, self._others[other].mask_key, terms.digest)
                add_mask_(masked, key, minus=other < self.number)
            return self._signed(Masked(packed(masked, terms.bits)))

    def consistency(self, survivors: Survivors) -> bytes:
        """A signature under what the server has told this client; the client signs only once."""
        with self._in_step("consistency"):
            self._survivors = checked_numbers(survivors.numbers, self._participants, self.terms)
            if self.number not in self._survivors:
                raise Refused(f"client {self.number}: the server has lost its upload")
            self._view = view(self._keys, sorted(self._participants), survivors.numbers)
            return self._signed(self._view)

    def unmask(self, agreement: Agreement) -> bytes:
        """Shares of what the server needs for the sum over the survivors, after t of them signed for it."""
        with self._in_step("unmask"):
            agreed = set()
            for data in agreement.signed:
                sender, theirs = opened(Agreed, self.terms, self._roster, data)
                if theirs != self._view or sender not in self._survivors or sender in agreed:
                    raise Refused(f"client {sender} was told something else, or is counted twice")
                agreed.add(sender)
            enough(agreed, self.terms)
            seeds = [(n, self._held[n][0]) for n in sorted(self._held) if n in self._survivors]
            masks = [(n, self._held[n][1]) for n in sorted(self._held) if n not in self._survivors]
            return self._signed(Unmask(tuple(seeds), tuple(masks)))

    @property
    def _advertised(self) -> Advertise:
        mask, share = public_bytes(self._mask_key), public_bytes(self._share_key)
        return Advertise(mask, share, commitment(self._seed, self.terms.digest))

    def _signed(self, message: Advertise | Shares | Masked | Agreed | Unmask) -> bytes:
        return signed(self._identity, self.terms, self.number, message)

    @contextmanager
    def _in_step(self, name: str) -> Iterator[None]:
        """Run the step that is due; any error in it, or a step out of order, ends the client's part."""
        due, self._step = self._step, None
        try:
            if due is None or STEPS[due] != name:
                state = "its part has ended" if due is None else f"{STEPS[due]} is due"
                raise Refused(f"client {self.number}: asked for {name} where {state}")
            yield
        except BaseException:
            self._forget()
            raise
        if name == STEPS[-1]:
            self._forget()
        else:
            self._step = due + 1

    def _forget(self) -> None:
        for secret in ("_seed", "_mask_seed", "_mask_key", "_share_key"):
            self.__dict__.pop(secret, None)
        self._held = {}
        self._step = None


def _checked(vector: NDArray[np.int64], terms: Terms) -> NDArray[np.int64]:
    """Refuse an upload of another shape, or with values that masking and unmasking would not preserve."""
    if vector.dtype != np.int64 or vector.shape != (terms.length,):
        raise Refused(f"an upload is {terms.length:,} whole numbers, not {vector.shape} of {vector.dtype}")
    most = 1 << terms.bits - 1
    if int(vector.max()) >= most or int(vector.min()) < -most:
        raise Refused(f"an upload has a number that {terms.bits} bits cannot hold; nothing was sent")
    return vector
