"""Plain gradients, and the two types every gradient here is made from.

A *batch* is a dict of tensors whose first dimension counts records; *losses* is any function that maps a
module and a batch to one loss per record. The task owns it, so this room never sees labels or logits.

>>> import torch
>>> flat = Flat(torch.nn.Linear(2, 1, bias=False))
>>> _ = flat.values.fill_(1.0)
>>> batch = {"x": torch.tensor([[1.0, 0.0], [0.0, 2.0]])}
>>> plain_gradient(flat, batch, lambda module, b: module(b["x"]).flatten()).item()
1.5
>>> flat.grad
tensor([0.5000, 1.0000])
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.gradients import autograd
from tacit.vector import Flat

Batch = dict[str, Tensor]
"""Named tensors whose first dimension counts the records."""

Losses = Callable[[nn.Module, Batch], Tensor]
"""One loss per record, shape [B]. Record j's loss may depend on record j alone."""


def batch_size(batch: Batch) -> int:
    """How many records `batch` holds; all its tensors must agree."""
    sizes = {name: len(tensor) for name, tensor in batch.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"a batch is tensors of one length, got {sizes or 'no tensors'}")
    return next(iter(sizes.values()))


def refuse_shape(losses: Tensor, records: int) -> None:
    """A mean in the place of losses would make gradients too small by a factor of the batch, silently."""
    if losses.shape != (records,):
        raise UserError(f"losses returned shape {tuple(losses.shape)} for {records} records; return one each")


def plain_gradient(flat: Flat, batch: Batch, losses: Losses) -> Tensor:
    """Fill `flat.grad` with the gradient of the mean loss; return that mean, detached.

    An empty batch has gradient zero and loss zero.
    """
    flat.grad.zero_()
    count = batch_size(batch)
    if count == 0:
        return flat.grad.new_zeros(())
    each = losses(flat.module, batch)
    refuse_shape(each, count)
    # The mean's gradient is 1/B for every loss: given outright, it spares autograd two nodes.
    autograd.backward(each, torch.full_like(each, 1 / count))
    return each.detach().mean()


class Descent:
    """SGD steps on a model's shared part that never write the gradient down as one vector.

    The same move, bit for bit, as `plain_gradient` followed by `flat.shared.sub_(flat.grad, alpha=lr)`, with
    fewer passes over memory; for a small model that is a fifth of a step's time.

    >>> import torch
    >>> flat = Flat(torch.nn.Linear(2, 1, bias=False))
    >>> _ = flat.values.fill_(1.0)
    >>> batch = {"x": torch.tensor([[1.0, 0.0], [0.0, 2.0]])}
    >>> Descent(flat)(batch, lambda module, b: module(b["x"]).flatten(), lr=0.5)
    tensor([1., 2.])
    >>> flat.values
    tensor([0.7500, 0.5000])
    """

    def __init__(self, flat: Flat) -> None:
        self._module = flat.module
        named = dict(flat.module.named_parameters())
        self._parameters = tuple(named[segment.name] for segment in flat.layout.shared_segments)
        self._views = [view for _, view in flat.layout.views(flat.shared)]
        self._weights = flat.values.new_empty(0)
        self.used = False
        """Whether it was ever called."""

    def __call__(self, batch: Batch, losses: Losses, lr: float) -> Tensor:
        """Move against the gradient of the mean loss of a batch that is not empty; its losses, detached."""
        self.used = True
        each = losses(self._module, batch)
        if self._weights.shape != each.shape:
            refuse_shape(each, batch_size(batch))
            self._weights = torch.full_like(each, 1 / len(each))
        grads = autograd.grad(each, self._weights, self._parameters)
        for view, grad in zip(self._views, grads, strict=True):
            if grad is not None:
                view.sub_(grad, alpha=lr)
        return each.detach()
