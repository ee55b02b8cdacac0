"""A client's code tries to reach the server or the next client, or to bypass the clip."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tacit
from conftest import blobs
from tacit.algorithms import Algorithm, FedAvg
from tacit.engine import ClientError, Order, Participant
from tacit.engine.guard import Shown, received, refuse_no_state
from tacit.vector import Layout, Vectors, read_values

CLIENT = {"unit": "client", "clip": 0.5, "noise": 1e-9, "delta": 1e-3, "entropy": "seed"}
WRITES = ("add_", "data", "numpy", "view", "resize", "set_", "storage", "grad")


def write(vector: Tensor, how: str) -> None:
    """Every way to write to a vector that a person would think of, and a few that one would not."""
    match how:
        case "add_":
            vector.add_(100)
        case "data":
            vector.data.add_(100)
        case "numpy":
            vector.numpy()[:] += 100
        case "view":
            vector[1:3].mul_(-1).sub_(1)
        case "resize":
            vector.resize_(1)
        case "set_":
            vector.set_(torch.ones(len(vector)))
        case "storage":
            vector.untyped_storage().fill_(1)
        case "grad":
            vector.requires_grad_(True)


@dataclass(frozen=True)
class Writer(FedAvg):
    """Writes to what the server sent, after it has trained honestly."""

    how: str = "add_"

    def client(self, msg: Vectors, memory: Vectors, work: Any) -> tuple[Vectors, Vectors]:
        upload, _ = super().client(msg, memory, work)
        write(msg["theta"], self.how)
        msg["theta"] = torch.zeros(3)
        msg.clear()
        return upload, {}


def weights(result: tacit.Result) -> Tensor:
    return read_values(result.model, Layout.of(result.model))


@pytest.mark.parametrize("how", WRITES)
def test_writing_to_the_message_changes_nothing_or_is_told(config, dataset, how: str) -> None:
    """What touches the bits ends the run and names the client; what touches a handle does nothing."""
    honest = tacit.run(config(rounds=2), "honest", dataset=dataset, algorithm=FedAvg())
    torch.manual_seed(0)
    if how in ("resize", "set_", "grad"):
        result = tacit.run(config(rounds=2), "run", dataset=dataset, algorithm=Writer(how=how))
        assert torch.equal(weights(result), weights(honest))
        return
    with pytest.raises(ClientError, match=r"client \d+, round 1, .* wrote to the message's 'theta'"):
        tacit.run(config(rounds=2), "run", dataset=dataset, algorithm=Writer(how=how))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["numpy", "set_"])
def test_the_same_in_a_pool(config, dataset, how: str) -> None:
    settings = config(rounds=2, engine__workers=2)
    if how == "set_":
        honest = tacit.run(config(rounds=2), "honest", dataset=dataset, algorithm=FedAvg())
        result = tacit.run(settings, "run", dataset=dataset, algorithm=Writer(how=how))
        assert torch.equal(weights(result), weights(honest))
        return
    with pytest.raises(ClientError, match="wrote to the message's 'theta'"):
        tacit.run(settings, "run", dataset=dataset, algorithm=Writer(how=how))


def test_neither_the_server_nor_the_next_client_sees_what_was_written(config, dataset, tmp_path) -> None:
    from tacit.config.build import build_job
    from tacit.engine import InProcess

    seen: list[float] = []

    class Looks(FedAvg):
        def client(self, msg: Vectors, memory: Vectors, work: Any) -> tuple[Vectors, Vectors]:
            seen.append(float(msg["theta"].norm()))
            msg["theta"].numpy()[:] = 7
            return super().client(msg, memory, work)

    job = build_job(config(), tmp_path, None, dataset, Looks())
    engine = InProcess(job)
    theta = read_values(job.model, job.layout).clone()
    before = theta.clone()
    for client in range(4):
        with pytest.raises(ClientError, match="wrote to the message"):
            engine.sum(Order(0, 0.1, 1), {"theta": theta}, [Participant(client)])
        assert torch.equal(theta, before)
    engine.close()
    assert seen == [float(before.norm())] * 4


# --- what is sent -----------------------------------------------------------------------------------------


class Lies(Tensor):
    """A vector that answers for its own size and norm."""

    def numel(self) -> int:
        return 148

    def norm(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(0.0)


def hostile_upload(kind: int, theta: Tensor, rng: np.random.Generator) -> Any:
    """One of many things that a client should not send."""
    d = len(theta)
    huge = torch.from_numpy(rng.normal(size=d).astype(np.float32)) * 10.0 ** rng.uniform(0, 30)
    choices = [
        lambda: theta,  # the message itself
        lambda: theta.expand(d),
        lambda: huge,
        lambda: torch.full((1,), 1e6).expand(d),  # one number in all places
        lambda: huge.flip(0)[::1],
        lambda: huge.double() * 1e200,
        lambda: huge.as_subclass(Lies),
        lambda: huge.to_sparse(),
        lambda: huge.clone().requires_grad_(True),
        lambda: huge.half(),
        lambda: torch.where(torch.rand(d) < 0.1, torch.nan, huge),
        lambda: torch.full((d,), torch.finfo(torch.float32).max),
        lambda: torch.full((d,), 1e-45),
        lambda: huge.reshape(1, d),
        lambda: huge.long(),
        lambda: huge.tolist(),
        lambda: huge[:-1],
        lambda: torch.complex(huge, huge),
        lambda: None,
        lambda: -theta.repeat(2)[::2],
    ]
    return choices[kind % len(choices)]()


@pytest.mark.parametrize("mode", ["clip", "normalize"])
@pytest.mark.parametrize("per", ["global", "dim"])
def test_whatever_is_sent_adds_no_more_than_the_bound(config, dataset, tmp_path, mode, per) -> None:
    """200 hostile uploads (50 for each rule): refused by name, or within C in the server's sum."""
    from tacit.config.build import build_job
    from tacit.engine import InProcess

    kinds: list[int] = [0]

    class Hostile(Algorithm):
        def client(self, msg: Vectors, memory: Vectors, work: Any) -> tuple[Vectors, Vectors]:
            kind = kinds[0]
            return {"delta": hostile_upload(kind, msg["theta"], np.random.default_rng(kind))}, {}

    privacy = {**CLIENT, "clip": {"bound": 0.5, "per": per, "mode": mode}, "noise": 1e-3}
    job = build_job(config(privacy=privacy), tmp_path, None, dataset, Hostile())
    engine, mechanism = InProcess(job), job.privacy
    theta = read_values(job.model, job.layout).clone()
    before, refused, bounded = theta.clone(), 0, 0
    for kind in range(50):
        kinds[0] = kind
        bounding = mechanism.bounding(mechanism.init(), job.upload_sizes, job.layout, 1)
        try:
            total, reports = engine.sum(
                Order(0, 0.1, 1, bounding=bounding), {"theta": theta}, [Participant(0)]
            )
        except ClientError as error:
            refused += 1
            assert "client 0, round 1, step 0: ValueError: the algorithm sent" in str(error)
        else:
            bounded += 1
            square = sum(int(k) ** 2 for k in total["delta"].tolist())
            assert math.isqrt(square) <= bounding.grid.radius
            assert reports[0].finite or square == 0
        assert torch.equal(theta, before)
    engine.close()
    assert (refused, bounded) == (13, 37)


def test_a_thread_that_still_writes_to_an_upload_is_too_late() -> None:
    vector, stop = torch.zeros(1000), threading.Event()

    def churn() -> None:
        while not stop.is_set():
            vector.fill_(1.0).fill_(0.0)

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        copy = received({"delta": vector}, {"delta": 1000})["delta"]
        first = copy.clone()
        assert all(torch.equal(copy, first) for _ in range(200))
    finally:
        stop.set()
        writer.join()
    assert copy.data_ptr() != vector.data_ptr()


def test_two_uploads_in_one_memory_are_bounded_as_two() -> None:
    from tacit.privacy import Clip

    one = torch.full((10,), 1000.0)
    sent = received({"delta": one, "c": one}, {"delta": 10, "c": 10})
    bounded, _ = Clip(6.0, per="dim", mode="normalize").bind({"delta": 10, "c": 10}).apply(sent)
    assert math.sqrt(sum(float(v.norm()) ** 2 for v in bounded.values())) <= 6.0
    assert one.tolist() == [1000.0] * 10


def test_bits_are_compared_and_not_numbers() -> None:
    """NaN is not equal to itself, and −0 equals 0: neither may decide."""
    server = {"theta": torch.tensor([torch.nan, 0.0, 1.0])}
    shown = Shown.copy_of(server)
    shown.refuse_if_written()
    shown.message["theta"][1] = -0.0
    with pytest.raises(ValueError, match="theta"):
        shown.refuse_if_written()
    shown.refuse_if_written()


def test_a_memory_that_cannot_be_kept_is_told_in_one_line(config) -> None:
    class Keeps(FedAvg):
        def client(self, msg: Vectors, memory: Vectors, work: Any) -> tuple[Vectors, Vectors]:
            upload, _ = super().client(msg, memory, work)
            shared = torch.arange(6.0)
            return upload, {"a": shared[:4], "b": shared[2:], "c": upload["delta"]}  # one memory, thrice

    result = tacit.run(config(rounds=2), dataset=blobs(), algorithm=Keeps())
    assert result.finished


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"rounds": 3}, r"keeps 'rounds' as a int; a client keeps dense tensors"),
        ({"c": torch.eye(2).to_sparse()}, r"keeps 'c' as a torch.sparse_coo tensor"),
        ([torch.zeros(2)], r"keeps a list; a client keeps tensors by name"),
    ],
)
def test_a_state_that_no_store_can_hold_is_named(state: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        refuse_no_state(state)


def test_states_that_are_tensors_or_nothing_are_kept() -> None:
    for state in ({}, None, {"c": torch.zeros(2), "rounds": torch.tensor(3)}):
        refuse_no_state(state)
