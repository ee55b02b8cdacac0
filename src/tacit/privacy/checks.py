"""Refusals that need to see the model or the aggregation; each names the fix.

>>> from torch import nn
>>> refuse_batch_norm(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)), "example")
>>> refuse_weights(weighted=False, unit="client")
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tacit.errors import UserError
from tacit.privacy.mechanisms.base import Unit


def refuse_batch_norm(model: nn.Module, unit: Unit) -> None:
    """BatchNorm mixes records, so none has a bounded influence, and its statistics escape the clipping."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            why = (
                "shares statistics between records, so no record's influence is bounded"
                if unit == "example"
                else "sends statistics of a client's data that no clipping bounds"
            )
            groups = next(g for g in (32, 16, 8, 4, 2, 1) if module.num_features % g == 0)
            raise UserError(
                f"model: {name or 'the model'} ({type(module).__name__}) {why}; "
                f"replace it by torch.nn.GroupNorm({groups}, {module.num_features})"
            )


def refuse_weights(weighted: bool, unit: Unit) -> None:
    """A client's number of examples is private, and a weight multiplies what it can change."""
    if weighted and unit == "client":
        raise UserError(
            "weights by number of examples under client-level privacy: the number is private and the weight "
            "raises the sensitivity; set uniform weights (weights: uniform)"
        )
