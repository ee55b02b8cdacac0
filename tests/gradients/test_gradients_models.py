"""Whole models, with and without LoRA, against a loop over records and against Opacus."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradients_reference import assert_exact, close, lengths, squared_outputs
from tacit.gradients import Batch, ClippedGradient, Losses
from tacit.gradients.proof import Known
from tacit.gradients.rules import RULES
from tacit.gradients.tape import Tape
from tacit.models import build, convolutional
from tacit.vector import Flat

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def classify(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"], reduction="none")


def classify_hub(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]).logits, batch["y"], reduction="none")


def classify_text(module: nn.Module, batch: Batch) -> Tensor:
    logits = module(input_ids=batch["x"], attention_mask=batch["mask"]).logits
    return F.cross_entropy(logits, batch["y"], reduction="none")


def next_token(module: nn.Module, batch: Batch) -> Tensor:
    logits = module(input_ids=batch["x"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["x"][:, 1:], reduction="none").mean(1)


def images(b: int, size: int = 32, channels: int = 3) -> Batch:
    return {"x": torch.randn(b, channels, size, size), "y": torch.arange(b) % 4}


def tokens(b: int, length: int = 9) -> Batch:
    mask = torch.ones(b, length, dtype=torch.long)
    mask[0, 6:] = 0
    return {"x": torch.randint(3, 50, (b, length)), "mask": mask, "y": torch.arange(b) % 4}


def hub_vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16,
        patch_size=4, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def hub_swin() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        num_labels=4, drop_path_rate=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.SwinForImageClassification(config)


def hub_roberta(**options: object) -> nn.Module:
    config = transformers.RobertaConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=20, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.RobertaForSequenceClassification(config)


def hub_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=24, n_layer=2, n_head=2, n_positions=20, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, pad_token_id=0, num_labels=4,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def lora(model: nn.Module, targets: list[str], heads: list[str] | None) -> nn.Module:
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, modules_to_save=heads)
    adapted: nn.Module = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at the start, which would hide A's gradient
            nn.init.normal_(parameter, std=0.1)
    return adapted


class Speech(nn.Module):
    """A small CTC transformer: strided convolution, GLU, pre-norm layers without biases."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 2 * width, 7, stride=3, padding=3)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width, bias=False),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "proj": nn.Linear(width, width, bias=False),
                    "norm2": nn.LayerNorm(width, bias=False),
                    "up": nn.Linear(width, 32, bias=False),
                    "down": nn.Linear(32, width, bias=False),
                }
            )
            for _ in range(layers)
        )
        self.scale = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(width, 6)

    def forward(self, sound: Tensor) -> Tensor:
        x = F.glu(self.conv(sound), dim=1).transpose(1, 2)
        b, t, w = x.shape
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm1"](x)).view(b, t, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, w)
            x = x + layer["proj"](y) * self.scale[0]
            x = x + layer["down"](layer["up"](layer["norm2"](x)).relu()) * self.scale[1]
        return self.head(x).log_softmax(-1)


def ctc(module: nn.Module, batch: Batch) -> Tensor:
    scores = module(batch["x"]).transpose(0, 1)
    frames = torch.full((scores.shape[1],), scores.shape[0])
    return F.ctc_loss(scores, batch["y"], frames, batch["n"], reduction="none")


def sounds(b: int) -> Batch:
    return {
        "x": torch.randn(b, 8, 40),
        "y": torch.randint(1, 6, (b, 4)),
        "n": torch.randint(2, 5, (b,)),
    }


QV, HEAD = ["query", "value", "q_proj", "v_proj"], ["classifier"]

MODELS: dict[str, tuple[Callable[[], nn.Module], Batch, Losses]] = {
    "vit": (hub_vit, images(4, 16), classify_hub),
    "swin": (hub_swin, images(4, 16), classify_hub),
    "roberta": (hub_roberta, tokens(4), classify_text),
    "gpt2": (hub_gpt2, tokens(4), next_token),
    "speech": (Speech, sounds(4), ctc),
    "vit-lora": (lambda: lora(hub_vit(), QV, HEAD), images(4, 16), classify_hub),
    "swin-lora": (lambda: lora(hub_swin(), QV, HEAD), images(4, 16), classify_hub),
    "roberta-lora": (lambda: lora(hub_roberta(), QV, HEAD), tokens(4), classify_text),
    "gpt2-lora": (lambda: lora(hub_gpt2(), ["c_attn"], None), tokens(4), next_token),
    "speech-lora": (lambda: lora(Speech(), ["qkv", "conv"], ["head"]), sounds(4), ctc),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_whole_model_equals_a_loop_over_records(name):
    torch.manual_seed(0)
    make, batch, losses = MODELS[name]
    assert_exact(make(), batch, losses)


class Encoder(nn.Module):
    """torch's own transformer, whose attention takes its weights behind the layers' backs."""

    def __init__(self, weights: bool, cross: bool) -> None:
        super().__init__()
        self.weights, self.cross = weights, cross
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        other = x.flip(1) if self.cross else x
        y, scores = self.attention(x, other, other, key_padding_mask=padding, need_weights=self.weights)
        x = self.layer(x + y, src_mask=causal, is_causal=True)
        return x if scores is None else x * scores.sum((1, 2), keepdim=True)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("b", [1, 4])
def test_torchs_own_attention(weights, cross, b):
    torch.manual_seed(0)
    model = Encoder(weights, cross).double()
    batch = {"x": torch.randn(b, 5, 8, dtype=torch.float64)}
    assert_exact(model, batch, squared_outputs())
    plain = model(batch["x"])
    tape = Tape(dict(model.named_parameters()), {"x": batch["x"]}, RULES, Known(model))
    with tape:
        seen = model(tape.batch["x"])
    assert torch.allclose(seen, plain)


OURS = ["cnn", "resnet18", "vit_tiny"]


@pytest.mark.parametrize("name", OURS)
def test_our_models_equal_a_loop_over_records(name):
    torch.manual_seed(0)
    assert_exact(build(name, shape=(3, 32, 32), classes=4), images(3), classify)


@pytest.mark.parametrize("name", [*OURS, "roberta"])
def test_agrees_with_opacus(name, monkeypatch):
    """Where Opacus supports the model: its per-record gradients, clipped here by the textbook."""
    # Opacus 1.6 is off by 2 % where channels come last; there ours is held to a loop over records, above.
    monkeypatch.setattr(convolutional, "LAYOUT", torch.contiguous_format)
    opacus = pytest.importorskip("opacus")
    torch.manual_seed(0)
    model, batch, losses = (
        MODELS[name] if name in MODELS else (build(name, shape=(3, 32, 32), classes=4), images(3), classify)
    )
    if name in MODELS:
        model = model()
    flat = Flat(model)
    result = ClippedGradient(flat)(batch, losses, 1.0)
    clipped = flat.grad.clone()
    hooked = opacus.GradSampleModule(model, loss_reduction="sum")
    losses(hooked, batch).sum().backward()
    named = dict(model.named_parameters())
    rows = torch.cat([named[s.name].grad_sample.flatten(1) for s in flat.layout.segments], 1)
    close(result.norms, lengths(rows), 1e-5)
    close(clipped, (rows / lengths(rows).clamp(min=1.0).unsqueeze(1)).sum(0), 1e-5)
