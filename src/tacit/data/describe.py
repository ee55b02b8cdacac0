"""What each client holds: rows for a program, a table for a terminal, a picture for a report.

Only the clients that are shown are read, so describing ten million is as fast as describing ten.

>>> from tacit.data.records import ArrayRecords
>>> records = ArrayRecords(np.zeros((6, 1, 2, 2), np.uint8), [0, 0, 1, 1, 1, 2])
>>> clients = Population(records, np.array([0, 4, 6]), np.arange(6), holdout=0.25)
>>> client_table(clients, classes=3, limit=1)
[ClientRow(client=0, train=3, test=1, labels=(2, 2, 0), name=None)]
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from tacit.data.population import Population
from tacit.errors import UserError


@dataclass(frozen=True)
class ClientRow:
    """One client: how many records it trains and tests on, and how many of each class it owns in total."""

    client: int
    train: int
    test: int
    labels: tuple[int, ...]
    """Empty if the records have no classes."""
    name: str | None = None
    """The user's name, if all records are one user's."""


def client_table(population: Population, classes: int, limit: int = 20) -> list[ClientRow]:
    """At most `limit` clients, evenly spread over the population."""
    shown = np.linspace(0, len(population) - 1, min(limit, len(population))).astype(int)
    return [_row(population, classes, int(client)) for client in shown]


def client_names(population: Population, most: int = 10_000) -> list[str] | None:
    """The names of all clients; None if records have no users, or there are more than `most` clients."""
    users = population.records.users
    if users is None or len(population) > most or not len(population.indices):
        return None
    first = population.indices[np.minimum(population.offsets[:-1], len(population.indices) - 1)]
    return [str(name) for name in users[first]]


def to_json(population: Population, classes: int, limit: int = 20) -> dict[str, Any]:
    """Plain values for `json.dumps`: the population in numbers, and some of its clients."""
    sizes = population.sizes
    return {
        "clients": len(population),
        "records": len(population.indices),
        "train_records": int(sizes.sum(dtype=np.int64)),
        "train_size": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "shown": [asdict(row) for row in client_table(population, classes, limit)],
    }


def to_table(population: Population, classes: int, limit: int = 20, names: tuple[str, ...] = ()) -> Table:
    """The same for a terminal. More than twelve classes would not fit; then only the largest are named."""
    rows = client_table(population, classes, limit)
    table = Table(title=f"{len(rows)} of {len(population):,} clients")
    for name in ("client", "train", "test"):
        table.add_column(name, justify="right")
    labelled, wide = bool(rows[0].labels), classes <= 12
    columns = _class_names(classes, names) if wide else ["most frequent classes"]
    for name in columns if labelled else []:
        table.add_column(name, justify="right" if wide else "left")
    for row in rows:
        cells = [str(n) if n else "·" for n in row.labels]
        if labelled and not wide:
            cells = [_largest(row, names)]
        who = f"{row.client:,}" if row.name is None else row.name
        table.add_row(who, f"{row.train:,}", f"{row.test:,}", *cells)
    return table


def split_picture(
    population: Population, classes: int, path: Path | str, limit: int = 30, names: tuple[str, ...] = ()
) -> None:
    """A PNG: a row for each of up to `limit` clients, a column for each class; darker is more records."""
    from matplotlib.figure import Figure  # a second of imports that a run does not need

    if population.records.labels is None:
        raise UserError("these records have no class labels, so there is no label split to draw")
    rows = client_table(population, classes, limit)
    counts = np.array([row.labels for row in rows])
    # Small splits have room for the numbers, which are clearer than shades.
    numbered = classes <= 20
    width = 3.2 + (0.42 * classes if numbered else min(10.0, 0.09 * classes + 3.0))
    figure = Figure(figsize=(max(6.0, width), 1.9 + 0.24 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(counts, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    axes.set_yticks(
        range(len(rows)),
        [f"{_short(row.name or f'{row.client:,}')}  (n = {row.train + row.test:,})" for row in rows],
        fontsize=8,
    )
    axes.set_ylabel("client  (n: its records)")
    axes.set_xlabel("class")
    if numbered:
        axes.set_xticks(
            range(classes), names or [str(c) for c in range(classes)], rotation=90 if names else 0
        )
        _write_numbers(axes, counts)
    shown = "every client" if len(rows) == len(population) else f"{len(rows)} of {len(population):,} clients"
    held = float((counts > 0).sum(axis=1).mean())
    figure.suptitle(f"Labels of {shown}: {held:.1f} of {classes} classes each, on average", fontsize=10)
    figure.colorbar(image, ax=axes, label="records of the class", fraction=0.05)
    # The file gets its final name only when complete, so no reader sees half a picture.
    scratch = Path(f"{path}.part")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # characters that the font lacks become boxes
            figure.savefig(scratch, format="png", dpi=130)
        scratch.replace(path)
    except OSError as error:
        raise UserError(
            f"the picture cannot be written to {path} ({error.strerror}); name another place"
        ) from None


def _short(name: str) -> str:
    return name if len(name) <= 45 else f"{name[:44]}…"


def _row(population: Population, classes: int, client: int) -> ClientRow:
    train, test = population.train(client), population.test(client)
    labels = population.records.labels
    histogram: tuple[int, ...] = ()
    if labels is not None:
        own = np.concatenate([train, test])
        histogram = tuple(np.bincount(labels[own], minlength=classes).tolist())
    return ClientRow(client, len(train), len(test), histogram, _user(population, client))


def _user(population: Population, client: int) -> str | None:
    users = population.records.users
    start, end = population.offsets[client : client + 2]
    if users is None or start == end:
        return None
    own = np.unique(users[population.indices[start:end]])
    return str(own[0]) if len(own) == 1 else None


def sizes_told(population: Population) -> str:
    """One line on how many records clients train on."""
    sizes = population.sizes
    return f"training records a client: {sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.0f}"


def _class_names(classes: int, names: tuple[str, ...]) -> list[str]:
    return list(names) if names else [f"class {c}" if c == 0 else str(c) for c in range(classes)]


def _largest(row: ClientRow, names: tuple[str, ...] = ()) -> str:
    order = np.argsort(row.labels)[::-1][:6]
    shown = [f"{names[c] if names else c}: {row.labels[c]:,}" for c in order if row.labels[c]]
    return ", ".join(shown) or "·"


def _write_numbers(axes: Any, counts: NDArray[np.int64]) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            colour = "white" if count > 0.55 * counts.max() else "black"
            axes.text(column, row, str(count), ha="center", va="center", fontsize=7, color=colour)
