"""Messages: reading returns exactly what was written, and nothing else is ever accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from deploy_small import federation, settings

from tacit.deploy import messages
from tacit.deploy.bodies import body_hash, encrypt_, pack, unpack
from tacit.deploy.messages import (
    LONGEST_HEAD,
    MAGIC,
    Answer,
    BadMessage,
    Refusal,
    StepAnswer,
    StepOrder,
    TrainOrder,
    read,
    read_any,
    written,
)

KEY = ec.generate_private_key(ec.SECP384R1())
TOKEN = "0123456789abcdef" * 2
PACKED, VECTORS = pack({"theta": torch.arange(3.0), "k": torch.tensor([1, -2], dtype=torch.int32)})
BODY = bytes(PACKED)
ORDER = TrainOrder(
    run=TOKEN,
    to=TOKEN * 2,
    client=1,
    clients=3,
    nonce=TOKEN,
    created=1.5,
    ttl=60.0,
    round=0,
    attempt=0,
    replay=0,
    lr=0.1,
    steps=None,
    decay=1.0,
    bound=0.3,
    config="rounds: 1\n",
    shape=(1, 4, 4),
    classes=3,
    labels=("a", "ß"),
    layout=TOKEN,
    frozen=None,
    state="",
    state_digest=None,
    keep=("0-0-0",),
    vectors=VECTORS,
    body=body_hash(BODY),
)
ANSWER = Answer(
    run=TOKEN,
    client=1,
    nonce=TOKEN,
    order=TOKEN * 2,
    steps=4,
    norm=1.25,
    examples=9,
    loss=None,
    notes={"rate": 0.5},
    seconds=None,
    state="0-0-0",
    state_digest=TOKEN,
    vectors=VECTORS,
    key=TOKEN * 2,
    body=body_hash(BODY),
)
REFUSAL = Refusal(TOKEN, 1, TOKEN, "budget", "no room")
STEP = StepOrder(TOKEN, TOKEN * 2, 1, TOKEN, 1.5, 60.0, 0, 0, "agree", TOKEN * 2, 3, body_hash(b"abc"))
STEPPED = StepAnswer(TOKEN, 1, TOKEN, TOKEN * 2, 3, body_hash(b"abc"))
MASKED = replace(ORDER, terms="00ff", members=(TOKEN * 2, TOKEN), delivery="ab")
ALL = (ORDER, ANSWER, REFUSAL, STEP, STEPPED, MASKED)


@pytest.mark.parametrize("head", ALL)
def test_what_is_written_is_read(head: messages.Head) -> None:
    assert read(written(head, KEY), KEY.public_key(), type(head)) == head


def test_bodies_are_exact() -> None:
    found = unpack(lambda size: BODY, ORDER, VECTORS)
    assert torch.equal(found["theta"], torch.arange(3.0)) and found["k"].tolist() == [1, -2]
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    body, vectors = pack({"x": odd})
    again = unpack(lambda size: body, replace(ORDER, vectors=vectors, body=body_hash(body)), vectors)["x"]
    assert torch.equal(again.view(torch.int32), odd.view(torch.int32))
    found["theta"].add_(1)
    again = unpack(lambda size: BODY, ORDER, VECTORS)["theta"]
    assert torch.equal(again, torch.arange(3.0)), "in memory of its own"
    fetched = bytearray(BODY)
    where_it_came = unpack(lambda size: fetched, ORDER, VECTORS)["theta"]
    where_it_came.add_(1)
    assert fetched != BODY and where_it_came.tolist() == [1.0, 2.0, 3.0], "no copy of what was fetched"


@pytest.mark.parametrize(
    ("body", "head", "expected"),
    [
        (BODY[:-1], ORDER, VECTORS),
        (BODY + b"\0", ORDER, VECTORS),
        (bytes(len(BODY)), ORDER, VECTORS),
        (BODY, ORDER, VECTORS[:1]),
        (BODY, ORDER, (("theta", "f4", 3), ("k", "f4", 2))),
        (BODY, replace(ORDER, vectors=(("theta", "f4", 1 << 50),)), (("theta", "f4", 1 << 50),)),
    ],
)
def test_another_body_is_refused(
    body: bytes, head: TrainOrder, expected: tuple[messages.Vector, ...]
) -> None:
    with pytest.raises(BadMessage):
        unpack(lambda size: body, head, expected)


def test_what_an_answer_carries_is_encrypted_with_the_key_in_its_head() -> None:
    body = bytearray(BODY)
    encrypt_(body, TOKEN * 2)
    assert bytes(body) != BODY
    head = replace(ANSWER, body=body_hash(body))
    found = unpack(lambda size: bytes(body), head, VECTORS)
    assert torch.equal(found["theta"], torch.arange(3.0)) and found["k"].tolist() == [1, -2]
    with pytest.raises(BadMessage):
        unpack(lambda size: BODY, head, VECTORS)
    for key in (TOKEN, TOKEN + "0" * 31, "g" * 64, ""):
        with pytest.raises(BadMessage):
            read(written(replace(ANSWER, key=key), KEY), KEY.public_key(), Answer)


def test_only_the_owner_of_the_key_can_write() -> None:
    other = ec.generate_private_key(ec.SECP384R1())
    with pytest.raises(BadMessage, match="not signed"):
        read(written(ORDER, other), KEY.public_key(), TrainOrder)
    with pytest.raises(BadMessage, match="kind"):
        read(written(ANSWER, KEY), KEY.public_key(), TrainOrder)
    sound = written(ORDER, KEY)
    with pytest.raises(BadMessage, match="not signed"):
        read(sound.replace(b'"lr":0.1', b'"lr":9.1'), KEY.public_key(), TrainOrder)
    with pytest.raises(BadMessage, match="longer"):
        read(sound + bytes(LONGEST_HEAD), KEY.public_key(), TrainOrder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"round":0', b'"round":-1'),
        (b'"round":0', b'"round":true'),
        (b'"round":0', b'"round":0.0'),
        (b'"round":0', b'"round": 0'),
        (b'"round":0', b'"round":0,"round":0'),
        (b'"round":0', b'"round":0,"more":1'),
        (b'"round":0,', b""),
        (b'"lr":0.1', b'"lr":NaN'),
        (b'"lr":0.1', b'"lr":1e999'),
        (b'"lr":0.1', b'"lr":"0.1"'),
        (b'"client":1', b'"client":3'),
        (b'"ttl":60.0', b'"ttl":60'),
        (b'"keep":["0-0-0"]', b'"keep":["../../x"]'),
        (b'"state":""', b'"state":"../x"'),
        (b'"run":"0', b'"run":"/'),
        (b'["theta","f4",3]', b'["theta","O",3]'),
        (b'["theta","f4",3]', b'["theta","f4",-3]'),
        (b'["theta","f4",3]', b'["theta","f4"]'),
        (b'"vectors":[', b'"vectors":[[[[' + b"[" * 50_000),
        (b'"kind":"train"', b'"kind":"other"'),
        (b'"kind":"train"', b'"kind":["train"]'),
    ],
)
def test_even_a_signed_head_must_be_exactly_one_of_ours(
    old: bytes, new: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "signed_by", lambda *args: True)
    sound = written(ORDER, KEY)
    assert old in sound
    with pytest.raises(BadMessage):
        read_any(sound.replace(old, new, 1), KEY.public_key())


def test_ten_thousand_damaged_messages_are_refused_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged bytes of all kinds, as if their signature were right; a reader that fell for one would raise
    something else, or take it for a message that is not the one that was written.
    """
    monkeypatch.setattr(messages, "signed_by", lambda *args: True)
    rng = np.random.default_rng(0)
    sound = [written(head, KEY) for head in ALL]
    refused = 0
    for number in range(10_000):
        message = bytearray(sound[number % len(ALL)])
        for _ in range(int(rng.integers(1, 4))):
            at, kind = int(rng.integers(len(message))), int(rng.integers(5))
            if kind == 0:
                message[at] = int(rng.integers(256))
            elif kind == 1:
                del message[at : at + int(rng.integers(1, 40))]
            elif kind == 2:
                message[at:at] = rng.bytes(int(rng.integers(1, 40)))
            elif kind == 3:
                other = sound[int(rng.integers(len(ALL)))]
                message[at : at + 20] = other[at : at + 20]
            else:
                message[at:at] = [b"{", b"[", b'"', b"\\u0000", b"null", b"1e999", b"\xff"][
                    int(rng.integers(7))
                ]
        try:
            head = read_any(bytes(message), KEY.public_key())
        except BadMessage:
            refused += 1
        else:  # only a value, or the signature, was changed: it is a whole message still, and is written so
            content = MAGIC + messages._dump(head)
            assert head.check() and bytes(message).startswith(content)
    assert refused > 8_000


def test_a_client_answers_garbage_with_silence_and_a_line_in_its_log(tmp_path: Path) -> None:
    small = federation(tmp_path)
    rng = np.random.default_rng(1)
    small.run(settings(deployed=small.folder, rounds=1), tmp_path / "run")
    _, head, body = small.transport.orders[0]
    client = small.clients[small.whos.index(small.transport.orders[0][0])]
    before = len(client.folder.joinpath("log.jsonl").read_text().splitlines())
    for number in range(300):
        damaged = bytearray(head)
        damaged[int(rng.integers(len(head)))] ^= 1 << int(rng.integers(8))
        assert client.answer(bytes(damaged) if number % 2 else rng.bytes(200), lambda size: body) is None
    log = [json.loads(line) for line in client.folder.joinpath("log.jsonl").read_text().splitlines()]
    assert [line["what"] for line in log[before:]] == ["dropped"] * 300
