"""ResNet-18 (He et al., 2016) for large and small images, with group or batch normalisation.

GroupNorm is the default. It looks at one record at a time, so it is sound under per-record privacy, and it
does not average the statistics of different clients. BatchNorm is there for the papers that use it without
privacy.

The last norm of each residual block starts at 1/√8, so that the eight branches together weigh as much as the
shortcut. Started at 1, the logits blow up in the first steps at the papers' rate of .1. Started at 0, as is
common, the convolutions learn only after many steps, and a federation has few rounds to spare.

>>> model = resnet18((3, 32, 32), 10)
>>> sum(p.numel() for p in model.parameters())
11173962
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt

import torch.nn.functional as F
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.models.initial import he_, head_, image

Norm = Callable[[int], nn.Module]


class Stem(nn.Module):
    """An image to 64 channels. "7x7" halves the size twice (ImageNet); "3x3" keeps it (32-pixel images)."""

    def __init__(self, channels: int, kind: str, norm: Norm) -> None:
        super().__init__()
        self.pool = kind == "7x7"
        size, stride = (7, 2) if self.pool else (3, 1)
        self.conv = nn.Conv2d(channels, 64, size, stride, padding=size // 2, bias=False)
        self.norm = norm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return F.max_pool2d(x, 3, 2, padding=1) if self.pool else x


class Residual(nn.Module):
    """Two 3×3 convolutions beside a shortcut; the shortcut is a 1×1 convolution if the shape changes."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)
        self.norm1 = norm(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = norm(fan_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), norm(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two residual blocks, global average pooling, `head`."""

    def __init__(self, channels: int, classes: int, stem: str, norm: Norm) -> None:
        super().__init__()
        self.stem = Stem(channels, stem, norm)
        self.blocks = nn.Sequential()
        fan_in = 64
        for fan_out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            self.blocks.append(Residual(fan_in, fan_out, stride, norm))
            self.blocks.append(Residual(fan_out, fan_out, 1, norm))
            fan_in = fan_out
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def resnet18(
    shape: tuple[int, ...], classes: int, norm: str = "group", stem: str = "3x3", groups: int = 32
) -> ResNet18:
    """ResNet-18 with `norm` "group" (of `groups` groups) or "batch", and a `stem` "3x3" or "7x7"."""
    channels, _, _ = image("resnet18", shape)
    if stem not in ("3x3", "7x7"):
        raise UserError(f"model 'resnet18': stem is '3x3' or '7x7', not {stem!r}")
    if norm not in ("group", "batch"):
        raise UserError(f"model 'resnet18': norm is 'group' or 'batch', not {norm!r}")
    if groups < 1 or 64 % groups:
        raise UserError(f"model 'resnet18': groups must divide 64 (1, 2, 4, …, 64), not {groups}")
    make: Norm = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
    model = ResNet18(channels, classes, stem, make)
    he_(model)
    for block in model.blocks:
        nn.init.constant_(block.get_parameter("norm2.weight"), 1 / sqrt(len(model.blocks)))
    head_(model.head)
    return model
