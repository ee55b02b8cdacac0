"""The slow, simple reference for clipped gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tacit.gradients import Batch, ClippedGradient, ClippedResult, Losses
from tacit.gradients.clipped import SAFE
from tacit.vector import Flat


def record_gradients(flat: Flat, batch: Batch, losses: Losses) -> Tensor:
    """[B, size]: plain autograd, one record after the other."""
    named = dict(flat.module.named_parameters())
    parameters = [named[s.name] for s in flat.layout.segments]
    rows = []
    for j in range(len(next(iter(batch.values())))):
        loss = losses(flat.module, {k: v[j : j + 1] for k, v in batch.items()}).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten()
                    for p, g in zip(parameters, grads, strict=True)
                ]
            )
        )
    return torch.stack(rows)


def assert_exact(
    model: nn.Module | Flat, batch: Batch, losses: Losses, tolerance: float = 1e-5, fast: bool = True
) -> ClippedResult:
    """The clipped sum and norms equal the loop's, with a bound that clips about half of the records."""
    flat = model if isinstance(model, Flat) else Flat(model)
    rows = record_gradients(flat, batch, losses)
    norms = lengths(rows)
    bound = max(float(norms.median()), 1e-6)
    expected = (rows * (bound * SAFE / norms).clamp(max=1.0).nan_to_num(nan=1.0).unsqueeze(1)).sum(0)
    clipped = ClippedGradient(flat)
    result = clipped(batch, losses, bound)
    if fast:
        assert clipped.obstacle is None, "took the slow road"
    close(result.norms, norms, tolerance)
    close(flat.grad, expected, tolerance)
    # Without a bound the sum is the plain sum.
    clipped(batch, losses, float("inf"))
    close(flat.grad, rows.sum(0), tolerance)
    return result


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal up to `tolerance` of the expected vector's length."""
    assert found.shape == expected.shape
    error, scale = float((found - expected).norm()), float(expected.norm())
    assert error <= tolerance * scale + 1e-9, f"off by {error / scale:.1e}"


def squared_outputs(get: Callable[[nn.Module, Batch], Tensor] | None = None) -> Losses:
    """A loss with a different, nonzero gradient everywhere."""

    def losses(module: nn.Module, batch: Batch) -> Tensor:
        out = module(batch["x"]) if get is None else get(module, batch)
        flat = out.reshape(len(batch["x"]), -1)
        return (flat * torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)).sin().sum(1)

    return losses


def lengths(rows: Tensor) -> Tensor:
    """Norm of each row; in float64, as float32 sums over millions of numbers are off by 1e-4."""
    return rows.double().norm(dim=1).to(rows.dtype)
