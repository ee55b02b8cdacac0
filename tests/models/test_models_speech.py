"""The CTC transformer: the paper's sizes, independent utterances, masks and positions active only in
training.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradients_reference import assert_exact
from tacit import models, tasks
from tacit.errors import UserError
from tacit.gradients import plain_gradient
from tacit.gradients.plain import Descent
from tacit.models.specaugment import SpecAugment
from tacit.models.speech import Cape, CtcTransformer, output_steps
from tacit.vector import Flat

TASK = tasks.build("speech")


def small(**options: Any) -> CtcTransformer:
    torch.manual_seed(1)
    sizes = {"depth": 2, "width": 16, "hidden": 24, "heads": 2}
    calm = {"dropout": 0.0, "layer_drop": 0.0, "augment": False, "shift": 0.0}
    model = models.build("ctc-transformer", (8,), 6, **{**sizes, **calm, **options})
    assert isinstance(model, CtcTransformer)
    for name, p in model.named_parameters():  # away from ones and zeros, where mistakes hide
        if "norm" in name:
            p.data.add_(0.3 * torch.randn_like(p))
    return model


def utterances(frames: list[int] = [40, 25, 31, 1], seed: int = 0) -> dict[str, Tensor]:  # noqa: B006
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([min(4, -(-f // 6)) for f in frames])
    tokens = torch.randint(1, 6, (len(frames), 4), generator=rng)
    for j, length in enumerate(lengths):
        tokens[j, length:] = 0
    x = torch.randn(len(frames), max(frames), 8, generator=rng)
    for j, f in enumerate(frames):
        x[j, f:] = 0
    return {"x": x, "frames": torch.tensor(frames), "tokens": tokens, "lengths": lengths}


def one(batch: dict[str, Tensor], j: int) -> dict[str, Tensor]:
    """Utterance j by itself, without a frame of padding."""
    alone = {name: values[j : j + 1] for name, values in batch.items()}
    frames, length = int(batch["frames"][j]), max(int(batch["lengths"][j]), 1)
    return {**alone, "x": alone["x"][:, :frames], "tokens": alone["tokens"][:, :length]}


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("base", 255_800_864),
        ("narrow", 113_910_816),
        ("shallow", 114_181_664),
        ("wide", 454_314_016),
        ("deep", 510_715_424),
    ],
)
def test_parameter_counts_of_the_paper(size: str, expected: int) -> None:
    with torch.device("meta"):
        model = models.build("ctc-transformer", (80,), 30, size=size)
        post = models.build("ctc-transformer", (80,), 30, size=size, norm="post")
    assert sum(p.numel() for p in model.parameters()) == expected
    width = model.get_submodule("norm").weight.numel()
    assert sum(p.numel() for p in post.parameters()) == expected - 2 * width


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_batch_of_one_equals_the_same_utterance_in_a_large_batch(norm: str) -> None:
    model, batch = small(norm=norm), utterances()
    together = TASK.losses(model, batch)
    for j in range(4):
        torch.testing.assert_close(together[j : j + 1], TASK.losses(model, one(batch, j)))
    assert (together > 0).all() and together.isfinite().all()


def test_padding_changes_neither_loss_nor_gradient() -> None:
    flat, batch = Flat(small()), utterances([40, 25, 31, 7])
    loss = plain_gradient(flat, batch, TASK.losses)
    gradient = flat.grad.clone()
    junk = torch.randn(4, 90, 8) * 30
    longer = {**batch, "x": torch.cat([batch["x"], torch.zeros(4, 50, 8)], 1)}
    for j, frames in enumerate(batch["frames"]):
        longer["x"][j, frames:] = junk[j, : 90 - frames]  # whatever stands in the padding
    longer["tokens"] = torch.cat([batch["tokens"], torch.full((4, 3), 2)], 1)
    torch.testing.assert_close(plain_gradient(flat, longer, TASK.losses), loss)
    torch.testing.assert_close(flat.grad, gradient, rtol=1e-4, atol=1e-5)
    summed = torch.zeros_like(gradient)
    for j in range(4):
        plain_gradient(flat, one(batch, j), TASK.losses)
        summed += flat.grad / 4
    torch.testing.assert_close(summed, gradient, rtol=1e-4, atol=1e-5)


def test_the_forward_pass_against_a_literal_one() -> None:
    """Utterance by utterance, head by head, in float64."""
    model, batch = small().double(), utterances()
    w = {name: value.double() for name, value in model.state_dict().items()}
    x = batch["x"][1, :25].double()
    scores, steps = model(batch["x"].double(), batch["frames"])
    x = (x - x.mean()) / (x.var(correction=0) + 1e-7).sqrt() * w["normalise.weight"] + w["normalise.bias"]
    edged = torch.cat([torch.zeros(3, 8), x, torch.zeros(3, 8)]).double()
    windows = torch.stack([edged[3 * t : 3 * t + 7] for t in range(9)])
    both = torch.einsum("tkc,ock->to", windows, w["conv.weight"]) + w["conv.bias"]
    x = both[:, :16] * both[:, 16:].sigmoid()
    seconds = 0.03 * (torch.arange(9.0).double() - 4)
    frequencies = torch.tensor([30 * 10_000 ** -(i // 2 * 2 / 16) for i in range(16)]).double()
    angles = seconds[:, None] * frequencies
    x = x + torch.where(torch.arange(16) % 2 == 0, angles.sin(), angles.cos())

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        std = (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        return centred / std * w[f"{name}.weight"] + w[f"{name}.bias"]

    for layer in ("layers.0", "layers.1"):
        q, k, v = (norm(x, f"{layer}.norm1") @ w[f"{layer}.attention.qkv.weight"].T).split(16, 1)
        heads = [(q[:, h] @ k[:, h].T / 8**0.5).softmax(1) @ v[:, h] for h in (slice(0, 8), slice(8, 16))]
        x = x + torch.cat(heads, 1) @ w[f"{layer}.attention.out.weight"].T
        inner = (norm(x, f"{layer}.norm2") @ w[f"{layer}.mlp.up.weight"].T).relu()
        x = x + inner @ w[f"{layer}.mlp.down.weight"].T
    expected = norm(x, "norm") @ w["head.weight"].T + w["head.bias"]
    assert int(steps[1]) == 9
    torch.testing.assert_close(scores[1, :9], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_clipped_gradients_equal_a_loop_over_records(norm: str) -> None:
    torch.manual_seed(0)
    assert_exact(small(norm=norm), utterances(), TASK.losses, tolerance=1e-4)


def test_training_noise_is_the_seeds_and_evaluation_has_none() -> None:
    model = small(dropout=0.2, layer_drop=0.3, augment=True, shift=30.0)
    batch = utterances()

    def loss(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return TASK.losses(model, batch)

    model.train()
    assert torch.equal(loss(1), loss(1)) and not torch.equal(loss(1), loss(2))
    model.eval()
    assert torch.equal(loss(1), loss(2))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_dropped_layer_gets_no_gradient(norm: str) -> None:
    model = small(layer_drop=0.5, depth=6, norm=norm).train()
    drawn = set()
    for seed in range(4):
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        TASK.losses(model, utterances([40, 31])).sum().backward()
        for n, layer in enumerate(model.layers):
            touched = {p.grad is not None for m in (layer.attention, layer.mlp) for p in m.parameters()}
            assert len(touched) == 1, "a layer is dropped as a whole"
            drawn.add((n, touched.pop()))
    assert {kept for _, kept in drawn} == {True, False}
    flat = Flat(model)
    before = flat.values.clone()
    torch.manual_seed(0)
    Descent(flat)(utterances([40, 31]), TASK.losses, 0.1)  # and a step leaves it where it was
    moved = {s.name for s in flat.layout.segments if not torch.equal(flat.values[s.slice], before[s.slice])}
    still = {s.name for s in flat.layout.segments} - moved
    assert any("mlp.up" in name for name in still) and any("mlp.up" in name for name in moved)


def test_spec_augment_masks_within_the_utterance_at_the_papers_sizes() -> None:
    torch.manual_seed(0)
    frames = torch.tensor([900, 300, 9])
    bands, spans = [], []
    for _ in range(300):
        silent = SpecAugment()(torch.ones(3, 900, 80), frames) == 0
        across = silent.all(1)
        bands.append(across.sum(1).float())
        spans.append((silent & ~across.unsqueeze(1)).any(2).sum(1).float())
        assert not silent[1, 300:].all(1).any() and not silent[2, 9:].all(1).any()
    widths, times = torch.stack(bands), torch.stack(spans)
    assert widths.max() <= 60 and abs(widths.mean() - 27) < 1.5  # two of 15 on average, less what they share
    assert times[:, 0].max() > 250  # ten of up to 50
    assert times[:, 1].max() < 200 and abs(times[:, 1].mean() - 120) < 10  # of 300, none above a tenth
    assert times[:, 2].max() == 0  # a tenth of nine frames is none
    assert torch.unique(widths[:, 0]).numel() > 20
    assert not torch.equal(widths[:, 0], widths[:, 1]), "each utterance has masks of its own"


def test_positions_are_centred_and_shifts_keep_distances() -> None:
    cape = Cape(16, shift=30.0).double()
    x, steps = torch.zeros(2, 21, 16).double(), torch.tensor([21, 11])
    torch.manual_seed(0)
    plain, moved = cape.eval()(x, steps), cape.train()(x, steps)
    middle = torch.tensor([0.0, 1.0]).repeat(8).double()
    torch.testing.assert_close(plain[0, 10], middle)
    torch.testing.assert_close(plain[1, 5], middle)
    assert not torch.allclose(plain, moved, atol=0.1)
    # Products of two positions are cosines of their distance.
    torch.testing.assert_close(plain[0] @ plain[0].T, moved[0] @ moved[0].T, rtol=1e-5, atol=1e-5)


def test_steps_are_a_third_rounded_up() -> None:
    frames = torch.arange(1, 200)
    conv = nn.Conv1d(1, 1, 7, 3, padding=3)
    assert output_steps(frames).tolist() == [conv(torch.zeros(1, 1, int(f))).shape[2] for f in frames]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"size": "huge"}, "size 'huge' is not one of base, narrow"),
        ({"norm": "none"}, "norm 'none' is not one of pre, post"),
        ({"width": 18, "heads": 4}, "width 18 must be a multiple of heads"),
        ({"layer_drop": 1.0}, "layer_drop must be at least 0 and below 1"),
        ({"shift": -1.0}, "shift is in seconds"),
    ],
)
def test_impossible_settings_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        models.build("ctc-transformer", (80,), 30, **options)


def test_pictures_are_refused() -> None:
    with pytest.raises(UserError, match="takes frames"):
        models.build("ctc-transformer", (1, 28, 28), 10)
