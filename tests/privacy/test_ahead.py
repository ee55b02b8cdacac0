"""Noise that is drawn ahead equals the noise that would have been drawn later, and is used once."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tacit.privacy import Bits, Clip, ExampleLevel, Poisson
from tacit.privacy.ahead import Drawn
from tacit.privacy.gaussian import STRETCH, rounded_gaussian
from tacit.privacy.grid import Grid
from tacit.privacy.mechanisms.example import FEW


def mechanism() -> ExampleLevel:
    return ExampleLevel(noise=1.0, delta=1e-5, clip=Clip(1.0), sampling=Poisson(0.5))


def steps(dimension: int, bits: Bits, early: bool) -> list[Tensor]:
    """Four private gradients of zero, their noise made before or after."""
    found = []
    for _ in range(4):
        source = mechanism().ahead(dimension, bits, 8.0, True) if early else bits
        assert isinstance(source, Drawn) == early
        found.append(mechanism().privatize_(torch.zeros(dimension), source, 8.0))
    return found


@pytest.mark.parametrize("dimension", [1, 1000, 300_000])
def test_the_same_bits_make_the_same_noise(dimension: int) -> None:
    early, late = (steps(dimension, Bits.named(3, 1), e) for e in (True, False))
    assert all(map(torch.equal, early, late))
    assert len({tuple(noise[:50].tolist()) for noise in early}) == 4 or dimension == 1


@pytest.mark.parametrize("dimension", [1, FEW - 1, FEW + 1, STRETCH, STRETCH + 1, STRETCH + FEW + 3])
def test_every_coordinate_gets_its_own_draw_once(dimension: int) -> None:
    """The formula in numpy, without blocks: ⌊g ÷ unit⌉ + noise, times unit ÷ B."""
    gradient = torch.randn(dimension, generator=torch.Generator().manual_seed(dimension))
    grid = Grid.fit(1.0, dimension, 1.0)
    draws = rounded_gaussian(dimension, mechanism().std(dimension, 8.0) / grid.unit, Bits.named(7))
    whole = np.rint(gradient.numpy().astype(np.float64) / grid.unit) + draws
    expected = (whole * (grid.unit / 8.0)).astype(np.float32)
    found = mechanism().privatize_(gradient, Bits.named(7), 8.0)
    assert np.array_equal(found.numpy(), expected)


def test_what_nobody_came_for_is_never_used() -> None:
    """A gradient that failed leaves its noise behind; the next one gets what comes after it."""
    bits, other = Bits.named(5), Bits.named(5)
    lost = mechanism().ahead(1000, bits, 8.0, True)
    first, second = steps(1000, other, early=False)[:2]
    source = mechanism().ahead(1000, bits, 8.0, True)
    found = mechanism().privatize_(torch.zeros(1000), source, 8.0)
    assert torch.equal(found, second) and not torch.equal(found, first)
    del lost


def test_noise_is_handed_out_once_and_for_what_it_was_drawn() -> None:
    source = mechanism().ahead(1000, Bits.secret(), 8.0, True)
    with pytest.raises(RuntimeError, match="was asked to serve"):
        mechanism().privatize_(torch.zeros(1001), source, 8.0)
    mechanism().privatize_(torch.zeros(1000), source, 8.0)
    with pytest.raises(RuntimeError, match="none is used twice"):
        mechanism().privatize_(torch.zeros(1000), source, 8.0)


def test_nothing_is_drawn_ahead_beside_a_gradient_on_the_host_nor_without_noise() -> None:
    bits = Bits.secret()
    assert mechanism().ahead(5, bits, 8.0, elsewhere=False) is bits
    assert replace(mechanism(), noise=0.0).ahead(5, bits, 8.0, elsewhere=True) is bits


def test_a_forked_process_has_a_thread_of_its_own() -> None:
    expected = steps(10, Bits.named(1), early=True)
    child = os.fork()
    if not child:
        same = all(map(torch.equal, expected, steps(10, Bits.named(1), early=True)))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
