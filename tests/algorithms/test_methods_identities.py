"""Identities: cases in which two methods, or a method and its own definition, must agree exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from methods_small import CLIENTS, EACH, STEPS, configured, halves, play, problem
from tacit.algorithms import Scaffold, Work
from tacit.algorithms.smoothing import laplacian_smoothing
from tacit.config.methods import METHODS
from tacit.privacy import Clip, ExampleLevel, Poisson
from tacit.vector import Layout, Vectors

EXAMPLE = [name for name, method in METHODS.items() if method.unit == "example"]
CLIENT = [name for name, method in METHODS.items() if method.unit == "client"]
NO_PRIVACY = {"privacy.clip": math.inf, "privacy.noise": 0.0}


@pytest.mark.parametrize("method", [*EXAMPLE, *CLIENT])
def test_without_noise_and_clip_a_private_method_is_its_plain_twin(method: str) -> None:
    private = play(configured(method, NO_PRIVACY), "private")
    plain = play(configured(method, {"privacy": None}), "plain")
    for number in (1, 2):
        expected = plain.state(number)
        for name, vector in private.state(number).items():
            torch.testing.assert_close(vector, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    for mine, other in zip(private.memory().values(), plain.memory().values(), strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=1e-4, atol=1e-5)


FALLS_BACK = {
    "fedprox without a pull": ("fedprox", {"method.mu": 0.0}, "fedavg", {}),
    "fedcm without a direction": ("fedcm", {"method.alpha": 1.0}, "fedavg", {}),
    "fedsam without a radius": ("fedsam", {"method.rho": 0.0}, "fedavg", {}),
    "dp-fedsam without a radius": ("dp-fedsam", {"method.rho": 0.0}, "dp-fedavg", {}),
    "dp-fedavg-ls without smoothing": ("dp-fedavg-ls", {"method.sigma_ls": 0.0}, "dp-fedavg", {}),
    "fedadamw without direction and aggregation": (
        "fedadamw", {"method.alpha": 0.0, "method.aggregate": "none"}, "local-adamw", {},
    ),
    "fedadamw without a direction": ("fedadamw", {"method.alpha": 0.0}, "agg-mean-v", {}),
    "dp-fedadamw without its three parts": (
        "dp-fedadamw",
        {"method.alpha": 0.0, "method.aggregate": "none", "method.debias": False},
        "dp-local-adamw",
        {},
    ),
    "dp-fedadamw without privacy": ("dp-fedadamw", {"privacy": None}, "fedadamw", {}),
    "adamw without decay": ("local-adamw", {"method.weight_decay": 0.0}, "local-adam",
                            {"method.weight_decay": 0.0}),
    "dp2-fedsam without a radius": ("dp2-fedsam", {"method.rho": 0.0}, "centaur", {}),
}  # fmt: skip


@pytest.mark.parametrize("which", FALLS_BACK)
def test_falls_back_to_its_parent(which: str) -> None:
    """With real batches, half of the clients and, where there is any, the same noise."""
    method, options, parent, parent_options = FALLS_BACK[which]
    small = {"local.batch": 5, "cohort.size": 2, "rounds": 3}
    noise = {"privacy.noise": 1.0} if METHODS[method].unit == "client" else {}
    child = play(configured(method, small | noise | options), "child")
    other = play(configured(parent, small | noise | parent_options), "parent")
    torch.testing.assert_close(child.theta, other.theta, rtol=1e-5, atol=1e-6)
    started = torch.cat([p.detach().flatten() for p in halves().parameters()])
    assert not torch.equal(child.theta, started[: len(child.theta)]), "the run did something"


@pytest.mark.parametrize("method", ["local-adam", "local-adamw"])
def test_a_round_of_local_adam_is_torchs_own(method: str) -> None:
    config = configured(method, {"rounds": 1, "local.steps": 7})
    data = problem(config).data
    moved = []
    for x, y in data:
        model = halves()
        kind = torch.optim.Adam if method == "local-adam" else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.01)
        for _ in range(7):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.tensor(x).float()), torch.tensor(y)).backward()
            optimizer.step()
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(play(config).theta, torch.stack(moved).mean(0), rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Listening(Scaffold):
    """SCAFFOLD that writes down every gradient it is given."""

    heard: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def client(self, msg: Vectors, memory: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        notes: list[Tensor] = []
        honest = work.gradient

        def gradient(*args: Any, **options: Any) -> Tensor:
            g = honest(*args, **options)
            notes.append(g.clone())
            return g

        work.gradient = gradient  # type: ignore[method-assign]
        upload, memory = super().client(msg, memory, work)
        self.heard[work.round, len(self.heard)] = [*notes, memory["c"]]
        return upload, memory


@pytest.mark.parametrize("method", ["scaffold", "dp-scaffold"])
def test_scaffolds_c_is_the_mean_local_gradient(method: str) -> None:
    """c_i⁺ = (1/K) Σ g_k, plain or private, in every round of every client, whatever c and c_i were."""
    algorithm = Listening()
    config = configured(method, {"cohort.size": 3, "rounds": 4, "local.batch": 5})
    play(config, algorithm=algorithm)
    assert len(algorithm.heard) == 12
    for *gradients, c in algorithm.heard.values():
        assert len(gradients) == STEPS
        mean = torch.stack(gradients).mean(0)
        # c_i⁺ comes from Δ/(Kη), a difference of two float32 models.
        torch.testing.assert_close(c, mean, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["dp-fedadamw", "dp-fedadamw-agg-v"])
def test_privacy_raises_the_second_moment_by_phi(method: str) -> None:
    """E[v̂] rises by φ = (σC/B)², also after v went through the server and came back.

    The step size is next to nothing, so a client's gradient g is the same at every step. Then
    v̂ − v̂(no noise) is a mean of 2gε + ε² over coordinates, clients and steps with Adam's weights w, ε having
    variance φ: expectation φ, variance Σw²(4g²φ + 2φ²). Each of at most 73 comparisons is made at 5.5
    standard errors: a false alarm for fewer than one seed in ten thousand, skewness of ε² included.
    """
    beta2, rounds, steps, sigma, c = 0.999, 2, 60, 1.0, 0.1
    length = {"local.steps": steps, "local.lr": 1e-12, "rounds": rounds}
    noisy = play(configured(method, length), "noisy").state(rounds)["v"].double()
    clean = play(configured(method, length | {"privacy.noise": 0.0}), "clean").state(rounds)["v"].double()
    t = rounds * steps
    weights = (1 - beta2) * beta2 ** np.arange(t) / (1 - beta2**t)
    rise = (noisy - clean) / (1 - beta2**t)
    sizes = np.array([40, 4, 24, 4]) if method == "dp-fedadamw" else np.ones(72)
    mechanism = ExampleLevel(sigma, 1e-5, Clip(c), Poisson(1.0))
    phi = (mechanism.std(72, EACH) / EACH) ** 2  # (σC/B)², and C has a little for the arithmetic
    assert (sigma * c / EACH) ** 2 <= phi <= 1.01 * (sigma * c / EACH) ** 2
    squares = (clean / (1 - beta2**t)).numpy()
    variance = np.sum(weights**2) * (4 * squares * phi + 2 * phi**2) / (sizes * CLIENTS)
    standard = (rise.numpy() - phi) / np.sqrt(variance)
    assert np.abs(standard).max() < 5.5
    share = sizes / sizes.sum()
    whole = (share @ rise.numpy() - phi) / math.sqrt(share**2 @ variance)
    assert abs(whole) < 5.5
    assert phi > 20 * math.sqrt(share**2 @ variance), "a rise of φ/2 or 2φ would be seen"


@given(st.integers(1, 40), st.floats(0, 10), st.integers(0, 2**31 - 1))
@settings(max_examples=60, deadline=None)
def test_laplacian_smoothing_keeps_the_sum_and_shrinks_the_rest(n: int, sigma: float, seed: int) -> None:
    u = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    smooth = laplacian_smoothing(u, sigma)
    torch.testing.assert_close(smooth.sum(), u.sum(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(laplacian_smoothing(u, 0.0), u, rtol=1e-5, atol=1e-6)
    assert torch.linalg.vector_norm(smooth) <= torch.linalg.vector_norm(u) * (1 + 1e-5)


@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    c=st.floats(1e-3, 10),
    per=st.sampled_from(["global", "uniform", "dim"]),
    second=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_bounds_of_layers_add_up_to_the_whole(widths: list[int], c: float, per: Any, second: bool) -> None:
    """√ΣC_h² = C for what clients send, with one upload or two, and for a record's gradient."""
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    layout = Layout.of(model)
    sizes = {"delta": layout.shared} | ({"c": layout.shared} if second else {})
    sent = Clip(c, per).bind(sizes, layout).groups
    assert math.sqrt(sum(group.bound**2 for group in sent)) == pytest.approx(c)
    assert sum(part.stop - part.start for group in sent for _, part in group.parts) == sum(sizes.values())
    records = Clip(c, per).groups(layout)
    assert math.sqrt(sum(bound**2 for _, bound in records)) == pytest.approx(c)
    assert sum(part.stop - part.start for parts, _ in records for part in parts) == layout.size


def test_seeded_noise_is_really_there() -> None:
    """The twins above would agree if noise and clip were never applied: they are."""
    for method in ("dp-fedavg", "dp-fedavg-client"):
        noisy = play(configured(method, {"privacy.noise": 1.0}), f"{method}-noisy")
        silent = play(configured(method, {"privacy.noise": 0.0}), f"{method}-silent")
        plain = play(configured(method, {"privacy": None}), f"{method}-plain")
        assert not torch.allclose(noisy.theta, silent.theta, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(silent.theta, plain.theta, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["agg-none", "agg-m", "agg-v", "agg-vm"])
def test_no_aggregation_makes_first_steps_longer_than_adams_own(method: str) -> None:
    """ε is 1e-8, and the gradients of the second round's clients are far smaller than the averaged m."""

    class Shrinking:
        """A gradient of one in the first round, of 1e-6 in the second."""

        layout, noise_variance, travel, decay = Layout.of(nn.Linear(3, 2)), 0.0, 1.0, 1.0

        def __init__(self, round: int) -> None:
            self.round, self.steps_before, self.moves = round, 50 * round, [torch.zeros(8)]

        def load(self, theta: Tensor) -> Tensor:
            self.y = theta.clone()
            return self.y

        def steps(self):
            for _ in range(50):
                yield 1.0
                self.moves.append(self.y.clone())

        def gradient(self) -> Tensor:
            return torch.full((8,), 1.0 if self.round == 0 else 1e-6)

        def note(self, name: str, value: float) -> None: ...

    algorithm = METHODS[method].algorithm(**METHODS[method].options | {"weight_decay": 0.0})
    assert algorithm.eps == 1e-8
    state = algorithm.init(torch.zeros(8), Shrinking.layout)
    for round in (0, 1):
        work = Shrinking(round)
        upload, _ = algorithm.client(algorithm.message(state), {}, work)
        longest = max(float((b - a).abs().max()) for a, b in pairwise(work.moves))
        assert longest <= 1.06, f"a step of {longest} η in round {round}"
        state = {name: upload.get(name, state[name]) for name in state}
