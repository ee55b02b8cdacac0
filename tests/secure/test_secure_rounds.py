"""Rounds of secure aggregation from start to end: dropouts at each stage, wrong shares, lying servers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_parties import STAGES, Parties, identity, roster_of, terms_for, uploads

from tacit.secure import Agreement, Client, Delivery, Keys, Refused, Roster, Survivors, decode, encode
from tacit.secure import graph as graphs
from tacit.secure import server as module
from tacit.secure.graph import Plan
from tacit.secure.messages import Advertise, Agreed, Signed, Unmask, opened, signed

N, T = 8, 6


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("gone", [0, 1, N - T, N - T + 1, T - 1, N])
def test_dropouts_at_each_stage(stage: str, gone: int) -> None:
    terms = terms_for(N, threshold=T, bits=24)
    vectors = uploads(terms)
    left = set(range(gone, N))
    parties = Parties(terms, {stage: set(range(gone))})
    if gone > N - T:
        with pytest.raises(Refused, match=f"round 4: {N - gone} of {N} clients are left where {T} must be"):
            parties.sum(vectors)
        return
    expected = sum(vectors[n] for n in (left if stage in STAGES[:3] else range(N)))
    assert np.array_equal(parties.sum(vectors), expected)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_sum_is_that_of_the_survivors_or_there_is_none(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 7), "members")
    t = data.draw(st.integers(n // 2 + 1, n), "threshold")
    terms = terms_for(
        n,
        threshold=t,
        colluding=data.draw(st.integers(0, 2 * t - n - 1), "colluding"),
        length=data.draw(st.integers(1, 20), "length"),
        bits=data.draw(st.integers(5, 64), "bits"),
    )
    vectors = uploads(terms, data.draw(st.integers(0, 1000), "seed"))
    leaves = {
        m: data.draw(st.sampled_from([*STAGES, None, None, None, None]), f"{m} leaves") for m in range(n)
    }
    absent = {stage: {m for m, when in leaves.items() if when == stage} for stage in STAGES}
    there = [sum(w is None or STAGES.index(w) > s for w in leaves.values()) for s in range(len(STAGES))]
    parties = Parties(terms, absent)
    if min(there) < t:
        with pytest.raises(Refused, match="nothing was released"):
            parties.sum(vectors)
        return
    survivors = [m for m, when in leaves.items() if when not in STAGES[:3]]
    assert np.array_equal(parties.sum(vectors), sum(vectors[m] for m in survivors))


@pytest.mark.parametrize("bits", [3, 8, 31, 32, 33, 63, 64])
def test_sums_come_back_modulo_the_bits(bits: int) -> None:
    terms = terms_for(3, bits=bits, length=9)
    half = 1 << bits - 1
    vectors = {n: np.full(9, half - 1, np.int64) for n in range(3)}
    wrapped = (3 * (half - 1) + half) % (2 * half) - half
    assert Parties(terms).sum(vectors).tolist() == [wrapped] * 9


def test_a_large_cohort_on_a_sparse_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "plan", lambda *_: Plan(8, 3))
    terms = terms_for(30, threshold=20, length=50, bits=20)
    vectors = uploads(terms)
    parties = Parties(terms, {"shares": {1}, "masked": {4, 17}, "agreed": {5}, "unmask": {9, 28}})
    assert np.array_equal(parties.sum(vectors), sum(vectors[n] for n in range(30) if n not in (1, 4, 17)))
    assert all(len(d.boxes) <= 8 for d in parties.deliveries.values())


# --- wrong shares ---------------------------------------------------------------------------------------


def _until_unmask(
    absent: dict[str, set[int]], members: int = 6, threshold: int = 4
) -> tuple[Parties, dict[int, np.ndarray], dict[int, bytes]]:
    terms = terms_for(members, threshold=threshold)
    parties, vectors = Parties(terms, absent), uploads(terms)
    parties.masked(vectors)
    survivors = parties.server.survivors()
    for n in survivors.numbers:
        parties.server.receive(parties.clients[n].consistency(survivors))
    agreement = parties.server.agreement()
    return parties, vectors, {n: parties.clients[n].unmask(agreement) for n in survivors.numbers}


def _with_wrong_shares(parties: Parties, sender: int, data: bytes) -> bytes:
    _, message = opened(Unmask, parties.terms, parties.roster, data)
    wrong = Unmask(
        tuple((n, bytes(b ^ 1 for b in share)) for n, share in message.seeds),
        tuple((n, bytes(b ^ 1 for b in share)) for n, share in message.keys),
    )
    return signed(identity(sender), parties.terms, sender, wrong)


@pytest.mark.parametrize("liar", [0, 2, 4])
@pytest.mark.parametrize("absent", [set(), {3}])
def test_wrong_shares_are_noticed_and_others_used(absent: set[int], liar: int) -> None:
    parties, vectors, answers = _until_unmask({"masked": absent})
    for n, data in answers.items():
        parties.server.receive(_with_wrong_shares(parties, n, data) if n == liar else data)
    assert np.array_equal(parties.server.result(), sum(vectors[n] for n in answers))


@pytest.mark.parametrize("liars", [{8}, {3, 9}, {1, 7, 13}])
def test_liars_among_many_are_found_once_and_asked_last(
    liars: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, vectors, answers = _until_unmask({}, 15, 10)
    for n, data in answers.items():
        parties.server.receive(_with_wrong_shares(parties, n, data) if n in liars else data)
    tried: list[int] = []
    real = module.combined
    monkeypatch.setattr(module, "combined", lambda shares: tried.append(1) or real(shares))
    assert np.array_equal(parties.server.result(), sum(vectors.values()))
    assert parties.server._suspects == liars
    assert len(tried) < module.TRIES + 5 + 15, "the search was made once"


@pytest.mark.parametrize("absent", [set(), {3}])
def test_where_too_many_shares_are_wrong_there_is_no_sum(absent: set[int]) -> None:
    parties, _, answers = _until_unmask({"masked": absent})
    for n, data in answers.items():
        parties.server.receive(_with_wrong_shares(parties, n, data) if n in (0, 1, 4) else data)
    with pytest.raises(Refused, match=r"round 4: .* secret are wrong; nothing was released"):
        parties.server.result()


def test_shares_that_were_not_asked_for_are_refused() -> None:
    parties, _, answers = _until_unmask({"masked": {3}})
    _, message = opened(Unmask, parties.terms, parties.roster, answers[0])
    for wrong in (
        Unmask(message.seeds, ()),
        Unmask(message.seeds[1:], message.keys),
        Unmask(message.seeds + message.keys, ()),
        Unmask((*message.seeds, (99, bytes(16))), message.keys),
    ):
        with pytest.raises(Refused, match="not the shares that it was asked for"):
            parties.server.receive(signed(identity(0), parties.terms, 0, wrong))


# --- servers that lie -----------------------------------------------------------------------------------


def test_a_server_that_names_different_survivors_to_different_clients_gets_nothing() -> None:
    terms = terms_for(5, threshold=4)
    parties = Parties(terms)
    parties.masked(uploads(terms))
    one, other = Survivors((0, 1, 2, 3, 4)), Survivors((0, 1, 2, 3))
    said = {
        0: parties.clients[0].consistency(one),
        1: parties.clients[1].consistency(one),
        2: parties.clients[2].consistency(other),
        3: parties.clients[3].consistency(other),
        4: parties.clients[4].consistency(one),
    }
    for chosen in ((0, 1, 2, 3), (0, 1, 4), (2, 3), (0, 1, 4, 4), (0, 1, 4, 2)):
        clients = [c for n, c in parties.clients.items() if n in (0, 2)]
        for client in clients:
            with pytest.raises(Refused):
                client.unmask(Agreement(tuple(said[n] for n in chosen)))
    for client in parties.clients.values():  # nor does anybody answer a second question
        with pytest.raises(Refused):
            client.consistency(other)


def test_views_differ_by_every_list_they_are_made_from() -> None:
    terms = terms_for(4, threshold=3)
    views = []
    for absent in ({}, {"advertise": {3}}, {"shares": {3}}, {"masked": {3}}, {"masked": {2}}):
        parties = Parties(terms, absent)
        parties.masked(uploads(terms))
        survivors = parties.server.survivors()
        _, said = opened(Agreed, terms, parties.roster, parties.clients[0].consistency(survivors))
        views.append(said.digest)
    assert len(set(views)) == len(views)


def test_one_client_told_of_other_participants_than_the_rest_is_never_unmasked() -> None:
    """The argument's third step, played: n = 5, t = 3, c = 0. Client 0 is told that only 1 and 2 take part;
    the server then calls 1 and 2 dropped out. Nobody else's signatures fit client 0's view, nor the reverse.
    """
    terms = terms_for(5, threshold=3)
    parties = Parties(terms)
    parties.step("advertise", {n: c.advertise for n, c in parties.clients.items()})
    keys = parties.server.keys()
    parties.step("shares", {n: lambda c=c: c.share_keys(keys) for n, c in parties.clients.items()})
    deliveries, vectors = parties.server.deliveries(), uploads(terms)
    boxes = tuple(box for box in deliveries[0].boxes if box[0] in (1, 2))
    parties.clients[0].masked_input(Delivery((0, 1, 2), boxes), vectors[0])
    for n in (3, 4):
        parties.clients[n].masked_input(deliveries[n], vectors[n])
    survivors = Survivors((0, 3, 4))
    with pytest.raises(Refused, match="who cannot be there"):
        parties.clients[0].consistency(survivors)
    said = tuple(parties.clients[n].consistency(survivors) for n in (3, 4))
    with pytest.raises(Refused, match="2 of 5 clients are left where 3 must be"):
        parties.clients[3].unmask(Agreement(said))


@pytest.mark.parametrize(
    "survivors", [(), (0, 1), (1, 2, 3, 4), (0, 1, 2, 9), (1, 0, 2, 3), (0, 0, 1, 2), (0, 1, 2, 3, 4, 5)]
)
def test_survivors_that_cannot_be_are_refused(survivors: tuple[int, ...]) -> None:
    terms = terms_for(5, threshold=4)
    parties = Parties(terms)
    parties.masked(uploads(terms))
    with pytest.raises(Refused):
        parties.clients[0].consistency(Survivors(survivors))


def test_a_server_that_holds_shares_back_or_changes_them_is_refused() -> None:
    terms = terms_for(5, threshold=4)

    def lies(delivery: Delivery) -> list[Delivery]:
        boxes = delivery.boxes
        bent = (boxes[0][0], boxes[0][1][:-1] + bytes([boxes[0][1][-1] ^ 1]))
        swapped = ((boxes[0][0], boxes[1][1]), (boxes[1][0], boxes[0][1]), *boxes[2:])
        return [
            replace(delivery, boxes=boxes[1:]),
            replace(delivery, boxes=(bent, *boxes[1:])),
            replace(delivery, boxes=swapped),
            replace(delivery, boxes=(*boxes, boxes[-1])),
            replace(delivery, participants=delivery.participants[1:]),
            replace(delivery, participants=delivery.participants[:3], boxes=boxes[:2]),
        ]

    for lie in range(6):
        parties = Parties(terms)
        parties.step("advertise", {n: c.advertise for n, c in parties.clients.items()})
        keys = parties.server.keys()
        parties.step("shares", {n: lambda c=c, k=keys: c.share_keys(k) for n, c in parties.clients.items()})
        delivery = lies(parties.server.deliveries()[0])[lie]
        with pytest.raises(Refused):
            parties.clients[0].masked_input(delivery, uploads(terms)[0])


# --- forged, foreign and repeated messages --------------------------------------------------------------


def test_forged_foreign_and_replayed_advertisements_are_refused() -> None:
    terms, again = terms_for(4, threshold=3), terms_for(4, threshold=3)
    assert replace(again, nonce=terms.nonce) == terms  # they differ by the nonce alone
    parties = Parties(terms)
    real = {n: c.advertise() for n, c in parties.clients.items()}
    envelope = decode(Signed, real[0])
    elsewhere = Client(0, identity(0), parties.roster, again).advertise()
    stranger = Client(0, identity(77), parties.roster, terms).advertise()
    outside = replace(envelope, sender=9)
    lies = {
        "another's name": encode(replace(envelope, sender=1)),
        "another body": encode(replace(envelope, body=envelope.body[:-1] + b"\0")),
        "another kind": encode(replace(envelope, kind=2)),
        "no signature": encode(replace(envelope, signature=b"")),
        "a signature of another message": encode(
            replace(envelope, signature=decode(Signed, real[1]).signature)
        ),
        "another attempt": elsewhere,
        "another attempt, renamed": encode(replace(decode(Signed, elsewhere), terms=terms.digest)),
        "another key": stranger,
        "no member": encode(outside),
    }

    def told(first: bytes) -> None:
        listener = Client(3, identity(3), parties.roster, terms)
        listener.share_keys(Keys((first, real[1], real[2], listener.advertise())))

    told(real[0])
    for what, lie in lies.items():
        with pytest.raises(Refused):
            parties.server.receive(lie)
            raise AssertionError(what)
        with pytest.raises(Refused, match="client"):  # and by clients, whatever the server says of it
            told(lie)
    for data in real.values():
        parties.server.receive(data)
    with pytest.raises(Refused, match="has sent this already"):
        parties.server.receive(real[0])
    keys = parties.server.keys()
    with pytest.raises(Refused, match="another stage"):
        parties.server.receive(real[0])
    for lie_keys in (
        Keys(keys.advertisements[::-1]),
        Keys((*keys.advertisements[:3], keys.advertisements[2])),
        Keys(keys.advertisements[:2]),
        Keys(()),
    ):
        fresh = Client(3, identity(3), parties.roster, terms)
        fresh.advertise()
        with pytest.raises(Refused):
            fresh.share_keys(lie_keys)


def test_a_server_cannot_put_its_own_key_in_a_clients_place() -> None:
    """Man in the middle: an advertisement of the server's making under a client's name."""
    terms = terms_for(4, threshold=3)
    parties = Parties(terms)
    theirs = Roster({n: identity(50 + n if n == 1 else n).public_key() for n in range(4)})
    forged = Client(1, identity(51), theirs, terms).advertise()
    real = {n: c.advertise() for n, c in parties.clients.items()}
    with pytest.raises(Refused, match="client 1: the signature is not its own"):
        parties.clients[0].share_keys(Keys((real[0], forged, real[2], real[3])))


def test_a_key_that_is_advertised_twice_is_refused() -> None:
    terms = terms_for(3, threshold=2)
    parties = Parties(terms)
    real = {n: c.advertise() for n, c in parties.clients.items()}
    _, message = opened(Advertise, terms, parties.roster, real[0])
    copied = signed(identity(1), terms, 1, message)
    parties.server.receive(real[0])
    with pytest.raises(Refused, match="another's"):
        parties.server.receive(copied)
    with pytest.raises(Refused, match="same key"):
        parties.clients[0].share_keys(Keys((real[0], copied, real[2])))


def test_points_of_low_order_are_refused() -> None:
    terms = terms_for(3, threshold=2)
    parties = Parties(terms)
    real = {n: c.advertise() for n, c in parties.clients.items()}
    low = signed(identity(1), terms, 1, Advertise(bytes(31) + b"\1", bytes(32), bytes(32)))
    with pytest.raises(Refused, match="low order"):
        parties.clients[0].share_keys(Keys((real[0], low, real[2])))


# --- order ----------------------------------------------------------------------------------------------


def test_a_client_does_each_step_once_and_in_order() -> None:
    terms = terms_for(3, threshold=2)
    vectors = uploads(terms)

    def played(until: int) -> tuple[Parties, list]:
        parties = Parties(terms)
        server = parties.server
        told: list = [(), None, None, None, None]
        parties.step("advertise", {n: c.advertise for n, c in parties.clients.items() if n or until > 0})
        if until == 0:
            told[1:] = [Keys(()), Delivery((), ()), Survivors(()), Agreement(())]
            return parties, told
        keys = server.keys()
        told[1] = keys
        if until > 1:
            parties.step("shares", {n: lambda c=c: c.share_keys(keys) for n, c in parties.clients.items()})
            deliveries = server.deliveries()
            told[2] = deliveries[0]
        if until > 2:
            for n, d in deliveries.items():
                server.receive(parties.clients[n].masked_input(d, vectors[n]))
            told[3] = server.survivors()
        if until > 3:
            for n in range(3):
                server.receive(parties.clients[n].consistency(told[3]))
            told[4] = server.agreement()
        told[2:] = [
            d or e for d, e in zip(told[2:], (Delivery((), ()), Survivors(()), Agreement(())), strict=True)
        ]
        return parties, told

    for due in range(5):
        for asked in range(5):
            parties, told = played(due)
            client = parties.clients[0]
            steps = [
                client.advertise,
                lambda c=client, m=told[1]: c.share_keys(m),
                lambda c=client, m=told[2]: c.masked_input(m, vectors[0]),
                lambda c=client, m=told[3]: c.consistency(m),
                lambda c=client, m=told[4]: c.unmask(m),
            ]
            if asked == due:
                steps[asked]()
            else:
                with pytest.raises(Refused, match="is due"):
                    steps[asked]()
                with pytest.raises(Refused, match="its part has ended"):
                    steps[due]()  # one wrong question ends it
                assert not vars(client).keys() & {"_seed", "_mask_seed", "_mask_key", "_share_key"}
                assert not client._held


def test_the_server_ends_its_stages_in_order_and_takes_nothing_afterwards() -> None:
    terms = terms_for(3, threshold=2)
    parties = Parties(terms)
    server = parties.server
    for early in (server.deliveries, server.survivors, server.agreement, server.result):
        with pytest.raises(Refused, match="the server is at ADVERTISE"):
            early()
    parties.sum(uploads(terms))
    for late in (server.keys, server.deliveries, server.survivors, server.agreement, server.result):
        with pytest.raises(Refused, match="the server is at DONE"):
            late()
    with pytest.raises(Refused, match="over"):
        server.receive(parties.heard["unmask"][0])


def test_an_absent_client_cannot_come_back_within_a_round() -> None:
    terms = terms_for(4, threshold=3)
    parties = Parties(terms)
    late = parties.clients.pop(3)
    advertised = late.advertise()
    parties.step("advertise", {n: c.advertise for n, c in parties.clients.items()})
    keys = parties.server.keys()
    with pytest.raises(Refused, match="does not pass on what it advertised"):
        late.share_keys(keys)
    with pytest.raises(Refused, match="another stage"):
        parties.server.receive(advertised)


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(4, np.int64),
        np.zeros(5, np.int32),
        np.zeros((5, 1), np.int64),
        np.full(5, 1 << 15),
        np.full(5, -(1 << 15) - 1),
    ],
)
def test_uploads_that_do_not_fit_are_not_sent(vector: np.ndarray) -> None:
    terms = terms_for(2, threshold=2)
    parties = Parties(terms)
    with pytest.raises(Refused, match="an upload"):
        parties.masked({0: vector, 1: vector})


def test_the_roster_is_of_nist_keys_from_openssh() -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from tacit.errors import UserError
    from tacit.secure import ec
    from tacit.secure.identity import sign

    def line(key: object) -> bytes:
        return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b" someone"

    large, small = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP256R1())
    roster = Roster.read({0: line(large), 1: line(small)})
    roster.verify(0, sign(large, b"x"), b"x")
    roster.verify(1, sign(small, b"x"), b"x")
    with pytest.raises(Refused):
        roster.verify(1, sign(large, b"x"), b"x")
    for wrong in (line(Ed25519PrivateKey.generate()), b"ecdsa-sha2-nistp256 AAAA", b"", line(small)[:60]):
        with pytest.raises(UserError):
            Roster.read({0: wrong})
    with pytest.raises(UserError, match="same key"):
        Roster.read({0: line(large), 1: line(large)})
    with pytest.raises(UserError, match="P-256 or P-384"):
        Roster({0: ec.generate_private_key(ec.SECP521R1()).public_key()})
    assert roster_of({0, 1})
