"""A server optimizer and a sampler passed as objects: recorded, required again on resume; nothing unproved is
claimed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tacit
from conftest import blobs
from tacit.errors import UserError
from tacit.federation import checkpoint
from tacit.federation.statements import LEDGER, read_ledger
from tacit.privacy import ClientLevel, Clip, FixedSize, Ledger, Poisson, as_sampling
from tacit.privacy.accountants import epsilon
from tacit.privacy.events import PoissonGaussian

ROUNDS, CLIENTS, COHORT = 4, 8, 2
SECTIONS = {
    "rounds": ROUNDS,
    "data": {"name": "blobs", "partition": {"kind": "iid", "clients": CLIENTS}},
    "model": {"name": "mlp", "hidden": [4]},
    "cohort": COHORT,
    "local": {"steps": 2, "batch": 5, "lr": 0.1},
    "engine": {"workers": 0},
}
PRIVATE = SECTIONS | {"privacy": {"unit": "client", "delta": 1e-3, "clip": 1.0, "noise": 2.0}}


class Growing(torch.optim.Optimizer):
    """SGD whose rate grows with every step, counted in its group of parameters as some libraries do."""

    def __init__(self, params, lr=0.1, growth=0.5):
        super().__init__(params, {"lr": lr, "growth": growth, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * (1 + group["growth"] * group["k"]))


@dataclass(frozen=True)
class InTurn:
    """The next clients in each round."""

    size: int = COHORT

    def repeatable(self, rng, population, round=0):
        return (self.size * round + np.arange(self.size)) % population

    def expected(self, population):
        return self.size


class Everyone(Poisson):
    """Claims a rate of 1/4 by its class, and takes the same clients each time."""

    def draw(self, bits, population):
        return np.arange(COHORT)

    def repeatable(self, rng, population, round=0):
        return np.arange(COHORT)


class Twice(InTurn):
    def repeatable(self, rng, population, round=0):
        return [3, 3]


def theta(folder: str) -> torch.Tensor:
    saved, _ = checkpoint.newest(Path(folder) / "checkpoint")
    assert saved is not None and saved.round == ROUNDS
    return saved.vectors["theta"]


def run(folder: str, sections: dict = SECTIONS, **objects: object) -> tacit.Result:
    return tacit.run(tacit.load(sections), folder, dataset=blobs(64), progress=False, **objects)


def test_an_optimizer_as_an_object_is_recorded_and_its_groups_survive_a_resume() -> None:
    optimizer = partial(Growing, growth=1.0)
    run("whole", optimizer=optimizer)
    run("half", SECTIONS | {"rounds": 2}, optimizer=optimizer)
    recorded = json.loads(Path("half/objects.json").read_text())
    assert "Growing" in json.dumps(recorded) and '"growth": 1.0' in json.dumps(recorded)
    with pytest.raises(UserError, match=r"optimizer=functools.partial\(Growing, growth=1.0\)"):
        tacit.resume("half", dataset=blobs(64), rounds=ROUNDS)
    with pytest.raises(UserError, match=r"this is Growing\(growth=2.0\)"):
        tacit.resume("half", dataset=blobs(64), rounds=ROUNDS, optimizer=partial(Growing, growth=2.0))
    tacit.resume("half", dataset=blobs(64), rounds=ROUNDS, optimizer=optimizer)
    assert torch.equal(theta("half"), theta("whole"))
    run("plain", optimizer=torch.optim.SGD)
    run("named")
    assert torch.equal(theta("plain"), theta("named")) and not torch.equal(theta("plain"), theta("whole"))


def test_an_optimizer_that_would_not_be_used_is_refused() -> None:
    with pytest.raises(UserError, match="leave out server"):
        run("a", SECTIONS | {"server": {"optimizer": "adam", "lr": 0.1}}, optimizer=Growing)
    with pytest.raises(UserError, match="server rule of its own"):
        run("b", SECTIONS | {"method": "fedadam"}, optimizer=Growing)
    with pytest.raises(UserError, match="already has its parameters"):
        run("c", optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    with pytest.raises(UserError, match="makes a list"):
        run("d", optimizer=lambda params, lr: [])


class Watch(tacit.Algorithm):
    """Nothing is learnt; each client counts how often it took part."""

    def client(self, msg, state, work):
        times = state.get("times", torch.zeros(1)) + 1
        return {"delta": torch.zeros_like(msg["theta"])}, {"times": times}


def test_a_sampler_as_an_object_decides_who_takes_part_and_must_be_given_again() -> None:
    run("run", algorithm=Watch(), sampling=InTurn())
    states = {
        int(p.parent.name): load_file(p)["times"].item() for p in Path("run").rglob("*-0-0.safetensors")
    }
    assert states == dict.fromkeys(range(CLIENTS), 1.0), "four rounds of two in turn"
    with pytest.raises(UserError, match=r"sampling=InTurn\(size=2\)"):
        tacit.resume("run", dataset=blobs(64), algorithm=Watch(), rounds=5)
    with pytest.raises(UserError, match="set it to 3"):
        run("other", sampling=InTurn(3))
    with pytest.raises(UserError, match="leave one of them out"):
        run("both", SECTIONS | {"cohort": {"size": COHORT, "sampling": "fixed"}}, sampling=InTurn())


def test_no_amplification_for_a_sampler_that_is_not_known() -> None:
    """Whatever its class is derived from: every round costs a whole Gaussian query."""
    whole = epsilon({PoissonGaussian(1.0, 2.0): ROUNDS}, 1e-3).value
    for sampler in (InTurn(), Everyone(COHORT / CLIENTS)):
        folder = type(sampler).__name__
        run(folder, PRIVATE, sampling=sampler)
        said = tacit.statement(folder)
        assert said.epsilon == pytest.approx(whole, rel=1e-6) and "nothing is claimed" in said.text()
        assert "stays secret" not in said.text()
        planned = tacit.plan(tacit.load(PRIVATE), dataset=blobs(64), sampling=sampler)
        assert (planned["epsilon"], planned["sampling"]) == (said.epsilon, "own")
    run("known", PRIVATE, sampling=Poisson(COHORT / CLIENTS))
    assert tacit.statement("known").epsilon < whole / 1.5
    with pytest.raises(UserError, match="is not known"):
        ClientLevel(1.0, 1e-3, Clip(1.0), Everyone(0.25))
    with pytest.raises(UserError, match="noise that the server makes"):
        ClientLevel(1.0, 1e-3, Clip(1.0), as_sampling(InTurn()), noise_at="clients")
    for known in (Poisson(0.25), FixedSize(2)):
        assert as_sampling(known) == known
    everyone = Poisson(0.1)  # claims to draw a tenth in secret, and draws all
    object.__setattr__(everyone, "draw", lambda bits, population: np.arange(population))
    assert "draw" not in vars(as_sampling(everyone))
    for kind in ("blt", {"kind": "banded", "bands": 2}):
        with pytest.raises(UserError, match="sampling"):
            run(
                "correlated",
                PRIVATE | {"privacy": PRIVATE["privacy"] | {"mechanism": kind}},
                sampling=InTurn(),
            )


def test_a_cohort_that_is_none_is_refused_before_it_is_paid_for() -> None:
    with pytest.raises(UserError, match="drew a client twice in round 1"):
        run("run", PRIVATE, sampling=Twice())
    assert Ledger.read(Path("run") / LEDGER).charges == [] and read_ledger(Path("run")).charges == []
    whole = "must give a list of whole numbers"
    numbers = (([CLIENTS], "numbered 0 to 7"), ([-1], "drew client -1"), ([2**64 - 1], "numbered 0 to 7"))
    others = ([0.5], ["a"], [None], [[1]], [[1], [2, 3]], 3, {1})
    for odd, message in (*numbers, *((other, whole) for other in others)):
        scheme = InTurn()
        object.__setattr__(scheme, "repeatable", lambda rng, population, round=0, odd=odd: odd)
        with pytest.raises(UserError, match=message):
            as_sampling(scheme).repeatable(np.random.default_rng(0), CLIENTS)


def test_a_known_sampler_as_an_object_is_the_config_s_own() -> None:
    simulated = PRIVATE | {"privacy": PRIVATE["privacy"] | {"entropy": "seed"}}
    run("object", simulated, sampling=Poisson(COHORT / CLIENTS))
    run("config", simulated)
    assert torch.equal(theta("object"), theta("config"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"trackers": tacit.Tracker}, "trackers: give a list of them, such as trackers="),
        (
            {"trackers": [blobs]},
            "trackers: this function has none of the methods that a run calls: start, clien",
        ),
        (
            {"trackers": [Growing]},
            r"trackers: Growing is a class; pass an instance of it, trackers=\[Growing",
        ),
        ({"model": torch.nn.Linear}, r"model: Linear is a class; pass an instance of it, model=Linear\(…\)"),
    ],
)
def test_what_a_run_cannot_use_is_told_before_it_begins(tmp_path: Path, given, told) -> None:
    with pytest.raises(UserError, match=told):
        tacit.run(tacit.load(SECTIONS), tmp_path / "run", dataset=blobs(), **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model.train", ["2.*"], "model.train"),
        ("model.lora", {"rank": 2, "targets": ["0"]}, "model.lora"),
        ("data.normalise", {"mean": [1.0], "std": [2.0]}, "data.normalise"),
    ],
)
def test_keys_about_what_was_given_as_an_object_are_told_to_do_nothing(key, value, told) -> None:
    config = tacit.load(SECTIONS, {"rounds": 1, key: value})
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
    with pytest.warns(RuntimeWarning, match=rf"not used, as the run was given objects instead: {told}$"):
        tacit.run(config, "run", model=model, dataset=blobs())


class Odd(tacit.Algorithm):
    """An algorithm whose server keeps what no checkpoint and no client can take for a model."""

    def __init__(self, state):
        self.kept = state

    def client(self, msg, state, work):
        return {"delta": torch.zeros_like(work.load(msg["theta"]))}, {}

    def server(self, state, mean, round):
        return self.kept


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"theta": torch.zeros(3)}, r"Odd.server returns a 'theta' of shape \[3\]; .* the model, 88 numbers"),
        ({"c": torch.zeros(3)}, "Odd.server returns no 'theta'"),
        (None, "Odd.server returns no 'theta'"),
        ({"theta": torch.zeros(88), "n": 3}, "Odd.server returns 'n' as a int"),
    ],
)
def test_a_server_state_that_is_none_is_named(state: object, told: str) -> None:
    config = tacit.load(SECTIONS, {"rounds": 1})
    with pytest.raises(UserError, match=told):
        tacit.run(config, "run", dataset=blobs(), algorithm=Odd(state))
