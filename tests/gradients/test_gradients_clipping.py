"""Bounds, groups, parts of a batch, odd batches, refusals, randomness and the record-by-record fallback."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import inf, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gradients_reference import assert_exact, close, lengths, record_gradients, squared_outputs
from tacit.errors import UserError
from tacit.gradients import ClippedGradient, autograd, plain_gradient
from tacit.gradients.modules import refuse_modules
from tacit.gradients.plain import Descent
from tacit.vector import Flat

losses = squared_outputs()


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 3)
    )


def images(b: int) -> dict[str, Tensor]:
    return {"x": torch.randn(b, 2, 6, 6)}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.floats(1e-3, 1e3), st.integers(1, 8), st.integers(0, 10**6))
def test_any_bound_and_any_parts_give_the_same_sum(b, bound, micro, seed):
    torch.manual_seed(seed)
    flat, batch = Flat(small_cnn()), images(b)
    rows = record_gradients(flat, batch, losses)
    norms = lengths(rows)
    result = ClippedGradient(flat, micro_batch=micro)(batch, losses, bound)
    close(result.norms, norms, 1e-5)
    close(flat.grad, (rows * (bound / norms).clamp(max=1).unsqueeze(1)).sum(0), 1e-5)
    assert float(flat.grad.norm()) <= b * bound * (1 + 1e-5)


def test_an_infinite_bound_gives_the_plain_gradient():
    flat, batch = Flat(small_cnn()), images(5)
    mean = plain_gradient(flat, batch, losses)
    plain = flat.grad.clone()
    result = ClippedGradient(flat)(batch, losses, inf)
    close(flat.grad / 5, plain, 1e-6)
    close(result.loss_sum / 5, mean, 1e-6)


def test_per_layer_and_per_group_bounds():
    flat, batch = Flat(small_cnn()), images(6)
    rows = record_gradients(flat, batch, losses)
    layers = [slices for _, slices in flat.layout.layer_slices()]
    bounds = [float(torch.cat([rows[:, s] for s in parts], 1).norm(dim=1).median()) for parts in layers]
    result = ClippedGradient(flat)(batch, losses, list(zip(layers, bounds, strict=True)))
    assert result.norms.shape == (6, 4)
    for g, (parts, c) in enumerate(zip(layers, bounds, strict=True)):
        own = torch.cat([rows[:, s] for s in parts], 1)
        norms = lengths(own)
        close(result.norms[:, g], norms, 1e-5)
        expected = (own * (c / norms).clamp(max=1).unsqueeze(1)).sum(0)
        close(torch.cat([flat.grad[s] for s in parts]), expected, 1e-5)
    # Segments by index: a weight and a bias of different layers bounded together.
    ClippedGradient(flat)(batch, losses, [([0, 5], 0.01), ([1, 2, 3, 4, 6, 7], inf)])
    segments = flat.layout.segments
    first = torch.cat([rows[:, segments[i].slice] for i in (0, 5)], 1)
    expected = (first * (0.01 / first.norm(dim=1)).clamp(max=1).unsqueeze(1)).sum(0)
    close(torch.cat([flat.grad[segments[i].slice] for i in (0, 5)]), expected, 1e-5)
    close(flat.grad[segments[4].slice], rows[:, segments[4].slice].sum(0), 1e-5)


@pytest.mark.parametrize(
    "bound", [0.0, -1.0, float("nan"), [([0], 1.0)], [(range(8), 1.0), ([3], 1.0)], [([slice(0, 7)], 1.0)]]
)
def test_bounds_that_bound_nothing_are_refused(bound):
    with pytest.raises(ValueError, match=r"group|bound"):
        ClippedGradient(small_cnn())(images(2), losses, bound)


def test_empty_batch():
    flat = Flat(small_cnn())
    flat.grad.fill_(1.0)
    result = ClippedGradient(flat)(images(0), losses, 1.0)
    assert result.norms.shape == (0,) and result.loss_sum == 0 and result.dropped == 0
    assert not flat.grad.any()
    flat.grad.fill_(1.0)
    assert plain_gradient(flat, images(0), losses) == 0 and not flat.grad.any()


@pytest.mark.parametrize("micro", [None, 2])
def test_a_record_that_is_not_finite_contributes_nothing(micro):
    flat, batch = Flat(small_cnn()), images(5)
    clipped = ClippedGradient(flat, micro_batch=micro)
    clipped({"x": batch["x"][[0, 1, 3, 4]]}, losses, 0.5)
    expected = flat.grad.clone()
    batch["x"][2, 0, 0, 0] = inf
    result = clipped(batch, losses, 0.5)
    assert result.dropped == 1 and not result.norms[2].isfinite()
    assert result.loss_sum.isfinite()
    close(flat.grad, expected, 1e-6)


def test_a_record_of_gradient_zero():
    flat = Flat(nn.Linear(3, 2, bias=False))
    result = ClippedGradient(flat)({"x": torch.zeros(2, 3)}, losses, 1.0)
    # Norms are upper bounds: that no square has vanished in float32 cannot be told from the squares.
    assert not flat.grad.any() and float(result.norms.max()) < 1e-15 and result.dropped == 0


def test_frozen_parameters_are_left_out():
    model = small_cnn()
    model[0].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    assert_exact(model, images(4), losses)
    assert model[0].weight.grad is None


def test_gradients_of_other_parameters_and_flags_are_untouched():
    flat = Flat(small_cnn())
    ClippedGradient(flat)(images(3), losses, 1.0)
    assert not flat.grad.requires_grad
    for _, p in flat.module.named_parameters():
        assert p.requires_grad and p.grad is not None
        assert p.grad.untyped_storage().data_ptr() == flat.grad.untyped_storage().data_ptr()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(64), nn.BatchNorm2d(64), nn.SyncBatchNorm(64)])
def test_batch_norm_is_refused_with_its_replacement(norm):
    with pytest.raises(UserError, match=r"'0\.1' \(.*BatchNorm.*nn\.GroupNorm\(32, 64\)"):
        ClippedGradient(nn.Sequential(nn.Sequential(nn.Linear(3, 64), norm)))
    with pytest.raises(UserError, match=r"no clipping bounds .*nn\.GroupNorm\(32, 64\)"):
        refuse_modules(nn.Sequential(nn.Linear(3, 64), norm), examples=False)


def test_statistics_of_private_records_are_refused():
    with pytest.raises(UserError, match="track_running_stats"):
        ClippedGradient(nn.Sequential(nn.Linear(3, 4), nn.InstanceNorm1d(4, track_running_stats=True)))
    ClippedGradient(nn.Sequential(nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4)))


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("zero", [False, True])
def test_a_module_that_mixes_records_is_found_and_named(position, zero):
    """Also in front of the first trainable layer, where no gradient would show it, and behind zeros."""
    layers = [nn.Linear(3, 4), nn.Linear(4, 2)]
    if zero:
        nn.init.zeros_(layers[1].weight)
    layers.insert(position, Centre())
    model = nn.Sequential(*layers)
    with pytest.raises(UserError, match=rf"'{position}' \(Centre\) mixes"):
        ClippedGradient(model)({"x": torch.randn(4, 3)}, losses, 1.0)


def test_a_loss_that_mixes_records_is_found():
    with pytest.raises(UserError, match="the loss function mixes"):
        ClippedGradient(nn.Linear(3, 2))(
            {"x": torch.randn(4, 3)}, lambda m, b: losses(m, b) - losses(m, b).mean(), 1.0
        )


def test_losses_must_be_one_per_record():
    with pytest.raises(UserError, match="one each"):
        ClippedGradient(nn.Linear(3, 2), micro_batch=1)({"x": torch.randn(1, 3)}, lambda m, b: m(b["x"]), 1.0)


class TimeFirst(nn.Module):
    """Records in the second dimension: not mixed, but no rule can tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("tokens", [3, 4])
@pytest.mark.parametrize("b", [1, 2, 4])
def test_records_in_another_dimension_take_the_slow_road(tokens, b):
    assert_exact(TimeFirst(), {"x": torch.randn(b, tokens, 3)}, losses, fast=False)


def test_records_in_another_dimension_are_seen_behind_an_output_layer_of_zeros():
    head = nn.Linear(3, 2)
    nn.init.zeros_(head.weight)
    model = nn.Sequential(TimeFirst(), head)
    clipped, batch = ClippedGradient(model), {"x": torch.randn(4, 4, 3)}
    clipped(batch, losses, 1.0)
    nn.init.ones_(head.weight)
    result = clipped(batch, losses, 1.0)
    close(result.norms, lengths(record_gradients(clipped.flat, batch, losses)), 1e-5)


class Bilinear(nn.Module):
    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.layer, self.drop, self.branch = nn.Bilinear(3, 3, 4), nn.Dropout(0.0), branch

    def forward(self, x: Tensor) -> Tensor:
        if self.branch and bool(x.sum() > 0):  # data-dependent control flow: vmap cannot
            x = -x
        return self.drop(self.layer(x, x))


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("b", [1, 5])
def test_slow_road_is_exact_and_says_so_once(branch, b, caplog):
    flat = Flat(Bilinear(branch))
    with caplog.at_level(logging.WARNING):
        assert_exact(flat, {"x": torch.randn(b, 3)}, losses, fast=False)
    named = "Tensor.sum" if branch else "bilinear"
    assert [r.message.count(named) for r in caplog.records] == [1]


def test_lstm_takes_the_slow_road():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    assert_exact(Recurrent(), {"x": torch.randn(3, 5, 3)}, losses, fast=False)


def test_precondition():
    flat, batch = Flat(small_cnn()), images(5)
    scale = torch.rand(flat.layout.size) * 3
    rows = record_gradients(flat, batch, losses) * scale
    norms = lengths(rows)
    bound = float(norms.median())
    result = ClippedGradient(flat)(batch, losses, bound, scale)
    close(result.norms, norms, 1e-5)
    close(flat.grad, (rows * (bound / norms).clamp(max=1).unsqueeze(1)).sum(0), 1e-5)


class Ones(nn.Module):
    """Its weight's gradient is the dropout mask itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.25, self.training)


@pytest.mark.parametrize("micro", [None, 2])
def test_dropout_masks_are_fresh_for_every_record_and_step(micro):
    """False alarm: two of ten independent masks of 1000 fair-ish coins agree, below 1e-100."""
    clipped = ClippedGradient(Ones(), micro_batch=micro)
    one_loss = lambda m, b: m(b["x"]).sum(1)  # noqa: E731
    masks = []
    for _ in range(2):
        for j in range(5):
            # Bounds cannot separate records; zero inputs can.
            x = torch.zeros(5, 1000)
            x[j] = 1.0
            clipped({"x": x}, one_loss, inf)
            masks.append(clipped.flat.grad.clone())
    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0.0, 4 / 3])
        # Binomial(1000, 3/4): six standard deviations, false alarm 2e-9 each.
        assert abs(int((mask > 0).sum()) - 750) < 6 * sqrt(1000 * 0.75 * 0.25)
    assert len({tuple(mask.tolist()) for mask in masks}) == 10


def test_dropout_in_one_part_equals_plain_training_with_the_same_seed():
    """Also shows that looking at a model first does not use up randomness."""
    model = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 2))
    flat, batch = Flat(model), {"x": torch.randn(6, 3)}
    torch.manual_seed(1)
    plain_gradient(flat, batch, losses)
    plain = flat.grad.clone()
    torch.manual_seed(1)
    ClippedGradient(flat)(batch, losses, inf)
    close(flat.grad / 6, plain, 1e-6)


def test_slow_road_draws_a_mask_for_each_record():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(1, 1, 200)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.layer(x, x), 0.5)

    clipped = ClippedGradient(Both())
    clipped({"x": torch.ones(2, 1)}, lambda m, b: m(b["x"]).sum(1), inf)
    assert clipped.obstacle
    # Same mask for both records: only 0 and 4. Independent masks: a 2 somewhere, but for 2^-200.
    assert 2.0 in clipped.flat.grad[:200]


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_bfloat16_with_norms_in_float32(outside):
    torch.manual_seed(0)
    flat, batch = Flat(small_cnn()), images(6)
    rows = record_gradients(flat, batch, losses)

    def half(module: nn.Module, b: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return losses(module, b).float()

    clipped = ClippedGradient(flat)
    if outside:
        with torch.autocast("cpu", torch.bfloat16):
            result = clipped(batch, losses, 0.5)
    else:
        result = clipped(batch, half, 0.5)
    assert result.norms.dtype == torch.float32 and flat.grad.dtype == torch.float32
    close(result.norms, lengths(rows), 0.03)
    # The norms are those of the gradients that are summed: each share has norm C to float32's precision.
    assert (result.norms > 0.5).all()
    one = clipped({"x": batch["x"][:1]}, half, 0.5)
    assert one.norms > 0.5
    assert float(flat.grad.norm()) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_in_half_precision_are_refused(dtype):
    """Beside 2,049 records' sum, half precision has no room for one more, or gives it the room of two."""
    with pytest.raises(UserError, match=r"'weight' is trained in torch\.b?float16.*model\.float\(\)"):
        ClippedGradient(nn.Linear(3, 2).to(dtype))
    frozen = nn.Sequential(nn.Linear(3, 4).to(dtype).requires_grad_(False), nn.Linear(4, 2))
    ClippedGradient(frozen)  # what is not trained may be what it likes


def test_parts_do_not_depend_on_what_came_before():
    """A worker that has seen other batches must compute the very same bits."""
    batch = images(40)
    model = small_cnn()
    fresh = ClippedGradient(model)
    fresh(batch, losses, 1.0)
    expected = fresh.flat.grad.clone()
    for size in (1, 2, 7, 40):
        fresh(images(size), losses, 1.0)
    fresh(batch, losses, 1.0)
    assert torch.equal(fresh.flat.grad, expected)


def test_parts_are_cut_so_that_memory_is_bounded(monkeypatch):
    from tacit.gradients import clipped as module

    seen: list[int] = []

    def noting(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(len(batch["x"]))
        return losses(model, batch)

    clipped, batch = ClippedGradient(small_cnn()), images(20)
    clipped(batch, noting, 1.0)
    assert max(seen) == 20
    whole = clipped.flat.grad.clone()
    found = next(iter(clipped._surveys.values()))
    monkeypatch.setattr(module, "MUCH", 6 * max(found.plain, found.kept))
    seen.clear()
    clipped(batch, noting, 1.0)
    assert [n for n in seen if n != 2] == [5, 5, 5, 5]  # two: the same program on another number of records
    close(clipped.flat.grad, whole, 1e-6)


def test_one_record_more_changes_no_bit_of_the_others_where_memory_is_short(monkeypatch):
    """A batch of five was computed record by record and one of six in pairs, by other kernels."""
    from tacit.gradients import clipped as module

    model, batch = small_cnn(), images(8)
    found = ClippedGradient(model)._survey(batch, losses)
    short = replace(found, kept=5 * found.plain)
    monkeypatch.setattr(module, "LITTLE", 0)
    monkeypatch.setattr(module, "survey", lambda *_: short)
    norms = [
        ClippedGradient(model)({name: tensor[:size] for name, tensor in batch.items()}, losses, 1.0).norms
        for size in range(1, 9)
    ]
    for few in norms:
        assert torch.equal(few, norms[-1][: len(few)])
    monkeypatch.setattr(module, "MUCH", 2 * short.kept - 1)
    assert {module.at_once(short, size) for size in range(2, 99)} == {1}, "then all of them are alone"


@pytest.mark.parametrize("documented", [False, True])
def test_the_engine_gives_what_the_documented_functions_give(documented, monkeypatch):
    if documented:
        monkeypatch.setattr(autograd, "_ENGINE", None)
    torch.manual_seed(0)
    model, weights = nn.Linear(3, 1), torch.rand(4)
    unused = nn.Parameter(torch.ones(2))
    inputs = (*model.parameters(), unused)
    x = torch.randn(4, 3)
    expected = torch.autograd.grad(weights @ model(x).flatten(), inputs, allow_unused=True)
    for found, wanted in zip(autograd.grad(model(x).flatten(), weights, inputs), expected, strict=True):
        assert (found is None and wanted is None) or torch.allclose(found, wanted)
    for _ in range(2):
        autograd.backward(model(x).flatten(), weights)
    assert torch.allclose(model.weight.grad, 2 * expected[0]) and unused.grad is None


def test_losses_that_are_not_one_each_are_refused():
    flat = Flat(nn.Linear(3, 1))
    batch = {"x": torch.randn(4, 3)}

    def mean(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return module(batch["x"]).mean()

    with pytest.raises(UserError, match="return one each"):
        plain_gradient(flat, batch, mean)
    with pytest.raises(UserError, match="return one each"):
        Descent(flat)(batch, mean, lr=0.1)
    with pytest.raises(UserError, match="return one each"):
        ClippedGradient(flat)(batch, mean, 1.0)


def test_switched_off_gradients_are_not_taken_for_zero():
    flat = Flat(nn.Linear(3, 1))
    with torch.no_grad(), pytest.raises(RuntimeError, match="switched off"):
        ClippedGradient(flat)({"x": torch.randn(4, 3)}, squared_outputs(), 1.0)
