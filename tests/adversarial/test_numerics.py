"""How far float32 lets one record move a sum of clipped gradients beyond C: what the noise allows for.

At example level sums are made by whatever kernels a batch's shape selects, so a record's neighbours change
the rounding of its part and it of theirs. The mechanism adds `NUMERICAL` = 2⁻⁹ of C to the sensitivity for
that. Here it is measured, with records that are all clipped (the worst case), by taking one out.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.gradients import ClippedGradient
from tacit.models import build
from tacit.privacy import Clip, ExampleLevel, Poisson
from tacit.privacy.mechanisms.example import MEASURED_BATCH, NUMERICAL

C = 0.1


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * 50


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "options", "size"),
    [("mlp", {"hidden": [64]}, 512), ("cnn", {}, 96), ("vit_tiny", {"depth": 2}, 48)],
)
def test_the_margin_for_float32_is_a_thousand(
    name: str, options: dict[str, object], size: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        clipped = ClippedGradient(build(name, (3, 32, 32), 10, **options))
        batch = {"x": torch.randn(size, 3, 32, 32), "y": torch.randint(0, 10, (size,))}
        assert (clipped(batch, losses, C).norms >= C).all(), "everyone is clipped"
        whole = clipped.flat.grad.double().clone()
        excess = []
        for out in (0, 1, size // 2, size - 1):
            kept = torch.arange(size) != out
            clipped({key: value[kept] for key, value in batch.items()}, losses, C)
            excess.append(float((whole - clipped.flat.grad.double()).norm()) / C - 1)
        assert max(excess) < NUMERICAL / 900, excess
        assert min(excess) > -1e-3, "a record that is clipped moves the sum by C"
    finally:
        torch.set_num_threads(before)
    assert size <= MEASURED_BATCH


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("size", [2.6e-23, 4.5e-23, 1e-22, 1e-20])
def test_no_record_hides_its_length_in_squares_that_vanish(tokens: int, size: float) -> None:
    """Features whose squares float32 has no room for, and an error of 10¹⁹ beside them: the gradient is 0.004
    long, and a product of two sums of squares would call it 0.
    """
    model = nn.Linear(100, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    batch = {"x": torch.full((2, tokens, 100), size), "y": torch.zeros(2, tokens)}
    batch["y"][0] = 8e18 / tokens**0.5
    if tokens == 1:
        batch = {"x": batch["x"][:, 0], "y": batch["y"]}

    def squared_errors(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).view(batch["y"].shape) - batch["y"]).square().sum(1)

    for bound in (1.0, 1e-3, 1e-6):
        clipped = ClippedGradient(model)
        clipped(batch, squared_errors, bound)
        assert float(clipped.flat.grad.double().norm()) <= bound * (1 + NUMERICAL)


def test_a_clip_that_float32_cannot_measure_is_refused() -> None:
    with pytest.raises(UserError, match=r"privacy\.clip 1e-12"):
        ExampleLevel(1.0, 1e-5, Clip(1e-12), Poisson(0.5))
