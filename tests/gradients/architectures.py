"""Thirty-six transformers architectures, all our models and all tasks: tiny, with uneven records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hub
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import tasks
from tacit.gradients import Batch, Losses
from tacit.models import build
from tacit.tasks import Task

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "num_labels": 3, "pad_token_id": 0,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 2,
}  # fmt: skip
"""Options that most configs know; those that a config does not know are left out."""


def tokens(b: int, length: int = 8) -> Batch:
    """Texts of different lengths, as in every real batch."""
    mask = (torch.arange(length) < torch.randint(3, length + 1, (b, 1))).long()
    mask[0] = 1
    ids = torch.randint(3, 40, (b, length)) * mask
    return {"input_ids": ids, "attention_mask": mask, "y": torch.arange(b) % 3}


def images(b: int, size: int = 16) -> Batch:
    return {"x": torch.randn(b, 3, size, size), "y": torch.arange(b) % 3}


def text(module: nn.Module, batch: Batch) -> Tensor:
    logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["y"], reduction="none")


def pooled(module: nn.Module, batch: Batch) -> Tensor:
    """For models without a head: the mean over a record's own tokens."""
    mask = batch["attention_mask"].unsqueeze(-1)
    out = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    return ((out * mask).sum(1) / mask.sum(1)).sin().sum(1)


def next_token(module: nn.Module, batch: Batch) -> Tensor:
    logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return (each * batch["attention_mask"][:, 1:]).sum(1)


def unmasked(module: nn.Module, batch: Batch) -> Tensor:
    """For models that know no mask."""
    return F.cross_entropy(module(input_ids=batch["input_ids"]).logits, batch["y"], reduction="none")


def picture(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]).logits, batch["y"], reduction="none")


def sound(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch["x"]).last_hidden_state.sin().sum((1, 2))


def made(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        kind = getattr(hub, config)
        known = {k: v for k, v in SMALL.items() if k not in kind.attribute_map}
        built: nn.Module = getattr(hub, model)(kind(**{**known, **options}))
        return built.train()

    return build


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Batch, Losses]] = {
    "bert": (made("BertConfig", "BertForSequenceClassification"), tokens(4), text),
    "roberta": (made("RobertaConfig", "RobertaForSequenceClassification"), tokens(4), text),
    "distilbert": (made("DistilBertConfig", "DistilBertForSequenceClassification", dim=16, n_layers=2, n_heads=2,  # noqa: E501
        hidden_dim=24, dropout=0.0, seq_classif_dropout=0.0), tokens(4), text),
    "albert": (made("AlbertConfig", "AlbertForSequenceClassification", embedding_size=8,
        classifier_dropout_prob=0.0), tokens(4), text),
    "electra": (made("ElectraConfig", "ElectraForSequenceClassification", embedding_size=8), tokens(4), text),
    "deberta": (made("DebertaV2Config", "DebertaV2ForSequenceClassification", relative_attention=True,
        pos_att_type=["p2c", "c2p"], position_buckets=4, pooler_hidden_size=16), tokens(4), text),
    "modernbert": (made("ModernBertConfig", "ModernBertForSequenceClassification", local_attention=4,
        cls_token_id=1, sep_token_id=2), tokens(4), text),
    "longformer": (made("LongformerConfig", "LongformerForSequenceClassification", attention_window=4),
        tokens(4), text),
    "fnet": (made("FNetConfig", "FNetForSequenceClassification"), tokens(4), unmasked),
    "yoso": (made("YosoConfig", "YosoForSequenceClassification", use_expectation=True), tokens(4), text),
    "t5-encoder": (made("T5Config", "T5EncoderModel", d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        dropout_rate=0.0), tokens(4), pooled),
    "gpt2": (made("GPT2Config", "GPT2ForSequenceClassification", n_embd=16, n_layer=2, n_head=2, n_positions=32,  # noqa: E501
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), tokens(4), text),
    "gpt2-lm": (made("GPT2Config", "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), tokens(4), next_token),
    "opt": (made("OPTConfig", "OPTForCausalLM", ffn_dim=24, dropout=0.0, word_embed_proj_dim=16),
        tokens(4), next_token),
    "bloom": (made("BloomConfig", "BloomForCausalLM", n_layer=2, n_head=2), tokens(4), next_token),
    "gpt-neox": (made("GPTNeoXConfig", "GPTNeoXForCausalLM", hidden_dropout=0.0), tokens(4), next_token),
    "llama": (made("LlamaConfig", "LlamaForCausalLM"), tokens(4), next_token),
    "mistral": (made("MistralConfig", "MistralForCausalLM", sliding_window=4), tokens(4), next_token),
    "qwen2": (made("Qwen2Config", "Qwen2ForCausalLM"), tokens(4), next_token),
    "mixtral": (made("MixtralConfig", "MixtralForCausalLM", num_local_experts=3), tokens(4), next_token),
    "mamba": (made("MambaConfig", "MambaForCausalLM", state_size=4, expand=2), tokens(4), next_token),
    "mamba2": (made("Mamba2Config", "Mamba2ForCausalLM", state_size=4, expand=2, num_heads=4, head_dim=8, n_groups=1,  # noqa: E501
        chunk_size=4), tokens(4), next_token),
    "rwkv": (made("RwkvConfig", "RwkvForCausalLM", attention_hidden_size=16, context_length=32), tokens(4), next_token),  # noqa: E501
    "gemma2": (made("Gemma2Config", "Gemma2ForCausalLM", head_dim=8, sliding_window=4),
        tokens(4), next_token),
    "qwen3-moe": (made("Qwen3MoeConfig", "Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2,
        head_dim=8, moe_intermediate_size=12), tokens(4), next_token),
    "bart": (made("BartConfig", "BartModel", d_model=16, encoder_layers=2, decoder_layers=2, dropout=0.0,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24),
        tokens(4), pooled),
    "canine": (made("CanineConfig", "CanineForSequenceClassification", num_hash_buckets=64,
        downsampling_rate=2, local_transformer_stride=4, upsampling_kernel_size=2), tokens(4), text),
    "ibert": (made("IBertConfig", "IBertForSequenceClassification"), tokens(4), text),
    "segformer": (made("SegformerConfig", "SegformerForImageClassification", num_encoder_blocks=2,
        depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], drop_path_rate=0.0, classifier_dropout_prob=0.0),
        images(4), picture),
    "vit": (made("ViTConfig", "ViTForImageClassification", image_size=16, patch_size=4), images(4), picture),
    "deit": (made("DeiTConfig", "DeiTForImageClassification", image_size=16, patch_size=4), images(4), picture),  # noqa: E501
    "swin": (made("SwinConfig", "SwinForImageClassification", image_size=16, patch_size=2, embed_dim=8,
        depths=[2, 2], num_heads=[2, 2], window_size=4, drop_path_rate=0.0), images(4), picture),
    "convnext": (made("ConvNextConfig", "ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 1],
        num_stages=2, image_size=16), images(4), picture),
    "mobilevit": (made("MobileViTV2Config", "MobileViTV2ForImageClassification", image_size=16), images(4), picture),  # noqa: E501
    "whisper-encoder": (lambda: hub.models.whisper.modeling_whisper.WhisperEncoder(hub.WhisperConfig(d_model=16,  # noqa: E501
        encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24, num_mel_bins=8, max_source_positions=10,  # noqa: E501
        dropout=0.0, encoder_layerdrop=0.0)).train(), {"x": torch.randn(4, 8, 20)}, sound),
    "wav2vec2": (made("Wav2Vec2Config", "Wav2Vec2Model", conv_dim=[8, 8], conv_stride=[4, 2], conv_kernel=[6, 3],  # noqa: E501
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.0,
        hidden_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, apply_spec_augment=False),
        {"x": torch.randn(4, 120)}, sound),
}  # fmt: skip


TINY: dict[str, dict[str, Any]] = {
    "vit": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    "swin": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2},
    "roberta": {**{k: SMALL[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")},
        "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32},
}  # fmt: skip
"""What the large networks' configs are made smaller by."""


def speech(b: int) -> Batch:
    """Utterances of different lengths; the fourth is too short for its transcript, the fifth has none."""
    frames, lengths = torch.tensor([32, 24, 30, 4, 28])[:b], torch.tensor([4, 2, 3, 4, 0])[:b]
    inside = (torch.arange(32) < frames.unsqueeze(1)).unsqueeze(2)
    said = torch.randint(2, 6, (b, 4)) * (torch.arange(4) < lengths.unsqueeze(1))
    return {"x": torch.randn(b, 32, 8) * inside, "frames": frames, "tokens": said, "lengths": lengths}


def tagged(b: int) -> Batch:
    """A class for each token; the last text has none."""
    batch = tokens(b)
    y = torch.where(batch["attention_mask"] > 0, torch.randint(0, 3, (b, 8)), -100)
    y[-1] = -100
    return {**batch, "y": y}


def messages(b: int) -> Batch:
    """Texts; the last is of one token, so it has none to predict."""
    batch = tokens(b)
    batch["attention_mask"][-1, 1:] = 0
    return {
        "input_ids": batch["input_ids"] * batch["attention_mask"],
        "attention_mask": batch["attention_mask"],
    }


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = (
            nn.Embedding(40, 8),
            nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.layer(self.table(input_ids), src_key_padding_mask=attention_mask == 0)
        logits: Tensor = self.head(hidden)
        return logits


PICTURE, STILL = (3, 16, 16), {"dropout": 0.0}
HEARD = {
    "depth": 2,
    "width": 16,
    "hidden": 24,
    "heads": 2,
    "dropout": 0.0,
    "layer_drop": 0.0,
    "augment": False,
    "shift": 0.0,
}
MODELS: dict[str, tuple[Task, tuple[int, ...], dict[str, Any], Batch]] = {
    "cnn": (tasks.Classification(), (3, 32, 32), {}, images(3, 32)),
    "ctc_transformer": (tasks.Speech(), (8,), HEARD, speech(3)),
    "logistic": (tasks.Classification(), PICTURE, {}, images(3)),
    "mlp": (tasks.Classification(), PICTURE, {}, images(3)),
    "resnet18": (tasks.Classification(), (3, 8, 8), {}, images(2, 8)),
    "roberta_base": (tasks.Classification(), (8,), STILL, tokens(4)),
    "swin_base": (tasks.Classification(), PICTURE, {"patch": 2, "window": 2, "drop_path": 0.0}, images(3)),
    "swin_tiny": (tasks.Classification(), PICTURE, {"patch": 2, "window": 2, "drop_path": 0.0}, images(3)),
    "vit": (tasks.Classification(), PICTURE, {"width": 16, "depth": 2, "heads": 2}, images(3)),
    "vit_base": (tasks.Classification(), PICTURE, {"patch": 4}, images(3)),
    "vit_tiny": (tasks.Classification(), PICTURE, {}, images(2)),
}
"""Every network of `tacit.models` by name: its task, shape, options and a batch."""

TASKS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "classification": (lambda: build("roberta_base", shape=(8,), classes=3, **STILL), tokens(4)),
    "language": (ARCHITECTURES["gpt2-lm"][0], messages(4)),
    "multi-label": (lambda: build("mlp", shape=(5,), classes=4),
        {"x": torch.randn(4, 5), "y": torch.randint(0, 2, (4, 4))}),
    "regression": (lambda: build("mlp", shape=(5,), classes=2),
        {"x": torch.randn(4, 5), "y": torch.randn(4, 2)}),
    "speech": (lambda: build("ctc_transformer", shape=(8,), classes=6, **HEARD), speech(5)),
    "token-classification": (Tagger, tagged(4)),
}  # fmt: skip
"""Every task of `tacit.tasks` by name: a model for it, and a batch."""
