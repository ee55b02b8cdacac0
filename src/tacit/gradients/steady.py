"""Operations that round a record's numbers in the same way, whatever records stand beside it.

A library of products takes another kernel for few rows, for the last few of them, or for few columns, and
each kernel adds up in an order of its own. So a record's numbers differ in their last bits with the number of
its neighbours. That is nothing to a gradient, but for a record on a kink of the network: where a ReLU's input
is 0 but for those bits, a neighbour turns its gradient on or off.

Here products have at least `ROWS` rows, a number of rows that leaves none over, and a multiple of `COLUMNS`
where that matters; what is missing is filled up with zeros. How many rows a processor takes at a time is
found by trial: with MKL on AVX2 any number above 11 will do in float32, and in float64 multiples of four on
one thread. Where every record has a matrix of its own, as in attention, a kernel depends on where in memory a
matrix begins, so all of them begin where a line of the cache does. Convolutions with kernels of one pixel,
which torch computes in several ways, are products here. Functions of single numbers are computed in whole
vectors, so that none of them are left over, and in one layout, of which torch has kernels of their own; so
are sums, softmax, GLU and the trapezoidal rule over an axis that comes before the records'.

This was measured on one thread of CPUs with AVX2 and AVX-512, of products on several (`tests/adversarial`),
and is said of nothing else. Fused attention, einsum, recurrent layers, and sums over axes on both sides of
the records' are as torch computes them.

>>> x, weight = torch.randn(2, 17), torch.randn(3, 17)
>>> linear(x, weight).shape, bool(torch.allclose(linear(x, weight), F.linear(x, weight), atol=1e-5))
(torch.Size([2, 3]), True)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ROWS = COLUMNS = 16
STEPS = (1, 4, 8, 16, 32)
"""Rows of which a processor may need a multiple."""
VECTOR = 64
"""Numbers that a function takes at a time, at most: two vectors of half precision with AVX-512."""
LINE = 16
"""Numbers of float32 in a line of the cache, to whose multiples torch aligns its memory."""
GRAIN = 32_768
"""Numbers up to which torch computes a function on one thread."""
_TRIED = ((200, 64), (768, 16), (33, 16))
"""Features and columns of the products that are tried: an aligned one, a deep one, an odd one."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`."""
    rows, columns = input.shape[:-1].numel(), len(weight)
    missing = _missing(input, rows)
    # Any number of columns but one will do where vectors of four fit into a row of weights.
    more = 0 if columns > 1 and not input.shape[-1] % 4 and weight.is_contiguous() else -columns % COLUMNS
    if weight.dim() != 2 or not rows:
        return F.linear(input, weight, bias)
    if max(missing, more) <= 0:
        return F.linear(input.contiguous(), weight, bias)  # a turned view would take a kernel of its own
    y = F.linear(
        _filled(input.reshape(rows, -1), missing),
        _filled(weight, more),
        None if bias is None else _filled(bias, more),
    )
    # A copy, not a view: what is written to it in place would leave the watched gradient behind.
    return y[:rows, :columns].reshape(*input.shape[:-1], columns).clone()


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> Tensor:
    """`torch.addmm`, of a bias for each column."""
    if input.dim() == 1 and not scales:
        return linear(mat1, mat2.t(), input)
    return torch.addmm(input, mat1, mat2, **scales)


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """`torch.matmul`."""
    if input.dim() > 1 and other.dim() == 1:
        return linear(input, other.unsqueeze(0)).squeeze(-1)
    if input.dim() > 1 and other.dim() == 2:
        return linear(input, other.t())
    if input.dim() == 1 and other.dim() > 2:
        return linear(other.mT, input.unsqueeze(0)).squeeze(-1)
    if input.dim() == 2 and other.dim() > 2:
        return linear(other.mT, input).mT
    return bmm(input, other) if input.dim() > 2 else torch.matmul(input, other)


def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """`torch.bmm`, or `torch.matmul` of more such axes: a product for each record."""
    (m, k), n = input.shape[-2:], mat2.shape[-1]
    if input.device.type != "cpu" or k != mat2.shape[-2]:
        return torch.matmul(input, mat2)
    if not any(size % LINE for size in (m * k, k * n, m * n)):
        return torch.matmul(_in_lines(input), _in_lines(mat2))
    deep, wide = -k % LINE, -n % LINE
    y = torch.matmul(_in_lines(F.pad(input, (0, deep))), _in_lines(F.pad(mat2, (0, wide, 0, deep))))
    return y[..., :n].clone() if wide else y


def _in_lines(matrices: Tensor) -> Tensor:
    """Matrices one behind the other, as they are or turned, the first at the beginning of a line."""
    dense = matrices.is_contiguous() or matrices.mT.is_contiguous()
    return matrices if dense and not matrices.storage_offset() % LINE else matrices.clone().contiguous()


def mm(input: Tensor, mat2: Tensor) -> Tensor:
    """`torch.mm`."""
    return matmul(input, mat2)


def mv(input: Tensor, vec: Tensor) -> Tensor:
    """`torch.mv`."""
    return matmul(input, vec)


def inner(input: Tensor, other: Tensor) -> Tensor:
    """`torch.inner`."""
    if not input.dim() or other.dim() not in (1, 2):
        return torch.inner(input, other)
    return matmul(input, other if other.dim() == 1 else other.t())


def _one_pixel(convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.conv1d` or `torch.conv2d`, whose kernels of one pixel are products."""

    @functools.wraps(convolution)
    def steady(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Sequence[int] = 1,
        padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        unpadded = padding == "valid" or (padding != "same" and not any(_each(padding)))
        if prod(weight.shape[2:]) > 1 or not unpadded or input.dim() != weight.dim():
            return convolution(input, weight, bias, stride, padding, dilation, groups)
        for axis, step in enumerate([stride] * (input.dim() - 2) if isinstance(stride, int) else stride, 2):
            if step > 1:
                input = input[(slice(None),) * axis + (slice(None, None, step),)]
        if groups == 1 and not input.is_contiguous():  # channels last: one row for each pixel
            return linear(input.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)
        b, _, *sides = input.shape
        pixels, matrix = prod(sides), weight.view(groups, len(weight) // groups, -1)
        # A matrix for each record, filled up so that all of them begin where vectors do.
        images = F.pad(input.reshape(b, groups, -1, pixels), (0, -pixels % 8))
        y = torch.matmul(matrix.expand(b, -1, -1, -1), images)[..., :pixels].reshape(b, -1, *sides)
        return y.clone() if bias is None else y + bias.view(-1, *[1] * len(sides))

    return steady


def _each(option: int | Sequence[int]) -> Sequence[int]:
    return (option,) if isinstance(option, int) else option


def _in_vectors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of single numbers, such as `torch.sigmoid`, computed in whole vectors by every thread."""

    @functools.wraps(function)
    def steady(input: Any, *options: Any, **named: Any) -> Tensor:
        others = (*options, *named.values())
        if not isinstance(input, Tensor) or any(isinstance(other, Tensor) for other in others):
            return _of_two(function, input, *options, **named)
        numbers = input.numel()
        step = _whole_vectors(numbers)
        if input.device.type != "cpu" or (input.is_contiguous() and not numbers % step):
            return function(input, *options, **named)
        in_place = named.pop("inplace", False)
        if options and options[-1] is True:  # the last argument of those that have one
            options, in_place = (*options[:-1], False), True
        filled = _filled(input.reshape(-1), -numbers % step, 1.0)  # where all of them have a slope
        y = function(filled, *options, **named)[:numbers].view(input.shape)
        return input.copy_(y) if in_place else y.clone()

    return steady


def _whole_vectors(numbers: int) -> int:
    """A multiple of how many numbers has no vector left over, as torch shares them out to its threads."""
    return VECTOR * max(1, min(torch.get_num_threads(), -(-numbers // GRAIN)))


def _of_two(function: Callable[..., Tensor], *operands: Any, **named: Any) -> Tensor:
    """A function of two numbers, such as a power to a tensor's, in whole vectors."""
    tensors = [t for t in operands if isinstance(t, Tensor)]
    if named or any(t.device.type != "cpu" for t in tensors):
        return function(*operands, **named)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    numbers = prod(shape)
    step = _whole_vectors(numbers)
    filled = [
        _filled(t.expand(shape).reshape(-1), -numbers % step, 1.0) if isinstance(t, Tensor) else t
        for t in operands
    ]
    return function(*filled)[:numbers].view(shape).clone()


def _pairs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return functools.wraps(function)(functools.partial(_of_two, function))


def _power_of(exponent: Tensor, base: Any) -> Tensor:
    """`base ** exponent`."""
    return _of_two(torch.pow, base, exponent)


def _written(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function in place, such as `torch.sigmoid_`, by the one that is not."""

    @functools.wraps(function)
    def steady(input: Tensor, *options: Any, **named: Any) -> Tensor:
        return input.copy_(function(input.clone(), *options, **named))  # autograd keeps what it was

    return steady


def _over_columns(reduction: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.sum`, `torch.softmax` and their kin. Over any axis but the last they take several columns at a
    time, and those that are left over in another order.
    """

    @functools.wraps(reduction)
    def steady(input: Tensor, *options: Any, **named: Any) -> Tensor:
        dim = options[0] if options else named.get("dim", named.get("axis"))
        axes = [axis % input.dim() for axis in _each(dim)] if dim is not None and input.dim() else []
        missing = -input.shape[-1] % VECTOR if axes else 0
        if not axes or input.dim() - 1 in axes or not missing or input.device.type != "cpu":
            return reduction(input, *options, **named)
        columns = input.shape[-1]
        return reduction(F.pad(input, (0, missing)), *options, **named)[..., :columns].clone()

    return steady


def _over_columns_of_two(product: Callable[..., Tensor], usual: int) -> Callable[..., Tensor]:
    """The same for products that are summed over an axis, the `usual` one if none is named."""

    @functools.wraps(product)
    def steady(*given: Any, **named: Any) -> Tensor:
        dim = given[2] if len(given) > 2 else named.get("dim", usual)
        alike = len(given) > 1 and given[0].shape == given[1].shape and given[0].dim() > 0
        missing = -given[0].shape[-1] % VECTOR if alike else 0
        if not missing or dim % given[0].dim() == given[0].dim() - 1 or given[0].device.type != "cpu":
            return product(*given, **named)
        columns = given[0].shape[-1]
        filled = [F.pad(factor, (0, missing)) for factor in given[:2]]
        return product(*filled, *given[2:], **named)[..., :columns].clone()

    return steady


def _trapezoid(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same for `torch.trapezoid`, whose points may be the same for all columns or not."""

    @functools.wraps(rule)
    def steady(y: Tensor, x: Tensor | None = None, *, dim: int = -1, **named: Any) -> Tensor:
        points = [] if x is None else [x]
        missing = -y.shape[-1] % VECTOR if y.dim() else 0
        if not missing or dim % y.dim() == y.dim() - 1 or y.device.type != "cpu":
            return rule(y, *points, dim=dim, **named)
        columns = y.shape[-1]
        points = [F.pad(x, (0, missing)) if x.dim() > 1 and x.shape[-1] == columns else x for x in points]
        return rule(F.pad(y, (0, missing)), *points, dim=dim, **named)[..., :columns].clone()

    return steady


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


def _filled(tensor: Tensor, missing: int, value: float = 0.0) -> Tensor:
    if missing <= 0:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing), value=value)


_NAMES = "atanh arctanh celu cosh elu exp2 expit gelu logsigmoid mish pow selu sigmoid silu sinh softplus"
_HOMES = (torch, Tensor, F, torch.special)
_FUNCTIONS = {
    getattr(home, name): _in_vectors(getattr(home, name))
    for home in _HOMES
    for name in (*_NAMES.split(), "float_power", "__pow__")
    if hasattr(home, name)
}
"""Those seen to round the last numbers of a tensor in another way than the others, and their kin."""
_IN_PLACE = {
    getattr(home, f"{name}_"): _written(_in_vectors(getattr(home, name)))
    for home in _HOMES
    for name in _NAMES.split()
    if hasattr(home, name) and hasattr(home, f"{name}_")
} | {Tensor.__ipow__: _written(_in_vectors(torch.pow))}
_TWO = [
    getattr(home, name)
    for home in (torch, Tensor)
    for name in ("arctan2", "atan2", "logaddexp", "logaddexp2")
]

_OVER = [
    getattr(home, name)
    for home in _HOMES
    for name in ("sum", "mean", "nansum", "nanmean", "softmax", "log_softmax", "softmin", "logsumexp")
    if hasattr(home, name)
]

STEADY: dict[Any, Callable[..., Tensor]] = {
    F.linear: linear,
    torch.addmm: addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm), bmm),
    **dict.fromkeys((torch.mm, Tensor.mm), mm),
    **dict.fromkeys((torch.mv, Tensor.mv), mv),
    **dict.fromkeys((torch.inner, Tensor.inner), inner),
    **{convolution: _one_pixel(convolution) for convolution in (torch.conv1d, torch.conv2d)},
    **_FUNCTIONS,
    **_IN_PLACE,
    **{function: _pairs(function) for function in _TWO},
    Tensor.__rpow__: _power_of,
    **{over: _over_columns(over) for over in _OVER},
    torch.linalg.vecdot: _over_columns_of_two(torch.linalg.vecdot, -1),
    F.cosine_similarity: _over_columns_of_two(F.cosine_similarity, 1),
    F.glu: _over_columns(F.glu),
    **{rule: _trapezoid(rule) for rule in (torch.trapezoid, torch.trapz)},
}
"""What the tape runs instead of torch's own; arguments are called what torch calls them."""


class Steadily(TorchFunctionMode):
    """All of them, also where no tape runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return STEADY.get(func, func)(*args, **(kwargs or {}))
