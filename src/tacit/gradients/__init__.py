"""Plain and clipped gradients of a model on a batch. Knows torch and the flat vector.

>>> import torch
>>> from torch import nn
>>> from tacit.gradients import ClippedGradient
>>> clipped = ClippedGradient(nn.Linear(3, 1))                      # any module without BatchNorm
>>> batch = {"x": torch.randn(8, 3), "y": torch.randn(8, 1)}
>>> def losses(module, batch):                                      # one loss per record
...     return (module(batch["x"]) - batch["y"]).square().flatten()
>>> result = clipped(batch, losses, bound=1.0)
>>> result.norms.shape, clipped.flat.grad.shape                     # the clipped sum is in flat.grad
(torch.Size([8]), torch.Size([4]))
"""

from tacit.gradients.clipped import Bound, ClippedGradient, ClippedResult
from tacit.gradients.plain import Batch, Losses, batch_size, plain_gradient

__all__ = ["Batch", "Bound", "ClippedGradient", "ClippedResult", "Losses", "batch_size", "plain_gradient"]
