"""Products whose every row is rounded in the same way, whatever stands in the rows beside it.

A library of products takes another kernel for few rows, for the last few of them, or for few columns, and
each kernel adds up in an order of its own. So a record's numbers differ in their last bits with the number of
its neighbours. That is nothing to a gradient, but for a record on a kink of the network: where a ReLU's input
is 0 but for those bits, a neighbour turns its gradient on or off.

Here products have at least `ROWS` rows and `COLUMNS` columns, and a number of rows that leaves none over;
what is missing is filled up with zeros. How many rows a processor takes at a time is found by trial: with
MKL on AVX2 any number above 11 will do in float32, and in float64 multiples of four on one thread.

>>> x, weight = torch.randn(2, 17), torch.randn(3, 17)
>>> linear(x, weight).shape, bool(torch.allclose(linear(x, weight), F.linear(x, weight), atol=1e-5))
(torch.Size([2, 3]), True)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = COLUMNS = 16
STEPS = (1, 4, 8, 16, 32)
"""Rows of which a processor may need a multiple."""
_TRIED = ((200, 64), (768, 16), (33, 16))
"""Features and columns of the products that are tried: an aligned one, a deep one, an odd one."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`."""
    rows, columns = input.shape[:-1].numel(), len(weight)
    missing = _missing(input, rows)
    # A few columns are no worse than many where vectors of four fit into a row of weights; a single one is.
    more = 0 if columns > 1 and not input.shape[-1] % 4 and weight.is_contiguous() else COLUMNS - columns
    if weight.dim() != 2 or not rows or max(missing, more) <= 0:
        return F.linear(input, weight, bias)
    y = F.linear(
        _filled(input.reshape(rows, -1), missing),
        _filled(weight, more),
        None if bias is None else _filled(bias, more),
    )
    # A copy, not a view: what is written to it in place would leave the watched gradient behind.
    return y[:rows, :columns].reshape(*input.shape[:-1], columns).clone()


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> Tensor:
    """`torch.addmm`, of a bias for each column."""
    if input.dim() == 1 and not scales and _unsteady(mat1, mat2):
        return linear(mat1, mat2.t(), input)
    return torch.addmm(input, mat1, mat2, **scales)


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """`torch.matmul`, of rows and one matrix or one vector."""
    if input.dim() > 1 and other.dim() == 1:
        return linear(input, other.unsqueeze(0)).squeeze(-1)
    if input.dim() > 1 and other.dim() == 2 and _unsteady(input, other):
        return linear(input, other.t())
    return torch.matmul(input, other)


def mm(input: Tensor, mat2: Tensor) -> Tensor:
    """`torch.mm`."""
    return matmul(input, mat2)


def _unsteady(x: Tensor, weight: Tensor) -> bool:
    return weight.shape[-1] < COLUMNS or _missing(x, x.shape[:-1].numel()) > 0


def _missing(x: Tensor, rows: int) -> int:
    """How many rows are too few."""
    if x.device.type != "cpu":
        return max(0, ROWS - rows)
    step = _step(x.dtype, torch.get_num_threads(), torch.is_autocast_enabled("cpu"))
    return max(ROWS, -(-rows // step) * step) - rows


@functools.cache
def _step(dtype: torch.dtype, threads: int, autocast: bool) -> int:
    """The smallest of `STEPS` with whose multiples products come out the same for rows in any place: 10
    to 20 ms, once. The last one where nothing of the kind is seen.
    """
    own = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=own).to(dtype)

    with torch.no_grad():
        tried = [(matrix(64, features), matrix(columns, features)) for features, columns in _TRIED]
        for step in STEPS:
            if all(_same(x, weight, rows) for rows in range(ROWS, 49, step) for x, weight in tried):
                return step
    return STEPS[-1]


def _same(x: Tensor, weight: Tensor, rows: int) -> bool:
    order = torch.arange(64).roll(rows)[:rows]
    return torch.equal(F.linear(x[order], weight), F.linear(x, weight)[order])


def _filled(tensor: Tensor, missing: int) -> Tensor:
    return tensor if missing <= 0 else F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))


STEADY: dict[Any, Callable[..., Tensor]] = {
    F.linear: linear,
    torch.addmm: addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), matmul),
    **dict.fromkeys((torch.mm, Tensor.mm), mm),
}
"""What the tape runs instead of torch's own; arguments are called what torch calls them."""
