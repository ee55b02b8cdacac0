"""The classification task: losses per record, sums that add up in any grouping."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tacit.tasks import Classification

TASK = Classification()


def batch(n: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(n, 5, generator=generator), "y": torch.randint(0, 3, (n,), generator=generator)}


def test_losses_are_minus_log_probability_of_the_right_class() -> None:
    model, data = nn.Linear(5, 3), batch()
    losses = TASK.losses(model, data)
    assert losses.shape == (7,)
    for j in range(7):
        scores = model(data["x"][j]).tolist()
        expected = math.log(sum(math.exp(s) for s in scores)) - scores[int(data["y"][j])]
        assert abs(losses[j].item() - expected) < 1e-5


def test_each_loss_depends_on_its_own_record_alone() -> None:
    model, data = nn.Linear(5, 3), batch()
    data["x"].requires_grad_()
    (gradient,) = torch.autograd.grad(TASK.losses(model, data)[2], data["x"])
    assert gradient[2].abs().sum() > 0
    gradient[2] = 0
    assert gradient.abs().sum() == 0


def test_sums_do_not_depend_on_the_grouping() -> None:
    model, data = nn.Linear(5, 3), batch()
    whole = TASK.evaluate(model, data)
    parts = [TASK.evaluate(model, {k: v[s] for k, v in data.items()}) for s in (slice(0, 3), slice(3, 7))]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value, rtol=1e-7, atol=1e-7)
    summary = TASK.summarise({k: v.item() for k, v in whole.items()})
    right = (model(data["x"]).argmax(1) == data["y"]).float().mean().item()
    assert abs(summary["accuracy"] - right) < 1e-7
    assert abs(summary["loss"] - TASK.losses(model, data).mean().item()) < 1e-6


def test_an_object_with_logits_is_an_answer() -> None:
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=x[:, :3])

    losses = TASK.losses(Wrapped(), batch())
    torch.testing.assert_close(losses, TASK.losses(nn.Identity(), {**batch(), "x": batch()["x"][:, :3]}))


def test_nothing_counted_is_not_a_number() -> None:
    empty = TASK.evaluate(nn.Linear(5, 3), batch(0))
    assert empty["count"] == 0 and empty["loss"] == 0
    assert math.isnan(TASK.summarise({k: v.item() for k, v in empty.items()})["accuracy"])


def test_losses_of_a_half_precision_model_are_in_full_precision() -> None:
    data = batch()
    losses = TASK.losses(nn.Linear(5, 3).bfloat16(), {**data, "x": data["x"].bfloat16()})
    assert losses.dtype == torch.float32
