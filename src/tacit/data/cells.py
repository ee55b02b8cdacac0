"""From the cells of a row to a model's input and its user.

Nothing is guessed: a cell that does not fit is refused, with its row.
"""

from __future__ import annotations

import datetime
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data.columns import Columns, Meaning
from tacit.data.pictures import mode_of
from tacit.errors import UserError

LARGEST = float(np.finfo(np.float32).max)
SKIP = "leave such rows out (data.on_bad: skip)"


def plain(value: Any) -> Any:
    """A numpy value as a Python value; a date in any unit as a date, and a missing date as None."""
    if isinstance(value, np.datetime64 | np.timedelta64):
        return value.astype(
            f"{value.dtype.kind}8[us]"
        ).item()  # for nanoseconds, `item` would return a whole number
    return (
        value.item()
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim)
        else value
    )


def missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def input_of(columns: Columns, meaning: Meaning, row: int) -> Any:
    if meaning.text:
        texts = [columns.column(name, "text")[row] for name in meaning.text]
        if meaning.task == "token-classification":
            return _words(texts, columns.where(row))
        for name, text in zip(meaning.text, texts, strict=True):
            if not isinstance(text, str):
                raise UserError(
                    f"text: {columns.where(row)}: column {name!r} holds {text!r}, which is no text"
                )
        return texts
    if meaning.image is not None:
        return _picture(columns.column(meaning.image, "image")[row], meaning.size, columns.where(row))
    if meaning.audio is not None:
        wave = _wave(columns.column(meaning.audio, "audio")[row], columns.where(row))
        return wave if meaning.task == "speech" else _heard(wave, float(meaning.seconds or 0))
    values = [columns.column(name, "features")[row] for name in meaning.features]
    if len(values) == 1 and np.ndim(values[0]):
        found = np.asarray(values[0])
        if found.dtype == object or found.dtype.kind not in "fiub":
            raise UserError(f"features: {columns.where(row)} holds {found.dtype}, not numbers")
        if found.dtype.kind in "iub" and meaning.task == "token-classification":
            return found.astype(np.int64)
        odd = ~(np.abs(found.astype(np.float64)) <= LARGEST)
        if odd.any():
            place = tuple(int(i) for i in np.argwhere(odd)[0])
            raise UserError(
                f"features: {columns.where(row)}: place {place} is {found[place]}, not a finite number that "
                f"float32 holds; mend it, or {SKIP}"
            )
        return found.astype(np.float32)
    numbers = []
    for name, value in zip(meaning.features, values, strict=True):
        try:
            numbers.append(_number(value))
        except (TypeError, ValueError):
            cell = plain(value)
            raise UserError(
                f"features: {columns.where(row)}: column {name!r} is "
                + (f"missing; fill it in, or {SKIP}" if missing(cell) else no_number(cell))
            ) from None
        if not abs(numbers[-1]) <= LARGEST:
            raise UserError(
                f"features: {columns.where(row)}: column {name!r} is {numbers[-1]}, not a finite number that "
                f"float32 holds; mend it, or {SKIP}"
            )
    return np.asarray(numbers, np.float32)


def _number(value: Any) -> float:
    """A cell as a number. TypeError for values that Python would silently convert: a date's nanoseconds, the
    real part of a complex number.
    """
    if isinstance(value, (np.datetime64, np.timedelta64, np.complexfloating)):
        raise TypeError
    return float(value)


def no_number(value: Any) -> str:
    """The error for a cell that should be a number, and what to do."""
    shown = repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, list | tuple | np.ndarray):
        return "a list; a column of lists is the only one of the features, so put all numbers into it"
    if isinstance(value, datetime.date):
        return f"the date {shown}, not a number; make it one, such as days since a date"
    if isinstance(value, datetime.timedelta):
        return f"the time {shown}, not a number; make it one, such as days"
    if isinstance(value, complex):
        return f"{shown}, not one number; make it two, such as its real and imaginary part"
    if shown.strip("'").lower() in ("true", "false", "yes", "no"):
        return f"{shown}, not a number; write it as 1 or 0, or {SKIP}"
    return f"{shown}, not a number; make it one (of a category, a column of 0 and 1 for each), or {SKIP}"


def _words(texts: list[Any], where: str) -> list[str]:
    """One text as its words."""
    if len(texts) != 1:
        raise UserError("text: a class for each word is for one column of texts, not for pairs")
    words = texts[0].tolist() if isinstance(texts[0], np.ndarray) else texts[0]
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) and word for word in words):
        raise UserError(
            f"text: {where}: a class for each word needs a list of words, like ['Ann', 'ran'] (got {words!r})"
        )
    if not words:
        raise UserError(f"text: {where}: there is no word in it")
    return list(words)


def user_of(columns: Columns, meaning: Meaning, row: int) -> Any:
    assert meaning.user is not None
    value = plain(columns.values[meaning.user][row])
    if missing(value) or value == "":
        raise UserError(
            f"user: {columns.where(row)}: column {meaning.user!r} is missing; whose record is it?"
        )
    return value


def _wave(value: Any, where: str) -> NDArray[np.float32]:
    """A sound as one channel at 16 kHz."""
    from tacit.data.speech.audio import BadAudio, read, resample
    from tacit.data.speech.features import RATE, WINDOW

    rate = RATE
    if isinstance(value, Mapping) and value.get("array") is not None:
        value, rate = value["array"], int(value["sampling_rate"])
    elif isinstance(value, Mapping):  # the form of undecoded sounds in `datasets`
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str | Path | bytes):
        try:
            return read(Path(value) if isinstance(value, str) else value)
        except BadAudio as error:
            shown = "it" if isinstance(value, bytes) else f"{str(value)!r}"
            raise UserError(f"audio: {where}: {shown} is no sound that can be used: {error}") from None
    wave = np.asarray(value, np.float32) if np.ndim(value) == 1 else None
    if wave is None or not np.isfinite(wave).all() or len(wave) * RATE < WINDOW * rate:
        raise UserError(
            f"audio: {where}: a sound is a file, {{array, sampling_rate}}, or one row of finite samples, of "
            "25 ms or more"
        )
    return resample(wave, rate)


def _heard(wave: NDArray[np.float32], seconds: float) -> NDArray[np.float32]:
    """Log-mel features of the first seconds, [1, frames, 80]; zero after the sound's end."""
    import torch

    from tacit.data.speech.features import RATE, log_mel

    samples = round(seconds * RATE)
    cut = torch.zeros(1, samples)
    own = min(len(wave), samples)
    cut[0, :own] = torch.from_numpy(wave[:own])
    found, _ = log_mel(cut, torch.tensor([own]))
    heard: NDArray[np.float32] = found.numpy()
    return heard


def _picture(value: Any, size: int | None, where: str) -> NDArray[Any]:
    """A picture as [C, H, W]: pixels as uint8, or an array of floats unchanged."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(value, np.ndarray) or (
        hasattr(value, "__array_interface__") and not hasattr(value, "convert")
    ):
        found = np.asarray(value)
        found = found[None] if found.ndim == 2 else found
        if found.ndim != 3:
            raise UserError(f"image: {where} has shape {found.shape}; a picture is [channels, height, width]")
        last = found.shape[-1] in (1, 3) and found.shape[0] not in (1, 3)
        if last or (found.shape[-1] == 4 and min(found.shape[:2]) > 4):  # RGBA
            found = found.transpose(2, 0, 1)
        if found.dtype == np.uint8:
            return found
        if not (np.abs(found.astype(np.float64)) <= LARGEST).all():
            raise UserError(f"image: {where} holds values that are not finite numbers that float32 holds")
        return found.astype(np.float32)
    try:
        if isinstance(value, Mapping):  # the form of undecoded pictures in `datasets`
            value = io.BytesIO(value["bytes"]) if value.get("bytes") else value["path"]
        picture = value if hasattr(value, "convert") else Image.open(value)
        picture = picture.convert(mode_of(picture))
        if size is not None:
            picture = picture.resize((size, size))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UnidentifiedImageError) as error:
        raise UserError(f"image: {where}: {value!r} cannot be read as a picture ({error})") from None
    pixels = np.asarray(picture, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
