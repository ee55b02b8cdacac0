"""Records: what a data set gives, a batch at a time.

A record is whatever one person contributed once: a picture, a sentence. `take` copies records out in their
storage form (pixels stay uint8, so a message or a cache is four times smaller); `prepare` turns a batch into
the model's inputs, and is cheap enough to be called on every batch, on any device.

>>> records = ArrayRecords(np.full((3, 1, 2, 2), 255, np.uint8), [7, 8, 9], mean=0.5, std=0.5)
>>> batch = records.take(np.array([2, 0]))
>>> batch["x"].dtype, batch["y"].tolist()
(torch.uint8, [9, 7])
>>> records.prepare(batch)["x"].unique().tolist()
[1.0]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from mmap import mmap
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.lazy import Tensor, torch

Batch = dict[str, Tensor]
"""Named tensors with the records along dimension 0; for pictures `x` [B, C, H, W] and `y` [B]."""

Indices = NDArray[np.integer[Any]]


class Records(Protocol):
    """A data set as the rest of the package sees it. Anything with these members will do."""

    def __len__(self) -> int: ...

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """One class per record, for partitions and tables; None where there is no such thing."""

    @property
    def users(self) -> NDArray[Any] | None:
        """Whose record it is, for natural clients; None where that is not known."""

    def take(self, indices: Indices) -> Batch:
        """Copy records out, in storage form.

        Args:
            indices: which records, in that order.

        Returns:
            Named tensors with the records along dimension 0; the caller may change them.
        """
        ...

    def prepare(self, batch: Batch) -> Batch:
        """The same records as a model wants them: float, normalised.

        Args:
            batch: what `take` returned, on any device.

        Returns:
            The model's inputs and targets.
        """
        ...


@runtime_checkable
class Timed(Protocol):
    """Records that last a while: sound."""

    @property
    def seconds(self) -> NDArray[Any]:
        """How long each record is, for batches by seconds."""


@runtime_checkable
class Raw(Protocol):
    """Records that show their contents as they came, so that data can be recognised under another name."""

    def raw(self, index: int) -> bytes:
        """One record's contents, before anything was made of them; without its user.

        Args:
            index: which record.
        """


class ArrayRecords:
    """Records held in arrays, in memory or memory-mapped from `.npy` files.

    uint8 `x` are pixels: `prepare` maps 0…255 to 0…1 and then normalises by `mean` and `std`, given for all
    channels at once or one each. Floats are normalised if `mean` and `std` are given; other integers (tokens)
    are left alone. With `size`, pictures come out that many pixels a side (bilinear), however large they are.
    A memory-mapped array is pickled as its file's path, so worker processes share its pages.
    """

    joint: bool
    """Preparing many records at once is as good as batch by batch: it does not make them much larger."""

    def __init__(
        self,
        x: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        users: ArrayLike | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        size: int | None = None,
    ) -> None:
        self.x: NDArray[Any] = _array(x)
        self.y: NDArray[Any] = _array(y)
        if np.issubdtype(self.y.dtype, np.integer) and self.y.dtype != np.int64:
            self.y = self.y.astype(np.int64)  # what torch's losses want
        self._users = None if users is None else _array(users)
        for name, array in (("y", self.y), ("users", self._users)):
            if array is not None and len(array) != len(self.x):
                raise ValueError(f"x has {len(self.x)} records and {name} has {len(array)}; they must agree")
        self.joint = size is None
        self.mean, self.std = mean, std
        self.size = size if size is not None and self.x.shape[2:] != (size, size) else None
        if std is not None and not bool((np.asarray(std) > 0).all()):
            raise ValueError(f"std must be positive, not {std}")

    @cached_property
    def _affine(self) -> tuple[Tensor, Tensor]:
        """(x/255 - mean)/std as one multiplication and one addition: x·scale + shift."""
        unit = 255.0 if self.x.dtype == np.uint8 else 1.0
        deviation = torch.as_tensor(1.0 if self.std is None else self.std, dtype=torch.float64)
        centre = torch.as_tensor(0.0 if self.mean is None else self.mean, dtype=torch.float64)
        scale, shift = 1.0 / (unit * deviation), -centre / deviation
        return _per_channel(scale, self.x.ndim), _per_channel(shift, self.x.ndim)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        return self.y if self.y.ndim == 1 and self.y.dtype == np.int64 else None

    @property
    def users(self) -> NDArray[Any] | None:
        return self._users

    def take(self, indices: Indices) -> Batch:
        """Copy the records at `indices` out, in that order and in storage form."""
        return {
            "x": torch.from_numpy(self.x.take(indices, 0)),
            "y": torch.from_numpy(self.y.take(indices, 0)),
        }

    def prepare(self, batch: Batch) -> Batch:
        """What `take` returned (`batch`) as a model wants it: float, normalised, of the wanted size."""
        x = batch["x"]
        if x.dtype == torch.uint8 or (x.is_floating_point() and (self.mean, self.std) != (None, None)):
            # A fresh tensor is made by the product; the sum may then be done in place.
            scale, shift = self._affine
            x = (x * scale.to(x.device)).add_(shift.to(x.device))
        if self.size is not None and len(x):
            x = resize(x, self.size)
        elif self.size is not None:
            x = x.new_zeros(0, x.shape[1], self.size, self.size)
        return {**batch, "x": x}

    def raw(self, index: int) -> bytes:
        """The contents of the record at `index`, without its user."""
        return bytes(self.x[index].tobytes() + self.y[index].tobytes())

    def apart(self, batch: Batch) -> list[Batch]:
        """The prepared `batch` in one part: records have one shape, and each number is scaled by itself."""
        return [self.prepare(batch)]

    def blank(self) -> Batch:
        """The first record: all have its shape."""
        return self.prepare(self.take(np.zeros(1, np.int64)))

    def __reduce__(self) -> tuple[Any, ...]:
        parts = tuple(packed(a) for a in (self.x, self.y, self._users))
        return _unpickle, (parts, self.mean, self.std, self.size)


class Subset:
    """Some of another's records, as records of their own."""

    def __init__(self, records: Records, indices: Indices) -> None:
        self.records, self._indices = records, indices

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        labels = self.records.labels
        return None if labels is None else labels[self._indices]

    @property
    def users(self) -> NDArray[Any] | None:
        users = self.records.users
        return None if users is None else users[self._indices]

    def take(self, indices: Indices) -> Batch:
        return self.records.take(self._indices[indices])

    def prepare(self, batch: Batch) -> Batch:
        return self.records.prepare(batch)


def resize(pictures: Tensor, size: int) -> Tensor:
    """Pictures [B, C, H, W] of floats at `size` × `size`: bilinear, and without aliasing if they shrink."""
    shrink = size < max(pictures.shape[2:])
    return torch.nn.functional.interpolate(
        pictures, (size, size), mode="bilinear", align_corners=False, antialias=shrink
    )


def _array(values: ArrayLike | Tensor) -> NDArray[Any]:
    loaded = sys.modules.get("torch")
    if loaded is not None and isinstance(values, loaded.Tensor):
        found: NDArray[Any] = values.numpy()
        return found
    return values if isinstance(values, np.ndarray) else np.asarray(values)


def _per_channel(values: Tensor, ndim: int) -> Tensor:
    """Shaped to meet [B, C, …]; one number alone stays a scalar."""
    values = values.float()
    return values.view(-1, *[1] * (ndim - 2)) if values.ndim else values


def packed(array: NDArray[Any] | None) -> NDArray[Any] | str | None:
    """A whole `.npy` memory map becomes its path; a view of one, or any other array, is sent by value."""
    if isinstance(array, np.memmap) and isinstance(array.base, mmap) and str(array.filename).endswith(".npy"):
        return str(array.filename)
    return array


def unpacked(part: Any) -> Any:
    """What `packed` was given."""
    return np.load(part, mmap_mode="r") if isinstance(part, str) else part


def _unpickle(parts: tuple[Any, Any, Any], mean: Any, std: Any, size: int | None) -> ArrayRecords:
    x, y, users = (unpacked(part) for part in parts)
    return ArrayRecords(x, y, users, mean, std, size)
