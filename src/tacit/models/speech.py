"""A CTC transformer for speech (paper 003): log-mel frames in, a score for each token and step out.

SpecAugment → normalisation → convolution (kernel 7, stride 3) and GLU → transformer layers without biases,
with CAPE positions → a last norm (pre-norm only) → `head`. Utterances of a batch have different lengths, and
none may affect another. Padded frames are zero before the convolution, where an utterance alone would have
the convolution's own zero padding, and attention ignores padded steps.

>>> import torch
>>> model = ctc_transformer((80,), 30, size="tiny").eval()
>>> x, frames = torch.randn(2, 50, 80), torch.tensor([50, 31])
>>> scores, steps = model(x, frames)
>>> scores.shape, steps.tolist()
(torch.Size([2, 17, 30]), [17, 11])
>>> alone, _ = model(x[1:, :31], frames[1:])
>>> torch.allclose(scores[1:, :11], alone, atol=1e-5)
True
"""

from __future__ import annotations

from math import log, pi
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.models.specaugment import SpecAugment, within

KERNEL, STRIDE = 7, 3
SIZES: dict[str, tuple[int, int, int, int]] = {
    "base": (36, 768, 3072, 4),
    "narrow": (36, 512, 2048, 4),
    "wide": (36, 1024, 4096, 4),
    "shallow": (16, 768, 3072, 4),
    "deep": (72, 768, 3072, 4),
    "tiny": (3, 64, 256, 4),
}
"""Depth, width, width of the MLP, heads: those of paper 003's Table 21, and a small one for tests and small
machines.
"""


class Normalise(nn.Module):
    """Each utterance to mean 0 and variance 1 over all its frames and bands, then one scale and one bias."""

    def __init__(self, epsilon: float = 1e-7) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, inside: Tensor) -> Tensor:
        """`inside` [B, T, 1] marks real frames; padding becomes zero."""
        count = (inside.sum(1, keepdim=True) * x.shape[2]).clamp(min=1)
        mean = (x * inside).sum((1, 2), keepdim=True) / count
        centred = (x - mean) * inside
        variance = centred.square().sum((1, 2), keepdim=True) / count
        return (centred * (variance + self.epsilon).rsqrt() * self.weight + self.bias) * inside


class Cape(nn.Module):
    """Continuous augmented positions (Likhomanenko et al., 2021), in seconds from the utterance's middle.

    In training each utterance is shifted as a whole by up to `shift` seconds, as in paper 003, so the model
    can learn only distances between steps. In evaluation nothing is shifted. A step is 30 ms.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(self, width: int, shift: float, step: float = 0.03, scale: float = 30.0) -> None:
        super().__init__()
        self.shift, self.step = shift, step
        pairs = torch.arange(width) // 2
        self.register_buffer(
            "frequencies", scale * torch.exp(-2 * pairs * (log(1e4) / width)), persistent=False
        )
        self.register_buffer("phases", (pi / 2) * (torch.arange(width) % 2), persistent=False)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        middle = (steps.unsqueeze(1) - 1) / 2
        positions = (torch.arange(x.shape[1], device=x.device) - middle) * self.step
        if self.training and self.shift:
            moved = torch.rand(len(x), 1, device=x.device) * 2 - 1
            positions = positions + self.shift * moved
        # These are sines of numbers up to a thousand: float32 keeps them to four digits, half precision would
        # not.
        return torch.sin(positions.unsqueeze(2) * self.frequencies + self.phases).to(x.dtype)


class Attention(nn.Module):
    """Multi-head self-attention among an utterance's own steps. The rows of `qkv` are Q, K and V."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    """Two linear layers: wider, ReLU, and back."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.dropout(F.relu(self.up(x)), self.dropout, self.training))
        return out


class Layer(nn.Module):
    """A transformer layer, pre-norm or post-norm.

    In training the whole layer is skipped for a batch with probability `drop` (Fan et al., 2020). Its
    parameters then get no gradient, not even a zero.
    """

    def __init__(
        self, width: int, hidden: int, heads: int, dropout: float, drop: float, norm: Literal["pre", "post"]
    ) -> None:
        super().__init__()
        self.drop, self.norm = drop, norm
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden, dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        dropped = self.training and self.drop > 0 and float(torch.rand(())) < self.drop
        out = x
        if self.norm == "post":  # a dropped layer keeps its norms: the next layer expects their output
            out = self.norm1(x if dropped else x + self.attention(x, seen))
            out = self.norm2(out if dropped else out + self.mlp(out))
        elif not dropped:
            out = x + self.attention(self.norm1(x), seen)
            out = out + self.mlp(self.norm2(out))
        return out


class CtcTransformer(nn.Module):
    """Maps frames [B, T, bands] to scores [B, steps, tokens] and each utterance's number of steps."""

    def __init__(
        self,
        bands: int,
        tokens: int,
        sizes: tuple[int, int, int, int],
        norm: Literal["pre", "post"],
        dropout: float,
        layer_drop: float,
        augment: bool,
        shift: float,
    ) -> None:
        super().__init__()
        depth, width, hidden, heads = sizes
        self.augment = SpecAugment() if augment else None
        self.normalise = Normalise()
        self.conv = nn.Conv1d(bands, 2 * width, KERNEL, STRIDE, padding=KERNEL // 2)
        self.cape = Cape(width, shift)
        self.dropout = dropout
        self.layers = nn.ModuleList(
            Layer(width, hidden, heads, dropout, layer_drop, norm) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width) if norm == "pre" else None
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        steps = output_steps(frames)
        if self.augment is not None:
            x = self.augment(x, frames)
        x = self.normalise(x, within(frames, x.shape[1]).unsqueeze(2))
        x = F.glu(self.conv(x.transpose(1, 2)), dim=1).transpose(1, 2)
        x = F.dropout(x, self.dropout, self.training)
        x = x + self.cape(x, steps)
        # An utterance without a frame attends to its first step: a softmax over nothing would be NaN.
        seen = within(steps.clamp(min=1), x.shape[1])[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(x if self.norm is None else self.norm(x)), steps


def output_steps(frames: Tensor) -> Tensor:
    """Steps after the convolution: a third of the frames, rounded up."""
    return (frames + STRIDE - 1) // STRIDE


def ctc_transformer(
    shape: tuple[int, ...],
    classes: int,
    size: str = "base",
    depth: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    norm: str = "pre",
    dropout: float = 0.3,
    layer_drop: float = 0.3,
    augment: bool = True,
    shift: float = 30.0,
) -> CtcTransformer:
    """The model of paper 003, for frames of `shape` (bands,) and `classes` tokens, blank included.

    `size` sets depth, width, the MLP's hidden width and heads; each can also be given separately. `augment`
    turns SpecAugment on; `shift` is CAPE's, in seconds. Both act in training only.
    """
    if len(shape) != 1:
        raise UserError(f"model 'ctc_transformer' takes frames (bands,), but records have shape {shape}")
    if size not in SIZES:
        raise UserError(f"model 'ctc_transformer': size {size!r} is not one of {', '.join(SIZES)}")
    if norm not in ("pre", "post"):
        raise UserError(f"model 'ctc_transformer': norm {norm!r} is not one of pre, post")
    for name, value in (("dropout", dropout), ("layer_drop", layer_drop)):
        if not 0 <= value < 1:
            raise UserError(f"model 'ctc_transformer': {name} must be at least 0 and below 1, not {value}")
    if shift < 0:
        raise UserError(f"model 'ctc_transformer': shift is in seconds and at least 0, not {shift}")
    given = (depth, width, hidden, heads)
    named = SIZES[size]
    sizes = tuple(n if g is None else g for g, n in zip(given, named, strict=True))
    if min(sizes) < 1 or sizes[1] % sizes[3]:
        raise UserError(f"model 'ctc_transformer': width {sizes[1]} must be a multiple of heads ({sizes[3]})")
    kind: Literal["pre", "post"] = "pre" if norm == "pre" else "post"
    model = CtcTransformer(
        shape[0],
        classes,
        (sizes[0], sizes[1], sizes[2], sizes[3]),
        kind,
        dropout,
        layer_drop,
        augment,
        shift,
    )
    # The input and output layers have variance 1/fan_in. The layers between keep torch's third of that, which
    # many residual additions make up for.
    for part, fan in ((model.conv, shape[0] * KERNEL), (model.head, sizes[1])):
        nn.init.uniform_(part.weight, -((3 / fan) ** 0.5), (3 / fan) ** 0.5)
    return model
