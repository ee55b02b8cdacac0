"""Small texts, models and federations for the tests of large models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tacit import Dataset
from tacit.config import Config, load
from tacit.data import Batch

VOCABULARY, LENGTH = 40, 9
ROBERTA = {
    "model_type": "roberta", "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 20,
    "initializer_range": 0.3,
}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 20,
}
VIT = {
    "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "patch_size": 4,
}  # fmt: skip
LORA = {"rank": 2, "alpha": 4, "targets": ["query", "value"]}


@dataclass(frozen=True)
class Texts:
    """Random tokens; a text's class is whether low tokens come first. Padded on the right with ones."""

    tokens: NDArray[np.int64]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        return self.y

    @property
    def users(self) -> NDArray[Any] | None:
        return None

    def take(self, indices: NDArray[np.integer[Any]]) -> Batch:
        tokens = torch.from_numpy(self.tokens.take(indices, 0))
        return {
            "input_ids": tokens,
            "attention_mask": (tokens != 1).long(),
            "y": torch.from_numpy(self.y.take(indices, 0)),
        }

    def prepare(self, batch: Batch) -> Batch:
        return batch


def texts(n: int = 96, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)

    def part(count: int) -> Texts:
        y = rng.integers(0, 2, count)
        tokens = rng.integers(3, VOCABULARY // 2, (count, LENGTH)) + (VOCABULARY // 2) * y[:, None]
        tokens[np.arange(LENGTH) >= rng.integers(4, LENGTH + 1, count)[:, None]] = 1
        return Texts(np.minimum(tokens, VOCABULARY - 1), y)

    return Dataset("texts", part(n), part(n // 2), 2, (LENGTH,), licence="none", origin="made here")


def text_config(overrides: dict[str, Any] | None = None, **model: Any) -> Config:
    values = {
        "rounds": 2,
        "data": {"name": "fashion-mnist-slice", "partition": {"kind": "iid", "clients": 6}},
        "model": model or {"config": {**ROBERTA, **QUIET}, "lora": LORA},
        "cohort": 3,
        "local": {"steps": 2, "batch": 8, "lr": 0.05},
        "engine": {"workers": 0},
    }
    return load(values, overrides or {})
