"""Per-record gradients of any model at all: `torch.func`, or one record after another.

The slow road, for what no rule knows. It holds every record's whole gradient, so it runs in small parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from tacit.gradients.plain import Batch, Losses, batch_size


class _Records(nn.Module):
    """Losses as a module, so that `functional_call` reaches the parameters inside it."""

    def __init__(self, module: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.module = module
        self.losses = losses

    def forward(self, batch: Batch) -> Tensor:
        return self.losses(self.module, batch)


def record_gradients(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    batch: Batch,
    losses: Losses,
    restore: Callable[[], None],
    alone: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """Each parameter's gradients [B, *shape], and the losses [B].

    `restore` sets back the generators outside torch, whose draws are the same for all records of a step;
    torch's own are drawn for each. `alone`: one record after another at once, for code of which `torch.func`
    cannot be sure either.
    """
    if alone:
        return _one_by_one(module, parameters, batch, losses, restore)
    wrapped = _Records(module, losses)
    values = {f"module.{name}": p.detach() for name, p in parameters.items()}

    def loss(values: dict[str, Tensor], record: Batch) -> Tensor:
        one = {name: tensor.unsqueeze(0) for name, tensor in record.items()}
        found: Tensor = functional_call(wrapped, values, (one,))
        return found.sum()

    restore()
    try:
        # "different": each record draws its own dropout mask, as in plain training.
        grads, found = vmap(grad_and_value(loss), in_dims=(None, 0), randomness="different")(values, batch)
    except (RuntimeError, ValueError, TypeError):  # data-dependent control flow, or a function without vmap
        return _one_by_one(module, parameters, batch, losses, restore)
    return {name: grads[f"module.{name}"] for name in parameters}, found.detach()


def _one_by_one(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    batch: Batch,
    losses: Losses,
    restore: Callable[[], None],
) -> tuple[dict[str, Tensor], Tensor]:
    size = batch_size(batch)
    grads = {name: p.new_zeros(size, *p.shape) for name, p in parameters.items()}
    values = []
    for j in range(size):
        restore()
        # Copies: in memory, too, there is nothing but this record.
        loss = losses(module, {name: tensor[j : j + 1].clone() for name, tensor in batch.items()}).sum()
        values.append(loss.detach())
        for name, grad in zip(
            parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True), strict=True
        ):
            if grad is not None:
                grads[name][j] = grad
    return grads, torch.stack(values)
