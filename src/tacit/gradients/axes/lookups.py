"""Rows that are picked by numbers: embeddings, gather, scatter, advanced indices."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.gradients.axes.call import Call, dims_of, made, makes, table


def _embedding(call: Call) -> str:
    if "R" in call.axes(call["weight"]):
        raise call.refuse("with data as its table")
    return call.axes(call["indices"]).replace("P", ".") + "."


def _gather(call: Call) -> str:
    source, index = call["self"], call["index"]
    (dim,) = dims_of(call["dim"], max(1, source.dim()))
    others = [t for t in (index, call.get("src")) if isinstance(t, Tensor)]
    shapes = []
    for tensor in (source, *others):
        axes = call.axes(tensor)
        if axes[dim] == "R":
            raise call.refuse()
        for d, letter in enumerate(axes):
            if d != dim and letter == "R" and any(t.shape[d] != tensor.shape[d] for t in (source, *others)):
                raise call.refuse()
        # Equal rows that are read at different places stay equal; draws and positions do not.
        shapes.append(
            (axes[:dim] + "." + axes[dim + 1 :], (*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :]))
        )
    if any(a[1] != shapes[0][1] for a in shapes):
        shapes = [(a if "R" in a else "." * len(a), shapes[-1][1]) for a, _ in shapes]
    return call.meet(shapes).replace("C", ".").replace("P", ".")


def _index_select(call: Call) -> str:
    source, index = call["self"], call["index"]
    (dim,) = dims_of(call["dim"], source.dim())
    axes = call.axes(source)
    if axes[dim] == "R" or ("R" in axes and "R" in call.axes(index)):
        raise call.refuse()
    letter = call.axes(index) or "."
    return call.only(axes[:dim] + (letter if letter == "R" else ".") + axes[dim + 1 :])


def _index_add(call: Call) -> str:
    source, index, added = call["self"], call["index"], call["source"]
    (dim,) = dims_of(call["dim"], source.dim())
    for tensor in (source, added):
        if call.axes(tensor)[dim] == "R":
            raise call.refuse()
    if "R" in call.axes(index):
        raise call.refuse("with data as its index")
    shapes = [
        (call.axes(t)[:dim] + "." + call.axes(t)[dim + 1 :], (*t.shape[:dim], 1, *t.shape[dim + 1 :]))
        for t in (source, added)
    ]
    return call.meet(shapes)


def _index(call: Call) -> str:
    """x[i, :, j]: advanced indices, broadcast together, take the place of the dimensions they index."""
    source, indices = call["self"], list(call["indices"])
    axes = call.axes(source)
    indices += [None] * (source.dim() - len(indices))
    used = [d for d, i in enumerate(indices) if i is not None]
    tensors = [indices[d] for d in used]
    if any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        raise call.refuse("with a mask: how many rows it takes depends on data")
    shapes = []
    for d, tensor in zip(used, tensors, strict=True):
        letters = call.axes(tensor)
        if axes[d] == "R":
            # The one index along the records' axis that keeps each record at its place.
            if letters.count("P") != 1 or source.shape[d] != call.records:
                raise call.refuse()
            if any(n != 1 for n, c in zip(tensor.shape, letters, strict=True) if c != "P"):
                raise call.refuse()
            letters = letters.replace("P", "R")
        shapes.append((letters.replace("P", "."), tensor.shape))
    front = call.meet(shapes)
    rest = [c for d, c in enumerate(axes) if d not in used]
    joined = used == list(range(used[0], used[-1] + 1))
    place = used[0] if joined else 0
    result = call.only("".join(rest[:place]) + front + "".join(rest[place:]))
    if result.count("R") > 1:
        raise call.refuse("of all records with all records")
    return result.replace("C", ".").replace("P", ".")


@makes
def _one_hot(call: Call) -> Tensor:
    if call["num_classes"] < 0:
        raise call.refuse("asks data for the number of classes")
    tensor = call["self"]
    return made((*tensor.shape, call["num_classes"]), torch.int64, call.axes(tensor).replace("P", ".") + ".")


def _bucketize(call: Call) -> str:
    if "R" in call.axes(call["boundaries"]):
        raise call.refuse("with data as its boundaries")
    return call.axes(call["self"]).replace("C", ".").replace("P", ".")


RULES = table(
    (_embedding, "embedding"),
    (_gather, "gather scatter scatter_add scatter_reduce"),
    (_index_select, "index_select"),
    (_index_add, "index_add"),
    (_index, "index"),
    (_one_hot, "one_hot"),
    (_bucketize, "bucketize"),
)
