"""Log-mel features against an independent implementation, and independence of padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tacit.data.speech.features import BANDS, frame_counts, log_mel
from tacit.data.speech.tiny import wave


def reference(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """The same features by transformers' audio utilities, in NumPy."""
    audio = pytest.importorskip("transformers.audio_utils")
    filters = audio.mel_filter_bank(257, BANDS, 0.0, 8000.0, 16_000, norm=None, mel_scale="htk")
    x: NDArray[np.float64] = audio.spectrogram(
        samples.astype(np.float64) * 32_768,
        audio.window_function(400, "hamming", periodic=False),
        frame_length=400,
        hop_length=160,
        fft_length=512,
        power=1.0,
        center=False,
        preemphasis=0.97,
        mel_filters=filters,
        mel_floor=1.0,
        log_mel="log",
        dtype=np.float64,
    ).T
    return (x - x.mean()) / np.sqrt(x.var() + 1e-7)


def literal(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """The same once more, written out loop by loop."""
    mel = np.linspace(0, 2595 * np.log10(1 + 8000 / 700), BANDS + 2)
    corners = 700 * (10 ** (mel / 2595) - 1)
    rows = []
    for start in range(0, len(samples) - 400 + 1, 160):
        frame = samples[start : start + 400].astype(np.float64) * 32_768
        sharp = np.array([frame[i] - 0.97 * frame[max(i - 1, 0)] for i in range(400)])
        spectrum = np.abs(np.fft.fft(sharp * np.hamming(400), 512))[:257]
        row = []
        for low, middle, high in zip(corners, corners[1:], corners[2:], strict=False):
            weights = np.interp(np.arange(257) * 8000 / 256, [low, middle, high], [0.0, 1.0, 0.0])
            row.append(np.log(max(spectrum @ weights, 1.0)))
        rows.append(row)
    x = np.array(rows)
    return (x - x.mean()) / np.sqrt(x.var() + 1e-7)


def signals() -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    noise = (0.1 * rng.normal(size=9_777)).astype(np.float32)
    half_silent = np.concatenate([noise[:4000], np.zeros(4000, np.float32)])
    return [wave("a bad cafe"), noise, half_silent, noise[:400]]


@pytest.mark.parametrize("independent", [reference, literal])
@pytest.mark.parametrize("samples", signals(), ids=["tones", "noise", "half silent", "one frame"])
def test_features_agree_with_an_independent_implementation(samples, independent) -> None:
    x, frames = log_mel(torch.from_numpy(samples)[None])
    wanted = independent(samples)
    assert x.dtype == torch.float32
    assert x.shape == (1, *wanted.shape) and int(frames[0]) == len(wanted)
    assert np.abs(x[0].numpy() - wanted).max() < 1e-4


def test_an_utterance_does_not_depend_on_its_batch() -> None:
    waves = signals()
    samples = torch.tensor([len(w) for w in waves])
    rng = np.random.default_rng(1)
    padded = rng.normal(size=(len(waves), int(samples.max()))).astype(np.float32)  # rubbish as padding
    for row, w in zip(padded, waves, strict=True):
        row[: len(w)] = w
    x, frames = log_mel(torch.from_numpy(padded), samples)
    for i, w in enumerate(waves):
        alone, own = log_mel(torch.from_numpy(w)[None])
        assert int(frames[i]) == int(own[0])
        torch.testing.assert_close(x[i, : int(own[0])], alone[0], atol=1e-5, rtol=0)
        assert not x[i, int(own[0]) :].any()


def test_a_wave_shorter_than_a_frame_has_none_and_silence_is_finite() -> None:
    x, frames = log_mel(torch.zeros(2, 399))
    assert x.shape == (2, 0, BANDS) and frames.tolist() == [0, 0]
    x, _ = log_mel(torch.zeros(1, 1600))
    assert torch.isfinite(x).all()
    assert frame_counts(torch.tensor([0, 399, 400, 559, 560])).tolist() == [0, 0, 1, 1, 2]
