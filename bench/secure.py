"""The cost of secure aggregation: CPU seconds and bytes of one client and of the server, in one thread.

    python bench/secure.py                         a million coordinates, cohorts of 100 and 1000; minutes
    python bench/secure.py --cohorts 20 --coordinates 100000

One client is simulated in full; the others only as far as needed to send it messages. The server's part is
measured for a few clients and multiplied by the cohort. Processor time is measured, so a busy machine does
not matter.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from tacit.secure import Agreement, Client, Delivery, Keys, Roster, Survivors, Terms, bits_needed, ec, encode
from tacit.secure.graph import graph_of
from tacit.secure.masks import SECRET, add_mask_, combined, own_key, seal, split, unpacked
from tacit.secure.messages import Advertise, Masked, opened, signed, view

FEW = 3
T = TypeVar("T")


def timed(act: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = act()
    return time.process_time() - start, result


def measure(cohort: int, coordinates: int, threshold: float, colluding: float, curve: str) -> None:
    kind = {"P-256": ec.SECP256R1, "P-384": ec.SECP384R1}[curve]
    identities = {n: ec.generate_private_key(kind()) for n in range(cohort)}
    roster = Roster({n: key.public_key() for n, key in identities.items()})
    terms = Terms.fresh(
        run=bytes(16),
        round=0,
        attempt=0,
        config=bytes(32),
        members=range(cohort),
        length=coordinates,
        bits=bits_needed(cohort, 1 << 20, 2.0**20 / math.sqrt(threshold)),
        threshold=math.ceil(threshold * cohort),
        colluding=math.floor(colluding * cohort),
    )
    clients = {n: Client(n, key, roster, terms) for n, key in identities.items()}
    me = clients[0]
    seconds, up, down = {}, {}, {}
    others = {n: client.advertise() for n, client in clients.items() if n}
    seconds["advertise"], mine = timed(me.advertise)
    keys = Keys((mine, *others.values()))
    graph = graph_of(keys.advertisements, range(cohort), terms.threshold, terms.colluding)
    seconds["share keys"], shared = timed(lambda: me.share_keys(keys))
    _, advertised = opened(Advertise, terms, roster, mine)
    boxes = (
        (n, seal(clients[n]._share_key, advertised.share_key, terms.digest, bytes(2 * SECRET)))
        for n in graph.neighbours(0)
    )
    delivery = Delivery(terms.members, tuple(boxes))
    vector = np.random.default_rng(0).integers(-(2**20), 2**20, coordinates)
    seconds["mask"], masked = timed(lambda: me.masked_input(delivery, vector))
    survivors = Survivors(terms.members)
    seconds["agree"], agreed = timed(lambda: me.consistency(survivors))
    seen = view(keys, terms.members, terms.members)
    signatures = [signed(identities[n], terms, n, seen) for n in range(1, terms.threshold)]
    agreement = Agreement((agreed, *signatures))
    seconds["unmask"], unmasked = timed(lambda: me.unmask(agreement))
    up = {"advertise": mine, "share keys": shared, "mask": masked, "agree": agreed, "unmask": unmasked}
    down = {
        "advertise": encode(terms),
        "share keys": encode(keys),
        "mask": encode(delivery),
        "agree": encode(survivors),
        "unmask": encode(agreement),
    }
    print(
        f"\ncohort {cohort:,}, {graph.plan.degree} neighbours, {coordinates:,} coordinates of {terms.bits} "
        f"bits, {curve}; {graph.plan.threshold} shares give a secret away"
    )
    print(f"{'client':<12}{'CPU s':>9}{'bytes up':>14}{'bytes down':>14}")
    for step, took in seconds.items():
        print(f"{step:<12}{took:>9.3f}{len(up[step]):>14,}{len(down[step]):>14,}")
    totals = sum(seconds.values()), sum(map(len, up.values())), sum(map(len, down.values()))
    print(f"{'all':<12}{totals[0]:>9.3f}{totals[1]:>14,}{totals[2]:>14,}")
    # The server: each upload is verified, unpacked and added; each secret is combined and its mask removed.
    total = np.zeros(coordinates, np.uint32 if terms.bits <= 32 else np.uint64)

    def take() -> None:
        _, message = opened(Masked, terms, roster, masked)
        np.add(total, unpacked(message.vector, coordinates, terms.bits), out=total)

    shares = split(bytes(16), graph.plan.threshold, len(graph.holders(0)))
    chosen = dict(enumerate(shares[: graph.plan.threshold]))
    adding = sum(timed(take)[0] for _ in range(FEW)) / FEW
    combining = sum(timed(lambda: combined(chosen))[0] for _ in range(FEW)) / FEW
    removing = (
        sum(timed(lambda: add_mask_(total, own_key(bytes(16), bytes(32))))[0] for _ in range(FEW)) / FEW
    )
    print(
        f"server, {cohort:,} × (add {adding:.3f} + combine shares {combining:.3f} + remove a mask "
        f"{removing:.4f}) = {cohort * (adding + combining + removing):.0f} CPU s, and for each client that "
        f"dropped out {graph.plan.degree} × {removing:.4f} = {graph.plan.degree * removing:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cohorts", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--coordinates", type=int, default=1_000_000)
    parser.add_argument("--threshold", type=float, default=2 / 3)
    parser.add_argument("--colluding", type=float, default=0.1)
    parser.add_argument("--curve", choices=["P-256", "P-384"], default="P-384")
    given = parser.parse_args()
    for cohort in given.cohorts:
        measure(cohort, given.coordinates, given.threshold, given.colluding, given.curve)


if __name__ == "__main__":
    main()
