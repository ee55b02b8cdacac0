"""Vision transformers (Dosovitskiy et al., 2021) for small images, pre-norm, trained from scratch.

`vit_tiny` is FedAdamW's (paper 004): 32-pixel images in 4×4 patches, width 192, six layers, three heads,
GELU, Xavier weights, sinusoidal positions. `vit` accepts any sizes.

Two choices make the network suit per-record gradients. Positions are fixed sines, as in the paper, so there
is nothing to learn or to noise. The class token is an `nn.Embedding` with a vocabulary of one, and patches
enter through an `nn.Linear`, so every parameter belongs to a layer with a per-record rule.

>>> model = vit_tiny((3, 32, 32), 100)
>>> sum(p.numel() for p in model.parameters())
2698468
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.models.initial import head_, image


class Embed(nn.Module):
    """An image as tokens: a class token, then one token for each patch, with positions added."""

    positions: Tensor

    def __init__(self, channels: int, rows: int, columns: int, patch: int, width: int) -> None:
        super().__init__()
        self.grid = (rows, patch, columns, patch)
        self.patch = nn.Linear(channels * patch * patch, width)
        self.token = nn.Embedding(1, width)
        self.register_buffer("positions", sines(rows, columns, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, channels, rows, p, columns, p) → (batch, rows, columns, channels, p, p)
        patches = x.reshape(*x.shape[:2], *self.grid).permute(0, 2, 4, 1, 3, 5)
        tokens = self.patch(patches.flatten(3).flatten(1, 2)) + self.positions
        first = self.token(torch.zeros(len(x), 1, dtype=torch.long, device=x.device))
        return torch.cat([first, tokens], dim=1)


class Attention(nn.Module):
    """Multi-head self-attention. The rows of `qkv` are Q, K and V, each of them head after head."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, tokens, 3, heads, size) → three of (batch, heads, tokens, size)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    """Two linear layers: four times wider, GELU, and back."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class ViT(nn.Module):
    """Tokens, layers, a last norm, and `head` on the class token."""

    def __init__(
        self, embed: Embed, width: int, depth: int, heads: int, dropout: float, classes: int
    ) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.Sequential(*(Layer(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        # Only the class token is read, and LayerNorm works token by token, so normalise only that one.
        logits: Tensor = self.head(self.norm(self.layers(self.embed(x))[:, 0]))
        return logits


def vit(
    shape: tuple[int, ...],
    classes: int,
    patch: int = 4,
    width: int = 96,
    depth: int = 4,
    heads: int = 3,
    dropout: float = 0.0,
) -> ViT:
    """A vision transformer of any size: `patch` divides the image, `heads` and 4 divide `width`."""
    channels, height, columns = image("vit", shape)
    if min(patch, width, depth, heads) < 1:
        raise UserError("model 'vit': patch, width, depth and heads must be at least 1")
    if height % patch or columns % patch:
        raise UserError(f"model 'vit': images of {height}×{columns} are not a multiple of patch {patch}")
    if width % heads or width % 4:
        raise UserError(f"model 'vit': width {width} must be a multiple of heads ({heads}) and of 4")
    if not 0 <= dropout < 1:
        raise UserError(f"model 'vit': dropout must be at least 0 and below 1, not {dropout}")
    embed = Embed(channels, height // patch, columns // patch, patch, width)
    model = ViT(embed, width, depth, heads, dropout, classes)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    for attention in (m for m in model.modules() if isinstance(m, Attention)):
        for part in attention.qkv.weight.data.chunk(3):  # three square matrices, not one tall one
            nn.init.xavier_uniform_(part)
    nn.init.trunc_normal_(embed.token.weight, std=0.02)
    head_(model.head)
    return model


def vit_tiny(
    shape: tuple[int, ...],
    classes: int,
    patch: int = 4,
    width: int = 192,
    depth: int = 6,
    heads: int = 3,
    dropout: float = 0.0,
) -> ViT:
    """ViT-Tiny of paper 004, which trains it with `dropout=0.1`; dropout is off unless asked for."""
    return vit(shape, classes, patch, width, depth, heads, dropout)


def sines(rows: int, columns: int, width: int) -> Tensor:
    """Fixed 2-D positions (rows·columns, width): sines and cosines of the row, then of the column."""
    frequencies = 10_000 ** -(torch.arange(width // 4) / (width // 4))
    row = torch.arange(rows).repeat_interleave(columns).outer(frequencies)
    column = torch.arange(columns).repeat(rows).outer(frequencies)
    return torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=1)
