"""Layers that are known to mix records or to keep something of them: refused by name, with the fix.

Parameters whose sums would be too rough are, too. What is not on this list is found out by the tape, and by
looking at what a pass has changed.

>>> from torch import nn
>>> refuse_modules(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)), examples=True)
>>> refuse_modules(nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8)), examples=True)
Traceback (most recent call last):
tacit.errors.UserError: model: module '1' (BatchNorm1d) shares statistics between the records of a batch, so \
no record's influence is bounded; replace it by nn.GroupNorm(8, 8)
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from tacit.errors import UserError


def refuse_modules(model: nn.Module, examples: bool) -> None:
    """Raise if `model` holds such a layer.

    `examples`: single records are protected. Where whole clients are, what a client's own steps write to the
    model is put back before the next one, so only what cannot be seen or would be of no use is refused.
    """
    for name, part in model.named_modules():
        reason = _of_any_unit(part, examples) or (_of_examples(part) if examples else None)
        if reason is not None:
            raise UserError(f"model: module {name!r} ({type(part).__name__}) {reason}")
    for name, parameter in model.named_parameters() if examples else ():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            raise UserError(
                f"model: parameter {name!r} is trained in {parameter.dtype}, in which rounding may change a "
                "sum over many records by more than one record can; train it in float32 (`model.float()`), "
                "and have only products taken in half precision (engine.precision: bf16)"
            )


def _of_any_unit(part: nn.Module, examples: bool) -> str | None:
    if isinstance(part, torch.jit.ScriptModule):
        return "is scripted, so what it remembers cannot be seen; give the module that it was made from"
    if isinstance(part, _BatchNorm):
        why = (
            "shares statistics between the records of a batch, so no record's influence is bounded"
            if examples
            else "needs statistics of clients' records, which no clipping bounds and which are not sent"
        )
        groups = next(g for g in (32, 16, 8, 4, 2, 1) if part.num_features % g == 0)
        return f"{why}; replace it by nn.GroupNorm({groups}, {part.num_features})"
    return None


def _of_examples(part: nn.Module) -> str | None:
    if isinstance(part, _InstanceNorm) and part.track_running_stats:
        return "keeps running statistics of private records; build it with track_running_stats=False"
    if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
        return "writes to its rows as records look them up, past the clipping; build it without max_norm"
    hooks = part._forward_pre_hooks.values()
    if isinstance(part, parametrizations._SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks):
        return (
            "divides by a spectral norm, whose power iteration goes on with every batch; leave it out, or "
            "normalise with nn.GroupNorm or nn.LayerNorm"
        )
    return None
