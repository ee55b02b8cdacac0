"""Networks by name, without weights. `hub` has the networks of transformers; `lora` selects what is trained.

This package's networks are plain `nn.Module`s whose last layer is called `head`.

No network has a random generator of its own: seed torch, build, and get the same weights every time. Except
for ResNet-18 with `norm="batch"`, no network lets one record of a batch influence another; per-record privacy
requires that.

>>> import torch
>>> _ = torch.manual_seed(0)
>>> model = build("cnn", shape=(3, 32, 32), classes=10)
>>> sum(p.numel() for p in model.parameters())
667402
>>> small = build("vit", shape=(1, 28, 28), classes=10, patch=7, width=64, depth=2, heads=4)
>>> small(torch.zeros(5, 1, 28, 28)).shape
torch.Size([5, 10])
>>> build("vit-tyni", shape=(3, 32, 32), classes=10)  # doctest: +ELLIPSIS
Traceback (most recent call last):
tacit.errors.UserError: unknown model 'vit-tyni'; did you mean 'vit_tiny'? (known: cnn, ...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from torch import nn

from tacit.errors import UserError
from tacit.models.convolutional import cnn
from tacit.models.dense import logistic, mlp
from tacit.models.large import roberta_base, swin_base, swin_tiny, vit_base
from tacit.models.resnet import resnet18
from tacit.models.speech import ctc_transformer
from tacit.models.vit import vit, vit_tiny

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "ctc_transformer": ctc_transformer,
    "logistic": logistic,
    "mlp": mlp,
    "resnet18": resnet18,
    "roberta_base": roberta_base,
    "swin_base": swin_base,
    "swin_tiny": swin_tiny,
    "vit": vit,
    "vit_base": vit_base,
    "vit_tiny": vit_tiny,
}
"""Every network by name; a builder takes `(shape, classes, **options)`."""


def options(name: str) -> dict[str, Any]:
    """A network's options and their defaults: what `build` takes besides shape and classes."""
    parameters = inspect.signature(_builder(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in ("shape", "classes")}


def build(name: str, shape: tuple[int, ...], classes: int, **given: Any) -> nn.Module:
    """The network called `name` for records of `shape` (channels first) and `classes` outputs.

    In a name, `-` and `_` are the same, and case does not matter. Weights come from torch's global generator.
    Raises `UserError` for an unknown name, an unknown option or sizes that do not fit.
    """
    builder, known = _builder(name), options(name)
    for option in given:
        if option not in known:
            takes = ", ".join(f"{k}={v!r}" for k, v in known.items()) or "none"
            raise UserError(f"model {name!r} has no option {option!r}; its options are: {takes}")
    if classes < 1:
        raise UserError(f"model {name!r} needs at least one class, not {classes}")
    return builder(tuple(shape), classes, **given)


def _builder(name: str) -> Callable[..., nn.Module]:
    key = name.lower().replace("-", "_")
    if key not in MODELS:
        near = get_close_matches(key, MODELS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"unknown model {name!r}{hint} (known: {', '.join(MODELS)})")
    return MODELS[key]
