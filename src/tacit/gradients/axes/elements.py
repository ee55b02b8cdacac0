"""Element by element, copies, constants and draws."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.gradients.axes.call import Call, plain, table, tensors_in


def pointwise(call: Call) -> str:
    tensors = call.tensors
    axes = call.aligned(*tensors)
    target = call.named[call.func._schema.arguments[0].name]
    if call.func._schema.is_mutable and isinstance(target, Tensor) and len(axes) != target.dim():
        raise call.refuse("in place")
    if len(tensors) == 1 and call.name in _FAITHFUL:
        return call.axes(tensors[0])
    return axes.replace("P", ".")


_FAITHFUL = {"aten.clone", "aten._to_copy", "aten.alias", "aten.detach", "aten.lift_fresh", "aten.contiguous"}
"""What leaves every row where, and as, it was."""


def _same(call: Call) -> str:
    """Copies, casts: the first tensor's own axes."""
    return call.axes(call.tensors[0])


def _overwrite(call: Call) -> str:
    """copy_: `self` becomes `src`, broadcast."""
    target, source = call["self"], call["src"]
    mine, letters = call.axes(target), []
    theirs, sizes = call.axes(source), [1] * (target.dim() - source.dim()) + list(source.shape)
    theirs = "." * (target.dim() - len(theirs)) + theirs
    for letter, size, now, wide in zip(theirs, sizes, mine, target.shape, strict=True):
        if size == 1 and wide != 1:
            if letter == "R":
                raise call.refuse("repeats one record")
            letters.append("R" if now == "R" else "E")
        elif now == "R" and wide != 1 and letter not in "REMC":
            raise call.refuse("of a constant that differs along the records")
        else:
            letters.append("R" if now == "R" else letter)
    if letters.count("R") > 1:
        raise call.refuse("of all records with all records")
    return call.only("".join(letters))


def _equal(call: Call) -> str:
    """zeros_like, full, fill_: all rows equal."""
    tensors = call.tensors
    if call.func._schema.is_mutable:
        mine = call.axes(call["self"])
        return mine if "R" in mine else "E" * len(mine)
    if tensors and list(tensors[0].shape) == list(call.out.shape) and "R" in call.axes(tensors[0]):
        return call.axes(tensors[0])
    return "E" * call.out.dim()  # type: ignore[no-any-return]


def _draws(call: Call) -> str:
    """Draws: rows independent, or each record's own; not where their chances differ by place."""
    fresh = call.func._schema.is_mutable or call.name.endswith(("_like", "randint_like"))
    given = [t for name, v in call.named.items() for t in tensors_in(v) if not (fresh and name == "self")]
    drawn, shape = call["self"] if fresh else None, call.out.shape
    if drawn is not None and "R" in call.axes(drawn):
        return call.aligned(drawn, *given)
    if not given:
        return "C" * len(shape)
    axes = call.aligned(*given)
    if len(axes) != len(shape):
        raise call.refuse("draws for data")
    return axes if "R" in axes else axes.replace("E", "C").replace("M", ".").replace("P", ".")


def _dropout(call: Call) -> list[str]:
    axes = call.axes(call["input"])
    return [axes if "R" in axes else axes.replace("E", "C")] * 2


def _prelu(call: Call) -> str:
    plain(call, "weight")
    return call.axes(call["self"])


def _arange(call: Call) -> str:
    count = call.out.shape[0] == call.records and call.get("start", 0) in (0, None)
    return "P" if count and call.get("step", 1) in (1, None) else "."


def _constant(call: Call) -> str:
    return "." * call.out.dim()  # type: ignore[no-any-return]


def _complex_view(call: Call) -> str:
    return call.axes(call["self"]) + "."


def _complex_of(call: Call) -> str:
    return call.axes(call["self"])[:-1]


RULES = table(
    (_same, "clone contiguous _to_copy detach alias lift_fresh lift conj _conj resolve_conj to _prelu"),
    (
        pointwise,
        "where masked_fill bernoulli_p polar complex rsub hardswish mish isfinite isinf isnan nan_to_num",
    ),
    (_equal, "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full"),
    (_equal, "new_empty scalar_tensor fill zero empty_strided new_empty_strided empty_permuted"),
    (_draws, "rand randn randint rand_like randn_like randint_like bernoulli uniform normal exponential"),
    (_draws, "random cauchy geometric log_normal poisson"),
    (_dropout, "native_dropout"),
    (_prelu, "_prelu_kernel prelu"),
    (_arange, "arange"),
    (_constant, "eye linspace logspace tril_indices triu_indices randperm hann_window _efficientzerotensor"),
    (_complex_view, "view_as_real"),
    (_complex_of, "view_as_complex"),
)
RULES[torch.ops.aten.floor_divide] = pointwise
RULES[torch.ops.aten.copy_] = _overwrite
