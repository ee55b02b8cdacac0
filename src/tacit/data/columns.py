"""Tables, arrays, lists and objects of other libraries, all as columns; and the meaning of the columns."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.data.tokens import Tokenizer
from tacit.errors import UserError


@dataclass(frozen=True)
class Columns:
    """Columns by name, and a way to say where a row came from."""

    values: Mapping[str, Sequence[Any]]
    where: Callable[[int], str] = field(default=lambda row: f"row {row}")
    called: str = "the data"

    def __len__(self) -> int:
        return len(next(iter(self.values.values()), ()))

    def column(self, name: str, what: str) -> Sequence[Any]:
        if name not in self.values:
            raise UserError(
                f"{what}: there is no column {name!r}; {self.called} have {', '.join(self.values)}"
            )
        return self.values[name]

    def contents(self, files: Sequence[str | None] = ()) -> Iterator[bytes]:
        """What is in each row; see `content`."""
        for row in range(len(self)):
            yield content({name: column[row] for name, column in self.values.items()}, files)

    def take(self, rows: NDArray[np.int64]) -> Columns:
        chosen = {name: [column[i] for i in rows] for name, column in self.values.items()}
        return Columns(chosen, lambda row: self.where(int(rows[row])), self.called)


def content(cells: Mapping[str, Any], files: Sequence[str | None] = ()) -> bytes:
    """What is in a row, to know it again wherever it stands: the same for equal cells. Of a file, which a
    picture or a sound may be, and a cell of the columns `files`, what is in it.
    """
    told = [(name, _told(cells[name], name in files)) for name in sorted(cells)]
    return repr(told).encode("utf-8", "replace")


def _told(cell: Any, file: bool = False) -> Any:
    cell = _array_like(cell)
    cell = cell[()] if isinstance(cell, np.ndarray) and not cell.ndim else cell
    if isinstance(cell, Mapping):  # the form of pictures and sounds in `datasets`
        whole = cell.get("bytes") is not None or cell.get("array") is not None
        return [(str(k), _told(v, k == "path")) for k, v in cell.items() if k != "path" or not whole]
    cell = sorted(cell, key=str) if isinstance(cell, set | frozenset) else cell
    if isinstance(cell, list | tuple) or (isinstance(cell, np.ndarray) and cell.dtype == object):
        return [_told(value) for value in cell]
    if file and isinstance(cell, str | Path):
        try:
            return sha256(Path(cell).read_bytes()).hexdigest()
        except (OSError, ValueError):
            return str(cell)
    if isinstance(cell, np.datetime64 | np.timedelta64):
        return str(cell.astype(f"{cell.dtype.kind}8[us]"))
    cell = cell.item() if isinstance(cell, np.generic) else cell
    if hasattr(cell, "tobytes"):  # an array or a picture
        try:
            return str(getattr(cell, "dtype", "")), str(np.shape(cell)), sha256(cell.tobytes()).hexdigest()
        except (OSError, SyntaxError, ValueError):  # a picture's file that is broken
            return ""
    plain = isinstance(cell, str | bytes | int | float | complex | datetime.date | datetime.timedelta)
    return str(cell) if cell is None or plain else type(cell).__name__  # a number as in a file of text


@dataclass(frozen=True)
class Meaning:
    """The meaning of the columns; see `dataset`."""

    features: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    image: str | None = None
    label: str | None = None
    user: str | None = None
    task: str = "classification"
    tokenizer: Tokenizer | None = None
    max_length: int = 128
    size: int | None = None
    mean: Sequence[float] | float | None = None
    std: Sequence[float] | float | None = None
    skip_bad: bool = False
    audio: str | None = None
    seconds: float | None = None
    language: str = "en"
    classes: tuple[str, ...] = ()


def columns_of(source: Any, what: str) -> Columns:
    """Columns of a DataFrame, a `datasets` object, a dict of columns or a list of rows."""
    if isinstance(source, Columns):
        return source
    if isinstance(source, Mapping):
        _refuse_equal_names(source, what)
        return _checked({str(key): value for key, value in source.items()}, what)
    library = type(source).__module__.split(".")[0]
    if library == "pandas":
        _refuse_equal_names(source.columns, what)
        return _checked({str(name): source[name].to_numpy() for name in source.columns}, what)
    if library == "polars":
        return _checked({str(name): source[name].to_list() for name in source.columns}, what)
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return _checked({name: _named_classes(source, name) for name in source.column_names}, what)
    if isinstance(source, list | tuple) and not source:
        raise UserError(f"{what}: there are no records in it")
    if isinstance(source, Sequence) and all(isinstance(row, Mapping) for row in source):
        names = list(dict.fromkeys(key for row in source for key in row))
        _refuse_equal_names(names, what)
        return _checked({str(n): [row.get(n) for row in source] for n in names}, what)
    raise UserError(
        f"{what}: a {type(source).__name__} is not known as data; give a DataFrame, a datasets object, a "
        "torch Dataset, a pair (x, y), a list of rows as dicts, a dict of columns, or a file's path"
    )


def refuse_stream(source: Any, what: str) -> None:
    """Refuse a source that streams records and has no length, or cannot return a record by its number."""
    from torch.utils.data import Dataset as TorchDataset
    from torch.utils.data import IterableDataset

    endless = not hasattr(source, "__len__") and (
        hasattr(source, "column_names") or isinstance(source, TorchDataset)
    )
    if not endless and not isinstance(source, IterableDataset):
        return
    fix = (
        "load it without streaming, or pass datasets.Dataset.from_list(list(…))"
        if hasattr(source, "column_names")
        else "pass a Dataset with __len__ and __getitem__, or arrays (x, y)"
    )
    raise UserError(
        f"{what}: this {type(source).__name__} gives its records one after the other, and clients need to "
        f"know theirs by number; {fix}"
    )


def _named_classes(source: Any, name: str) -> Sequence[Any]:
    """A column of a `datasets` object; classes as names, which the object knows."""
    values, feature = source[name], source.features[name]
    names = getattr(feature, "names", None)
    return [names[v] if v is not None and v >= 0 else None for v in values] if names else list(values)


def _refuse_equal_names(names: Iterable[Any], what: str) -> None:
    """Refuse two columns of one name (1 and "1" are the same): one could be mistaken for the other."""
    seen: set[str] = set()
    for name in map(str, names):
        if name in seen:
            raise UserError(f"{what}: two columns are called {name!r}; rename one of them")
        seen.add(name)


def _checked(values: dict[str, Sequence[Any]], what: str) -> Columns:
    values = {name: _by_position(column) for name, column in values.items()}
    if sparse := next((name for name, column in values.items() if hasattr(column, "toarray")), None):
        raise UserError(f"{what}: {sparse} is a sparse matrix; give an array ({sparse}.toarray())")
    lengths = {name: len(column) for name, column in values.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"{what}: columns differ in length ({told})")
    return Columns(values)


def _by_position(column: Any) -> Sequence[Any]:
    """A column whose entries are numbered 0, 1, 2, …. A pandas Series is indexed by its own index, which a
    shuffle or a split does not renumber.
    """
    found: Sequence[Any] = column.to_numpy() if hasattr(column, "to_numpy") else column
    return found


def are_columns(source: Mapping[Any, Any]) -> bool:
    """Whether a mapping holds columns, and not the splits of a data set."""
    return not all(hasattr(part, "column_names") or hasattr(part, "columns") for part in source.values())


def pair_of(source: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """(x, y) from a pair of arrays, or from a torch data set of pairs; None for anything else."""
    if isinstance(source, tuple) and len(source) == 2:
        return _array_like(source[0]), _array_like(source[1])
    from torch.utils.data import Dataset as TorchDataset

    if isinstance(source, TorchDataset):
        items = [source[i] for i in range(len(source))]  # type: ignore[arg-type]
        if not items or not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
            raise UserError("source: a torch Dataset must give pairs (x, y)")
        return [_array_like(x) for x, _ in items], [_array_like(y) for _, y in items]
    return None


def _array_like(value: Any) -> Any:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def refuse_pair(test: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    raise UserError(f"test: the training data are a pair (x, y), and this is a {type(test).__name__}")


def of_pair(pair: tuple[Sequence[Any], Sequence[Any]], users: Sequence[Any] | None, what: str) -> Columns:
    values: dict[str, Sequence[Any]] = {"x": pair[0], "y": pair[1]}
    if users is not None:
        values["user"] = users
    return _checked(values, what)
