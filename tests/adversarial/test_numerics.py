"""How far float32 lets one record move a sum of clipped gradients beyond C: what the noise allows for.

At example level sums are made by whatever kernels a batch's shape selects, so a record's neighbours change
the rounding of its part and it of theirs. The mechanism adds `NUMERICAL` = 2⁻⁹ of C to the sensitivity for
that. Here it is measured, with records that are all clipped (the worst case), by taking one out.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.gradients import ClippedGradient, steady
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


measured = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2",
    reason="how kernels round rows was measured with AVX2; the statement claims it for nothing else",
)


def on_the_kink(weight: Tensor, records: int) -> Tensor:
    """Records whose products with a row of weights are 0 but for float32's rounding."""
    x = torch.randn(records, len(weight), dtype=torch.float64)
    x -= torch.outer(x @ weight.double(), weight.double()) / weight.double().square().sum()
    return x.float()


class Convolved(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.view(len(x), 4, 4, 4)).flatten(1)


class Multiplied(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first.weight.t().contiguous() + self.first.bias


@measured
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["linear", "narrow", "matmul", "frozen", "convolution"])
def test_no_record_turns_another_ones_gradient_on(
    kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit counts, and every record sits on its ReLU's kink: with another number of records a kernel
    that adds up in another order would turn whole gradients on or off, and move the sum by several C.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(1)
        hidden = 1 if kind == "narrow" else 24
        body: nn.Module = {
            "matmul": Multiplied,
            "convolution": Convolved,
        }.get(kind, lambda hidden: nn.Linear(64, hidden))(hidden)
        layer = getattr(body, "first", body)
        with torch.no_grad():
            layer.bias.fill_(-1e3)
            layer.bias[0] = 0.0
        if kind == "frozen":
            layer.requires_grad_(False)
        model = nn.Sequential(body, nn.ReLU(), nn.Linear(hidden, 1, bias=False))
        nn.init.constant_(model[2].weight, 1.0)
        clipped = ClippedGradient(model)
        monkeypatch.setattr(clipped, "_test", lambda batch, losses: None)  # it computes records by themselves
        alive = 0.0

        def total(x: Tensor) -> Tensor:
            clipped({"x": x}, lambda model, batch: model(batch["x"]).sum(1) * 1e12, C)
            return clipped.flat.grad.double().clone()

        for size in (2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 16, 17, 18):
            for _ in range(3):
                x = on_the_kink(layer.weight.detach()[0].flatten(), size)
                whole = total(x)
                alive += float(whole.norm()) / C / size
                for out in (0, size - 1):
                    moved = float((whole - total(x[torch.arange(size) != out])).norm())
                    assert moved <= C * (1 + NUMERICAL), (size, out, moved / C)
        assert alive > 5, "about half of them are on the side where a gradient is"
    finally:
        torch.set_num_threads(before)


@measured
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("half", [False, True])
def test_products_round_every_row_alike(half: bool, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        for features, columns in ((784, 200), (200, 10), (17, 1), (64, 1), (33, 7), (512, 5), (96, 384)):
            x, weight, bias = torch.randn(96, features), torch.randn(columns, features), torch.randn(columns)
            products: dict[str, Callable[[Tensor], Tensor]] = {
                "linear": lambda x, weight=weight, bias=bias: steady.linear(x, weight, bias),
                "addmm": lambda x, weight=weight, bias=bias: steady.addmm(bias, x, weight.t().contiguous()),
                "matmul": lambda x, weight=weight: steady.matmul(x, weight.t().contiguous()),
                "vector": lambda x, weight=weight: steady.matmul(x, weight[0]),
            }
            for name, product in products.items():
                with torch.autocast("cpu", enabled=half):
                    whole = product(x)
                    for rows in range(1, 64):
                        chosen = torch.randperm(96)[:rows]
                        assert torch.equal(product(x[chosen]), whole[chosen]), (name, features, columns, rows)
    finally:
        torch.set_num_threads(before)


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
