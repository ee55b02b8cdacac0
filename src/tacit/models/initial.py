"""Initial weights shared by the networks, and the check of an image's shape."""

from __future__ import annotations

from math import sqrt

from torch import nn

from tacit.errors import UserError


def he_(module: nn.Module) -> None:
    """He et al. (2015): variance 2/fan_in, which ReLU layers preserve through any depth; biases are zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def head_(layer: nn.Linear) -> None:
    """Small logits: training starts near log(classes), but the body gets a gradient from the first step."""
    bound = 1 / sqrt(layer.in_features)
    nn.init.uniform_(layer.weight, -bound, bound)
    nn.init.zeros_(layer.bias)


def image(model: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """`shape` as channels, height, width; a `UserError` if it is not an image's."""
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(
            f"model {model!r} takes images (channels, height, width), but records have shape {shape}"
        )
    channels, height, width = shape
    return channels, height, width
