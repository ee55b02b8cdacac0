"""The networks: the papers' sizes, independent records, reproducible seeds, helpful errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tacit import models
from tacit.errors import UserError

SMALL: dict[str, dict[str, object]] = {
    "cnn": {},
    "logistic": {},
    "mlp": {"hidden": (32, 16)},
    "resnet18": {"groups": 2},
    "vit": {"patch": 7, "width": 32, "depth": 2, "heads": 4},
    "vit_tiny": {"patch": 7},
}


def small(name: str, **more: object) -> nn.Module:
    torch.manual_seed(3)
    return models.build(name, (1, 28, 28), 7, **{**SMALL[name], **more})


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_every_name_has_a_small_twin_here() -> None:
    large = {"roberta_base", "swin_base", "swin_tiny", "vit_base"}  # transformers', see test_large_models.py
    assert {*SMALL, *large, "ctc_transformer"} == set(models.MODELS)  # speech: test_models_speech.py


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "expected"),
    [
        ("cnn", (3, 32, 32), 10, {}, 667_402),
        ("cnn", (1, 28, 28), 10, {}, 667_402 - 2 * 64 * 9 - 3 * 256 * 256),  # one channel; 1×1 left, not 2×2
        ("resnet18", (3, 224, 224), 10, {"stem": "7x7"}, 11_181_642),
        ("resnet18", (3, 32, 32), 10, {}, 11_173_962),
        ("resnet18", (3, 32, 32), 100, {"norm": "batch"}, 11_220_132),
        ("vit_tiny", (3, 32, 32), 100, {}, 2_698_468),
        ("logistic", (1, 28, 28), 10, {}, 7_850),
        ("mlp", (1, 28, 28), 10, {}, 199_210),  # McMahan et al. (2017), "2NN"
    ],
)
def test_parameter_counts(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, object], expected: int
) -> None:
    with torch.device("meta"):
        assert count(models.build(name, shape, classes, **options)) == expected


def test_vit_tiny_by_its_formula() -> None:
    e, depth, patch, classes = 192, 6, 4 * 4 * 3, 100
    layer = (3 * e * e + 3 * e) + (e * e + e) + (8 * e * e + 5 * e) + 4 * e
    with torch.device("meta"):
        model = models.build("vit-tiny", (3, 32, 32), classes)
    assert count(model) == depth * layer + (patch * e + e) + e + 2 * e + (e * classes + classes)


@pytest.mark.parametrize("name", SMALL)
def test_seed_decides_the_weights_and_the_head_is_called_head(name: str) -> None:
    a, b = small(name).state_dict(), small(name).state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert a["head.weight"].shape[0] == 7
    heads = [n for n in a if n.startswith("head.")]
    assert heads == ["head.weight", "head.bias"]


@pytest.mark.parametrize("name", SMALL)
def test_records_do_not_mix_and_all_parameters_learn(name: str) -> None:
    model = small(name).train()
    x = torch.randn(5, 1, 28, 28)
    together = model(x)
    alone = torch.cat([model(record[None]) for record in x])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    F.cross_entropy(together, torch.arange(5)).backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", SMALL)
def test_first_loss_is_near_that_of_a_uniform_guess(name: str) -> None:
    model = small(name).eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(torch.randn(64, 1, 28, 28)), torch.randint(7, (64,)))
    assert abs(loss.item() - math.log(7)) < 0.8


@pytest.mark.parametrize("name", ["cnn", "vit", "mlp"])
def test_a_few_steps_fit_a_small_batch(name: str) -> None:
    model = small(name).train()
    x, y = torch.randn(14, 1, 28, 28), torch.arange(14) % 7
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(25):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert F.cross_entropy(model(x), y).item() < 0.5 * math.log(7)


def test_batch_norm_only_when_asked_for() -> None:
    def kinds(model: nn.Module) -> set[type[nn.Module]]:
        return {type(m) for m in model.modules()}

    assert nn.BatchNorm2d not in kinds(small("resnet18"))
    assert nn.GroupNorm not in kinds(small("resnet18", norm="batch"))
    groups = [m.num_groups for m in small("resnet18", groups=2).modules() if isinstance(m, nn.GroupNorm)]
    assert set(groups) == {2} and len(groups) == 20


def test_residual_network_against_a_literal_forward() -> None:
    model = small("resnet18").eval()
    w = model.state_dict()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.group_norm(x, 2, w[f"{name}.weight"], w[f"{name}.bias"])

    x = torch.randn(3, 1, 28, 28)
    y = F.relu(norm(F.conv2d(x, w["stem.conv.weight"], padding=1), "stem.norm"))
    for i in range(8):
        stride = 2 if i in (2, 4, 6) else 1
        z = F.conv2d(y, w[f"blocks.{i}.conv1.weight"], stride=stride, padding=1)
        z = F.conv2d(F.relu(norm(z, f"blocks.{i}.norm1")), w[f"blocks.{i}.conv2.weight"], padding=1)
        if stride == 2:
            y = norm(F.conv2d(y, w[f"blocks.{i}.shortcut.0.weight"], stride=2), f"blocks.{i}.shortcut.1")
        y = F.relu(norm(z, f"blocks.{i}.norm2") + y)
    torch.testing.assert_close(model(x), F.linear(y.mean((2, 3)), w["head.weight"], w["head.bias"]))


def test_transformer_against_a_literal_forward() -> None:
    """Patches as a strided convolution, attention head by head from the rows of `qkv` that blocks rely on."""
    model = models.build("vit", (3, 8, 12), 5, patch=4, width=16, depth=2, heads=2)
    w = model.state_dict()
    x = torch.randn(2, 3, 8, 12)
    tokens = F.conv2d(x, w["embed.patch.weight"].view(16, 3, 4, 4), w["embed.patch.bias"], stride=4)
    positions = model.get_buffer("embed.positions")
    tokens = tokens.flatten(2).transpose(1, 2) + positions
    y = torch.cat([w["embed.token.weight"].expand(2, 1, 16), tokens], dim=1)
    for i in range(2):
        p = f"layers.{i}"
        z = F.layer_norm(y, (16,), w[f"{p}.norm1.weight"], w[f"{p}.norm1.bias"])
        parts = []
        for head in range(2):
            rows = [slice(part * 16 + head * 8, part * 16 + head * 8 + 8) for part in range(3)]
            q, k, v = (
                F.linear(z, w[f"{p}.attention.qkv.weight"][r], w[f"{p}.attention.qkv.bias"][r]) for r in rows
            )
            parts.append((q @ k.transpose(1, 2) / math.sqrt(8)).softmax(-1) @ v)
        out = torch.cat(parts, dim=2)
        y = y + F.linear(out, w[f"{p}.attention.out.weight"], w[f"{p}.attention.out.bias"])
        z = F.layer_norm(y, (16,), w[f"{p}.norm2.weight"], w[f"{p}.norm2.bias"])
        z = F.gelu(F.linear(z, w[f"{p}.mlp.up.weight"], w[f"{p}.mlp.up.bias"]))
        y = y + F.linear(z, w[f"{p}.mlp.down.weight"], w[f"{p}.mlp.down.bias"])
    z = F.layer_norm(y[:, 0], (16,), w["norm.weight"], w["norm.bias"])
    torch.testing.assert_close(model(x), F.linear(z, w["head.weight"], w["head.bias"]))


def test_positions_tell_every_place_apart() -> None:
    model = models.build("vit", (3, 8, 12), 5, patch=4, width=16, depth=1, heads=2)
    positions = model.get_buffer("embed.positions")
    assert positions.shape == (6, 16)
    assert (torch.cdist(positions, positions) + torch.eye(6) > 0.5).all()


def test_dropout_acts_in_training_only() -> None:
    model = small("vit", dropout=0.5)
    x = torch.randn(2, 1, 28, 28)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("resnet-81", (3, 32, 32), {}, "did you mean 'resnet18'"),
        ("zzz", (3, 32, 32), {}, r"unknown model 'zzz' \(known: cnn"),
        ("cnn", (3, 32, 32), {"depth": 3}, "no option 'depth'; its options are: none"),
        ("resnet18", (3, 32, 32), {"nrm": 1}, "norm='group', stem='3x3', groups=32"),
        ("resnet18", (3, 32, 32), {"norm": "layer"}, "'group' or 'batch', not 'layer'"),
        ("resnet18", (3, 32, 32), {"stem": "5x5"}, "'3x3' or '7x7'"),
        ("resnet18", (3, 32, 32), {"groups": 3}, "groups must divide 64"),
        ("cnn", (3, 16, 16), {}, "at least 22×22"),
        ("cnn", (30,), {}, "takes images"),
        ("vit", (3, 32, 32), {"patch": 5}, "not a multiple of patch 5"),
        ("vit", (3, 32, 32), {"heads": 5}, "multiple of heads"),
        ("vit", (3, 32, 32), {"depth": 0}, "at least 1"),
        ("vit", (3, 32, 32), {"dropout": 1.0}, "dropout"),
        ("mlp", (3,), {"hidden": (4, 0)}, "at least one unit"),
    ],
)
def test_mistakes_are_named(
    name: str, shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        models.build(name, shape, 10, **options)


def test_smallest_image_of_the_cnn() -> None:
    with pytest.raises(UserError):
        models.build("cnn", (1, 21, 22), 2)
    assert models.build("cnn", (1, 22, 22), 2)(torch.zeros(1, 1, 22, 22)).shape == (1, 2)


def test_residual_branches_start_small_but_alive() -> None:
    weights = {n: p for n, p in small("resnet18").named_parameters() if "norm" in n and n.endswith("weight")}
    for name, weight in weights.items():
        assert (weight == (torch.tensor(8.0).rsqrt() if "norm2" in name else 1.0)).all(), name


@pytest.mark.parametrize("channels", [1, 3])
def test_cnn_works_with_channels_last(channels):
    """Max pooling is slow otherwise; one channel lies in memory like many, so it needs saying."""
    model = models.build("cnn", (channels, 28, 28), 10)
    seen = []
    model.conv1.register_forward_hook(lambda module, args, out: seen.append(out))
    model(torch.zeros(2, channels, 28, 28))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
