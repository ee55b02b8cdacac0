"""The papers' large networks by name, at their published sizes, without weights (papers 000 and 004).

They are transformers' own modules, so `hub: google/vit-base-patch16-224-in21k` and similar names are the same
networks with pretrained weights.

>>> import torch
>>> with torch.device("meta"):
...     model = roberta_base((128,), 2)
>>> round(sum(p.numel() for p in model.parameters()) / 1e6)
125
"""

from __future__ import annotations

from torch import nn

from tacit.errors import UserError
from tacit.models.hub import from_config
from tacit.models.initial import image


def vit_base(shape: tuple[int, ...], classes: int, patch: int = 16, dropout: float = 0.0) -> nn.Module:
    """ViT-Base (Dosovitskiy et al., 2021): 12 layers of 768, 12 heads; 86 M parameters at 224 pixels."""
    image("vit-base", shape)
    return from_config(
        {"model_type": "vit", "patch_size": patch, "hidden_dropout_prob": dropout}, shape, classes
    )


def swin_tiny(
    shape: tuple[int, ...], classes: int, patch: int = 4, window: int = 7, drop_path: float = 0.1
) -> nn.Module:
    """Swin-Tiny (Liu et al., 2021): stages of 2, 2, 6 and 2 layers from width 96; 28 M parameters."""
    return _swin("swin-tiny", shape, classes, 96, [2, 2, 6, 2], [3, 6, 12, 24], patch, window, drop_path)


def swin_base(
    shape: tuple[int, ...], classes: int, patch: int = 4, window: int = 7, drop_path: float = 0.1
) -> nn.Module:
    """Swin-Base (Liu et al., 2021): stages of 2, 2, 18 and 2 layers from width 128; 87 M parameters."""
    return _swin("swin-base", shape, classes, 128, [2, 2, 18, 2], [4, 8, 16, 32], patch, window, drop_path)


def roberta_base(shape: tuple[int, ...], classes: int, dropout: float = 0.1) -> nn.Module:
    """RoBERTa-base (Liu et al., 2019): 12 layers of 768, 12 heads, 50,265 tokens; 125 M parameters."""
    if len(shape) == 3:
        raise UserError(f"model 'roberta-base' reads text, but records have shape {shape}")
    sizes = {
        "model_type": "roberta",
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    return from_config(sizes, shape, classes)


def _swin(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    width: int,
    depths: list[int],
    heads: list[int],
    patch: int,
    window: int,
    drop_path: float,
) -> nn.Module:
    image(name, shape)
    sizes = {
        "model_type": "swin",
        "embed_dim": width,
        "depths": depths,
        "num_heads": heads,
        "patch_size": patch,
        "window_size": window,
        "drop_path_rate": drop_path,
    }
    return from_config(sizes, shape, classes)
