"""Blocks: the papers' counts, the right coordinates in each, and means against a plain index."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tacit import models
from tacit.vector import Layout
from tacit.vector.blocks import Blocks, Cut, _assemble, blocks
from tacit.vector.layout import Segment

transformers = pytest.importorskip("transformers")


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def vit_base() -> nn.Module:
    return models.build("vit-base", (3, 224, 224), 10)


def roberta_base() -> nn.Module:
    return models.build("roberta-base", (128,), 2)


def swin_base() -> nn.Module:
    return models.build("swin-base", (3, 224, 224), 10)


def swin_small() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, window_size=4, embed_dim=8, depths=[1, 2], num_heads=[2, 4]
    )
    return transformers.SwinForImageClassification(config)


def gpt2_small() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=12, n_head=3, vocab_size=20, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


def bert_small() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20
    )
    return transformers.BertForMaskedLM(config)


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 20)
    return nn.Sequential(
        nn.Embedding(9, 12), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(12, 5)
    )


def our_vit() -> nn.Module:
    return models.build("vit", (3, 8, 8), 5, patch=4, width=12, depth=2, heads=3)


SMALL = [our_vit, swin_small, gpt2_small, bert_small, torch_encoder]
KINDS = ["architecture", "fine", "tensor"]


def partition(module: nn.Module, kind: str = "architecture", personal: tuple[str, ...] = ()) -> Blocks:
    return blocks(Layout.of(module, personal), kind)  # type: ignore[arg-type]


def ids(b: Blocks) -> Tensor:
    """The block of each coordinate."""
    return b.spread(torch.arange(len(b), dtype=torch.float64)).long()


def views(module: nn.Module, b: Blocks) -> dict[str, Tensor]:
    return dict(Layout.of(module).views(ids(b)))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "expected"), [(vit_base, 458), (roberta_base, 458), (swin_base, 1178)])
def test_counts_of_table_13(make: Callable[[], nn.Module], expected: int) -> None:
    module = on_meta(make)
    b = partition(module)
    assert len(b) == len(set(b.names)) == expected
    assert int(b.sizes.sum()) == sum(p.numel() for p in module.parameters())
    assert int(b.sizes.min()) > 0


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (our_vit, 2 * 11 + 2),
        (swin_small, 8 + 2 * 14 + 2),
        (gpt2_small, 24),
        (bert_small, 24),
        (torch_encoder, 24),
    ],
)
def test_counts_follow_the_formula(make: Callable[[], nn.Module], expected: int) -> None:
    assert len(partition(make())) == expected


def test_counts_of_convolutional_and_plain_networks() -> None:
    def count(name: str, kind: str = "architecture") -> int:
        return len(partition(on_meta(lambda: models.build(name, (3, 32, 32), 10)), kind))

    assert count("resnet18") == 1 + 8 + 1
    assert count("cnn") == 6
    assert count("mlp") == count("mlp", "tensor") == 6
    assert count("cnn", "fine") == count("cnn", "tensor") == 12
    assert count("vit_tiny") == 6 * (3 * 3 + 2) + 2


def test_residual_blocks_hold_their_shortcut_and_the_stem_its_norm() -> None:
    module = models.build("resnet18", (3, 32, 32), 10)
    b = partition(module)
    for name, block in views(module, b).items():
        owner = "stem.conv" if name.startswith("stem") else name.rpartition(".")[0]
        wanted = ".".join(owner.split(".")[:2]) if owner.startswith("blocks") else owner
        assert {b.names[i] for i in block.unique()} == {wanted}, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", SMALL)
def test_mean_and_spread_against_a_plain_index(make: Callable[[], nn.Module], kind: str) -> None:
    b = partition(make(), kind)
    index = ids(b).numpy()
    assert set(index) == set(range(len(b)))
    x = torch.randn(b.size, dtype=torch.float64)
    means = np.bincount(index, weights=x.numpy()) / np.bincount(index)
    np.testing.assert_allclose(b.mean(x).numpy(), means, rtol=1e-10, atol=1e-12)
    assert torch.equal(b.spread(b.mean(x)), b.mean(x)[index])
    torch.testing.assert_close(b.mean(b.spread(b.mean(x))), b.mean(x))
    assert b.sizes.tolist() == np.bincount(index).tolist()


def test_heads_are_rows_of_a_fused_matrix_and_bring_their_bias() -> None:
    module = our_vit()
    b = partition(module)
    where = views(module, b)
    size = 12 // 3
    for part, letter in enumerate("QKV"):
        for head in range(3):
            rows = slice(part * 12 + head * size, part * 12 + (head + 1) * size)
            block = b.names.index(f"layers.1.attention.{letter}[{head}]")
            assert (where["layers.1.attention.qkv.weight"][rows] == block).all()
            assert (where["layers.1.attention.qkv.bias"][rows] == block).all()
            assert b.sizes[block] == size * 12 + size


def test_heads_are_columns_in_gpt2() -> None:
    module = gpt2_small()
    b = partition(module)
    where = views(module, b)
    block = b.names.index("transformer.h.0.attn.K[2]")
    columns = slice(12 + 8, 12 + 12)
    assert (where["transformer.h.0.attn.c_attn.weight"][:, columns] == block).all()
    assert (where["transformer.h.0.attn.c_attn.bias"][columns] == block).all()
    assert b.sizes[block] == 12 * 4 + 4


def test_what_has_no_block_of_its_own_joins_the_neighbour_the_lesson_names() -> None:
    module = swin_small()
    b = partition(module)
    where = {name: {b.names[i] for i in block.unique()} for name, block in views(module, b).items()}
    first = "swin.encoder.layers.0.blocks.0"
    for name, names in where.items():
        if "embeddings" in name:
            assert names == {"embedding"}
        elif name.startswith(("classifier", "swin.layernorm")):
            assert names == {"output"}
        elif "downsample" in name:
            assert names == {f"{first}.mlp"}
        elif name.startswith(first) and ("layernorm_before" in name or "bias_table" in name):
            assert names == {f"{first}.attention.projection"}
        elif name.startswith(first) and "layernorm_after" in name:
            assert names == {f"{first}.mlp"}


def test_fine_partition_by_its_definition() -> None:
    module = our_vit()
    b = partition(module, "fine")
    where = views(module, b)
    qkv, up = where["layers.0.attention.qkv.weight"], where["layers.0.mlp.up.weight"]
    assert len(qkv[:24].unique()) == 2 * 3 and len(qkv[24:].unique()) == 12  # Q, K by head; V by neuron
    assert len(up.unique()) == 48 and (up == up[:, :1]).all()
    assert (where["layers.0.mlp.up.bias"] == up[:, 0]).all()
    assert len(where["layers.0.norm1.weight"].unique()) == 1
    assert where["layers.0.norm1.weight"][0] != where["layers.0.norm1.bias"][0]
    assert len(where["head.weight"].unique()) == 5
    per_layer = 2 * 3 + 12 + 12 + 48 + 12 + 4
    assert len(b) == 2 * per_layer + (12 + 1) + 2 + 5


def test_fine_partition_of_columns_and_of_tokens() -> None:
    module = gpt2_small()
    b = partition(module, "fine")
    where = views(module, b)
    square, wide = where["transformer.h.1.attn.c_proj.weight"], where["transformer.h.1.mlp.c_fc.weight"]
    assert (square == square[:1]).all() and len(square.unique()) == 12
    assert (wide == where["transformer.h.1.mlp.c_fc.bias"]).all() and len(wide.unique()) == 48
    assert len(where["transformer.wte.weight"].unique()) == 20
    v = where["transformer.h.1.attn.c_attn.weight"][:, 24:]
    assert (v == v[:1]).all() and len(v.unique()) == 12


def test_lora_factors_are_blocks_of_their_own() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["cls"])
    module = peft.get_peft_model(bert_small(), config)
    layout = Layout.of(module)
    b = partition(module)
    factors = [s.name for s in layout.segments if "lora_" in s.name]
    assert len(factors) == 2 * 2 * 2
    assert set(b.names) == {*factors, "output"}
    full = partition(bert_small())
    assert len(full) == 24


def test_a_personal_head_has_no_block() -> None:
    module = our_vit()
    b = partition(module, personal=("head.*",))
    assert b.size == Layout.of(module, ("head.*",)).shared
    whole = partition(module)
    # The last norm alone is what is left of the output.
    assert len(b) == len(whole) and b.sizes[-1] == 2 * 12
    assert torch.equal(ids(b), ids(whole)[: b.size])


def test_small_floats_are_summed_wide() -> None:
    b = blocks(Layout.of(nn.Linear(300, 300, bias=False)), "tensor")
    assert b.mean(torch.ones(90_000, dtype=torch.bfloat16)).item() == 1.0
    assert b.mean(torch.ones(90_000, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_view_into_a_larger_buffer_is_read_in_place() -> None:
    b = partition(our_vit())
    buffer = torch.randn(b.size + 7)
    assert torch.equal(b.mean(buffer[7:]), b.mean(buffer[7:].clone()))


def test_wrong_sizes_and_kinds_are_refused() -> None:
    b = partition(our_vit())
    with pytest.raises(ValueError, match="expected a vector of"):
        b.mean(torch.zeros(b.size + 1))
    with pytest.raises(ValueError, match="expected a vector of"):
        b.spread(torch.zeros(1))
    with pytest.raises(ValueError, match="unknown kind"):
        partition(our_vit(), "heads")


@given(
    outer=st.integers(1, 3),
    groups=st.integers(1, 4),
    places=st.integers(1, 3),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    inner=st.integers(1, 3),
    offset=st.integers(0, 4),
)
def test_a_cut_takes_what_indexing_takes(
    outer: int, groups: int, places: int, before: int, after: int, inner: int, offset: int
) -> None:
    length = groups * places
    segment = Segment("w", (outer, before + length + after, inner), offset)
    b = _assemble([Cut("a", segment, 1, before, length, groups)], offset + segment.size)
    vector = torch.randn(b.size, dtype=torch.float64)
    tensor = vector[segment.slice].view(segment.shape)
    for g in range(groups):
        rows = slice(before + g * places, before + (g + 1) * places)
        torch.testing.assert_close(b.mean(vector)[g], tensor[:, rows].mean())


@pytest.mark.parametrize("kind", ["architecture", "fine", "tensor"])
def test_blocks_are_no_more_than_asked_for_and_cover_everything_once(kind: str) -> None:
    from tacit.models.vit import vit

    layout = Layout.of(vit((3, 32, 32), 10, patch=8, width=24, depth=2, heads=3))
    whole = blocks(layout, kind)  # type: ignore[arg-type]
    vector = torch.rand(layout.shared)
    for most, least in ((7, 1), (0, layout.shared // 5), (7, layout.shared // 5), (10**9, 1)):
        capped = blocks(layout, kind, most, least)  # type: ignore[arg-type]
        bound = min(most or layout.shared, layout.shared // least)
        assert len(capped) == min(bound, len(whole))
        assert int(capped.sizes.sum()) == layout.shared
        means = capped.mean(vector)
        torch.testing.assert_close((means * capped.sizes).sum(), vector.sum(), rtol=1e-5, atol=0)
        torch.testing.assert_close(capped.mean(capped.spread(means)), means)
        assert len(set(capped.names)) == len(capped)
