"""Attention functions that take parameters themselves.

`nn.MultiheadAttention` (and so `nn.TransformerEncoderLayer`) hands its weights to one large function instead
of calling layers. Here it is written out in small functions, which the tape then sees one by one, and with
the records first, which the original has second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.gradients.tape import Tape, Unsupported


def learnt_mask(
    tape: Tape, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **kwargs: Any
) -> Tensor:
    """Scaled dot-product attention with a learnt bias on its scores."""
    if any(tape.owned(t) for t in (query, key, value)):
        raise Unsupported("a parameter as query, key or value")
    mask = tape.spread(attn_mask, (*query.shape[:-1], key.shape[-2]), tape.axis(query))
    out: Tensor = func(query, key, value, attn_mask=mask, **kwargs)
    return out


def multi_head(
    tape: Tape,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **rare: Any,
) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention` with one common width, without the additions few use."""
    if in_proj_weight is None or bias_k is not None or add_zero_attn or query.dim() != 3:
        raise Unsupported("multi-head attention with separate widths, added keys, or without a batch")
    with tape:
        same = query is key and key is value
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        if same:
            parts = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
        else:
            weights = in_proj_weight.chunk(3)
            biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
            parts = tuple(map(F.linear, (query, key, value), weights, biases))
        q, k, v = (part.view(*part.shape[:2], num_heads, -1).transpose(1, 2) for part in parts)
        mask = _mask(attn_mask, key_padding_mask, num_heads, q)
        dropout = dropout_p if training else 0.0
        scores = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            scores = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = scores @ v
            scores = scores.mean(1) if average_attn_weights else scores
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        out = F.linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
        return out.transpose(0, 1), scores


def _mask(mask: Tensor | None, padding: Tensor | None, heads: int, like: Tensor) -> Tensor | None:
    """Both masks as one number to add to each score; [L, S], [B·heads, L, S] and [B, S] become 4-D."""
    total: Tensor | None = None
    for part, is_padding in ((mask, False), (padding, True)):
        if part is None:
            continue
        if part.dtype == torch.bool:
            part = torch.zeros_like(part, dtype=like.dtype).masked_fill_(part, float("-inf"))
        if is_padding:
            part = part[:, None, None, :]
        elif part.dim() == 3:
            part = part.view(-1, heads, *part.shape[1:])
        total = part if total is None else total + part
    return total
