"""Torch functions that the tape knows by name: they say nothing of what is in a tensor, or the same for every
record.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


FREE = frozenset(
    [
        getattr(owner, name)
        for owner in (torch, Tensor)
        for name in [
            "size",
            "dim",
            "numel",
            "nelement",
            "ndimension",
            "__len__",
            "stride",
            "is_contiguous",
            "element_size",
            "is_floating_point",
            "is_complex",
            "is_signed",
            "get_device",
            "storage_offset",
            "is_inference",
            "is_conj",
            "is_neg",
            "is_same_size",
            "__hash__",
            "is_pinned",
            "is_shared",
        ]
        if hasattr(owner, name)
    ]
    + _getters(
        *[
            "shape",
            "ndim",
            "dtype",
            "device",
            "layout",
            "requires_grad",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_leaf",
            "is_mkldnn",
            "is_mps",
            "is_xpu",
            "is_nested",
            "itemsize",
            "nbytes",
            "names",
            "is_sparse_csr",
            "is_vulkan",
            "is_ipu",
            "is_maia",
        ]
    )
)
"""Functions that tell a tensor's shape and kind, and nothing of what is in it."""
DATA, GRAD, WANTS = Tensor.data.__get__, Tensor.grad.__get__, Tensor.requires_grad.__set__  # type: ignore[attr-defined,union-attr]
AGREED = frozenset(
    f
    for name in ("all", "any", "max", "min", "amax", "amin")
    for f in (getattr(torch, name), getattr(Tensor, name))
)
"""Reductions whose value may leave to Python where it is the same for every record by itself.

Not where it has a gradient, which all records together would be given."""


COMPARISONS: dict[Any, Any] = {
    Tensor.lt: Tensor.gt,
    Tensor.gt: Tensor.lt,
    Tensor.le: Tensor.ge,
    Tensor.ge: Tensor.le,
    Tensor.__eq__: Tensor.__eq__,
    Tensor.ne: Tensor.ne,
}
"""The operators, and what they are with their sides exchanged."""
