"""From the cells of a row to a model's input, target and user.

Nothing is guessed: a cell that does not fit is refused, with its row.
"""

from __future__ import annotations

import datetime
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data.columns import Columns, Meaning
from tacit.data.pictures import mode_of
from tacit.errors import UserError

LARGEST = float(np.finfo(np.float32).max)
SKIP = "leave such rows out (data.on_bad: skip)"


@dataclass(frozen=True)
class Coding:
    """How labels become numbers."""

    outputs: int
    names: tuple[str, ...] = ()
    codes: Mapping[Any, int] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    """For speech: the characters of transcripts."""


def coding_of(columns: Columns, meaning: Meaning) -> Coding:
    if meaning.label is None:
        return Coding(0)
    values = columns.column(meaning.label, "label")
    if meaning.task == "speech":
        from tacit.data.speech.tokens import alphabet

        letters = alphabet(meaning.language).tokens
        return Coding(len(letters), tokens=tuple(letters))
    if meaning.task == "regression":
        sizes = Counter(int(np.size(v)) for v in values if not _missing(_plain(v)))
        length, agree = max(sizes.items(), key=lambda one: one[1], default=(1, 1))
        if sizes and 2 * agree <= sizes.total():
            told = ", ".join(map(str, sorted(sizes)))
            raise UserError(
                f"label: column {meaning.label!r} holds lists of {told} numbers, and no length is that of "
                "most rows; make them equal"
            )
        return Coding(length)
    if meaning.task == "token-classification":
        flat = [
            v for row in values if not _missing(row) for v in map(_plain, np.ravel(row)) if not _missing(v)
        ]
        words = {v for v in flat if isinstance(v, str)}
        most = max((int(v) for v in flat if v not in words and int(v) >= 0), default=0) + 1
        if meaning.classes:  # each label is the name of a class, or its number
            if most > len(meaning.classes) and not meaning.skip_bad:
                raise UserError(f"label: {most - 1} is the number of none of {len(meaning.classes)} classes")
            return _coded(sorted(words), columns, meaning)
        return _coded(sorted({str(v) for v in flat}), columns, meaning) if words else Coding(most)
    known: set[Any] = set()
    if meaning.task == "multi-label":
        lists = [_list_of_labels(columns, meaning, row) for row in range(len(values))]
        there = [(row, found) for row, found in enumerate(lists) if found is not None]
        size = None if meaning.classes else _places([found for _, found in there])
        if size is not None:
            odd = next((row for row, found in there if not _hot(found) or len(found) != size), None)
            if odd is not None and not meaning.skip_bad:
                raise UserError(_not_hot(columns, meaning, odd, lists[odd], size))
            return Coding(size)
        known = {v for _, found in there for v in found}
        if not known and not meaning.classes:
            raise UserError(
                f"label: column {meaning.label!r} names no class in any training record, so there is nothing "
                "to learn; name another column, or all classes that there may be (classes)"
            )
    else:
        for row, value in enumerate(values):
            plain = _plain(value)
            if isinstance(plain, (list, tuple, set, dict, np.ndarray)):
                raise UserError(
                    f"label: column {meaning.label!r} holds a list ({columns.where(row)}), which is no "
                    f"class; {_instead(plain)}"
                )
            if not meaning.classes and isinstance(plain, str):
                plain = _decimal(plain)
            if not meaning.classes and _negative(plain):
                raise UserError(
                    f"label: column {meaning.label!r} holds {plain} ({columns.where(row)}), which often "
                    "stands for a label that is missing; leave such rows out or, if it is a class, name all "
                    "of them (classes)"
                )
            if isinstance(plain, float) and not plain.is_integer() and not math.isnan(plain):
                raise UserError(
                    f"label: column {meaning.label!r} holds {plain:g} ({columns.where(row)}), which is no "
                    "class; set task: regression for numbers"
                )
            if not _unlabelled(plain, meaning):
                known.add(int(plain) if isinstance(plain, float) else plain)
    if meaning.classes:  # each label is a class, or none
        return _coded(sorted(known, key=str), columns, meaning)
    if len({type(v) for v in known}) > 1:
        raise UserError(
            f"label: column {meaning.label!r} holds both numbers and words; make them all one kind"
        )
    _refuse_no_classes(columns, meaning, known)
    return _coded(sorted(known), columns, meaning)


def _instead(labels: Any) -> str:
    """The advice for a list where one class is expected."""
    numbers = [v for v in map(_plain, labels) if isinstance(v, int | float)]
    if len(labels) == 1:
        return "it has one entry, so take that (of an array y: y.ravel())"
    if len(numbers) == len(labels) and sorted(numbers) == [0] * (len(labels) - 1) + [1]:
        return "if it has a single 1, take its place (of an array y: y.argmax(1)); else set task: multi-label"
    return "set task: multi-label, or token-classification for the classes of words"


def _list_of_labels(columns: Columns, meaning: Meaning, row: int) -> list[Any] | None:
    """The labels of a `multi-label` row, or None if they are missing; refuses anything but a list."""
    value = columns.column(meaning.label or "", "label")[row]
    if _missing(_plain(value)):
        return None
    if isinstance(value, str | bytes) or np.ndim(value) != 1:
        raise UserError(
            f"label: column {meaning.label!r} holds {value!r} ({columns.where(row)}), and multi-label "
            "takes a list of classes, or of zeros and ones, in each row; parquet and json files have such"
        )
    found = [_plain(v) for v in value]
    if any(_missing(v) for v in found):
        return None
    return found


def _hot(labels: Sequence[Any]) -> bool:
    """Whether these are zeros and ones, and not names."""
    return bool(labels) and all(not isinstance(v, str) and v in (0, 1) for v in labels)


def _places(rows: Sequence[Sequence[Any]]) -> int | None:
    """How many zeros and ones a row has, if most rows consist of them: then any other row is a mistake, and
    not a list of names.
    """
    lengths = Counter(len(labels) for labels in rows if _hot(labels))
    size, agree = max(lengths.items(), key=lambda one: one[1], default=(0, 0))
    return size if agree and (agree == len(rows) or (size > 1 and 2 * agree > len(rows))) else None


def _not_hot(columns: Columns, meaning: Meaning, row: int, found: Any, size: int) -> str:
    return (
        f"label: {columns.where(row)}: column {meaning.label!r} holds {found!r}, where others have {size} "
        f"zeros and ones; mend it, {SKIP}, or name the classes if these are numbers of classes (classes)"
    )


def _refuse_no_classes(columns: Columns, meaning: Meaning, known: set[Any]) -> None:
    """Refuse a column in which each record has its own value, or all have the same: it has no classes."""
    if meaning.task != "classification":
        return
    where = f"label: column {meaning.label!r}"
    if len(known) > 10 and 2 * len(known) > len(columns):
        raise UserError(
            f"{where} has {len(known):,} different values in {len(columns):,} training records, which are no "
            "classes; name another column, set task: regression for numbers, or name the classes (classes)"
        )
    if len(known) == 1 and len(columns) > 1:
        raise UserError(
            f"{where} is {next(iter(known))!r} in every training record, so there is nothing to learn; name "
            "another column, or all classes that there may be (classes)"
        )
    bare: dict[str, str] = {}
    for name in sorted(v for v in known if isinstance(v, str)):
        if (other := bare.setdefault(name.strip(), name)) != name:
            raise UserError(
                f"{where} holds {other!r} and {name!r}, which differ in spaces alone; make them one"
            )


def _coded(found: Sequence[Any], columns: Columns, meaning: Meaning) -> Coding:
    """Numbers for the labels that were found, in sorted order, or in the order of the declared classes."""
    classes = meaning.classes
    if not classes:
        names = tuple(str(v) for v in found)
        return Coding(len(names), names, {_key(v): number for number, v in enumerate(found)})
    if len(set(classes)) < len(classes):
        raise UserError(f"classes: one is named twice: {', '.join(classes)}")
    beyond = [v for v in found if str(v) not in classes]
    if beyond and not meaning.skip_bad:
        raise UserError(
            f"label: {_place(columns, meaning, beyond[0])}{beyond[0]!r} is not among the classes: "
            f"{', '.join(classes)}; correct it, name it there (data.classes), or {SKIP}"
        )
    numbers: dict[Any, int] = {name: number for number, name in enumerate(classes)}
    numbers |= {int(name): n for n, name in enumerate(classes) if _whole(name)}
    return Coding(len(classes), classes, numbers)


def _key(label: Any) -> Any:
    """What a label is looked up by: truth values by their names, since True would be found as 1."""
    return str(label) if isinstance(label, bool) else label


def class_name(label: Any) -> str:
    """The name of a class that is given as a value: 1.0 is the class 1, as in a column of labels."""
    plain = _plain(label)
    return str(int(plain) if isinstance(plain, float) and plain.is_integer() else plain)


def _whole(name: str) -> bool:
    """Whether the name of a class is a whole number."""
    return name.removeprefix("-").isdecimal() and str(int(name)) == name


def _negative(label: Any) -> bool:
    """Whether a label is a whole number below 0, or is written as one."""
    if isinstance(label, str):
        return label.startswith("-") and _whole(label)
    return isinstance(label, int | float) and label < 0 and (isinstance(label, int) or label.is_integer())


def _place(columns: Columns, meaning: Meaning, label: Any) -> str:
    """The place of a label's first occurrence, as the start of a sentence."""
    for row, value in enumerate(columns.column(meaning.label or "", "label")):
        held = (int(v) if isinstance(v, float) and v.is_integer() else v for v in np.ravel(value))
        if str(label) in map(str, held):
            return f"{columns.where(row)}: "
    return ""


def _plain(value: Any) -> Any:
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


def _decimal(text: str) -> Any:
    """A text cell as a number, if it has decimals: such values are no classes."""
    try:
        number = float(text)
    except ValueError:
        return text
    return text if not math.isfinite(number) or number.is_integer() else number


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _unlabelled(value: Any, meaning: Meaning) -> bool:
    """Whether this is no class: None, or an empty cell unless "" is the name of a class."""
    return _missing(value) or (isinstance(value, str) and not value.strip() and value not in meaning.classes)


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
            plain = _plain(value)
            raise UserError(
                f"features: {columns.where(row)}: column {name!r} is "
                + (f"missing; fill it in, or {SKIP}" if _missing(plain) else _no_number(plain))
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


def _no_number(value: Any) -> str:
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


def target_of(columns: Columns, meaning: Meaning, coding: Coding, row: int) -> Any:
    assert meaning.label is not None
    value = _plain(columns.column(meaning.label, "label")[row])
    if _missing(value):
        raise UserError(
            f"label: {columns.where(row)}: column {meaning.label!r} is missing; fill it in, or {SKIP}"
        )
    if meaning.task == "classification" and _unlabelled(value, meaning):
        raise UserError(
            f"label: {columns.where(row)}: column {meaning.label!r} is empty; fill it in, name all classes "
            f"if that is one of them (classes), or {SKIP}"
        )
    if meaning.task == "speech":
        from tacit.data.speech.tokens import UnknownCharacters, alphabet

        try:
            return alphabet(meaning.language).encode(alphabet(meaning.language).normalise(str(value)))
        except UnknownCharacters as error:
            raise UserError(f"label: {columns.where(row)}: {error}") from None
    if meaning.task == "regression":
        try:
            number = np.asarray(value)
            if number.dtype.kind in "mMc":
                raise TypeError
            number = number.astype(np.float64)
        except (TypeError, ValueError):
            what = _no_number(value) if np.ndim(value) == 0 else f"{value!r}, not numbers"
            raise UserError(f"label: {columns.where(row)}: column {meaning.label!r} is {what}") from None
        if not (np.abs(number) <= LARGEST).all():
            raise UserError(
                f"label: {columns.where(row)}: {value!r} is not a finite number that float32 holds"
            )
        if number.size != coding.outputs:
            raise UserError(
                f"label: {columns.where(row)}: {number.size} numbers, where most have {coding.outputs}; "
                f"make them equal, or {SKIP}"
            )
        return number.astype(np.float32)
    if meaning.task == "token-classification":
        if any(_missing(v) for v in map(_plain, np.ravel(value))):
            raise UserError(
                f"label: {columns.where(row)}: a class is missing in column {meaning.label!r}; fill it in, "
                f"or {SKIP}"
            )
        tags = [_tag(coding, _plain(v), columns, row, meaning) for v in value] if coding.codes else value
        found = np.asarray(tags, np.int64)
        if meaning.text and len(found) != (words := len(columns.column(meaning.text[0], "text")[row])):
            raise UserError(f"label: {columns.where(row)}: {len(found)} classes for {words} words")
        return found
    if meaning.task == "multi-label":
        labels = _list_of_labels(columns, meaning, row)
        if labels is None:
            raise UserError(
                f"label: {columns.where(row)}: something is missing in column {meaning.label!r}; fill it in, "
                f"or {SKIP}"
            )
        if not coding.codes:
            if not _hot(labels) or len(labels) != coding.outputs:
                raise UserError(_not_hot(columns, meaning, row, labels, coding.outputs))
            return np.asarray(labels, np.float32)
        hot = np.zeros(coding.outputs, np.float32)
        for one in labels:
            hot[_code(coding, _plain(one), columns, row, meaning)] = 1.0
        return hot
    return _code(coding, int(value) if isinstance(value, float) else value, columns, row, meaning)


def _tag(coding: Coding, value: Any, columns: Columns, row: int, meaning: Meaning) -> int:
    """The class of a word. If all classes are named, a number is the number of one of them, or means no
    class.
    """
    if isinstance(value, str) or not meaning.classes:
        return _code(coding, str(value), columns, row, meaning)
    if value >= coding.outputs:
        raise UserError(
            f"label: {columns.where(row)}: {value} is the number of none of {coding.outputs} classes"
        )
    return int(value)


def _code(coding: Coding, value: Any, columns: Columns, row: int, meaning: Meaning) -> int:
    if _key(value) not in coding.codes:
        why = "not among the classes" if meaning.classes else "in no training record"
        raise UserError(
            f"label: {columns.where(row)}: class {value!r} is {why}; known: "
            f"{', '.join(coding.names[:8])}{' …' if len(coding.names) > 8 else ''}"
        )
    return coding.codes[_key(value)]


def user_of(columns: Columns, meaning: Meaning, row: int) -> Any:
    assert meaning.user is not None
    value = _plain(columns.values[meaning.user][row])
    if _missing(value) or value == "":
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
