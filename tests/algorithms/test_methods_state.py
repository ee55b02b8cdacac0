"""A method's state between rounds: for clients that are not drawn, across a stop, on every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tacit
from conftest import blobs
from methods_small import CLIENTS, Played, configured, drawn, memories, play
from tacit.config.methods import METHODS
from tacit.federation import run as loop

SMALL = {"model": {"name": "mlp", "hidden": [6]}, "local.batch": 5, "cohort.size": 3, "rounds": 3}
"""Real batches and partial participation, on a network that the config builds."""


class After:
    """A tracker that does something after every round."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        pass

    def clients(self, done: int, cohort: int) -> None:
        pass

    def round(self, record: Mapping[str, Any]) -> None:
        self._act(int(record["round"]))

    def close(self) -> None:
        pass


def chosen(method: str, **more: Any) -> tacit.Config:
    """A method's preset, small; client level gets a noise, so that nothing has to be solved for."""
    noise = {"privacy.noise": 1.0} if METHODS[method].unit == "client" else {}
    return configured(method, SMALL | noise | {key.replace("__", "."): v for key, v in more.items()})


def run(config: tacit.Config, folder: str, *trackers: After) -> Played:
    dataset = blobs(60, seed=3)
    return Played(tacit.run(config, folder, dataset=dataset, trackers=trackers))


def same_state(a: Played, b: Played, rounds: int = 3) -> None:
    """Bit for bit: the server's vectors, the clients' memories, and what was measured."""
    for number in range(1, rounds + 1):
        mine, other = a.state(number), b.state(number)
        assert mine.keys() == other.keys()
        for name, vector in mine.items():
            assert torch.equal(vector, other[name]), f"{name} after round {number}"
    for client, memory in a.memory().items():
        assert memory.keys() == b.memory()[client].keys()
        for name, vector in memory.items():
            assert torch.equal(vector, b.memory()[client][name]), f"{name} of client {client}"
    timing = {"seconds"}
    for mine, other in zip(a.result.metrics, b.result.metrics, strict=True):
        assert {k: v for k, v in mine.items() if k not in timing} == {
            k: v for k, v in other.items() if k not in timing
        }


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_goes_on_after_a_stop(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stopped after its second round and resumed is the run that was never stopped."""
    config = chosen(method)
    whole = run(config, "whole")
    records = whole.result.metrics
    assert [r["round"] for r in records] == [1, 2, 3]
    assert all(torch.isfinite(vector).all() for vector in whole.state(3).values())
    if config.privacy is None:
        assert "epsilon" not in records[-1]
    else:
        spent = [r["epsilon"] for r in records]
        assert 0 < spent[0] < spent[1] < spent[2]
        assert records[-1]["delta"] == config.privacy.delta

    asked = []

    @contextmanager
    def stop_requested() -> Iterator[Callable[[], bool]]:
        yield lambda: bool(asked)

    monkeypatch.setattr(loop, "stop_requested", stop_requested)
    stopped = run(config, "stopped", After(lambda number: asked.append(number) if number == 2 else None))
    assert not stopped.result.finished
    assert len(stopped.result.metrics) == 2
    asked.clear()
    resumed = Played(tacit.resume("stopped", dataset=blobs(60, seed=3)))
    assert resumed.result.finished
    same_state(resumed, whole)


@pytest.mark.parametrize(
    ("method", "kept"),
    [("scaffold", "c"), ("dp-scaffold", "c"), ("dp2-fedsam", "personal"), ("centaur", "personal")],
)
def test_a_client_that_was_not_drawn_keeps_its_memory_bit_for_bit(method: str, kept: str) -> None:
    rounds = 6
    private = {"privacy__noise": 0.5} if METHODS[method].unit == "client" else {}
    cohort = {"size": 2, "sampling": "fixed"}
    config = chosen(method, rounds=rounds, cohort=cohort, **private)
    seen: list[dict[int, dict[str, torch.Tensor]]] = []

    def remember(number: int) -> None:
        if number > 1:  # a round is saved after its trackers are told: this is the state before it
            seen.append(memories(Path("run")))

    played = run(config, "run", After(remember))
    seen.append(played.memory())
    before: dict[int, dict[str, torch.Tensor]] = {client: {} for client in range(CLIENTS)}
    waited = 0
    for round, after in enumerate(seen):
        for client in range(CLIENTS):
            if client in drawn(config, round):
                assert after[client].keys() == {kept}
                old = before[client].get(kept)
                assert old is None or not torch.equal(after[client][kept], old)
            else:
                assert after[client].keys() == before[client].keys()
                for name, vector in before[client].items():
                    waited += 1
                    assert torch.equal(after[client][name], vector)
        before = after
    assert len(seen) == rounds
    assert waited > 0


def test_only_these_methods_keep_anything_with_a_client() -> None:
    keepers = set()
    for method in ("fedavg", "scaffold", "fedcm", "fedlada", "fafed", "fedadamw", "dp2-fedsam", "fedsam"):
        more = {"privacy.noise": 1.0} if method == "dp2-fedsam" else {}
        played = play(configured(method, {"rounds": 1} | more), method)
        if any(played.memory().values()):
            keepers.add(method)
    assert keepers == {"scaffold", "dp2-fedsam"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", "dp2-fedsam", "dp-fedadamw"])
def test_two_workers_give_the_same_as_none(method: str) -> None:
    alone = run(chosen(method), "alone")
    pooled = run(chosen(method, engine__workers=2), "pooled")
    same_state(alone, pooled)
    for name, value in alone.result.model.state_dict().items():
        assert torch.equal(value, pooled.result.model.state_dict()[name]), name
