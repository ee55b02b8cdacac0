"""How far each layer moves in a client's hands: mean and deviation over the clients of a round.

Paper 003's Figures 5, 10 and 19 to 23; 13 and 14 have the gradients of local training, updates after
clipping and the server's update. Layers move by very different amounts, which is why one clipping bound for
the whole update serves some of them badly.

>>> [kind(name) for name in ("layers.3.attention.qkv", "layers.3.mlp.up", "layers.3.norm2", "conv", "head")]
['attention', 'MLP', 'norm', 'convolution', 'head']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from tacit.federation.tracking import Record
from tacit.vector import Layout

Statistics = dict[str, tuple[float, float]]
"""Mean and standard deviation by layer."""

_KINDS = {
    "attention": ("attention", "attn", "qkv", "query", "key", "value"),
    "MLP": ("mlp", "intermediate", "fc", "output.dense"),
    "convolution": ("conv", "patch"),
    "head": ("head", "classifier"),
    "embedding": ("embed", "token", "position"),
}
"""What a layer's name may hold; the first that fits decides, after norms, which stand inside all of them."""


def layer_statistics(layout: Layout, clients: Sequence[Sequence[float] | None]) -> dict[str, list[float]]:
    """Mean and deviation of each layer's norm over a round's clients, to five digits."""
    norms = np.array([layers for layers in clients if layers is not None], np.float64)
    if not len(norms):
        return {}
    names = [name for name, _ in layout.layer_slices()]
    return {
        name: [float(f"{mean:.5g}"), float(f"{std:.5g}")]
        for name, mean, std in zip(names, norms.mean(0), norms.std(0), strict=True)
    }


def server_statistics(layout: Layout, before: Tensor, after: Tensor) -> dict[str, list[float]]:
    """Norm of each layer of the mean update, before the server's noise and after it (paper 003, Figures 13,
    14).
    """
    names = [name for name, _ in layout.layer_slices()]
    both = zip(names, layout.layer_norms(before).tolist(), layout.layer_norms(after).tolist(), strict=True)
    return {name: [float(f"{a:.5g}"), float(f"{b:.5g}")] for name, a, b in both}


def over_rounds(metrics: Sequence[Record], what: str = "layers") -> Statistics:
    """The statistics of all clients of all rounds together; rounds that drew more clients count for more.

    `what`: "layers" (of clients' updates), "clipped_layers" (the same after clipping) or "gradient_layers"
    (of their gradients while they train).
    """
    rounds = [(r[what], r["clients"]) for r in metrics if r.get(what)]
    if not rounds:
        return {}
    weights = np.array([clients for _, clients in rounds], np.float64)
    weights /= weights.sum()
    found: Statistics = {}
    for name in rounds[0][0]:
        mean, std = np.array([layers[name] for layers, _ in rounds]).T
        middle = float(weights @ mean)
        found[name] = middle, float(np.sqrt(weights @ (std**2 + (mean - middle) ** 2)))
    return found


def of_server(metrics: Sequence[Record]) -> Statistics:
    """Norms of the mean update's layers before the server's noise and after it, in the mean over rounds."""
    rounds = [r["server_layers"] for r in metrics if r.get("server_layers")]
    found: Statistics = {}
    for name in rounds[0] if rounds else ():
        before, after = np.array([layers[name] for layers in rounds]).mean(0)
        found[name] = float(before), float(after)
    return found


def by_kind(layers: Mapping[str, tuple[float, float]]) -> Statistics:
    """The mean over the layers of each kind, and their pooled deviation (within and between layers)."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for name, pair in layers.items():
        groups.setdefault(kind(name), []).append(pair)
    pooled: Statistics = {}
    for name, pairs in groups.items():
        mean, std = np.array(pairs).T
        pooled[name] = float(mean.mean()), float(np.sqrt((std**2).mean() + mean.var()))
    return pooled


def kind(layer: str) -> str:
    """What sort of layer it is, by its name."""
    low = layer.lower()
    leaf = low.rpartition(".")[2]
    if "norm" in leaf or leaf.startswith("ln"):
        return "norm"
    return next((kind for kind, words in _KINDS.items() if any(w in low for w in words)), "other")
