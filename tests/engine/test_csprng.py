"""Masks under an example-level guarantee come from the cipher, and torch's own kernels are restored
afterwards.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

import tacit
from tacit.engine.csprng import SecretPlaces, csprng, refresh_generator

N = 40_000
ALARM = 1e-7
"""False alarms of each statistical test below."""


def seeded() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "dropout": functional.dropout(torch.ones(N), 0.3),
        "rand": torch.rand(N),
        "randn": torch.randn(N),
        "exponential": torch.empty(N).exponential_(2.0),
        "bernoulli": torch.bernoulli(torch.full((N,), 0.2)),
    }


def test_a_seed_that_everybody_knows_tells_nothing() -> None:
    plain = seeded()
    with csprng():
        first = seeded()
        again = seeded()
    with csprng():
        other = seeded()
    for name, values in seeded().items():
        assert torch.equal(values, plain[name])  # torch's own kernels are back
        assert torch.equal(first[name], again[name])  # a state that is set again is repeated
        assert not torch.equal(first[name], other[name]) and not torch.equal(first[name], plain[name])


def test_distributions() -> None:
    with csprng():
        refresh_generator()
        drawn = seeded()
        p = 2.0**-6
        rare = torch.empty(N).bernoulli_(p)
        assert torch.empty(9).bernoulli_(1.0).all() and not torch.empty(9).bernoulli_(0.0).any()
        half = torch.empty(N, dtype=torch.bfloat16).uniform_(-1, 1)
        shifted = torch.empty(3, 5).normal_(100.0, 1e-3)
    assert drawn["dropout"].unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    for values, rate in ((drawn["dropout"], 0.7), (drawn["bernoulli"], 0.2), (rare, p)):
        assert stats.binomtest(int(values.count_nonzero()), N, rate).pvalue > ALARM
    assert stats.kstest(drawn["rand"].numpy(), "uniform").pvalue > ALARM
    assert stats.kstest(drawn["randn"].numpy(), "norm").pvalue > ALARM
    assert stats.kstest(drawn["exponential"].numpy(), "expon", args=(0, 0.5)).pvalue > ALARM
    assert float(drawn["rand"].min()) >= 0 and float(drawn["rand"].max()) < 1
    assert float(half.float().min()) >= -1 and float(half.float().max()) < 1
    assert (shifted - 100).abs().max() < 0.1


def test_masks_of_records_calls_and_steps_are_independent() -> None:
    """Correlations of masks' rows, of calls in a row, and of steps: |r| < 6/√n, 2e-9 each."""
    with csprng():
        masks = []
        for _ in range(2):
            refresh_generator()
            masks += [functional.dropout(torch.ones(4, N), 0.5) for _ in range(2)]
    rows = torch.cat(masks).sub_(1.0)
    off = (rows @ rows.t() / N).fill_diagonal_(0.0)
    assert off.abs().max() < 6 / math.sqrt(N)


def test_vmap_attention_and_strides_draw_from_the_cipher_too() -> None:
    def masked(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5)

    with csprng():
        torch.manual_seed(0)
        rows = torch.func.vmap(masked, randomness="different")(torch.ones(3, 999))
        query = torch.eye(64).view(1, 1, 64, 64)
        attended = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        pictures = functional.dropout(torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last), 0.5)
    assert not torch.equal(rows[0], rows[1]) and 0.3 < float((rows > 0).float().mean()) < 0.7
    assert 0.3 < float((attended > 0).float().mean()) < 0.7
    assert set(pictures.unique().tolist()) == {0.0, 2.0}


def test_a_place_has_bits_of_its_own_whoever_else_is_there() -> None:
    key, places = SecretPlaces(), np.array([5, 0, 70_000])
    bits = key(3, 1, places)
    assert [key(3, 1, places[[i]])[0] for i in range(3)] == bits.tolist()
    assert len({*bits.tolist(), *key(3, 2, places).tolist(), *SecretPlaces()(3, 1, places).tolist()}) == 9
    assert key(0, 0, np.empty(0, np.int64)).shape == (0,)


def test_seeds_of_the_users_own_are_left_as_they_were() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    with csprng():
        inside = random.random(), np.random.rand()  # noqa: NPY002
    assert (random.random(), np.random.rand()) == expected != inside  # noqa: NPY002


def test_a_private_run_draws_masks_from_the_cipher_and_others_do_not(config, dataset, monkeypatch) -> None:
    """Dropout's kernel is the cipher's inside a client's step, and only under a guarantee for examples."""
    entered = []

    def watched():
        entered.append(True)
        return csprng()

    monkeypatch.setattr("tacit.engine.worker.csprng", watched)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 4))
    example = {"unit": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-3}
    for name, privacy, secret in (
        ("none", None, False),
        ("client", {**example, "unit": "client"}, False),
        ("named", {**example, "entropy": "seed"}, False),
        ("example", example, True),
    ):
        entered.clear()
        tacit.run(config(rounds=1, privacy=privacy), name, dataset=dataset, model=model)
        assert bool(entered) is secret, name
