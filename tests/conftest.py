"""Small federations that train within a moment."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tacit import ArrayRecords, Dataset
from tacit.config import Config, load

# A machine under load is no fault of a test: nothing of hypothesis is timed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

DEVICE = pytest.StashKey[Any]()

torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before anything is computed here: the process whose forks will have the pretended device."""
    items = [item for item in session.items if "accel" in item.path.name]
    if items:
        from elsewhere import Elsewhere

        session.config.stash[DEVICE] = Elsewhere(session, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """Tests of the pretended device run in a fork that has it; all others, here, without."""
    if "accel" not in item.path.name:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in item.config.stash[DEVICE].run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.session._setupstate.teardown_exact(nextitem)  # what the test before this one has left for it
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(autouse=True)
def _runs_go_to_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _the_same_draws_in_every_order(request: pytest.FixtureRequest) -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def blobs(n: int = 240, classes: int = 4, side: int = 4, seed: int = 0) -> Dataset:
    """Gaussian clouds as tiny pictures: real enough to be learnt, small enough to be instant."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, 1, side, side))

    def part(count: int) -> ArrayRecords:
        y = rng.integers(0, classes, count)
        x = centres[y] + rng.normal(size=(count, 1, side, side))
        return ArrayRecords(x.astype(np.float32), y, users=np.arange(count) % 12)

    return Dataset(
        "blobs", part(n), part(n // 2), classes, (1, side, side), licence="none", origin="made here"
    )


@pytest.fixture
def dataset() -> Dataset:
    return blobs()


@pytest.fixture
def config() -> Callable[..., Config]:
    """A small config; keyword arguments are dotted overrides with __ for the dot."""

    def make(**overrides: Any) -> Config:
        values = {
            "rounds": 4,
            "data": {
                "name": "fashion-mnist-slice",
                "partition": {"kind": "dirichlet", "clients": 12, "alpha": 0.5},
            },
            "model": {"name": "mlp", "hidden": [8]},
            "cohort": 5,
            "local": {"epochs": 1, "batch": 6, "lr": 0.1},
            "engine": {"workers": 0},
        }
        return load(values, {key.replace("__", "."): value for key, value in overrides.items()})

    return make
