"""Logistic regression and the multilayer perceptron, for records of any shape.

>>> import torch
>>> mlp((1, 28, 28), 10, hidden=(32,))(torch.zeros(2, 1, 28, 28)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from tacit.errors import UserError
from tacit.models.initial import he_, head_


class Dense(nn.Module):
    """Fully connected layers with ReLU between them; records are flattened first."""

    def __init__(self, inputs: int, hidden: Sequence[int], classes: int) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        self.body = nn.Sequential()
        for fan_in, fan_out in pairwise(widths):
            self.body.extend([nn.Linear(fan_in, fan_out), nn.ReLU()])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x.flatten(1)))
        return logits


def logistic(shape: tuple[int, ...], classes: int) -> Dense:
    """Multinomial logistic regression, started at zero: the problem is convex, so any start will do."""
    model = Dense(prod(shape), (), classes)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


def mlp(shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (200, 200)) -> Dense:
    """The multilayer perceptron; two hidden layers of 200 units are McMahan et al.'s (2017) "2NN"."""
    if any(width < 1 for width in hidden):
        raise UserError(f"model 'mlp': every hidden layer needs at least one unit, not {tuple(hidden)}")
    model = Dense(prod(shape), hidden, classes)
    he_(model.body)
    head_(model.head)
    return model
