"""Random changes to training pictures, one whole batch at a time.

The change to a picture is a function of the client's key for this round, the step, and the picture's own
place among the client's records. It does not depend on which other pictures share the batch. So each clipped
gradient is that of one record alone, and the sum has the same sensitivity as without augmentation. Adding or
removing a record shifts the places of those after it, but nobody can observe that while the key is secret.
Under an example-level guarantee it is secret (see `Worker`), like all other randomness.

>>> pictures = torch.arange(9, dtype=torch.uint8).view(1, 1, 3, 3)
>>> Augment(crop=1)({"x": pictures}, np.array([4]), step=0, key=1)["x"][0, 0].tolist()
[[1, 2, 0], [4, 5, 0], [7, 8, 0]]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tacit import randomness
from tacit.lazy import torch
from tacit.section import section

if TYPE_CHECKING:
    from torch import Tensor

    from tacit.data.records import Batch

Key = int | Callable[[int, int, NDArray[np.int64]], NDArray[np.uint64]]
"""The name of a client's random numbers: a number, or a function from step, purpose and place to 64 secret
bits.
"""


@section
class Augment:
    """Cut pictures out of a black margin of `crop` pixels, and mirror half of them (`flip`)."""

    crop: Annotated[int, Field(ge=0)] = 0
    """Black pixels added on every side before a part of the old size is cut out at random."""
    flip: bool = False
    """Mirror half of the pictures, left to right."""

    def __call__(self, batch: Batch, rows: NDArray[np.int64], step: int, key: Key) -> Batch:
        """The batch in storage form with its `x` changed; `rows`: each record's place among its client's
        records.
        """
        x = batch["x"]
        down, right, mirrored = (_words(key, step, rows, purpose) for purpose in range(3))
        if self.crop and len(x):
            choices = 2 * self.crop + 1
            x = _cut(x, self.crop, down % choices, right % choices)
        if self.flip:
            x = torch.where((mirrored % 2 == 1).view(-1, 1, 1, 1), x.flip(3), x)
        return {**batch, "x": x}


def _words(key: Key, step: int, rows: NDArray[np.int64], purpose: int) -> Tensor:
    bits = key(step, purpose, rows) if callable(key) else randomness.scattered(key, step, purpose, rows)
    return torch.from_numpy(
        (bits >> np.uint64(1)).astype(np.int64)
    )  # torch cannot compute with unsigned ones


def _cut(pictures: Tensor, margin: int, down: Tensor, right: Tensor) -> Tensor:
    """From each picture with a margin, cut a part of the original size that starts at (down, right)."""
    height, width = pictures.shape[2:]
    padded = torch.nn.functional.pad(pictures, (margin,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: [B, C, down, right, H, W]
    return windows[torch.arange(len(pictures)), :, down, right]
