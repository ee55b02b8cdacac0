"""How a model is called on a batch.

Pictures, and any other record that is one tensor, are `x`. Texts are a tokenizer's output: `input_ids` with
`attention_mask`, the names that every model of transformers takes.

>>> import torch
>>> ask(nn.Identity(), {"x": torch.ones(2, 3), "y": torch.zeros(2)}).shape
torch.Size([2, 3])
"""

from __future__ import annotations

from torch import Tensor, nn

from tacit.data.records import Batch
from tacit.errors import UserError

TEXT = ("input_ids", "attention_mask", "token_type_ids")


def ask(model: nn.Module, batch: Batch) -> Tensor:
    """The model's logits for a batch. The model returns a tensor, or an object with `.logits`.

    Any other output is refused (`UserError`).
    """
    text = {name: batch[name] for name in TEXT if name in batch}
    answer = model(**text) if text else model(batch["x"])
    logits = answer if isinstance(answer, Tensor) else getattr(answer, "logits", None)
    if not isinstance(logits, Tensor):
        raise UserError(
            f"model: {type(model).__name__} answers with a {type(answer).__name__}; let its `forward` return "
            "logits as one tensor, or an object with `.logits`"
        )
    return logits.float()  # half precision is too coarse for cross-entropy
