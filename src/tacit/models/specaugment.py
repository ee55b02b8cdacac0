"""SpecAugment (Park et al., 2019): masks bands and stretches of time in training.

Each utterance draws its own masks from torch's generator, all at once, so a client's seed determines them.
Time is not warped.

>>> import torch
>>> _ = torch.manual_seed(0)
>>> masks, sound = SpecAugment(), torch.ones(1, 400, 80)
>>> heard = masks(sound, torch.tensor([400]))
>>> silent_bands = (heard == 0).all(1).sum().item()
>>> 0 < silent_bands <= 60, bool((heard == 0).all(2).any())
(True, True)
>>> bool((masks.eval()(sound, torch.tensor([400])) == sound).all())
True
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SpecAugment(nn.Module):
    """Paper 003: two masks of up to 30 bands, ten of up to 50 frames and a tenth of the utterance.

    Active in training only. Masked values become zero, the mean of normalised features.
    """

    def __init__(
        self, bands: int = 2, widest: int = 30, times: int = 10, longest: int = 50, ratio: float = 0.1
    ) -> None:
        super().__init__()
        self.bands, self.widest = bands, widest
        self.times, self.longest, self.ratio = times, longest, ratio

    def forward(self, x: Tensor, frames: Tensor) -> Tensor:
        if not self.training:
            return x
        size = x.new_full((len(x),), x.shape[2])
        silent = _covered(size, self.bands, size.clamp(max=self.widest), x.shape[2])
        longest = (frames * self.ratio).floor().clamp(max=self.longest)
        skipped = _covered(frames, self.times, longest, x.shape[1])
        return x.masked_fill(silent.unsqueeze(1) | skipped.unsqueeze(2), 0.0)


def _covered(length: Tensor, masks: int, widest: Tensor, total: int) -> Tensor:
    """Which of `total` positions are under one of `masks` masks in [0, length), for each record: [B, total].

    Widths are 0 … widest and starts 0 … length − width, each value equally likely.
    """
    draws = torch.rand(2, len(length), masks, device=length.device)
    width = (draws[0] * (widest.unsqueeze(1) + 1)).floor()
    start = (draws[1] * (length.unsqueeze(1) - width + 1)).floor()
    position = torch.arange(total, device=length.device).view(1, 1, -1)
    under = (position >= start.unsqueeze(2)) & (position < (start + width).unsqueeze(2))
    return under.any(1)


def within(lengths: Tensor, total: int) -> Tensor:
    """Which of `total` positions lie within each length: [B, total]."""
    return torch.arange(total, device=lengths.device) < lengths.unsqueeze(1)
