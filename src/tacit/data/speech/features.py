"""Log-mel features: the input that a recogniser gets from a wave.

Frames of 25 ms every 10 ms of 16 kHz audio; pre-emphasis, a Hamming window, the magnitude spectrum, 80
triangular bands equally wide on the mel scale, the logarithm. Each utterance is then normalised to mean 0 and
variance 1 over all of its frames and bands together (Pelikan et al., 2025). This removes its loudness, and
uses nothing of any other utterance.

>>> x, frames = log_mel(torch.randn(2, 16_000) / 10, torch.tensor([16_000, 8_000]))
>>> x.shape, frames.tolist()
(torch.Size([2, 98, 80]), [98, 48])
>>> bool(x[1, 48:].eq(0).all()), bool(x[1, :48].mean().abs() < 1e-5), round(float(x[1, :48].var()), 2)
(True, True, 1.0)
"""

from __future__ import annotations

import math
from functools import cache

from tacit.lazy import Tensor, torch

RATE = 16_000
"""Samples a second."""
BANDS = 80
WINDOW = 400
"""Samples in a frame: 25 ms."""
HOP = 160
"""Samples from one frame to the next: 10 ms."""
_FFT = 512
_PRE_EMPHASIS = 0.97
_FULL_SCALE = 32_768.0
"""The scale from waves in −1…1 to 16-bit samples, at which a band's floor of 1 is inaudible."""
_FLOOR = 1.0


def frame_counts(samples: Tensor) -> Tensor:
    """Number of whole frames in waves with these numbers of samples."""
    return ((samples - WINDOW) // HOP + 1).clamp(min=0)


def log_mel(waves: Tensor, samples: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normalised features [B, T, 80] of waves [B, N] at 16 kHz, float32, and each wave's number of frames.

    `samples` are the waves' own lengths, if they are padded. An utterance's features do not depend on its
    padding, and frames past its end are zero. A wave shorter than one frame has no frames.
    """
    with torch.no_grad():
        if samples is None:
            samples = torch.full((len(waves),), waves.shape[1])
        frames = frame_counts(samples)
        if waves.shape[1] < WINDOW:
            return waves.new_zeros(len(waves), 0, BANDS, dtype=torch.float32), frames
        pieces = (waves.float() * _FULL_SCALE).unfold(1, WINDOW, HOP)
        # Each frame is processed alone: its first sample counts as its own predecessor.
        before = torch.cat([pieces[..., :1], pieces[..., :-1]], dim=-1)
        pieces = (pieces - _PRE_EMPHASIS * before) * _window()
        bands = torch.fft.rfft(pieces, _FFT).abs() @ _filters()
        return normalize(bands.clamp_(min=_FLOOR).log_(), frames), frames


def normalize(x: Tensor, frames: Tensor) -> Tensor:
    """Mean 0 and variance 1 over each record's first `frames` frames and all bands; zero after them."""
    inside = (torch.arange(x.shape[1]) < frames[:, None])[:, :, None]
    count = (frames * x.shape[2]).clamp(min=1)[:, None, None]
    x = (x - (x * inside).sum((1, 2), keepdim=True) / count) * inside
    variance = x.square().sum((1, 2), keepdim=True) / count
    return x * torch.rsqrt(variance + 1e-7)


@cache
def _window() -> Tensor:
    return torch.hamming_window(WINDOW, periodic=False, dtype=torch.float64).float()


@cache
def _filters() -> Tensor:
    """Each frequency's weight in each band, [257, 80]: triangles whose feet are their neighbours' peaks."""
    top = 2595.0 * math.log10(1.0 + RATE / 2 / 700.0)
    mels = torch.linspace(0.0, top, BANDS + 2, dtype=torch.float64)
    hertz = 700.0 * (10.0 ** (mels / 2595.0) - 1.0)
    frequency = torch.linspace(0.0, RATE / 2, _FFT // 2 + 1, dtype=torch.float64)[:, None]
    width = hertz.diff()
    rising = (frequency - hertz[:-2]) / width[:-1]
    falling = (hertz[2:] - frequency) / width[1:]
    return torch.minimum(rising, falling).clamp_(min=0.0).float()
