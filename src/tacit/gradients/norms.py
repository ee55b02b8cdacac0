"""Normalisation layers: the input's gradient and each record's weight gradient from one fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.gradients.records import Explicit, PerRecord, in_full
from tacit.gradients.tape import Tape

Found = Callable[[Tensor, Tensor | None, Tensor | None], None]
"""found(output gradient, weight gradients [B, C], bias gradients [B, C])"""


def _constant(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else in_full(parameter.detach())


def _as_native(y: Tensor, x: Tensor) -> Tensor:
    """The type torch's own function would return: float32 under autocast, else the input's."""
    return y if torch.is_autocast_enabled(x.device.type) else y.to(x.dtype)


class _GroupNorm(torch.autograd.Function):
    """Group normalisation of records side by side: one "image" of B·C channels.

    The native kernel sums weight gradients over images; with one image there is nothing to sum, so the
    same kernel, at the same cost, returns them per record.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        found: Found,
    ) -> Tensor:
        n, c = x.shape[:2]
        space = x[0, 0].numel()
        x = x.contiguous()
        y, mean, rstd = torch.native_group_norm(x, weight, bias, n, c, space, groups, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.groups, ctx.found = groups, found
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        n, c = x.shape[:2]
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_group_norm_backward(
            grads[0].contiguous().view(1, n * c, -1),
            x.view(1, n * c, -1),
            mean.view(1, -1),
            rstd.view(1, -1),
            None if weight is None else weight.repeat(n),
            1,
            n * c,
            x[0, 0].numel(),
            n * ctx.groups,
            [ctx.needs_input_grad[0], True, True],
        )
        ctx.found(grads[0], grad_weight.view(n, c), grad_bias.view(n, c))
        return (None if grad_x is None else grad_x.view_as(x), *[None] * 6)


def group_norm(
    tape: Tape,
    func: Any,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Per-channel scale and shift after normalising groups of channels."""
    tape.check(x)
    tape.expect(weight, bias)

    def found(grad: Tensor, weights: Tensor | None, biases: Tensor | None) -> None:
        for target, grads in ((weight, weights), (bias, biases)):
            if target is not None and grads is not None and tape.owned(target):
                tape.give(target, Explicit(tape.per_record(grads).sum(1)))

    y: Tensor = _GroupNorm.apply(  # type: ignore[no-untyped-call]
        in_full(x), tape.anchor, num_groups, _constant(weight), _constant(bias), eps, found
    )
    return _as_native(y, x)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        shape: list[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        found: Callable[..., None],
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.shape, ctx.found = shape, found
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        grad = grads[0].contiguous()
        ctx.found(grad, x, mean, rstd)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.aten.native_layer_norm_backward(
                grad, x, ctx.shape, mean, rstd, weight, bias, [True, False, False]
            )[0]
        return (grad_x, *[None] * 6)


def layer_norm(
    tape: Tape,
    func: Any,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Per-feature scale and shift after normalising each token."""
    shape = list(normalized_shape)
    features = len(shape)
    tape.check(x, features)
    tape.expect(weight, bias)

    def found(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
        grad = tape.per_record(grad, features).flatten(2)
        x = tape.per_record(x, features).flatten(2)
        mean, rstd = mean.view(tape.records, 1, -1), rstd.view(tape.records, 1, -1)
        # Σ_t grad_t (x_t − mean_t) rstd_t and Σ_t grad_t, as products with rows of weights for the tokens.
        sums = torch.bmm(torch.cat((mean * rstd, torch.ones_like(rstd)), 1), grad)
        if weight is not None and tape.owned(weight):
            weights = torch.bmm(rstd, grad * x).squeeze(1) - sums[:, 0]
            tape.give(weight, Explicit(weights.view(-1, *shape)))
        if bias is not None and tape.owned(bias):
            tape.give(bias, Explicit(sums[:, 1].reshape(-1, *shape)))

    y: Tensor = _LayerNorm.apply(  # type: ignore[no-untyped-call]
        in_full(x).contiguous(), tape.anchor, shape, _constant(weight), _constant(bias), eps, found
    )
    return _as_native(y, x)


def rms_norm(
    tape: Tape,
    func: Any,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    eps: float | None = None,
) -> Tensor:
    """Per-feature scale after dividing each token by its root mean square."""
    features = len(normalized_shape)
    tape.check(x, features)
    normal = F.rms_norm(x, list(normalized_shape), None, eps)

    def grads(grad: Tensor, normal: Tensor) -> Sequence[PerRecord | None]:
        product = in_full(grad) * in_full(normal)
        return (Explicit(tape.per_record(product, features).sum(1)),)

    return tape.watch(normal * weight.detach(), (weight,), (normal,), grads)
