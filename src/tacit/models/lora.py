"""Selects which parameters of a network are trained: all, some by name, or LoRA's factors and the output
layers.

LoRA (Hu et al., 2021) freezes a matrix W and trains a product of two thin matrices beside it, W + (α/r)·B·A.
peft inserts it into the network in place, so the result is an ordinary module in which few parameters need a
gradient. Frozen parameters are never sent: they are in no message and no checkpoint.

>>> from tacit.models import build
>>> model = build("vit", (1, 8, 8), 5, patch=4, width=16, depth=1, heads=2)
>>> adapt(model, Lora(rank=2, targets=("qkv",)))
>>> [n for n, p in model.named_parameters() if p.requires_grad]  # doctest: +NORMALIZE_WHITESPACE
['layers.0.attention.qkv.lora_A.default.weight', 'layers.0.attention.qkv.lora_B.default.weight',
 'head.weight', 'head.bias']
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.models.settings import Lora as Lora
from tacit.vector.blocks import Transformer
from tacit.vector.layout import HEAD, output_layers

FUSED = [name for name, part in Transformer.PARTS.items() if part == "QKV"]


def adapt(module: nn.Module, lora: Lora) -> None:
    """Insert adapters into `module`, in place, and freeze everything except them and the output layers.

    A classifier's output layers are new, so they are trained; a language model's are not.
    """
    heads = trained_heads(module)
    config = lora_config(module, lora, heads)
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, module)
    for name in heads:
        module.get_submodule(name).requires_grad_(True)


def lora_config(module: nn.Module, lora: Lora, heads: Sequence[str]) -> Any:
    """peft's config of the adapters."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise UserError("model.lora needs peft; `pip install 'tacit[transformers]'`") from None

    targets = _targets(module, lora.targets)
    # An output layer is trained whole; an adapter beside it would be redundant.
    inside_heads = "|".join(re.escape(name) for name in heads)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        # GPT-2 stores its matrices transposed.
        fan_in_fan_out=any(
            type(part).__name__ == "Conv1D" and any(_ends(name, target) for target in targets)
            for name, part in module.named_modules()
        ),
        exclude_modules=rf"({inside_heads})(\..*)?" if heads else None,
    )


def half_frozen(module: nn.Module) -> None:
    """Keep frozen parameters in bfloat16 and trained ones in float32, in place.

    A trained output layer gets its input in its own type. Quantised parameters stay as they are.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            wanted = torch.float32 if parameter.requires_grad else torch.bfloat16
            parameter.data = parameter.data.to(wanted)
    for name in trained_heads(module):
        module.get_submodule(name).register_forward_pre_hook(_in_full)


def _in_full(part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def trained_heads(module: nn.Module) -> tuple[str, ...]:
    """The output layers that are trained along with the adapters."""
    tokens = getattr(module, "get_output_embeddings", lambda: None)()
    return tuple(name for name in output_layers(module) if module.get_submodule(name) is not tokens)


def train_only(module: nn.Module, patterns: Sequence[str], adapted: bool = False) -> None:
    """Freeze every parameter whose name matches no pattern; `head` means the output layers.

    In an `adapted` module, the patterns come on top of the adapters and the output layers.
    """
    heads = tuple(f"{name}.*" for name in output_layers(module))
    parameters = dict(module.named_parameters())
    chosen: set[str] = set()
    for pattern in patterns:
        globs = heads if pattern == HEAD and heads else (pattern,)
        found = {name for name in parameters if any(fnmatchcase(name, glob) for glob in globs)}
        if not found:
            names = list(parameters)
            raise UserError(
                f"model.train: {pattern!r} matches no parameter; the model has {', '.join(names[:3])}, …, "
                f"{names[-1]}"
            )
        chosen |= found
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen or (adapted and parameter.requires_grad))


def _targets(module: nn.Module, wanted: Iterable[str]) -> list[str]:
    """The targets, by the names that this module has for them."""
    layers = [name for name, part in module.named_modules() if hasattr(part, "weight")]
    names = {name.rpartition(".")[2]: None for name in layers}
    found: dict[str, None] = {}
    for target in wanted:
        part = Transformer.PARTS.get(target)
        same = [name for name, other in Transformer.PARTS.items() if part and part != "QKV" and other == part]
        candidates = (target, *same, *(FUSED if same else ()))
        name = next((c for c in candidates if any(_ends(layer, c) for layer in layers)), None)
        if name is None:
            raise UserError(
                f"model.lora.targets: the model has no layer {target!r}; it has {', '.join(names)}"
            )
        found[name] = None
    return list(found)


def _ends(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")
