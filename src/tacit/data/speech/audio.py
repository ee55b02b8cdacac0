"""Sound files as waves at 16 kHz, and clear reasons why a file cannot be used.

soundfile reads wav, flac, ogg and mp3. It is too lenient for a corpus: it returns what is left of a truncated
file. So the length that the file itself states is checked first.

>>> tone = np.sin(2 * np.pi * 440 * np.arange(22_050) / 22_050).astype(np.float32)
>>> at_16k = resample(tone, 22_050)
>>> wanted = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
>>> len(at_16k), bool(np.abs(at_16k - wanted)[1000:-1000].max() < 1e-3)
(16000, True)
"""

from __future__ import annotations

import io
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data.speech.features import RATE, WINDOW
from tacit.errors import UserError

Wave = NDArray[np.float32]


class BadAudio(ValueError):
    """A sound file that cannot be used, with the reason."""


def soundfile() -> Any:
    """The decoding library; if it is missing, an error that says how to install it."""
    try:
        import soundfile
    except (ImportError, OSError):
        raise UserError("reading sound files needs soundfile: pip install 'tacit[speech]'") from None
    return soundfile


def read(source: Path | bytes, resampled: bool = True) -> Wave:
    """The sound of a file, or of a file's content, as one channel in −1…1 at 16 kHz.

    `BadAudio` if it is not a sound, is truncated, is shorter than a frame, or, unless `resampled`, has
    another rate.
    """
    sound = soundfile()
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
        _refuse_truncated(content)
        with sound.SoundFile(io.BytesIO(content)) as file:
            rate, expected = file.samplerate, file.frames
            samples: NDArray[np.float32] = file.read(dtype="float32", always_2d=True)
    except OSError as error:
        raise BadAudio(error.strerror or "cannot be read") from None
    except sound.LibsndfileError as error:
        raise BadAudio(f"cannot be decoded ({error.error_string.rstrip('.')})") from None
    if len(samples) < expected:
        raise BadAudio("truncated")
    if rate != RATE and not resampled:
        raise BadAudio(f"{rate} Hz instead of {RATE}")
    wave = resample(samples.mean(axis=1), rate)
    if len(wave) < WINDOW:
        raise BadAudio("empty" if not len(wave) else f"only {1000 * len(wave) / RATE:.0f} ms long")
    if not np.isfinite(wave).all():
        raise BadAudio("not a number among its samples")
    return wave


def resample(wave: NDArray[Any], rate: int) -> Wave:
    """Resample a wave from `rate` samples a second to 16 kHz, by cutting or extending its spectrum.

    Exactly band-limited. Padding makes the ratio of lengths exact and keeps the end from ringing into the
    start.
    """
    if rate == RATE or not len(wave):
        return wave.astype(np.float32)
    common = math.gcd(rate, RATE)
    up, down = RATE // common, rate // common
    blocks = -(-(len(wave) + rate // 20) // down)
    spectrum = np.fft.rfft(wave, blocks * down)
    long = np.fft.irfft(spectrum[: blocks * up // 2 + 1], blocks * up) * (up / down)
    return long[: round(len(wave) * up / down)].astype(np.float32)


def _refuse_truncated(content: bytes) -> None:
    """Raise `BadAudio` if a container says that it should be longer."""
    if not content:
        raise BadAudio("empty")
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        (size,) = struct.unpack("<I", content[4:8])
        # 0 and all ones are left by a recorder that never came back to fill in the length.
        if size not in (0, 0xFFFFFFFF) and size + 8 > len(content) + 1:
            raise BadAudio("truncated")
    elif content[:4] == b"OggS":
        last = content.rfind(b"OggS")
        header = content[last : last + 27]
        lacing = content[last + 27 : last + 27 + (header[26] if len(header) == 27 else 0)]
        whole = len(header) == 27 and last + 27 + len(lacing) + sum(lacing) <= len(content)
        if not whole or not header[5] & 4:  # flag 4: the stream's last page
            raise BadAudio("truncated")
