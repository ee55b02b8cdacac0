"""The first rounds of each method, compared with a literal transcription of its formulas
(methods_reference.py).

The tested side is the whole system: config, preset, engine, privacy, release, server, checkpoint. The other
side is NumPy in float64. Every vector of the server's state is compared after every round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import methods_reference as reference
from methods_reference import Problem, State
from methods_small import BODY, Played, configured, play, problem

Transcription = Callable[[Problem], list[State]]

LS = partial(reference.fedavg, smooth=reference.laplacian_smoothing(16, 1.0))
ADAMW = partial(reference.adamw, decay=0.01)
DP_ADAMW = partial(ADAMW, starts="b", alpha=0.5, debias=True)

PLAIN: dict[str, Transcription] = {
    "fedavg": reference.fedavg,
    "fedprox": partial(reference.fedavg, mu=0.01),
    "scaffold": reference.scaffold,
    "fedcm": reference.fedcm,
    "fedadam": partial(reference.fedopt, rule="adam"),
    "fedyogi": partial(reference.fedopt, rule="yogi"),
    "fedadagrad": partial(reference.fedopt, rule="adagrad"),
    "fedlada": reference.fedlada,
    "fafed": reference.fafed,
    "fedsam": partial(reference.fedavg, rho=0.05),
    "local-lars": partial(reference.local_layerwise, rule="lars"),
    "local-lamb": partial(reference.local_layerwise, rule="lamb"),
    "local-adam": partial(reference.adamw, l2=0.01),
    "local-adamw": ADAMW,
    "fedadamw": partial(ADAMW, starts="b", alpha=0.5),
    "fedadamw-alg3": reference.fedadamw_theory,
    "agg-none": ADAMW,
    "agg-m": partial(ADAMW, starts="m"),
    "agg-v": partial(ADAMW, starts="v"),
    "agg-vm": partial(ADAMW, starts="vm"),
    "agg-mean-v": partial(ADAMW, starts="b"),
}

EXAMPLE: dict[str, Transcription] = {
    "dp-fedavg": reference.fedavg,
    "dp-scaffold": reference.scaffold,
    "dp-fedavg-ls": LS,
    "dp-fedsam": partial(reference.fedavg, rho=0.05),
    "dp-local-adamw": ADAMW,
    "dp-fedadamw": DP_ADAMW,
    "dp-fedadamw-no-agg": partial(DP_ADAMW, starts=""),
    "dp-fedadamw-no-bc": partial(DP_ADAMW, debias=False),
    "dp-fedadamw-no-align": partial(DP_ADAMW, alpha=0.0),
    "dp-fedadamw-agg-v": partial(DP_ADAMW, starts="v"),
    "adadps": reference.adadps,
    "dp-fedopt": partial(reference.fedopt, rule="adam"),
    "dp-fafed": reference.fafed,
    "dp-fedlada": reference.fedlada,
}

HEAD_LR = [0.005, 0.0025]
CLIENT: dict[str, Transcription] = {
    "dp-fedavg-client": partial(reference.fedavg, momentum=0.7),
    "dp-fedavg-ft": partial(reference.fedavg, momentum=0.7),
    "dp-fedsam-client": partial(reference.fedavg, rho=0.1, momentum=0.7),
    "dp-fedsam-ft": partial(reference.fedavg, rho=0.1, momentum=0.7),
    "centaur": partial(reference.dp2_fedsam, rho=0.0, head_lr=HEAD_LR, momentum=0.7),
    "dp2-fedsam": partial(reference.dp2_fedsam, rho=0.1, head_lr=HEAD_LR, momentum=0.7),
    "dp-fedlamb": partial(reference.fedlamb, lr=0.002),
}


def agree(played: Played, expected: list[State]) -> None:
    """Every vector after every round; `NAME of I` is what client I remembers at the end."""
    for number, state in enumerate(expected, start=1):
        saved = played.state(number)
        server = {name: vector for name, vector in state.items() if " of " not in name}
        assert saved.keys() - {n for n in saved if n.startswith("optimizer.")} == server.keys()
        for name, vector in server.items():
            close(saved[name].numpy(), vector, f"{name} after round {number}")
    remembered = {
        f"{name} of {client}": vector.numpy()
        for client, memory in played.memory().items()
        for name, vector in memory.items()
    }
    expected_memory = {name: vector for name, vector in expected[-1].items() if " of " in name}
    assert remembered.keys() == expected_memory.keys()
    for name, vector in expected_memory.items():
        close(remembered[name], vector, name)


def close(found: Any, expected: Any, what: str) -> None:
    # float32 against float64; Δ/(Kη) and 1/√v of small numbers lose a few digits on the way.
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=3e-4, atol=3e-5 * scale, err_msg=what)


@pytest.mark.parametrize("method", PLAIN)
def test_not_private(method: str) -> None:
    config = configured(method)
    agree(play(config), PLAIN[method](problem(config)))


@pytest.mark.parametrize("method", EXAMPLE)
def test_example_level(method: str) -> None:
    """σ 1, C 0.1 as in the presets: every record's gradient is clipped, and the noise counts."""
    config = configured(method)
    agree(play(config), EXAMPLE[method](problem(config)))


DECAYED = ["fedavg", "fedprox", "scaffold", "fedcm", "fedadam", "fedlada", "fedsam"]


@pytest.mark.parametrize("method", DECAYED)
def test_weight_decay_of_clients_that_run_sgd(method: str) -> None:
    """004 Appendix C: "FedAvg, SCAFFOLD, FedCM, FedAdam: weight decay = 0.001"; here it is large enough to be
    felt in two rounds. FedLADA's Adam has it inside of its gradient.
    """
    config = configured(method, {"local.weight_decay": 0.3})
    agree(play(config), PLAIN[method](problem(config)))


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-scaffold", "dp-fedavg-ls", "dp-fedsam", "adadps"])
def test_weight_decay_of_private_clients(method: str) -> None:
    """000 Table 20: 0.001 for SGD and SAM. It is added after clip and noise, neither smoothed nor scaled, and
    has no part in SAM's perturbation.
    """
    config = configured(method, {"local.weight_decay": 0.3})
    agree(play(config), EXAMPLE[method](problem(config)))


@pytest.mark.parametrize("per", ["uniform", "dim"])
@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedadamw"])
def test_example_level_clipped_by_layer(method: str, per: str) -> None:
    config = configured(method, {"privacy.clip": {"bound": 1.0, "per": per}})
    agree(play(config), EXAMPLE[method](problem(config)))


def test_sam_on_one_batch_is_the_same_step() -> None:
    """When every record is in every batch, a fresh batch is the same batch: only its price differs."""
    config = configured("dp-fedsam", {"method.fresh": False})
    agree(play(config), EXAMPLE["dp-fedsam"](problem(config)))


@pytest.mark.parametrize("method", CLIENT)
def test_client_level(method: str) -> None:
    """Clips that bite, and noise; at client level a round's noise is drawn once."""
    config = configured(method, {"privacy.noise": 0.7})
    sent = BODY if method in ("centaur", "dp2-fedsam") else 72
    agree(play(config), CLIENT[method](problem(config, sent)))


@pytest.mark.parametrize("per", ["global", "uniform", "dim"])
def test_lamb_after_every_kind_of_clip(per: str) -> None:
    config = configured("dp-fedlamb", {"privacy.clip.per": per, "server.lr": 0.02, "server.eps": 0.01})
    agree(play(config), reference.fedlamb(problem(config), lr=0.02, xi=0.01))


def test_client_level_scaffold_bounds_both_uploads_together() -> None:
    privacy = {"unit": "client", "clip": 0.3, "noise": 0.5, "delta": 1e-3}
    config = configured("scaffold", {"privacy": privacy})
    agree(play(config), reference.scaffold(problem(config)))


@pytest.mark.parametrize("method", ["scaffold", "dp-scaffold"])
def test_scaffold_with_half_of_the_clients(method: str) -> None:
    """c moves by S/N of the mean change, and a client's c_i waits until it is drawn again."""
    config = configured(method, {"cohort": 2, "rounds": 4})
    expected = problem(config)
    assert len({tuple(cohort) for cohort in expected.cohorts}) > 1
    agree(play(config), reference.scaffold(expected))


@pytest.mark.parametrize("method", ["fedcm", "fedadamw", "fedlada", "fafed", "fedyogi"])
def test_half_of_the_clients(method: str) -> None:
    config = configured(method, {"cohort": 2, "rounds": 3})
    agree(play(config), PLAIN[method](problem(config)))


def test_heads_with_half_of_the_clients() -> None:
    """DP²-FedSAM with cohorts of two: a head moves only when its client is drawn."""
    config = configured(
        "dp2-fedsam", {"privacy.noise": 0.7, "cohort": {"size": 2, "sampling": "fixed"}, "rounds": 4}
    )
    expected = problem(config, BODY)
    assert len({tuple(cohort) for cohort in expected.cohorts}) > 1
    rates = [0.005 * 0.5**r for r in range(4)]
    agree(play(config), reference.dp2_fedsam(expected, rho=0.1, head_lr=rates, momentum=0.7))


def test_heads_and_bodies_of_unequal_length() -> None:
    """Paper 002, Figure 7: τ_φ varies "with a fixed τ_h = 2"; a batch is all records, so an epoch is a
    step.
    """
    config = configured(
        "dp2-fedsam", {"privacy.noise": 0.7, "method.head_epochs": 2, "method.body_epochs": 5}
    )
    expected = reference.dp2_fedsam(
        problem(config, BODY), rho=0.1, head_lr=HEAD_LR, momentum=0.7, head_steps=2, body_steps=5
    )
    agree(play(config), expected)


@pytest.mark.parametrize("method", ["fedavg", "fedcm"])
def test_a_rate_that_falls_within_a_round(method: str) -> None:
    """Paper 004, line "Cosine decay is applied to local learning rates over the 50 local steps per round"."""
    config = configured(method, {"local.within": {"cosine": True}, "method": method})
    shape = [(1 + np.cos(np.pi * k / 3)) / 2 for k in range(3)]
    p = problem(config)
    theta, direction = p.theta, np.zeros_like(p.theta)
    for r, eta, cohort in p.rounds():
        deltas = []
        for i in cohort:
            g, y = p.gradient(r, i), theta
            for k in range(p.steps):
                step = g(y) if method == "fedavg" else 0.1 * g(y) + 0.9 * direction
                y = y - eta * shape[k] * step
            deltas.append(y - theta)
        delta = np.mean(deltas, axis=0)
        theta, direction = theta + delta, -delta / (eta * sum(shape))
    close(play(config).theta.numpy(), theta, "theta")
