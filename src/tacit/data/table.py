"""Files of rows (csv, tsv, json, jsonl, parquet) as columns; every row knows its file and its line or number.

Lines count from 1, as in editors, and rows from 0, as in pandas.

Values are the file's text, and become numbers only if a column is declared to be one. A value is missing only
if it is declared to be, never by a library's guess: a person called "NA" keeps the name.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.data.columns import Columns
from tacit.errors import UserError
from tacit.reading import from_json

SEPARATORS = ";\t|,"
"""Other separators that may stand between two cells of a csv file."""


@dataclass(frozen=True)
class Format:
    """The format of a file of rows."""

    delimiter: str = ","
    encoding: str = "utf-8"
    missing: tuple[str, ...] = ("",)
    """Texts that stand for a missing value; no other text does."""


def read_table(path: Path, format: Format, key: str = "data.path") -> Columns:
    """The rows of a csv, tsv, parquet, json or jsonl file, or of all such files in a folder.

    `key`: the config's name for the path, for error messages.
    """
    path = path.expanduser()
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _READERS) if path.is_dir() else [path]
    if not path.exists():
        # A client's paths are resolved from its own folder, so they are complete here.
        whence = (
            "put the file there, or correct it"
            if path.is_absolute()
            else "it is from the folder that tacit is run in"
        )
        raise UserError(f"{key}: there is no {path}; {whence}")
    if not files:
        raise UserError(f"{key}: {path} holds no table; give a csv, tsv, parquet, json or jsonl file")
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    for file in files:
        reader = _READERS.get(file.suffix.lower())
        if reader is None:
            raise UserError(f"{key}: {file}: not a table; known are {', '.join(_READERS)}")
        try:
            for place, row in reader(file, format):
                rows.append(row)
                places.append(f"{file}, {place}")
        except (OSError, UnicodeError, LookupError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise UserError(
                f"{key}: {file} cannot be read as {format.encoding} text ({reason}); set data.encoding, "
                "for example to latin-1 or utf-16"
            ) from None
    if not rows:
        raise UserError(f"{key}: {path} has no records; give a table with some")
    names = list(dict.fromkeys(key for row in rows for key in row))
    return Columns({name: [row.get(name) for row in rows] for name in names}, lambda row: places[row])


def _csv(file: Path, format: Format) -> Iterable[tuple[str, dict[str, Any]]]:
    delimiter = "\t" if file.suffix.lower() == ".tsv" and format.delimiter == "," else format.delimiter
    with file.open(encoding=format.encoding, newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        try:
            header = next(reader, None)
            if header is None:
                raise UserError(f"{file} is empty; its first line names the columns")
            header = [name.removeprefix("\ufeff") for name in header]
            for other in SEPARATORS if len(header) == 1 else "":
                if other in header[0]:
                    raise UserError(
                        f"{file}, line 1: one column is called {header[0]!r}; set data.delimiter to {other!r}"
                    )
            for name in header:
                if header.count(name) > 1:
                    raise UserError(f"{file}, line 1: two columns are called {name!r}; rename one of them")
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise UserError(
                        f"{file}, line {reader.line_num}: {len(cells)} values where the first line names "
                        f"{len(header)} columns; is data.delimiter {delimiter!r} right?"
                    )
                values = [None if cell in format.missing else cell for cell in cells]
                yield f"line {reader.line_num}", dict(zip(header, values, strict=True))
        except csv.Error as error:
            raise UserError(f"{file}, line {reader.line_num}: {error}") from None


def _json(file: Path, format: Format) -> Iterable[tuple[str, dict[str, Any]]]:
    text = file.read_text(encoding=format.encoding)
    if text.lstrip().startswith("["):
        try:
            rows = list(enumerate(from_json(text)))
        except ValueError as error:
            raise UserError(f"{file}: {error}") from None
        name = "row"
    else:
        rows, name = [], "line"
        for n, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    rows.append((n, from_json(line)))
                except ValueError as error:
                    raise UserError(f"{file}, line {n}: {error}") from None
    for n, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{file}, {name} {n}: a row is an object of columns, not {type(row).__name__}")
        yield (
            f"{name} {n}",
            {k: None if v in format.missing else v for k, v in row.items() if _hashable(v)}
            | {k: v for k, v in row.items() if not _hashable(v)},
        )


def _hashable(value: Any) -> bool:
    return not isinstance(value, list | dict)


def _parquet(file: Path, format: Format) -> Iterable[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file}: {str(error).splitlines()[0]}") from None
    for n, row in enumerate(table.to_pylist()):
        yield f"row {n}", row


_READERS: dict[str, Callable[[Path, Format], Iterable[tuple[str, dict[str, Any]]]]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".json": _json,
    ".jsonl": _json,
    ".parquet": _parquet,
}
