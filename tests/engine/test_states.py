"""Client state: versions of two repetitions never mix, whoever writes last."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tacit.engine.states import NONE, ClientStates, DirectoryStates, version
from tacit.engine.url_states import UrlStates, states_of
from tacit.errors import UserError


@pytest.fixture(params=["folder", "file://", "memory://"])
def states(request: pytest.FixtureRequest, tmp_path: Path) -> ClientStates:
    if request.param == "folder":
        return states_of(tmp_path)
    return states_of(tmp_path, f"{request.param}{tmp_path}/store")


def test_a_worker_given_up_for_lost_writes_to_a_version_that_nobody_names(states: ClientStates) -> None:
    lost, counted, again = version(3, 0, 0), version(3, 0, 1), version(3, 1, 0)
    assert len({lost, counted, again, NONE}) == 4
    states.save(7, counted, {"c": torch.ones(2)})
    known = states.digest(7, counted)
    states.save(7, lost, {"c": torch.full((2,), 9.0)})  # it still lives, and is late
    assert states.digest(7, counted) == known
    assert states.load(7, counted)["c"].tolist() == [1.0, 1.0]
    states.prune(7, {counted})
    with pytest.raises(ValueError, match="is missing"):
        states.digest(7, lost)
    assert states.load(7, NONE) == {}


def test_what_is_kept_elsewhere_is_what_would_be_kept_here(states: ClientStates, tmp_path: Path) -> None:
    kept = {"c": torch.randn(5), "b": torch.arange(3.0)[1:]}
    states.save(3, "0-0-0", kept)
    local = DirectoryStates(tmp_path / "local")
    local.save(3, "0-0-0", kept)
    assert states.digest(3, "0-0-0") == local.digest(3, "0-0-0")
    states.sync({3: "0-0-0"})
    sent = pickle.loads(pickle.dumps(states))
    assert sent.load(3, "0-0-0")["b"].tolist() == [1.0, 2.0]
    states.prune(9, set())
    states.clear()
    states.clear()
    with pytest.raises(ValueError, match="is missing"):
        states.digest(3, "0-0-0")
    with pytest.raises(UserError, match="cannot be read"):
        states.load(3, "0-0-0")


def test_a_run_has_a_place_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}/store"
    a, b = (states_of(tmp_path / run, url) for run in "ab")
    a.save(0, "0-0-0", {"c": torch.ones(1)})
    with pytest.raises(ValueError, match="is missing"):
        b.digest(0, "0-0-0")
    assert states_of(tmp_path / "a").digest(0, "0-0-0") == a.digest(0, "0-0-0"), "without being told where"
    assert states_of(tmp_path / "a", "memory://elsewhere").digest(0, "0-0-0"), "nor moved"
    b.clear()
    assert a.load(0, "0-0-0")["c"].tolist() == [1.0]


def test_a_store_that_cannot_be_had_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nostore://x.* cannot be opened"):
        states_of(tmp_path, "nostore://x").save(0, "0-0-0", {"c": torch.ones(1)})


def test_a_run_whose_states_are_in_its_folder_keeps_them_there(tmp_path: Path) -> None:
    """To resume it on an engine with a store's URL must not make all of its states missing."""
    here = states_of(tmp_path)
    here.save(0, "0-0-0", {"c": torch.ones(1)})
    assert states_of(tmp_path, f"memory://{tmp_path}").digest(0, "0-0-0") == here.digest(0, "0-0-0")


class Broken:
    """A store whose network is gone."""

    def __getattr__(self, name: str) -> Any:
        raise OSError("connection reset")


@pytest.mark.parametrize(
    ("ask", "failed"),
    [
        (lambda states: states.load(3, "0-0-0"), "the state of client 3 cannot be read"),
        (lambda states: states.save(3, "0-0-0", {}), "the state of client 3 cannot be written"),
        (lambda states: states.digest(3, "0-0-0"), "the state of client 3 cannot be read"),
        (lambda states: states.prune(3, set()), "old states of client 3 cannot be removed"),
        (lambda states: states.clear(), "the states cannot be removed"),
    ],
)
def test_a_store_that_fails_is_told_in_one_line(ask: Any, failed: str) -> None:
    states = UrlStates("memory://gone")
    states.__dict__["_store"] = Broken(), "/gone"
    said = rf"^engine.state: memory://gone: {failed} \(connection reset\); mend that, then resume$"
    with pytest.raises(UserError, match=said):
        ask(states)
