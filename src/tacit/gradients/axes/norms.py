"""Normalisation layers: which of the rows share statistics."""

from __future__ import annotations

from tacit.gradients.axes.call import Call, plain, table, tensors_in


def _layer_norm(call: Call) -> list[str]:
    x, dims = call["input"], len(call["normalized_shape"])
    axes = call.touch(x, range(x.dim() - dims, x.dim()))
    plain(call, "weight", "bias")
    means = axes[: len(axes) - dims] + "." * dims
    return [axes, *[means] * (len(tensors_in(call.out)) - 1)]


def _rms_norm(call: Call) -> str:
    x, dims = call["input"], len(call["normalized_shape"])
    plain(call, "weight")
    return call.touch(x, range(x.dim() - dims, x.dim()))


def _group_norm(call: Call) -> list[str]:
    x = call["input"]
    axes = call.touch(x, range(1, x.dim()))
    plain(call, "weight", "bias")
    return [axes, axes[0] + ".", axes[0] + "."]


def _batch_norm(call: Call) -> list[str]:
    """Statistics over all but the channels: right only where the records are channels (instance norm)."""
    x = call["input"]
    running = [call.get("running_mean"), call.get("running_var")]
    if call.get("training", call.get("train", True)):
        if any(t is not None for t in running):
            raise call.refuse("keeps running statistics")
        axes = call.touch(x, [d for d in range(x.dim()) if d != 1])
        for name in ("weight", "bias"):
            if call.get(name) is not None:
                call.meet([(axes[1:2], x.shape[1:2]), (call.axes(call[name]), call[name].shape)])
    else:
        plain(call, "weight", "bias", "running_mean", "running_var")
        axes = call.axes(x)
        if axes[1] == "R":
            raise call.refuse()
    outputs = tensors_in(call.out)
    return [axes, *[axes[1] if t.dim() else "" for t in outputs[1:]]]


RULES = table(
    (_layer_norm, "native_layer_norm"),
    (_rms_norm, "rms_norm"),
    (_group_norm, "native_group_norm"),
    (_batch_norm, "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"),
)
