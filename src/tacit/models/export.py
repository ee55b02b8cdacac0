"""Export of a trained model in its field's standard formats, for programs that do not know tacit.

With LoRA: a peft adapter (`adapter_config.json` and safetensors) with the factors and the output layers.
`PeftModel.from_pretrained(base, folder)` loads it on top of the base, which is saved in `base/` unless it is
on the hub. Without LoRA: a transformers folder for `from_pretrained`, or, for this package's own networks,
the tensors and a `config.json` that says how the network was built.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from tacit.models.hub import quiet
from tacit.models.lora import Lora, lora_config, trained_heads

TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model")
"""Files of a tokenizer."""
CAUSAL = "AutoPeftModelForCausalLM"
_ADAPTER = ".default"
"""peft's name for a module's single adapter; its files leave the name out."""


def save_adapter(model: nn.Module, base: nn.Module, lora: Lora, source: str, into: Path) -> None:
    """Write the adapters and all other trained parameters of `model` as a peft adapter for `base`.

    `base` is the same network without adapters; `source` is where other users find it.
    """
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    heads = trained_heads(base)
    others = [n.rpartition(".")[0] for n in trained if "lora_" not in n]
    whole = list(dict.fromkeys([*heads, *(o for o in others if not _inside(o, heads))]))
    config = lora_config(base, lora, heads)
    config.modules_to_save = whole or None
    config.base_model_name_or_path = source
    config.task_type = _task_type(model)
    config.inference_mode = True
    if config.task_type is None and hasattr(base, "save_pretrained"):  # pictures: record the class itself
        config.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": "transformers"}
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name in trained or _inside(name, whole):
            key = re.sub(rf"\{_ADAPTER}(?=\.|$)", "", name)
            tensors[f"base_model.model.{key}"] = parameter.detach().clone().contiguous()
    config.save_pretrained(into)
    save_file(tensors, into / "adapter_model.safetensors", metadata={"format": "pt"})


def save_model(model: nn.Module, how: Mapping[str, Any], into: Path) -> None:
    """Write a whole model. Where there is no transformers config, `how` says how the model was built."""
    if (save := getattr(model, "save_pretrained", None)) is not None:
        library = sys.modules.get("transformers")  # models of other libraries also have this method
        with nullcontext() if library is None else quiet(library):
            save(into)
        return
    into.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(how, indent=1) + "\n", encoding="utf-8")


def name_labels(model: nn.Module, labels: Sequence[str]) -> None:
    """Give a transformers model the names of its classes."""
    config = getattr(model, "config", None)
    if config is not None and labels and getattr(config, "num_labels", None) == len(labels):
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}


def name_task(model: nn.Module, task: str) -> None:
    """Tell a transformers model what its outputs mean, if they are not classes of which one is right. A
    pipeline that does not know this makes them sum to 1, or maps them into [0, 1].
    """
    kinds = {"regression": "regression", "multi-label": "multi_label_classification"}
    config = getattr(model, "config", None)
    if config is not None and task in kinds and hasattr(config, "problem_type"):
        config.problem_type = kinds[task]


def outputs(folder: Path) -> int | None:
    """How many classes the model in a transformers folder has."""
    try:
        plain = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return len(plain["id2label"]) if "id2label" in plain else int(plain.get("num_labels", 2))
    except (OSError, ValueError, TypeError):
        return None


def auto_class(model: nn.Module) -> str:
    """The peft class that loads an adapter together with its base, from the name alone."""
    kinds = {
        "SEQ_CLS": "AutoPeftModelForSequenceClassification",
        "TOKEN_CLS": "AutoPeftModelForTokenClassification",
        "CAUSAL_LM": CAUSAL,
    }
    return kinds.get(_task_type(model) or "", "AutoPeftModel")


def copy_tokenizer(source: Path, into: Path) -> None:
    """Copy a text model's tokenizer next to it."""
    for pattern in TOKENIZER:
        for file in source.glob(pattern):
            shutil.copyfile(file, into / file.name)


def _task_type(model: nn.Module) -> str | None:
    """peft's name for the model's task; it has none for pictures."""
    name = type(model).__name__
    kinds = {
        "ForSequenceClassification": "SEQ_CLS",
        "ForTokenClassification": "TOKEN_CLS",
        "LMHeadModel": "CAUSAL_LM",
        "ForCausalLM": "CAUSAL_LM",
    }
    return next((kind for ending, kind in kinds.items() if name.endswith(ending)), None)


def _inside(name: str, modules: tuple[str, ...] | list[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
