"""LAMB, LARS, schedules and the server's optimizer, against transcriptions, other libraries and hand
calculation.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tacit import optimizers
from tacit.errors import UserError
from tacit.optimizers import Constant, Cosine, Exponential, Lamb, Lars, PerRound, ServerOptimizer
from tacit.optimizers.schedules import AnySchedule
from tacit.optimizers.server import OPTIMIZERS, options
from tacit.vector import Layout

Arrays = list[np.ndarray[Any, np.dtype[np.float64]]]
SHAPES = [(4, 3), (3,), (2, 2, 2), (5,)]


def start() -> Arrays:
    """Four tensors; the last is all zero, as a bias at the start."""
    rng = np.random.default_rng(7)
    arrays = [rng.normal(size=shape) for shape in SHAPES]
    arrays[-1][:] = 0
    return arrays


def gradients(steps: int) -> list[Arrays]:
    rng = np.random.default_rng(8)
    # The third step has a layer without gradient.
    return [[rng.normal(size=s) * (i != 1 or t != 2) for i, s in enumerate(SHAPES)] for t in range(steps)]


def run(optimizer: torch.optim.Optimizer, parameters: list[Tensor], steps: list[Arrays]) -> Arrays:
    for grads in steps:
        for p, g in zip(parameters, grads, strict=True):
            p.grad = torch.from_numpy(g.copy())
        optimizer.step()
    return [p.detach().numpy() for p in parameters]


def tensors(arrays: Arrays) -> list[Tensor]:
    return [torch.from_numpy(a.copy()) for a in arrays]


def lamb_by_hand(
    theta: Arrays, steps: list[Arrays], lr: float, eps: float, decay: float, correct: bool
) -> Arrays:
    """You et al. (2020), Algorithm 2, with φ the identity."""
    theta = [t.copy() for t in theta]
    m = [np.zeros_like(t) for t in theta]
    v = [np.zeros_like(t) for t in theta]
    for t, grads in enumerate(steps, start=1):
        for h, g in enumerate(grads):
            m[h] = 0.9 * m[h] + 0.1 * g
            v[h] = 0.999 * v[h] + 0.001 * g**2
            m_hat = m[h] / (1 - 0.9**t) if correct else m[h]
            v_hat = v[h] / (1 - 0.999**t) if correct else v[h]
            u = m_hat / (np.sqrt(v_hat) + eps) + decay * theta[h]
            a, b = np.linalg.norm(theta[h]), np.linalg.norm(u)
            theta[h] = theta[h] - lr * (a / b if a > 0 and b > 0 else 1.0) * u
    return theta


def lars_by_hand(theta: Arrays, steps: list[Arrays], lr: float, trust: float, decay: float) -> Arrays:
    """You et al. (2017), Algorithm 1."""
    theta = [t.copy() for t in theta]
    momentum = [np.zeros_like(t) for t in theta]
    for grads in steps:
        for h, g in enumerate(grads):
            a, b = np.linalg.norm(theta[h]), np.linalg.norm(g)
            rate = trust * a / (b + decay * a) if a > 0 and b + decay * a > 0 else 1.0
            momentum[h] = 0.9 * momentum[h] + lr * rate * (g + decay * theta[h])
            theta[h] = theta[h] - momentum[h]
    return theta


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize(("eps", "decay"), [(1e-6, 0.0), (0.01, 0.1)])
def test_lamb_against_a_literal_transcription(eps: float, decay: float, correct: bool) -> None:
    p = tensors(start())
    optimizer = Lamb(p, lr=0.05, eps=eps, weight_decay=decay, bias_correction=correct)
    for ours, expected in zip(
        run(optimizer, p, gradients(6)),
        lamb_by_hand(start(), gradients(6), 0.05, eps, decay, correct),
        strict=True,
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_against_a_literal_transcription(decay: float) -> None:
    p = tensors(start())
    optimizer = Lars(p, lr=0.7, trust_coefficient=0.02, weight_decay=decay)
    for ours, expected in zip(
        run(optimizer, p, gradients(6)), lars_by_hand(start(), gradients(6), 0.7, 0.02, decay), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-11, atol=1e-13)


def test_lamb_against_pytorch_optimizer() -> None:
    """The same without bias correction, where no norm is zero or above its clamp of 10, and eps vanishes."""
    peer = pytest.importorskip("pytorch_optimizer")
    ours, theirs = tensors(start()[:3]), tensors(start()[:3])
    steps = [g[:3] for g in gradients(2)]
    a = run(Lamb(ours, lr=0.05, eps=1e-12, weight_decay=0.1, bias_correction=False), ours, steps)
    # "AdamD" in this peer's terms: no correction of the first moment; it never corrects the second.
    group = [{"params": theirs, "adam_debias": True}]
    b = run(peer.Lamb(group, lr=0.05, eps=1e-12, weight_decay=0.1, weight_decouple=False), theirs, steps)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9)


def test_lars_against_pytorch_optimizer() -> None:
    """The same for matrices at a constant rate; it leaves vectors to plain SGD."""
    peer = pytest.importorskip("pytorch_optimizer")
    ours, theirs = tensors(start()[:3:2]), tensors(start()[:3:2])
    steps = [g[:3:2] for g in gradients(6)]
    a = run(Lars(ours, lr=0.7, trust_coefficient=0.02, weight_decay=0.1), ours, steps)
    b = run(peer.LARS(theirs, lr=0.7, trust_coefficient=0.02, weight_decay=0.1, momentum=0.9), theirs, steps)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e4])
def test_length_of_a_lamb_step_is_the_rate_times_the_layer(scale: float) -> None:
    theta = torch.randn(50)
    before = theta.clone()
    theta.grad = scale * torch.randn(50)
    Lamb([theta], lr=0.01).step()
    torch.testing.assert_close((theta - before).norm(), 0.01 * before.norm(), rtol=1e-4, atol=0)


def test_lamb_with_trust_one_is_adamw() -> None:
    """At ‖θ‖ = 0 the ratio is 1, so the first step is Adam's."""
    theta, other = torch.zeros(9), torch.zeros(9)
    theta.grad = torch.randn(9)
    other.grad = theta.grad.clone()
    Lamb([theta], lr=0.1, eps=1e-8).step()
    torch.optim.Adam([other], lr=0.1, eps=1e-8).step()
    torch.testing.assert_close(theta, other)


@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_closure_and_parameters_without_gradient(kind: type[Lamb] | type[Lars]) -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = kind([used, unused], lr=0.1)

    def closure() -> float:
        loss = used.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert (used < 1).all() and (unused == 1).all()


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-3}, {"weight_decay": -1.0}])
def test_lamb_refuses_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Lamb([torch.ones(1)], **bad)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"momentum": 1.0}, {"trust_coefficient": -1.0}])
def test_lars_refuses_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Lars([torch.ones(1)], **bad)


# Schedules


def test_schedules_by_hand() -> None:
    assert [Constant().over(9)(t) for t in (0, 7)] == [1.0, 1.0]
    assert [round(Cosine().over(4)(t), 12) for t in range(6)] == [
        1.0,
        round((1 + math.sqrt(0.5)) / 2, 12),
        0.5,
        round((1 - math.sqrt(0.5)) / 2, 12),
        0.0,
        0.0,
    ]
    assert Cosine(floor=0.2).over(4)(2) == pytest.approx(0.6)
    assert Cosine(floor=0.2).over(4)(9) == pytest.approx(0.2)
    asr = Exponential(0.6, every=750, start=750).over(2000)
    assert [asr(t) for t in (0, 749, 750)] == [1.0, 1.0, 1.0]
    assert asr(1500) == pytest.approx(0.6)
    assert asr(2250) == pytest.approx(0.36)
    assert asr(1125) == pytest.approx(math.sqrt(0.6))
    assert PerRound(0.99).over(200)(0) == 1.0
    assert PerRound(0.99).over(200)(200) == pytest.approx(0.13397967485796175)


# The server


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def server(name: str, lr: float = 0.1, **given: Any) -> ServerOptimizer:
    layout = Layout.of(model(), personal=("2.*",))
    torch.manual_seed(6)
    return ServerOptimizer(name, torch.randn(layout.shared), layout, lr, **given)


def delta(t: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(t))


def test_sgd_at_rate_one_adds_the_update_to_the_last_bit() -> None:
    s = server("SGD", lr=1.0)
    before, d = s.theta.clone(), delta(1, s.theta.numel())
    s.step(d)
    assert torch.equal(s.theta, before + d)
    assert torch.equal(d, delta(1, s.theta.numel()))


def test_it_owns_its_vector_and_updates_it_in_place() -> None:
    layout = Layout.of(model())
    theta = torch.randn(layout.shared)
    s = ServerOptimizer("adam", theta, layout, 0.1, lambda round: float(round == 0))
    kept, address = theta.clone(), s.theta.data_ptr()
    s.step(torch.ones_like(theta))
    assert torch.equal(theta, kept) and not torch.equal(s.theta, kept)
    assert s.theta.data_ptr() == address
    s.theta.zero_()
    s.step(torch.zeros_like(theta), round=1)
    assert torch.equal(s.theta, torch.zeros_like(theta))


@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad", "rmsprop", "lamb", "lars"])
def test_it_is_the_optimizer_on_each_tensor(name: str) -> None:
    """Layer-wise methods see the layout's tensors, not the flat vector, and not the personal ones."""
    s = server(name, lr=0.03, schedule=lambda round: 0.5)
    layout = Layout.of(model(), personal=("2.*",))
    parameters = [v.clone() for _, v in layout.views(s.theta)]
    assert len(parameters) == 4
    kind: Any = OPTIMIZERS[name]
    plain = kind(parameters, lr=0.03 * 0.5)
    for t in range(3):
        d = delta(t, s.theta.numel())
        s.step(d, t)
        for p, (_, g) in zip(parameters, layout.views(-d), strict=True):
            p.grad = g.clone()
        plain.step()
    assert torch.equal(s.theta, torch.cat([p.flatten() for p in parameters]))


def test_rate_factor_does_not_accumulate() -> None:
    s = server("sgd", lr=2.0, schedule=lambda round: (0.5, 0.25)[round])
    before, d = s.theta.clone(), delta(0, s.theta.numel())
    for round in range(2):
        s.step(d, round)
    torch.testing.assert_close(s.theta, before + 1.5 * d)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adam", {}),
    ("adam", {"amsgrad": True}),
    ("rmsprop", {"momentum": 0.5, "centered": True}),
    *((name, {}) for name in OPTIMIZERS if name not in ("sgd", "adam", "muon")),
]


@pytest.mark.parametrize(("name", "given"), CASES)
@pytest.mark.parametrize("after", [0, 2])
def test_save_load_continue_equals_uninterrupted(name: str, given: dict[str, Any], after: int) -> None:
    from safetensors.torch import load, save

    whole, first = server(name, **given), server(name, **given)
    for t in range(5):
        whole.step(delta(t, whole.theta.numel()), 0.9**t)
    for t in range(after):
        first.step(delta(t, first.theta.numel()), 0.9**t)
    tensors, scalars = first.state()
    file = save(tensors)
    resumed = server(name, **given)
    resumed.step(torch.ones_like(resumed.theta))  # whatever happened before a load must not matter
    resumed.theta.copy_(first.theta)
    resumed.load(load(file), dict(scalars))
    for t in range(after, 5):
        resumed.step(delta(t, resumed.theta.numel()), 0.9**t)
    assert torch.equal(resumed.theta, whole.theta)
    assert all(torch.equal(a, whole.state()[0][k]) for k, a in resumed.state()[0].items())
    assert resumed.state()[1] == whole.state()[1]


def test_loaded_state_is_a_copy() -> None:
    s = server("adam")
    s.step(delta(0, s.theta.numel()))
    tensors = {k: v.clone() for k, v in s.state()[0].items()}
    kept = {k: v.clone() for k, v in tensors.items()}
    other = server("adam")
    other.load(tensors, {})
    other.step(delta(1, s.theta.numel()))
    assert all(torch.equal(tensors[k], kept[k]) for k in tensors)


def test_state_names_are_those_of_torch() -> None:
    s = server("adam")
    assert s.state() == ({}, {})
    s.step(delta(0, s.theta.numel()))
    assert {"0.exp_avg", "0.exp_avg_sq", "0.step", "3.exp_avg"} <= set(s.state()[0])
    with pytest.raises(ValueError, match="another model"):
        s.load({"4.exp_avg": torch.zeros(1)}, {})


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("adm", {}, "did you mean 'adam'"),
        ("zzz", {}, r"unknown server optimizer 'zzz' \(known: adadelta.*; a class of your own is passed"),
        ("lbfgs", {}, "unknown server optimizer 'lbfgs'"),
        ("adam", {"beta": 0.9}, r"no option 'beta'; its options are: betas=\(0.9, 0.999\), eps=1e-08"),
        ("sgd", {"maximize": True}, "no option 'maximize'"),
        ("lamb", {"betas": (0.9, 2.0)}, "refuses its settings: betas"),
        ("adam", {"eps": "small"}, "refuses its settings"),
        ("sgd", {"nesterov": True}, "refuses its settings"),
        ("muon", {}, "refuses its settings"),
    ],
)
def test_mistakes_are_named(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        server(name, **given)


def test_options_of_lamb_are_its_own() -> None:
    assert options("LAMB") == {
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "bias_correction": True,
    }


def test_warm_up_over_rounds_rises_and_then_leaves_the_schedule_alone() -> None:

    plain, warm = (Cosine(warmup=w).over(100) for w in (0, 10))
    assert [warm(r) / plain(r) for r in (0, 4, 9, 10, 50)] == pytest.approx([0.1, 0.5, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("total", [1, 2, 50])
def test_the_shape_within_a_round(total: int) -> None:
    from tacit.optimizers import Within

    cosine = [Within(cosine=True)(k, total) for k in range(total)]
    assert cosine[0] == 1.0 and cosine == sorted(cosine, reverse=True) and min(cosine) > 0
    warm = [Within(cosine=True, floor=0.1, warmup=5)(k, 50) for k in range(50)]
    assert warm[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and warm[5] == 1.0
    assert min(warm[5:]) > 0.1
    assert {Within()(k, total) for k in range(total)} == {1.0}


def test_every_schedule_is_exported() -> None:
    union, _ = get_args(AnySchedule)
    for schedule in get_args(union):
        assert getattr(optimizers, schedule.__name__) is schedule and schedule.__name__ in optimizers.__all__
