"""Where rows along an axis see each other: sums, softmax, sorting, transforms."""

from __future__ import annotations

from tacit.gradients.axes.call import Call, dims_of, table, tensors_in
from tacit.gradients.axes.elements import pointwise


def _reduce(call: Call) -> str:
    tensor = call["self"]
    dim = call.get("dim")
    dims = dims_of(dim, tensor.dim())
    axes = call.touch(tensor, dims)
    if call.get("keepdim") and tensors_in(call.out)[0].dim() == tensor.dim():
        return axes
    return "".join(c for i, c in enumerate(axes) if i not in dims)


def _extreme(call: Call) -> str:
    """max and min: of two tensors, along a dimension, or of everything."""
    if "other" in call.named:
        return pointwise(call)
    return _reduce(call)


def _along(call: Call) -> str:
    """softmax, cumsum, sort, topk, …: rows along `dim` see each other, all others do not."""
    tensor = call.tensors[0]
    return call.touch(tensor, dims_of(call.get("dim", -1), tensor.dim()))


def _renormed(call: Call) -> str:
    """renorm: each slice along `dim` is divided by its own norm, over all other axes."""
    tensor = call["self"]
    (dim,) = dims_of(call["dim"], tensor.dim())
    return call.touch(tensor, [d for d in range(tensor.dim()) if d != dim])


def _moved(call: Call) -> str:
    """flip, roll: equal rows stay equal."""
    tensor, axes = call["self"], list(call.axes(call["self"]))
    for dim in dims_of(call["dims"], tensor.dim()):
        if axes[dim] == "R":
            raise call.refuse()
        axes[dim] = axes[dim] if axes[dim] in "EC" else "."
    return "".join(axes)


def _transformed(call: Call) -> str:
    """Fourier transforms along `dim`."""
    tensor = call["self"]
    return call.touch(tensor, dims_of(call["dim"], tensor.dim()))


def _rows(call: Call) -> str:
    """multinomial: row by row."""
    tensor = call["self"]
    axes = call.touch(tensor, [tensor.dim() - 1])
    return axes if "R" in axes else axes.replace("E", "C")


def _last_two(call: Call) -> str:
    """tril, triu: what is kept depends on the place."""
    tensor = call["self"]
    return call.touch(tensor, [tensor.dim() - 2, tensor.dim() - 1])


def _diagonal(call: Call) -> str:
    source = call["self"]
    pair = dims_of([call["dim1"], call["dim2"]], source.dim())
    axes = call.touch(source, pair)
    return "".join(c for d, c in enumerate(axes) if d not in pair) + "."


RULES = table(
    (_reduce, "sum mean prod amax amin argmax argmin all any var std norm linalg_vector_norm logsumexp"),
    (_reduce, "var_mean std_mean median nanmedian mode aminmax nansum nanmean count_nonzero kthvalue"),
    (_extreme, "max min"),
    (_along, "_softmax _log_softmax softmax log_softmax cumsum cumprod cummax cummin logcumsumexp sort topk"),
    (_along, "argsort glu"),
    (_renormed, "renorm"),
    (_moved, "flip roll"),
    (_diagonal, "diagonal"),
    (_last_two, "tril triu"),
    (_transformed, "_fft_r2c _fft_c2c _fft_c2r"),
    (_rows, "multinomial"),
)
