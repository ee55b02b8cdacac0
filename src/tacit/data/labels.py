"""From the label of a row to a target: what labels become is settled once, then each row is held against it.

Nothing is guessed: a label that does not fit is refused, with its row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data.cells import LARGEST, SKIP, missing, no_number, plain
from tacit.data.columns import Columns, Meaning
from tacit.errors import UserError


@dataclass(frozen=True)
class Coding:
    """How labels become numbers."""

    outputs: int
    names: tuple[str, ...] = ()
    codes: Mapping[Any, int] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    """For speech: the characters of transcripts."""


_Target = Callable[[Columns, Meaning, Coding, int, Any], Any]
"""The target of a row, from its label."""


def coding_of(columns: Columns, meaning: Meaning) -> Coding:
    """How the labels of these columns become numbers; refuses a column that cannot be labels."""
    if meaning.label is None:
        return Coding(0)
    _labels(columns, meaning)  # refuses a column that is not there
    return _CODINGS.get(meaning.task, _class_coding)(columns, meaning)


def target_of(columns: Columns, meaning: Meaning, coding: Coding, row: int) -> Any:
    """The target of a row; refuses a label that is missing or does not fit."""
    value = plain(_labels(columns, meaning)[row])
    if missing(value):
        raise UserError(
            f"label: {columns.where(row)}: column {meaning.label!r} is missing; fill it in, or {SKIP}"
        )
    target: _Target = _TARGETS.get(meaning.task, _class)
    return target(columns, meaning, coding, row, value)


def _labels(columns: Columns, meaning: Meaning) -> Sequence[Any]:
    assert meaning.label is not None
    return columns.column(meaning.label, "label")


# --- numbers --------------------------------------------------------------------------------------------


def _numbers_coding(columns: Columns, meaning: Meaning) -> Coding:
    """As many outputs as most rows have numbers."""
    sizes = Counter(int(np.size(v)) for v in _labels(columns, meaning) if not missing(plain(v)))
    length, agree = max(sizes.items(), key=lambda one: one[1], default=(1, 1))
    if sizes and 2 * agree <= sizes.total():
        told = ", ".join(map(str, sorted(sizes)))
        raise UserError(
            f"label: column {meaning.label!r} holds lists of {told} numbers, and no length is that of "
            "most rows; make them equal"
        )
    return Coding(length)


def _numbers(columns: Columns, meaning: Meaning, coding: Coding, row: int, value: Any) -> NDArray[np.float32]:
    try:
        number = np.asarray(value)
        if number.dtype.kind in "mMc":
            raise TypeError
        number = number.astype(np.float64)
    except (TypeError, ValueError):
        what = no_number(value) if np.ndim(value) == 0 else f"{value!r}, not numbers"
        raise UserError(f"label: {columns.where(row)}: column {meaning.label!r} is {what}") from None
    if not (np.abs(number) <= LARGEST).all():
        raise UserError(f"label: {columns.where(row)}: {value!r} is not a finite number that float32 holds")
    if number.size != coding.outputs:
        raise UserError(
            f"label: {columns.where(row)}: {number.size} numbers, where most have {coding.outputs}; "
            f"make them equal, or {SKIP}"
        )
    return number.astype(np.float32)


# --- a class --------------------------------------------------------------------------------------------


def _class_coding(columns: Columns, meaning: Meaning) -> Coding:
    """The classes that are named, or all that training records have."""
    known = set(_classes(columns, meaning))
    if meaning.classes:  # each label is a class, or none
        return _coded(sorted(known, key=str), columns, meaning)
    _refuse_mixed(meaning, known)
    _refuse_no_classes(columns, meaning, known)
    return _coded(sorted(known), columns, meaning)


def _classes(columns: Columns, meaning: Meaning) -> Iterator[Any]:
    """The class of each row that has one; refuses what cannot be a class."""
    for row, value in enumerate(_labels(columns, meaning)):
        label = plain(value)
        if isinstance(label, (list, tuple, set, dict, np.ndarray)):
            raise UserError(
                f"label: column {meaning.label!r} holds a list ({columns.where(row)}), which is no "
                f"class; {_instead(label)}"
            )
        if not meaning.classes and isinstance(label, str):
            label = _decimal(label)
        if not meaning.classes and _negative(label):
            raise UserError(
                f"label: column {meaning.label!r} holds {label} ({columns.where(row)}), which often "
                "stands for a label that is missing; leave such rows out or, if it is a class, name all "
                "of them (classes)"
            )
        if isinstance(label, float) and not label.is_integer() and not math.isnan(label):
            raise UserError(
                f"label: column {meaning.label!r} holds {label:g} ({columns.where(row)}), which is no "
                "class; set task: regression for numbers"
            )
        if not _unlabelled(label, meaning):
            yield int(label) if isinstance(label, float) else label


def _class(columns: Columns, meaning: Meaning, coding: Coding, row: int, value: Any) -> int:
    if meaning.task == "classification" and _unlabelled(value, meaning):
        raise UserError(
            f"label: {columns.where(row)}: column {meaning.label!r} is empty; fill it in, name all classes "
            f"if that is one of them (classes), or {SKIP}"
        )
    return _code(coding, int(value) if isinstance(value, float) else value, columns, row, meaning)


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


def _negative(label: Any) -> bool:
    """Whether a label is a whole number below 0, or is written as one."""
    if isinstance(label, str):
        return label.startswith("-") and _whole(label)
    return isinstance(label, int | float) and label < 0 and (isinstance(label, int) or label.is_integer())


def _decimal(text: str) -> Any:
    """A text cell as a number, if it has decimals: such values are no classes."""
    try:
        number = float(text)
    except ValueError:
        return text
    return text if not math.isfinite(number) or number.is_integer() else number


def _unlabelled(value: Any, meaning: Meaning) -> bool:
    """Whether this is no class: None, or an empty cell unless "" is the name of a class."""
    return missing(value) or (isinstance(value, str) and not value.strip() and value not in meaning.classes)


def _instead(labels: Any) -> str:
    """The advice for a list where one class is expected."""
    numbers = [v for v in map(plain, labels) if isinstance(v, int | float)]
    if len(labels) == 1:
        return "it has one entry, so take that (of an array y: y.ravel())"
    if len(numbers) == len(labels) and sorted(numbers) == [0] * (len(labels) - 1) + [1]:
        return "if it has a single 1, take its place (of an array y: y.argmax(1)); else set task: multi-label"
    return "set task: multi-label, or token-classification for the classes of words"


# --- several classes ------------------------------------------------------------------------------------


def _several_coding(columns: Columns, meaning: Meaning) -> Coding:
    """As many as there are zeros and ones in a row; else the classes that are named, or found."""
    rows = range(len(_labels(columns, meaning)))
    lists = [_list_of_labels(columns, meaning, row) for row in rows]
    there = [(row, found) for row, found in enumerate(lists) if found is not None]
    size = None if meaning.classes else _places([found for _, found in there])
    if size is not None:
        odd = next((row for row, found in there if not _hot(found) or len(found) != size), None)
        if odd is not None and not meaning.skip_bad:
            raise UserError(_not_hot(columns, meaning, odd, lists[odd], size))
        return Coding(size)
    known = {v for _, found in there for v in found}
    if not meaning.classes:
        _refuse_mixed(meaning, known)
        if not known:
            raise UserError(
                f"label: column {meaning.label!r} names no class in any training record, so there is nothing "
                "to learn; name another column, or all classes that there may be (classes)"
            )
    return _coded(sorted(known, key=str if meaning.classes else None), columns, meaning)


def _several(columns: Columns, meaning: Meaning, coding: Coding, row: int, value: Any) -> NDArray[np.float32]:
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
        hot[_code(coding, plain(one), columns, row, meaning)] = 1.0
    return hot


def _list_of_labels(columns: Columns, meaning: Meaning, row: int) -> list[Any] | None:
    """The labels of a `multi-label` row, or None if they are missing; refuses anything but a list."""
    value = columns.column(meaning.label or "", "label")[row]
    if missing(plain(value)):
        return None
    if isinstance(value, str | bytes) or np.ndim(value) != 1:
        raise UserError(
            f"label: column {meaning.label!r} holds {value!r} ({columns.where(row)}), and multi-label "
            "takes a list of classes, or of zeros and ones, in each row; parquet and json files have such"
        )
    found = [plain(v) for v in value]
    if any(missing(v) for v in found):
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


# --- a class for each word ------------------------------------------------------------------------------


def _tags_coding(columns: Columns, meaning: Meaning) -> Coding:
    flat = [
        v
        for row in _labels(columns, meaning) if not missing(row)
        for v in map(plain, np.ravel(row)) if not missing(v)
    ]  # fmt: skip
    words = {v for v in flat if isinstance(v, str)}
    most = max((int(v) for v in flat if v not in words and int(v) >= 0), default=0) + 1
    if meaning.classes:  # each label is the name of a class, or its number
        if most > len(meaning.classes) and not meaning.skip_bad:
            raise UserError(f"label: {most - 1} is the number of none of {len(meaning.classes)} classes")
        return _coded(sorted(words), columns, meaning)
    return _coded(sorted({str(v) for v in flat}), columns, meaning) if words else Coding(most)


def _tags(columns: Columns, meaning: Meaning, coding: Coding, row: int, value: Any) -> NDArray[np.int64]:
    if any(missing(v) for v in map(plain, np.ravel(value))):
        raise UserError(
            f"label: {columns.where(row)}: a class is missing in column {meaning.label!r}; fill it in, "
            f"or {SKIP}"
        )
    tags = [_tag(coding, plain(v), columns, row, meaning) for v in value] if coding.codes else value
    found = np.asarray(tags, np.int64)
    if meaning.text and len(found) != (words := len(columns.column(meaning.text[0], "text")[row])):
        raise UserError(f"label: {columns.where(row)}: {len(found)} classes for {words} words")
    return found


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


# --- what was said ---------------------------------------------------------------------------------------


def _words_coding(columns: Columns, meaning: Meaning) -> Coding:
    from tacit.data.speech.tokens import alphabet

    letters = alphabet(meaning.language).tokens
    return Coding(len(letters), tokens=tuple(letters))


def _words(columns: Columns, meaning: Meaning, coding: Coding, row: int, value: Any) -> Any:
    from tacit.data.speech.tokens import UnknownCharacters, alphabet

    letters = alphabet(meaning.language)
    try:
        return letters.encode(letters.normalise(str(value)))
    except UnknownCharacters as error:
        raise UserError(f"label: {columns.where(row)}: {error}") from None


# --- classes by number -----------------------------------------------------------------------------------


def _refuse_mixed(meaning: Meaning, known: set[Any]) -> None:
    if len({type(v) for v in known}) > 1:
        raise UserError(
            f"label: column {meaning.label!r} holds both numbers and words; make them all one kind"
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
    held = plain(label)
    return str(int(held) if isinstance(held, float) and held.is_integer() else held)


def _whole(name: str) -> bool:
    """Whether the name of a class is a whole number."""
    return name.removeprefix("-").isdecimal() and str(int(name)) == name


def _place(columns: Columns, meaning: Meaning, label: Any) -> str:
    """The place of a label's first occurrence, as the start of a sentence."""
    for row, value in enumerate(columns.column(meaning.label or "", "label")):
        held = (int(v) if isinstance(v, float) and v.is_integer() else v for v in np.ravel(value))
        if str(label) in map(str, held):
            return f"{columns.where(row)}: "
    return ""


def _code(coding: Coding, value: Any, columns: Columns, row: int, meaning: Meaning) -> int:
    if _key(value) not in coding.codes:
        why = "not among the classes" if meaning.classes else "in no training record"
        raise UserError(
            f"label: {columns.where(row)}: class {value!r} is {why}; known: "
            f"{', '.join(coding.names[:8])}{' …' if len(coding.names) > 8 else ''}"
        )
    return coding.codes[_key(value)]


_CODINGS: Mapping[str, Callable[[Columns, Meaning], Coding]] = {
    "regression": _numbers_coding,
    "multi-label": _several_coding,
    "token-classification": _tags_coding,
    "speech": _words_coding,
}
_TARGETS: Mapping[str, _Target] = {
    "regression": _numbers,
    "multi-label": _several,
    "token-classification": _tags,
    "speech": _words,
}
"""By task; labels of any other are classes."""
